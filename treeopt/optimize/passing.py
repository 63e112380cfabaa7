"""Guesses that pass typical acceptance along a trace: several ranks of one head may, at one position."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt.errors import AcceptanceError
from treeopt.optimize.models import Child
from treeopt.paths import Path

__all__ = ["PassingModel"]

Rows = NDArray[np.int64]


class PassingModel:
    """How often a path passes on a trace, as a path model, and how often some node of a tree does.

    Parameters
    ----------
    passes : array_like of bool, shape (positions, heads, ranks)
        Whether each head's guess at each rank passes at each position.

    Notes
    -----
    Conditionals are plain shares of the positions: path (r0, r1) passes where rank r0 of head 0 and rank r1 of head 1
    do. Those of one family may sum to more than 1.

    Examples
    --------
    >>> model = PassingModel([[[True, True]], [[False, True]]])
    >>> model.children(())
    [(1.0, 1), (0.5, 0)]
    >>> model.covered([(0,), (1,)])
    1.0
    """

    def __init__(self, passes: ArrayLike) -> None:
        self.passes = np.asarray(passes)
        if self.passes.ndim != 3 or self.passes.dtype != np.bool_:
            raise AcceptanceError(
                f"`passes` has shape {self.passes.shape} and dtype {self.passes.dtype}; give booleans (positions, heads, ranks)"
            )
        if not len(self.passes):
            raise AcceptanceError("`passes` has no positions; calibrate on longer continuations")
        self._rows: dict[Path, Rows] = {(): np.arange(len(self.passes))}

    @property
    def num_positions(self) -> int:
        """Positions counted."""
        return len(self.passes)

    @property
    def num_levels(self) -> int:
        """Number of heads."""
        return int(self.passes.shape[1])

    @cached_property
    def reachable(self) -> NDArray[np.float64]:
        """Share of positions at which any path of each depth passes, shape (heads,)."""
        some = np.logical_and.accumulate(self.passes.any(axis=2), axis=1)
        shares: NDArray[np.float64] = some.mean(axis=0)
        return shares

    def children(self, path: Path) -> Sequence[Child]:
        """See `PathModel.children`."""
        rows = self.rows(path)
        if len(path) >= self.num_levels or not len(rows):
            return []
        rates = self.passes[rows, len(path)].mean(axis=0)
        order = np.argsort(-rates, kind="stable")
        order = order[rates[order] > 0]
        return list(zip(rates[order].tolist(), order.tolist()))

    def rows(self, path: Path) -> Rows:
        """Return the positions at which a path passes, ascending."""
        if path not in self._rows:
            above = self.rows(path[:-1])
            inside = path[-1] < self.passes.shape[2] and len(path) <= self.num_levels
            self._rows[path] = above[self.passes[above, len(path) - 1, path[-1]]] if inside else above[:0]
        return self._rows[path]

    def covered(self, paths: Collection[Path]) -> float:
        """Return E[L] of a tree of these paths: the mean depth that some path of it passes to, in [0, heads]."""
        deepest = np.zeros(self.num_positions, dtype=np.int64)
        for path in sorted(paths, key=len):
            deepest[self.rows(path)] = len(path)
        return float(deepest.mean())

    def together(self, paths: Collection[Path]) -> Iterator[tuple[tuple[Path, ...], float]]:
        """Give every set of paths of one depth that pass together at some positions, and the share of these positions."""
        for depth in range(1, self.num_levels + 1):
            level = [path for path in paths if len(path) == depth]
            if not level:
                return
            member = np.zeros((len(level), self.num_positions), dtype=bool)
            for row, path in zip(member, level):
                row[self.rows(path)] = True
            packed = np.packbits(member, axis=0).T
            sets, counts = np.unique(packed, axis=0, return_counts=True)
            for bits, count in zip(sets, counts.tolist()):
                inside = np.flatnonzero(np.unpackbits(bits, count=len(level)))
                if inside.size:
                    yield tuple(level[i] for i in inside), count / self.num_positions
