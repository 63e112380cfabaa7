"""TensorRT-LLM's C++ runtime: the arrays that it makes of choices."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from treeopt.buffers import TreeBuffers
from treeopt.engines._engine import Engine, Settings
from treeopt.engines._texts import numbers, parse_json, write_json
from treeopt.engines.trtllm import DRAFT_LENGTH, VERSIONS, rules
from treeopt.errors import EngineError
from treeopt.tree import DraftTree

__all__ = ["ENGINES"]

KEYS = ("topKs", "positionOffsets", "treeIds", "paths", "packedMask")
WORD_BITS = 32


def _write(tree: DraftTree, settings: Settings) -> str:
    return write_json(_arrays(tree))


def _arrays(tree: DraftTree) -> dict[str, Any]:
    buffers = TreeBuffers.of(tree)
    guesses = [1 + int(tree.ranks[tree.depths == depth].max()) for depth in range(1, tree.max_depth + 1)]
    starts = np.array([0, *accumulate(guesses)])
    words = -(-tree.num_nodes // WORD_BITS)
    packed = buffers.packed_mask.astype("<u8").view("<i4")[:, :words]  # signed: bit 31 makes a word negative
    return {
        "topKs": guesses,
        "positionOffsets": buffers.position_ids.tolist(),
        "treeIds": (starts[tree.depths[1:] - 1] + tree.ranks[1:]).tolist(),
        "paths": buffers.retrieve.tolist(),
        "packedMask": packed.tolist(),
    }


def _read(text: str) -> DraftTree:
    data = parse_json(text)
    if not isinstance(data, dict) or set(data) != set(KEYS):
        raise EngineError(f"the file must be an object with exactly the keys {', '.join(KEYS)}")
    guesses, depths, places = (numbers(data[key], key) for key in KEYS[:3])
    if len(depths) != len(places) + 1:
        raise EngineError(f"`treeIds` has {len(places)} numbers for {len(depths)} nodes; give one a node but the root")
    tree = DraftTree.from_parents(_parents(data["packedMask"], depths), [-1, *_ranks(guesses, depths[1:], places)])
    for key, expected in _arrays(tree).items():
        if data[key] != expected:
            raise EngineError(f"`{key}` contradicts the other arrays; export the tree again")
    return tree


def _parents(mask: Any, depths: list[int]) -> list[int]:
    """Return for each node the deepest other node that it sees."""
    words = -(-len(depths) // WORD_BITS)
    if not isinstance(mask, list) or len(mask) != len(depths):
        raise EngineError(f"`packedMask` must have {len(depths)} rows, one a node")
    parents = [-1]
    for node, row in enumerate(mask):
        found = numbers(row, f"packedMask[{node}]")
        if len(found) != words:
            raise EngineError(f"`packedMask` has {len(found)} words in row {node}; {len(depths)} nodes take {words}")
        seen = [j for j in range(len(depths)) if j != node and found[j // WORD_BITS] >> (j % WORD_BITS) & 1]
        if node > 0:
            if not seen:
                raise EngineError(f"node `{node}` sees no other in `packedMask`; every node sees the root")
            parents.append(max(seen, key=lambda other: depths[other]))
    return parents


def _ranks(guesses: list[int], depths: list[int], places: list[int]) -> list[int]:
    starts = [0, *accumulate(guesses)]
    wrong = next((place for place, depth in enumerate(depths) if not 1 <= depth < len(starts)), None)
    if wrong is not None:
        raise EngineError(
            f"node `{wrong + 1}` has position offset {depths[wrong]}, but `topKs` has {len(guesses)} levels"
        )
    return [place - starts[depth - 1] for place, depth in zip(places, depths)]


ENGINES = (
    Engine(
        name="trtllm-buffers",
        reader="TensorRT-LLM, C++ runtime",
        form="JSON of its arrays, masks as 32-bit words",
        holds="tree",
        counts_root=True,
        write=_write,
        read=_read,
        rules=rules,
        settings=(DRAFT_LENGTH,),
        versions=VERSIONS,
    ),
)
