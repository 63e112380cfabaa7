"""Draft trees: which ranks of which heads are tried together in one verification pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt.errors import TreeError
from treeopt.paths import Path, as_path, format_path, order_key

__all__ = ["DraftTree", "chain", "dense_tree", "frozen"]


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A tree of head ranks, its nodes sorted by (depth, path).

    Node 0 is the root: the token the target itself has already decided. The node with path ``(r0, r1)`` proposes the
    token that head 1 ranks at ``r1``, after the token that head 0 ranks at ``r0``. Build one with `from_paths`,
    `from_parents`, `dense_tree` or `chain`.

    Attributes
    ----------
    parents : ndarray of int64, shape (num_nodes,)
        Index of each node's parent; -1 for the root. A parent always comes before its children.
    ranks : ndarray of int64, shape (num_nodes,)
        Rank of each node's token in the head of its depth, from 0; -1 for the root.

    Examples
    --------
    >>> tree = DraftTree.from_paths([(0,), (1,), (0, 0)])
    >>> tree.num_nodes, tree.max_depth
    (4, 2)
    >>> tree.parents.tolist()
    [-1, 0, 0, 1]
    """

    parents: NDArray[np.int64]
    ranks: NDArray[np.int64]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> DraftTree:
        """Build a tree from the paths of its nodes, in any order, root excluded.

        Parameters
        ----------
        paths : iterable of sequences of int
            Ranks from the root to each node.

        Raises
        ------
        TreeError
            For a path that is empty, repeated, holds a negative or non-integer rank, or lacks its parent.
        """
        found: set[Path] = set()
        for given in paths:
            path = as_path(given)
            if path in found:
                raise TreeError(f"node `{format_path(path)}` is given twice; delete one of the two")
            found.add(path)
        for path in sorted(found, key=order_key):
            if len(path) > 1 and path[:-1] not in found:
                parent = format_path(path[:-1])
                raise TreeError(f"node `{format_path(path)}` has no parent; add `{parent}` or delete the node")
        return cls._of_valid(found)

    @classmethod
    def _of_valid(cls, paths: Iterable[Path]) -> DraftTree:
        """Build from paths known to be distinct and closed under taking parents."""
        index: dict[Path, int] = {(): 0}
        parents, ranks = [-1], [-1]
        for path in sorted(paths, key=order_key):
            index[path] = len(parents)
            parents.append(index[path[:-1]])
            ranks.append(path[-1])
        return cls(frozen(parents), frozen(ranks))

    @classmethod
    def from_parents(cls, parents: ArrayLike, ranks: ArrayLike) -> DraftTree:
        """Build a tree from parent indices and ranks, in any order.

        Parameters
        ----------
        parents : array_like of int, shape (num_nodes,)
            The root has parent -1.
        ranks : array_like of int, shape (num_nodes,)
            The root's is not read.

        Raises
        ------
        TreeError
            When there is not exactly one root, a parent does not exist, nodes form a cycle, a rank is negative, or
            two siblings share a rank.
        """
        parent, rank = np.asarray(parents), np.asarray(ranks)
        _check_parents(parent, rank)
        # Level by level from the root, sorting each by (parent's place, rank): that is the order by (depth, path).
        place = np.full(len(parent), -1, dtype=np.int64)
        level = np.flatnonzero(parent == -1)
        ordered, count = [level], 1
        place[level] = 0
        children_of = np.argsort(parent, kind="stable")
        starts = np.searchsorted(parent[children_of], np.arange(len(parent) + 1))
        while level.size:
            runs = [children_of[starts[node] : starts[node + 1]] for node in level]
            level = np.concatenate(runs) if runs else level[:0]
            level = level[np.lexsort((rank[level], place[parent[level]]))]
            place[level] = np.arange(count, count + level.size)
            count += level.size
            ordered.append(level)
        if count != len(parent):
            cyclic = np.flatnonzero(place < 0)
            raise TreeError(f"node `{cyclic[0]}` is never reached from the root: its parents form a cycle; mend them")
        new = np.concatenate(ordered)
        tree_parents = np.where(parent[new] < 0, -1, place[parent[new]])
        tree_ranks = rank[new].astype(np.int64)
        tree_ranks[0] = -1
        twice = np.flatnonzero((tree_parents[1:] == tree_parents[:-1]) & (tree_ranks[1:] == tree_ranks[:-1]))
        if twice.size:
            node = int(new[twice[0] + 1])
            raise TreeError(f"node `{node}` has the same parent and rank as a sibling; delete one of the two")
        return cls(frozen(tree_parents), frozen(tree_ranks))

    @property
    def num_nodes(self) -> int:
        """Tokens in one verification pass, root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """Depth of each node, shape (num_nodes,); 0 for the root."""
        depths = np.zeros(self.num_nodes, dtype=np.int64)
        start = 1  # nodes are sorted by depth, so a level is a run that begins where the last one ended
        previous_start = 0
        depth = 0
        while start < self.num_nodes:
            depth += 1
            end = int(np.searchsorted(self.parents, start, side="left"))
            depths[start:end] = depth
            previous_start, start = start, end
            assert start > previous_start, "a level is never empty"
        depths.setflags(write=False)
        return depths

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node: the number of heads the tree needs."""
        return int(self.depths[-1])

    @property
    def max_rank(self) -> int:
        """Largest rank of any node; -1 for a tree of the root alone."""
        return int(self.ranks.max())

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """Path of each node; the root's is ``()``."""
        paths: list[Path] = [()]
        for parent, rank in zip(self.parents[1:].tolist(), self.ranks[1:].tolist()):
            paths.append((*paths[parent], rank))
        return tuple(paths)

    @cached_property
    def leaves(self) -> NDArray[np.int64]:
        """Indices of the nodes without children, ascending."""
        is_leaf = np.ones(self.num_nodes, dtype=bool)
        is_leaf[self.parents[1:]] = False
        leaves = np.flatnonzero(is_leaf)
        leaves.setflags(write=False)
        return leaves

    @property
    def level_widths(self) -> tuple[int, ...]:
        """Number of nodes at depths 1, 2, …."""
        return tuple(np.bincount(self.depths)[1:].tolist())

    def prune(self, *, max_depth: int | None = None, max_rank: int | None = None) -> DraftTree:
        """Return the tree without the nodes beyond a depth or a rank, and without their descendants.

        Examples
        --------
        >>> chain(4).prune(max_depth=3).num_nodes
        4
        """
        kept = [
            path
            for path in self.paths[1:]
            if (max_depth is None or len(path) <= max_depth) and (max_rank is None or max(path) <= max_rank)
        ]
        return DraftTree._of_valid(kept)

    def require_heads(self, num_heads: int) -> None:
        """Check that `num_heads` heads reach every node.

        Raises
        ------
        TreeError
            Naming the nodes that are too deep.
        """
        if self.max_depth <= num_heads:
            return
        deep = [path for path in self.paths if len(path) > num_heads]
        named = ", ".join(format_path(path) for path in deep[:4]) + (", …" if len(deep) > 4 else "")
        raise TreeError(
            f"the tree has depth {self.max_depth} but there are {num_heads} heads: {len(deep)} nodes are out of reach "
            f"(`{named}`); use prune(max_depth={num_heads}) or build with --max-depth {num_heads}"
        )

    def __len__(self) -> int:
        return self.num_nodes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftTree):
            return NotImplemented
        return np.array_equal(self.parents, other.parents) and np.array_equal(self.ranks, other.ranks)

    def __hash__(self) -> int:
        return hash((self.parents.tobytes(), self.ranks.tobytes()))

    def __repr__(self) -> str:
        return f"DraftTree(num_nodes={self.num_nodes}, max_depth={self.max_depth}, level_widths={self.level_widths})"


