"""Sequoia and UMbreLLa: growmaps, a tree level by level with its mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treeopt.buffers import TreeBuffers
from treeopt.engines._engine import Engine, Settings
from treeopt.engines._rules import Rule
from treeopt.engines._siblings import DenseSiblings
from treeopt.engines._texts import numbers, parse_json, tree_of_children, write_json
from treeopt.errors import EngineError
from treeopt.tree import DraftTree

__all__ = ["ENGINES"]

KEYS = ("roots", "branches", "Successors", "mask", "depth", "size")


def _rules(settings: Settings) -> Sequence[Rule]:
    return (DenseSiblings(),)  # a growmap has no ranks: the i-th child is the i-th guess


def _write(tree: DraftTree, settings: Settings) -> str:
    return write_json(_growmap(tree))


def _growmap(tree: DraftTree) -> dict[str, Any]:
    children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
    for node, parent in enumerate(tree.parents[1:].tolist(), 1):
        children[parent].append(node)
    levels = [np.flatnonzero(tree.depths == depth).tolist() for depth in range(tree.max_depth + 1)]
    return {
        "roots": levels,
        "branches": [[len(children[node]) for node in level] for level in levels],
        "Successors": children,
        "mask": TreeBuffers.of(tree).attention_mask.astype(int).tolist(),
        "depth": tree.depths.tolist(),
        "size": tree.num_nodes,
    }


def _read(text: str) -> DraftTree:
    data = parse_json(text)
    if not isinstance(data, dict) or set(data) != set(KEYS):
        raise EngineError(f"the file must be an object with exactly the keys {', '.join(KEYS)}")
    if not isinstance(data["Successors"], list):
        raise EngineError(f"`Successors` is {data['Successors']!r}; give a list of lists of node numbers")
    tree = tree_of_children([numbers(row, f"Successors[{node}]") for node, row in enumerate(data["Successors"])])
    for key, expected in _growmap(tree).items():
        if data[key] != expected:
            raise EngineError(f"`{key}` contradicts `Successors`; export the tree again")
    return tree


def _sequoia_notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    return ("Sequoia loads growmaps with torch.load: save this object with torch.save, mask and depth as tensors",)


def _umbrella_notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    return ("give the file as growmap_path of the static engine",)


ENGINES = tuple(
    Engine(
        name=name,
        reader=reader,
        form="a JSON growmap",
        holds="tree",
        counts_root=True,
        write=_write,
        read=_read,
        rules=_rules,
        notes=notes,
    )
    for name, reader, notes in (
        ("sequoia", "Sequoia, growmap", _sequoia_notes),
        ("umbrella", "UMbreLLa, growmap_path", _umbrella_notes),
    )
)
