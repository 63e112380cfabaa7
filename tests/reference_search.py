"""Brute-force twin of the constrained search: every prefix-closed set of a small universe, measured once."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import numpy as np


def features(members, depth, num_ranks):
    """What limits look at, of one set of paths without the root: one flat list of numbers."""
    levels = Counter(map(len, members))
    children = Counter(path[:-1] for path in members)
    nodes = [(), *members]
    by_level = [{children[node] for node in nodes if len(node) == level} for level in range(depth)]
    return [
        len(nodes),
        max(levels, default=0),
        max(children.values(), default=0),
        sum(children[node] == 0 for node in nodes),
        all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in members for path in members),
        all(len(counts) <= 1 for counts in by_level),
        *(levels[level] for level in range(1, depth + 1)),
        *(max((path[-1] for path in members if len(path) == level), default=-1) for level in range(1, depth + 1)),
    ]


def obeyed(table, limits, depth):
    """Rows of a table of features that obey the limits on shape; `must_include` is not one of them."""
    nodes, deepest, children, leaves, dense, regular = table[:, :6].T
    levels, ranks = table[:, 6 : 6 + depth], table[:, 6 + depth : 6 + 2 * depth]
    fine = nodes <= limits.num_nodes
    if limits.max_depth is not None:
        fine &= deepest <= limits.max_depth
    if limits.max_rank is not None:
        fine &= (ranks <= limits.max_rank).all(axis=1)
    if limits.max_children is not None:
        fine &= children <= limits.max_children
    if limits.max_leaves is not None:
        fine &= leaves <= limits.max_leaves
    if limits.dense_siblings:
        fine &= dense == 1
    if limits.level_regular:
        fine &= regular == 1
    for level, cap in enumerate(limits.rank_caps[:depth]):
        fine &= ranks[:, level] <= cap
    for level, cap in enumerate(limits.level_caps[:depth]):
        fine &= levels[:, level] <= cap
    return fine


def violates(paths, limits, depth):
    """Whether a returned set breaks a limit, or is no tree."""
    members = set(paths)
    if len(members) != len(paths) or not all(path[:-1] in members for path in members if len(path) > 1):
        return True
    needed = {path[:i] for path in limits.must_include for i in range(1, len(path) + 1)}
    table = np.array([features(members, max([depth, *map(len, paths)]), 0)])
    return not needed <= members or not obeyed(table, limits, max([depth, *map(len, paths)]))[0]


@cache
def universe(num_ranks):
    """All paths with rank < num_ranks[d - 1] at depth d, every prefix-closed set of them as a row, and its features."""
    paths = [
        path for depth in range(1, len(num_ranks) + 1) for path in itertools.product(*map(range, num_ranks[:depth]))
    ]
    place = {path: i for i, path in enumerate(paths)}

    def subtrees(path):
        """Every set of descendants of a path."""
        depth = len(path)
        if depth == len(num_ranks):
            return [()]
        options = []
        for rank in range(num_ranks[depth]):
            child = (*path, rank)
            options.append([(), *((child, *below) for below in subtrees(child))])
        return [tuple(itertools.chain(*combination)) for combination in itertools.product(*options)]

    sets = subtrees(())
    rows = np.zeros((len(sets), len(paths)), dtype=bool)
    for row, members in zip(rows, sets):
        row[[place[path] for path in members]] = True
    table = np.array([features(set(members), len(num_ranks), max(num_ranks)) for members in sets], dtype=int)
    return paths, place, rows, table


def probabilities(model, paths):
    """Whole-path probabilities, multiplied from the root down."""
    found = {(): 1.0}
    for path in paths:
        rates = {rank: rate for rate, rank in model.children(path[:-1])}
        found[path] = found[path[:-1]] * rates.get(path[-1], 0.0)
    return [found[path] for path in paths]


def total(model):
    """Value of every set of a universe: the sum of its path probabilities."""
    return lambda rows, paths: rows @ np.array(probabilities(model, paths))


def worst(models):
    """Value of every set of a universe: the smallest of the models' sums."""
    return lambda rows, paths: np.min([total(model)(rows, paths) for model in models], axis=0)


def coverage(passes):
    """Value of every set of a universe: the mean over positions of the deepest path all whose guesses pass."""

    def values(rows, paths):
        sums = np.zeros(len(rows))
        for position in passes:
            good = [all(position[depth][rank] for depth, rank in enumerate(path)) for path in paths]
            lengths = np.array([len(path) if fine else 0 for path, fine in zip(paths, good)])
            sums += (rows * lengths).max(axis=1, initial=0)
        return sums / len(passes)

    return values


def best_value(value, limits, num_ranks):
    """Largest value of any set of the universe that obeys the limits; None if none does."""
    paths, place, rows, table = universe(num_ranks)
    fine = obeyed(table, limits, len(num_ranks))
    for path in limits.must_include:
        fine &= rows[:, place[path]]
    if not fine.any():
        return None
    return float(value(rows[fine], paths).max())


def value_of(value, chosen):
    """Value of one set of paths."""
    paths = sorted(chosen, key=lambda path: (len(path), path))
    return float(value(np.ones((1, len(paths)), dtype=bool), paths)[0])
