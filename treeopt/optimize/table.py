"""The best tree of independent heads with dense siblings or few leaves: dynamic programming."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from treeopt.optimize.families import Families, Probabilities
from treeopt.paths import Path

__all__ = ["Table", "table_steps"]

Values = NDArray[np.float64]
Places = NDArray[np.int64]


def table_steps(families: Families) -> float:
    """Additions that a `Table` would make; infinite where it does not apply."""
    limits = families.limits
    if limits.required or limits.level_caps or not families.independent:
        return math.inf
    leaves = limits.max_leaves if families.leaves_bind and limits.max_leaves is not None else 0
    num_children = sum(len(families((0,) * depth)) for depth in range(families.num_levels))
    return float(num_children * ((limits.num_nodes + 1) * (leaves + 1)) ** 2)


class Table:
    """Best subtrees of independent heads by level, most nodes and most leaves, where siblings come first to last.

    values[d][n, l] is the E[L] below a node of depth d, times 1 / its probability, with at most n nodes, it included,
    and at most l leaves. A node's first k children share its nodes as in a knapsack: one max-plus convolution a child.
    Without `max_leaves` the axis of leaves has length 1 and leaves weigh 0. After Chen et al. 2024 (Sequoia, arXiv
    2402.12374, section 4.1), with leaves, and with other rates at every level.
    """

    def __init__(self, families: Families) -> None:
        self.families, limits = families, families.limits
        self.num_leaves = limits.max_leaves if families.leaves_bind and limits.max_leaves is not None else 0
        self.num_nodes = limits.num_nodes
        self.num_children: list[Places] = []  # for each level: how many children are best
        self.shares: list[list[Places]] = []  # for each level and child: its nodes and leaves, as a flat index
        leaf = np.full((self.num_nodes + 1, self.num_leaves + 1), -np.inf)
        leaf[1:, min(1, self.num_leaves) :] = 0.0
        values = leaf
        for depth in range(families.num_levels - 1, -1, -1):
            values = self._level(leaf, values, [rate for rate, _, _ in families((0,) * depth)])
        self.num_children.reverse()
        self.shares.reverse()

    def tree(self) -> Probabilities:
        """Return the best tree of the whole budget."""
        chosen: Probabilities = {}
        self._place(chosen, (), 1.0, self.num_nodes, self.num_leaves)
        return chosen

    def _level(self, leaf: Values, below: Values, rates: list[float]) -> Values:
        values, best = leaf.copy(), np.zeros(leaf.shape, dtype=np.int64)
        shares: list[Places] = []
        children = np.zeros_like(leaf)  # [nodes, leaves] below the node, of its first children
        for count, rate in enumerate(rates, 1):
            block = np.full_like(below, -np.inf)
            np.multiply(1.0 + below, rate, out=block, where=np.isfinite(below))
            children, share = _max_plus(children, block)
            shares.append(share)
            better = children[:-1] > values[1:]
            values[1:][better] = children[:-1][better]
            best[1:][better] = count
        self.num_children.append(best)
        self.shares.append(shares)
        return values

    def _place(self, chosen: Probabilities, path: Path, probability: float, nodes: int, leaves: int) -> None:
        depth = len(path)
        if depth == self.families.num_levels:
            return
        nodes_left = nodes - 1
        for place in range(int(self.num_children[depth][nodes, leaves]) - 1, -1, -1):
            share = int(self.shares[depth][place][nodes_left, leaves])
            child_nodes, child_leaves = divmod(share, self.num_leaves + 1)
            nodes_left, leaves = nodes_left - child_nodes, leaves - child_leaves
            rate, _, rank = self.families(path)[place]
            below = (*path, rank)
            chosen[below] = probability * rate
            self._place(chosen, below, chosen[below], child_nodes, child_leaves)


def _max_plus(first: Values, second: Values) -> tuple[Values, Places]:
    """Return the two-dimensional max-plus convolution and, flat, the smallest index in `second` that attains it."""
    rows, columns = first.shape
    padded = np.full((2 * rows - 1, 2 * columns - 1), -np.inf)
    padded[rows - 1 :, columns - 1 :] = first
    # windows[n, l, i, j] = first[n - i, l - j]
    windows = np.lib.stride_tricks.sliding_window_view(padded, (rows, columns))[:, :, ::-1, ::-1]
    values, places = np.empty((rows, columns)), np.empty((rows, columns), dtype=np.int64)
    chunk = max(1, (1 << 20) // (rows * columns * columns))  # 8 MiB of sums at a time stay in cache
    for start in range(0, rows, chunk):
        sums = (windows[start : start + chunk] + second).reshape(-1, columns, rows * columns)
        places[start : start + chunk] = sums.argmax(axis=2)
        values[start : start + chunk] = sums.max(axis=2)
    return values, places
