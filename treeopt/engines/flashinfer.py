"""FlashInfer: custom masks over prefix and tree, packed by bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treeopt.buffers import TreeBuffers
from treeopt.engines._engine import Engine, Setting, Settings
from treeopt.engines._texts import numbers, parse_json, write_json
from treeopt.errors import EngineError
from treeopt.tree import DraftTree

__all__ = ["ENGINES"]

KEYS = ("qo_len", "kv_len", "prefix_len", "custom_mask", "packed_custom_mask")


def _write(tree: DraftTree, settings: Settings) -> str:
    prefix = int(settings["prefix_len"])
    mask = np.ones((tree.num_nodes, prefix + tree.num_nodes), dtype=bool)
    mask[:, prefix:] = TreeBuffers.of(tree).attention_mask
    flat = mask.ravel()  # one row follows the other, also within a byte
    values = (*mask.shape, prefix, flat.astype(int).tolist(), np.packbits(flat, bitorder="little").tolist())
    return write_json(dict(zip(KEYS, values)))


def _read(text: str) -> DraftTree:
    data = parse_json(text)
    if not isinstance(data, dict) or set(data) != set(KEYS):
        raise EngineError(f"the file must be an object with exactly the keys {', '.join(KEYS)}")
    queries, keys, prefix = numbers([data[key] for key in KEYS[:3]], "qo_len, kv_len, prefix_len")
    flat = np.array(numbers(data["custom_mask"], "custom_mask"))
    if queries < 1 or prefix < 0 or keys != prefix + queries or len(flat) != queries * keys:
        raise EngineError(
            f"`kv_len` is {keys} for qo_len {queries} and prefix_len {prefix}, and custom_mask has {len(flat)} bits; make them agree"
        )
    if np.packbits(flat.astype(bool), bitorder="little").tolist() != data["packed_custom_mask"]:
        raise EngineError("`packed_custom_mask` contradicts `custom_mask`; export the tree again")
    mask = flat.reshape(queries, keys).astype(bool)
    if not mask[:, :prefix].all():
        raise EngineError(
            "`custom_mask` hides a part of the prefix, and a tree's nodes see all of it; export the tree again"
        )
    return _tree(mask[:, prefix:])


def _tree(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> DraftTree:
    """Return the tree of a mask, siblings ranked in their order."""
    parents = [-1]
    ranks = [-1]
    for node in range(1, len(mask)):
        above = np.flatnonzero(mask[node, :node])
        # An ancestor sees fewer nodes than its descendants: the parent is the one that sees most.
        parents.append(int(max(above, key=lambda other: mask[other].sum(), default=-1)))
        ranks.append(parents[:-1].count(parents[-1]))
    tree = DraftTree.from_parents(parents, ranks)
    if not np.array_equal(TreeBuffers.of(tree).attention_mask, mask):
        raise EngineError("`custom_mask` is no tree's with its nodes level by level; export the tree again")
    return tree


def _notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    return (f"the mask fits a prefix of {settings['prefix_len']} tokens and no other",)


ENGINES = (
    Engine(
        name="flashinfer",
        reader="FlashInfer, custom_mask and packed_custom_mask",
        form="JSON of a mask over prefix and tree, as bits and packed",
        holds="structure",
        counts_root=True,
        write=_write,
        read=_read,
        settings=(Setting("prefix_len", "tokens before the tree", least=0, required=True),),
        notes=_notes,
    ),
)
