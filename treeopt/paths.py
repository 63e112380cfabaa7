"""Paths: tuples of ranks from the root to a node."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from treeopt.errors import TreeError

__all__ = ["MAX_RANK", "Path", "as_path", "closed", "format_path", "order_key"]

Path = tuple[int, ...]
MAX_RANK = (1 << 31) - 1  # beyond any vocabulary, and within what arrays of a tree hold


def order_key(path: Path) -> tuple[int, Path]:
    """Sort key of the only order of nodes: by depth, then path."""
    return len(path), path


def format_path(path: Path) -> str:
    """Write a path as ``(0,1)``."""
    return f"({','.join(map(str, path))})"


def as_path(given: Sequence[int]) -> Path:
    """Return a path given as any sequence of integers.

    Raises
    ------
    TreeError
        For the root, a negative or absurdly large rank, or something that is no sequence of integers.
    """
    try:
        path = tuple(operator.index(rank) for rank in given)
    except TypeError:
        raise TreeError(f"node `{given!r}` is not a sequence of integer ranks; write it as (0,) or (0, 1)") from None
    if not path:
        raise TreeError("node `()` is the root, which every tree has; leave it out of the paths")
    if min(path) < 0:
        raise TreeError(f"node `{format_path(path)}` has a negative rank; ranks start at 0")
    if max(path) > MAX_RANK:
        raise TreeError(
            f"a node at depth `{len(path)}` has a rank of {max(path).bit_length()} bits; ranks end at {MAX_RANK}"
        )
    return path


def closed(paths: Iterable[Path], *, dense_siblings: bool = False) -> frozenset[Path]:
    """Return the smallest tree that holds some paths: with all ancestors, root excluded.

    Parameters
    ----------
    paths : iterable of paths
    dense_siblings : bool
        Also add, to the left of every node, its siblings of smaller rank.

    Examples
    --------
    >>> sorted(closed([(0, 0, 0, 0)]), key=order_key)
    [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    >>> sorted(closed([(0,), (2,), (0, 0)], dense_siblings=True), key=order_key)
    [(0,), (1,), (2,), (0, 0)]
    """
    return frozenset(
        (*path[:depth], rank)
        for path in paths
        for depth, last in enumerate(path)
        for rank in range(0 if dense_siblings else last, last + 1)
    )
