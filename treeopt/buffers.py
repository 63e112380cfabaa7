"""What a decoder needs of a tree: attention mask, position ids, parents, and the rows that lead to its leaves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.tree import DraftTree

__all__ = ["TreeBuffers", "pack_mask"]

WORD_BITS = 64


@dataclass(frozen=True, eq=False)
class TreeBuffers:
    """Index arrays of one tree, nodes in its own order.

    Attributes
    ----------
    attention_mask : ndarray of bool, shape (num_nodes, num_nodes)
        True where the row's node may attend to the column's: itself and its ancestors. The whole prefix is visible to
        every node and is not part of the mask.
    packed_mask : ndarray of uint64, shape (num_nodes, ceil(num_nodes / 64))
        The same; bit ``j % 64`` of word ``j // 64`` is column ``j``.
    position_ids : ndarray of int64, shape (num_nodes,)
        Depth of each node; add the prefix length.
    parents : ndarray of int64, shape (num_nodes,)
        -1 for the root.
    retrieve : ndarray of int64, shape (leaves, max_depth + 1)
        Nodes from the root to each leaf, leaves ascending; -1 where `retrieve_valid` is False.
    retrieve_valid : ndarray of bool, shape (leaves, max_depth + 1)

    Examples
    --------
    >>> buffers = TreeBuffers.of(DraftTree.from_paths([(0,), (1,), (0, 0)]))
    >>> buffers.attention_mask.astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    >>> buffers.retrieve.tolist()
    [[0, 2, -1], [0, 1, 3]]
    """

    attention_mask: NDArray[np.bool_]
    packed_mask: NDArray[np.uint64]
    position_ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    retrieve: NDArray[np.int64]
    retrieve_valid: NDArray[np.bool_]

    @classmethod
    def of(cls, tree: DraftTree) -> TreeBuffers:
        """Return the buffers of `tree`."""
        mask = _ancestor_mask(tree)
        retrieve = ancestor_rows(tree)[tree.leaves]
        return cls(
            attention_mask=mask,
            packed_mask=pack_mask(mask),
            position_ids=tree.depths,
            parents=tree.parents,
            retrieve=retrieve,
            retrieve_valid=retrieve >= 0,
        )


def ancestor_rows(tree: DraftTree) -> NDArray[np.int64]:
    """Return for each node the nodes from the root to it, (num_nodes, max_depth + 1), padded with -1."""
    rows = np.full((tree.num_nodes, tree.max_depth + 1), -1, dtype=np.int64)
    rows[0, 0] = 0
    for depth in range(1, tree.max_depth + 1):
        level = np.flatnonzero(tree.depths == depth)
        rows[level] = rows[tree.parents[level]]
        rows[level, depth] = level
    return rows


def pack_mask(mask: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Pack rows of booleans into little-endian words of 64 bits."""
    num_rows, num_columns = mask.shape
    num_words = -(-num_columns // WORD_BITS)
    padded = np.zeros((num_rows, num_words * WORD_BITS), dtype=bool)
    padded[:, :num_columns] = mask
    packed = np.packbits(padded, axis=1, bitorder="little").view("<u8")
    return packed.astype(np.uint64)


def _ancestor_mask(tree: DraftTree) -> NDArray[np.bool_]:
    mask = np.eye(tree.num_nodes, dtype=bool)
    for depth in range(1, tree.max_depth + 1):
        level = np.flatnonzero(tree.depths == depth)
        mask[level] |= mask[tree.parents[level]]
    return mask
