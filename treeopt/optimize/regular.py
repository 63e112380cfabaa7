"""The best level-regular tree: every vector of level widths is tried."""

from __future__ import annotations

import operator
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from treeopt.optimize.families import Child, Families, Probabilities, best_first
from treeopt.paths import Path

__all__ = ["Regular"]

MAX_INNER_PATHS = 8_192  # paths whose children a search under a general model asks for: two seconds

Widths = tuple[int, ...]
Values = NDArray[np.float64]


class Regular:
    """Best level-regular subtrees below every path, for all widths at once.

    The widths alone decide nodes, depth, children, level sizes and leaves; given them, each node takes its children on
    its own: those required, and of the others the ones whose rate times (1 + E[L] below) is largest.
    """

    def __init__(self, families: Families) -> None:
        self.families, self.limits = families, families.limits
        self.forced: dict[Path, list[int]] = {}
        for path in sorted(self.limits.required):
            self.forced.setdefault(path[:-1], []).append(path[-1])
        self.inner, self.hidden = self._inner_paths()
        self.looked_at = {path for paths in self.inner.values() for path in paths}
        self.widths = self._all_widths()
        self.columns = [{widths: i for i, widths in enumerate(level)} for level in self.widths]
        self._known: dict[Path | int, Values] = {}

    def bound(self, value: float) -> float | None:
        """Return a value that no tree exceeds, or None if the tree's own is proven.

        What is left out of a search are nodes below paths not looked at, each no likelier than the likeliest of these.
        """
        return value + (self.limits.num_nodes - 1) * self.hidden if self.hidden > 0.0 else None

    def tree(self) -> Probabilities:
        """Return the best tree of the whole budget."""
        chosen: Probabilities = {}
        self._place(chosen, (), 1.0, self._best())
        return chosen

    def _best(self) -> Widths:
        """Return the best widths of the whole tree; of equally good ones the fewest nodes."""
        ranked = [
            (value, -sum(_level_sizes(widths)), widths)
            for widths, value in zip(self.widths[0], self._values(()).tolist())
        ]
        return max(ranked)[2]

    def _place(self, chosen: Probabilities, path: Path, probability: float, widths: Widths) -> None:
        """Add the best nodes of these widths below a path."""
        if not widths:
            return
        forced, free = self._children(path) if probability > 0.0 else self._children_of_none(path)
        if not self.limits.dense_siblings:
            gains = self._gains(path, free)[:, self.columns[len(path) + 1][widths[1:]]].tolist()
            free = [child for _, child in sorted(zip(gains, free), key=lambda pair: -pair[0])]
        rates = {rank: rate for rate, _, rank in (forced + free)[: widths[0]]}
        rank = 0
        while len(rates) < widths[0]:
            rates.setdefault(rank, 0.0)
            rank += 1
        for rank, rate in rates.items():
            chosen[(*path, rank)] = probability * rate
            self._place(chosen, (*path, rank), probability * rate, widths[1:])

    def _inner_paths(self) -> tuple[dict[int, list[Path]], float]:
        """Return by depth the paths whose children are looked at, and the probability of the likeliest that is not."""
        levels = range(self.families.num_levels)
        if self.families.independent:
            return {depth: [(0,) * depth] for depth in levels}, 0.0
        room = {**dict.fromkeys(levels, MAX_INNER_PATHS), self.families.num_levels: 0}
        found = best_first(self.families, MAX_INNER_PATHS, room)
        inner: dict[int, list[Path]] = {depth: [] for depth in levels}
        for path in [(), *found.taken]:
            inner[len(path)].append(path)
        hidden = [-entry[0] for entry in found.left if entry[1] < self.families.num_levels]
        return inner, max(hidden, default=0.0)

    def _all_widths(self) -> list[list[Widths]]:
        """Return for every depth the widths that a subtree of a node there can have."""
        levels: list[list[Widths]] = [[()]]
        for depth in range(self.families.num_levels - 1, -1, -1):
            needed = self.limits.required_widths[depth] if depth < len(self.limits.required_widths) else 0
            # A wider level would give every parent a child of probability 0 that nothing requires.
            most = needed + max((len(self.families(path)) for path in self.inner[depth]), default=0)
            most, cap = min(most, self.limits.child_cap(depth + 1)), self.limits.rank_cap(depth + 1)
            most = most if cap is None else min(most, cap + 1)
            found: list[Widths] = [] if needed else [()]
            for rest in levels[-1]:
                for width in range(max(needed, 1), most + 1):
                    if not self._fits(depth, (width, *rest)):
                        break
                    found.append((width, *rest))
            levels.append(found)
        return levels[::-1]

    def _fits(self, depth: int, widths: Widths) -> bool:
        sizes = _level_sizes(widths)
        caps = (self.limits.level_cap(below) for below in range(depth + 1, depth + 1 + len(sizes)))
        return depth + 1 + sum(sizes) <= self.limits.num_nodes and all(size <= cap for size, cap in zip(sizes, caps))

    def _values(self, path: Path) -> Values:
        """Return E[L] below a path, times 1 / its probability, for each of its depth's widths."""
        depth = len(path)
        known = depth if self.families.independent and path not in self.limits.required else path
        if known not in self._known:
            self._known[known] = self._computed(path)
        return self._known[known]

    def _computed(self, path: Path) -> Values:
        depth = len(path)
        if depth == self.families.num_levels:
            return np.zeros(1)
        forced, free = self._children(path)
        gains = self._gains(path, free)
        if not self.limits.dense_siblings:
            gains = -np.sort(-gains, axis=0)
        totals = np.concatenate([np.zeros((1, gains.shape[1])), self._gains(path, forced), gains]).cumsum(axis=0)
        values = np.zeros(len(self.widths[depth]))
        for i, widths in enumerate(self.widths[depth]):
            if widths:
                values[i] = totals[min(widths[0], len(totals) - 1), self.columns[depth + 1][widths[1:]]]
        return values

    def _gains(self, path: Path, children: list[Child]) -> Values:
        """Return rate times (1 + E[L] below) of each child, for each of its depth's widths."""
        gains = np.zeros((len(children), len(self.widths[len(path) + 1])))
        for row, (rate, _, rank) in zip(gains, children):
            below = (*path, rank)
            if rate > 0.0 and (self.families.independent or below in self.looked_at):
                row[:] = rate * (1.0 + self._values(below))
            else:
                row[:] = rate
        return gains

    def _children(self, path: Path) -> tuple[list[Child], list[Child]]:
        """Return the required children and the others, in the order in which to take them."""
        ranks = self.forced.get(path, [])
        family = self.families(path)
        rates = {rank: rate for rate, _, rank in family}
        forced = [(rates.get(rank, 0.0), 0.0, rank) for rank in ranks]
        return forced, [child for child in family if child[2] not in ranks]

    def _children_of_none(self, path: Path) -> tuple[list[Child], list[Child]]:
        return [(0.0, 0.0, rank) for rank in self.forced.get(path, [])], []


def _level_sizes(widths: Widths) -> list[int]:
    return list(accumulate(widths, operator.mul))
