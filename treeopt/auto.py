"""The budget of a machine: trees of every size against a latency curve."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treeopt.budget import BudgetChoice, choose_budget
from treeopt.latency import LatencyCurve
from treeopt.optimize.built import BuiltTree
from treeopt.replays import replay_many
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree

__all__ = ["auto_budget", "nested_tree"]


def auto_budget(build: Callable[[int], BuiltTree], curve: LatencyCurve, trace: RankTrace | None = None) -> BudgetChoice:
    """Compare budgets by tokens a second on a curve.

    Where trees nest, every budget up to the largest measured one is looked at; elsewhere the measured ones.

    Parameters
    ----------
    build : callable
        Returns the tree of a budget, root included.
    curve : LatencyCurve
    trace : RankTrace, optional
        Tokens a step are then those of the exact replay; without it 1 + E[L].
    """
    largest = build(curve.max_nodes)
    if largest.certificate.nested:
        trees = [nested_tree(largest, n) for n in range(1, largest.tree.num_nodes + 1)]
        rates = 1.0 + largest.curve
    else:
        built = [build(int(n)) for n in curve.nodes[:-1]] + [largest]
        trees, rates = [one.tree for one in built], np.array([one.tokens_per_step for one in built])
    if trace is not None:
        rates = np.array([one.tokens_per_step for one in replay_many(trees, trace)])
    sizes, first = np.unique([tree.num_nodes for tree in trees], return_index=True)
    depths = np.array([tree.max_depth for tree in trees])
    return choose_budget(curve, sizes, rates[first], depths[first])


def nested_tree(built: BuiltTree, num_nodes: int) -> DraftTree:
    """Return the best tree of fewer nodes out of one whose trees nest."""
    kept = np.zeros(built.tree.num_nodes, dtype=bool)
    kept[built.added[:num_nodes]] = True
    place = np.cumsum(kept) - 1
    parents = built.tree.parents[kept]
    return DraftTree.from_parents(np.where(parents < 0, -1, place[parents]), built.tree.ranks[kept])
