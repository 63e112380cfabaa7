"""Best-first search over path probabilities.

A path is never likelier than its parent, so the most likely nodes always form a tree, and taking them one by one is
optimal at every budget: the trees of one run nest.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike

from treeopt.acceptance import AcceptanceTable
from treeopt.errors import ConstraintError
from treeopt.optimize.built import BuiltTree, Constraints
from treeopt.tree import DraftTree, Path

__all__ = ["best_tree"]

# (minus probability, depth, path, place among its siblings): the heap's order is the rule for ties.
Entry = tuple[float, int, Path, int]


def best_tree(
    acceptance: AcceptanceTable | ArrayLike,
    num_nodes: int = 64,
    *,
    max_depth: int | None = None,
    max_rank: int | None = None,
    provenance: Mapping[str, str] | None = None,
) -> BuiltTree:
    """Return the tree with the largest E[L] at a budget, under independent heads.

    Parameters
    ----------
    acceptance : AcceptanceTable or array_like of float, shape (heads, ranks)
        Accuracy of each head at each rank.
    num_nodes : int
        Tokens in one verification pass, root included. Paths of probability 0 are never added, so the tree is smaller
        when fewer paths are possible.
    max_depth : int, optional
        Deepest level; at most the number of heads.
    max_rank : int, optional
        Largest rank in any path.
    provenance : mapping of str to str, optional
        Kept in the result.

    Returns
    -------
    BuiltTree

    Raises
    ------
    ConstraintError
        For a budget below 1 or a negative limit.

    Examples
    --------
    >>> built = best_tree([[0.6, 0.2], [0.5, 0.1]], num_nodes=4)
    >>> built.tree.paths
    ((), (0,), (1,), (0, 0))
    >>> round(built.tokens_per_step, 3)
    2.1
    """
    table = acceptance if isinstance(acceptance, AcceptanceTable) else AcceptanceTable.from_rates(acceptance)
    constraints = _checked(Constraints(num_nodes, max_depth, max_rank))
    paths, probabilities, following = _search(table, constraints)
    free = _search(table, Constraints(num_nodes))[1] if _may_bind(table, constraints) else probabilities
    unconstrained = float(sum(free))
    return _built(paths, probabilities, constraints, following, unconstrained, provenance or {})


def _checked(constraints: Constraints) -> Constraints:
    if constraints.num_nodes < 1:
        raise ConstraintError(
            f"`num_nodes` is {constraints.num_nodes}; a tree has at least the root, so give 1 (plain decoding) or more"
        )
    for name in ("max_depth", "max_rank"):
        limit = getattr(constraints, name)
        if limit is not None and limit < 0:
            raise ConstraintError(f"`{name}` is {limit}; give 0 or more, or leave it out")
    return constraints


def _may_bind(table: AcceptanceTable, constraints: Constraints) -> bool:
    depth, rank = constraints.max_depth, constraints.max_rank
    return (depth is not None and depth < table.num_heads) or (rank is not None and rank + 1 < table.num_ranks)


def _search(table: AcceptanceTable, constraints: Constraints) -> tuple[list[Path], list[float], float]:
    """Return the most likely paths in order, their probabilities, and the probability of the next one."""
    levels = _sorted_levels(table, constraints)
    paths: list[Path] = []
    probabilities: list[float] = []
    heap: list[Entry] = []
    # Of each family only the best child not yet taken is in the heap; taking it brings in the next.
    parents: dict[Path, float] = {(): 1.0}

    def push(parent: Path, place: int) -> None:
        depth = len(parent)
        if depth < len(levels) and place < len(levels[depth]):
            rate, rank = levels[depth][place]
            heappush(heap, (-(parents[parent] * rate), depth + 1, (*parent, rank), place))

    push((), 0)
    while heap and len(paths) < constraints.num_nodes - 1 and heap[0][0] < 0.0:
        negative, _, path, place = heappop(heap)
        paths.append(path)
        probabilities.append(-negative)
        parents[path] = -negative
        push(path[:-1], place + 1)
        push(path, 0)
    return paths, probabilities, -heap[0][0] if heap else 0.0


def _sorted_levels(table: AcceptanceTable, constraints: Constraints) -> list[list[tuple[float, int]]]:
    """Return for each depth the (rate, rank) pairs, best first: a head's next rank may be the better one."""
    depth = table.num_heads if constraints.max_depth is None else min(constraints.max_depth, table.num_heads)
    num_ranks = table.num_ranks if constraints.max_rank is None else min(constraints.max_rank + 1, table.num_ranks)
    # No node ranks below the budget's worth of better siblings.
    useful = min(num_ranks, constraints.num_nodes)
    rates = table.rates[:depth, :num_ranks]
    order = np.argsort(-rates, axis=1, kind="stable")[:, :useful]
    best = np.take_along_axis(rates, order, axis=1)
    return [list(zip(rate, rank)) for rate, rank in zip(best.tolist(), order.tolist())]


def _built(
    paths: list[Path],
    probabilities: list[float],
    constraints: Constraints,
    following: float,
    unconstrained: float,
    provenance: Mapping[str, str],
) -> BuiltTree:
    tree = DraftTree._of_valid(paths)
    place = {path: node for node, path in enumerate(tree.paths)}
    added = np.array([0, *(place[path] for path in paths)], dtype=np.int64)
    path_probabilities = np.empty(len(added))
    path_probabilities[added] = [1.0, *probabilities]
    return BuiltTree(tree, path_probabilities, added, constraints, following, unconstrained, dict(provenance))
