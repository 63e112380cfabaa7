"""The most likely paths under independent heads, without a Python step per node.

A threshold on the path probability is found first, from histograms of its logarithm: the histogram of paths of depth d
is that of depth d - 1 convolved with head d's. Then the paths above it are enumerated level by level with array
operations, and the surplus is cut off by the rule for ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["LikeliestPaths", "likeliest_paths"]

# Bins of the logarithm; a path of depth 5 is misplaced by at most 5 of them. Fewer take less time to add up, more let
# fewer paths too many be enumerated: 2 % at 512 nodes, 4 % at a million.
COARSE_BINS, FEW_BINS, MANY_BINS = 64, 512, 2048
FEW_NODES = 8192
SLACK = 1 - 1e-12  # a quotient rounds; children are looked up a little too generously and checked by their product


@dataclass(frozen=True, eq=False)
class LikeliestPaths:
    """The nodes of a tree as arrays, root included, sorted by (depth, path).

    Attributes
    ----------
    parents, ranks : ndarray of int64, shape (num_nodes,)
    probabilities : ndarray of float64, shape (num_nodes,)
    added : ndarray of int64, shape (num_nodes,)
        Nodes by falling probability, ties by depth and path; the root first.
    following : float
        Probability of the likeliest path left out; 0 if there is none.
    """

    parents: NDArray[np.int64]
    ranks: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    added: NDArray[np.int64]
    following: float


@dataclass(frozen=True, eq=False)
class _Level:
    """Paths of one depth above a threshold, sorted by path."""

    parents: NDArray[np.int64]  # places in the level before
    ranks: NDArray[np.int64]
    probabilities: NDArray[np.float64]


def likeliest_paths(rates: NDArray[np.float64], num_nodes: int) -> LikeliestPaths:
    """Return the `num_nodes` - 1 likeliest paths of positive probability, or all if there are fewer.

    Parameters
    ----------
    rates : ndarray of float64, shape (heads, ranks)
    num_nodes : int
        Root included.
    """
    heads = [_sorted_row(row) for row in rates]
    threshold = _threshold(heads, num_nodes)  # one path more than fits, to know the likeliest left out
    while True:
        levels = _enumerate(heads, threshold)
        if threshold == 0.0 or sum(len(level.ranks) for level in levels) >= num_nodes:
            return _select(levels, num_nodes)
        threshold = threshold * 0.5 if threshold > np.finfo(float).tiny else 0.0


def _sorted_row(row: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    order = np.argsort(-row, kind="stable")
    order = order[row[order] > 0]
    return row[order], order


def _threshold(heads: Sequence[tuple[NDArray[np.float64], NDArray[np.int64]]], count: int) -> float:
    """Return a probability that at least `count` paths reach, as nearly as bins tell; 0 if there are not so many."""
    if not heads or not len(heads[0][0]):
        return 0.0
    lowest = sum(float(np.log(rates[-1])) for rates, _ in heads if len(rates))
    # The second time over the range that matters alone.
    for bins in (COARSE_BINS, FEW_BINS if count <= FEW_NODES else MANY_BINS):
        found = _lowest_logarithm(heads, count, lowest, bins)
        if found is None:
            return 0.0
        lowest = found
    return float(np.exp(lowest))


def _lowest_logarithm(
    heads: Sequence[tuple[NDArray[np.float64], NDArray[np.int64]]], count: int, lowest: float, bins: int
) -> float | None:
    """Return a logarithm that at least `count` paths reach, from a histogram over [`lowest`, 0]; None if too few do."""
    # Bin b holds logarithms in (-(b + 1) · width, -b · width]. Rounding makes a path look likelier by less than a bin a
    # level, so what is returned lies as many bins lower.
    width = max(-lowest, 1e-9) / bins
    total, paths = np.zeros(bins), np.zeros(bins)
    paths[0] = 1.0
    for rates, _ in heads:
        places = (-np.log(rates) / width).astype(np.int64)
        following = np.zeros(bins)
        repeats = np.bincount(places[places < bins])
        for place in np.flatnonzero(repeats).tolist():
            following[place:] += repeats[place] * paths[: bins - place]
        paths = following
        total += paths
    reached = np.flatnonzero(np.cumsum(total) >= count)
    return -(int(reached[0]) + 1 + len(heads)) * width if reached.size else None


def _enumerate(heads: Sequence[tuple[NDArray[np.float64], NDArray[np.int64]]], threshold: float) -> list[_Level]:
    levels: list[_Level] = []
    above = np.ones(1)
    for rates, order in heads:
        if not len(rates) or not len(above):
            break
        level = _children(above, rates, order, threshold)
        levels.append(level)
        above = level.probabilities
    return levels


def _children(
    above: NDArray[np.float64], rates: NDArray[np.float64], order: NDArray[np.int64], threshold: float
) -> _Level:
    counts = np.searchsorted(-rates, -(threshold / above) * SLACK, side="right")
    parents = np.repeat(np.arange(len(above)), counts)
    places = np.arange(len(parents)) - np.repeat(np.cumsum(counts) - counts, counts)
    probabilities = above[parents] * rates[places]
    kept = probabilities >= threshold if threshold > 0 else probabilities > 0
    if not kept.all():
        parents, places, probabilities = parents[kept], places[kept], probabilities[kept]
    ranks = order[places]
    if not bool((np.diff(order) > 0).all()):  # where rates fall with the rank, a family is in order already
        by_path = np.argsort(parents * (int(order.max(initial=0)) + 1) + ranks)
        parents, ranks, probabilities = parents[by_path], ranks[by_path], probabilities[by_path]
    return _Level(parents, ranks, probabilities)


def _select(levels: list[_Level], num_nodes: int) -> LikeliestPaths:
    """Keep the likeliest num_nodes - 1 of the enumerated paths; ties go to the smaller depth, then the smaller path."""
    sizes = np.array([1, *(len(level.ranks) for level in levels)])
    starts = np.cumsum(sizes) - sizes
    probabilities = np.concatenate([[1.0], *(level.probabilities for level in levels)])
    parents = np.concatenate([[-1], *(level.parents + starts[i] for i, level in enumerate(levels))])
    ranks = np.concatenate([[-1], *(level.ranks for level in levels)])
    order = np.argsort(-probabilities, kind="stable")  # stable over (depth, path): the rule for ties
    order = np.concatenate([[0], order[order != 0]])  # a path of probability 1 does not come before the root
    chosen = order[:num_nodes]
    following = float(probabilities[order[num_nodes]]) if len(order) > num_nodes else 0.0
    kept = np.zeros(len(probabilities), dtype=bool)
    kept[chosen] = True
    place = np.cumsum(kept) - 1
    old = np.flatnonzero(kept)
    return LikeliestPaths(
        parents=np.where(parents[old] < 0, -1, place[parents[old]]),
        ranks=ranks[old],
        probabilities=probabilities[old],
        added=place[chosen],
        following=following,
    )