def dense_tree(widths: Sequence[int]) -> DraftTree:
    """Return the tree in which every node of depth d has children of ranks 0 … widths[d] - 1.

    Examples
    --------
    >>> dense_tree([7, 6]).num_nodes
    50
    """
    for depth, width in enumerate(widths, 1):
        if width < 1:
            raise TreeError(f"level `{depth}` of a dense tree has width {width}; give at least 1 or drop the level")
    parents, ranks = [np.array([-1])], [np.array([-1])]
    first, count = 0, 1
    for width in widths:
        parents.append(np.repeat(np.arange(first, first + count), width))
        ranks.append(np.tile(np.arange(width), count))
        first, count = first + count, count * width
    return DraftTree(frozen(np.concatenate(parents)), frozen(np.concatenate(ranks)))


def chain(depth: int) -> DraftTree:
    """Return the tree of every head's first guess: classic speculative decoding. Depth 0 is plain decoding.

    Examples
    --------
    >>> chain(2).paths
    ((), (0,), (0, 0))
    """
    if depth < 0:
        raise TreeError(f"a chain of depth `{depth}` does not exist; give 0 or more")
    return dense_tree([1] * depth)


def _check_parents(parent: NDArray[Any], rank: NDArray[Any]) -> None:
    if parent.ndim != 1 or parent.shape != rank.shape:
        raise TreeError(f"`parents` has shape {parent.shape} and `ranks` {rank.shape}; give two lists of one length")
    if not (np.issubdtype(parent.dtype, np.integer) and np.issubdtype(rank.dtype, np.integer)):
        raise TreeError(f"`parents` and `ranks` are {parent.dtype} and {rank.dtype}; give integers")
    roots = np.flatnonzero(parent == -1)
    if roots.size != 1:
        raise TreeError(f"`parents` has {roots.size} roots; exactly one node has parent -1")
    outside = np.flatnonzero((parent < -1) | (parent >= len(parent)))
    if outside.size:
        node = int(outside[0])
        raise TreeError(f"node `{node}` has parent {parent[node]}, which does not exist; use -1 … {len(parent) - 1}")
    negative = np.flatnonzero((rank < 0) & (parent != -1))
    if negative.size:
        raise TreeError(f"node `{negative[0]}` has rank {rank[negative[0]]}; ranks start at 0")


def frozen(values: ArrayLike) -> NDArray[np.int64]:
    """Return a read-only int64 copy."""
    array = np.array(values, dtype=np.int64)
    array.setflags(write=False)
    return array
