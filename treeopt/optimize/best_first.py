"""Best-first search over path probabilities.

A path is never likelier than its parent, so the most likely nodes always form a tree, and taking them one by one is
optimal at every budget: the trees of one run nest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from treeopt.acceptance import AcceptanceTable
from treeopt.errors import ConstraintError
from treeopt.optimize.built import BuiltTree, Constraints, expected_accepted
from treeopt.optimize.certificate import sampling_noise
from treeopt.optimize.large import LikeliestPaths, likeliest_paths
from treeopt.optimize.models import Child, HeadModel, PathModel
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree, Path, frozen, order_key

__all__ = ["as_model", "best_tree", "certified"]

VECTORISED_NODES = 1024  # above, array operations beat the heap; below, their fixed cost of a few ms does not

# (minus probability, depth, path, place among its siblings): the heap's order is the rule for ties.
Entry = tuple[float, int, Path, int]


def best_tree(
    acceptance: AcceptanceTable | PathModel | ArrayLike,
    num_nodes: int = 64,
    *,
    max_depth: int | None = None,
    max_rank: int | None = None,
    provenance: Mapping[str, str] | None = None,
) -> BuiltTree:
    """Return the tree with the largest E[L] at a budget.

    Parameters
    ----------
    acceptance : AcceptanceTable, PathModel, or array_like of float, shape (heads, ranks)
        Accuracy of each head at each rank, heads being independent; or any model of path probabilities.
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
    model = as_model(acceptance)
    constraints = _checked(Constraints(num_nodes, max_depth, max_rank))
    found = _search(model, constraints)
    free = found
    if max_rank is not None or (max_depth is not None and max_depth < model.num_levels):
        free = _search(model, Constraints(num_nodes))
    return BuiltTree(
        tree=DraftTree(frozen(found.parents), frozen(found.ranks)),
        path_probabilities=found.probabilities,
        added=found.added,
        constraints=constraints,
        first_excluded=found.following,
        unconstrained=expected_accepted(free.probabilities, free.added),
        provenance=dict(provenance or {}),
    )


def certified(built: BuiltTree, trace: RankTrace, *, seed: int = 0) -> BuiltTree:
    """Return a tree built from a trace's accuracies with the sampling noise of its E[L].

    Parameters
    ----------
    built : BuiltTree
        Of independent heads.
    trace : RankTrace
        The trace whose table built it.
    seed : int
        Of the bootstrap over documents.
    """
    limits = built.constraints
    larger = best_tree(trace.table(), limits.num_nodes + 1, max_depth=limits.max_depth, max_rank=limits.max_rank)
    left_out = larger.tree.paths[larger.added[-1]] if larger.tree.num_nodes > built.tree.num_nodes else None
    return replace(built, noise=sampling_noise(trace, built.tree, left_out, seed=seed))


def as_model(acceptance: AcceptanceTable | PathModel | ArrayLike) -> PathModel:
    """Return the path model that is meant: tables and arrays of rates are independent heads."""
    if hasattr(acceptance, "children"):
        return cast(PathModel, acceptance)
    if isinstance(acceptance, AcceptanceTable):
        return HeadModel(acceptance)
    return HeadModel(AcceptanceTable.from_rates(acceptance))


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


def _search(model: PathModel, constraints: Constraints) -> LikeliestPaths:
    depth, rank = constraints.max_depth, constraints.max_rank
    if isinstance(model, HeadModel) and constraints.num_nodes > VECTORISED_NODES:
        rates = model.table.rates[:depth, : None if rank is None else rank + 1]
        return likeliest_paths(rates, constraints.num_nodes)
    return _heap_search(model, constraints)


def _heap_search(model: PathModel, constraints: Constraints) -> LikeliestPaths:
    """Take the likeliest path again and again; works for every model."""
    max_depth = model.num_levels if constraints.max_depth is None else constraints.max_depth
    max_rank = constraints.max_rank
    heap: list[Entry] = []
    # Of each family only the best child not yet taken is in the heap; taking it brings in the next.
    families: dict[Path, tuple[float, Sequence[Child]]] = {}

    def open_family(path: Path, probability: float) -> None:
        children: Sequence[Child] = model.children(path) if len(path) < max_depth else ()
        if max_rank is not None:
            children = [child for child in children if child[1] <= max_rank]
        families[path] = probability, children
        push(path, 0)

    def push(path: Path, place: int) -> None:
        probability, children = families[path]
        if place < len(children):
            rate, rank = children[place]
            heappush(heap, (-(probability * rate), len(path) + 1, (*path, rank), place))

    open_family((), 1.0)
    paths: list[Path] = []
    probabilities: list[float] = []
    while heap and len(paths) < constraints.num_nodes - 1 and heap[0][0] < 0.0:
        negative, _, path, place = heappop(heap)
        paths.append(path)
        probabilities.append(-negative)
        push(path[:-1], place + 1)
        open_family(path, -negative)
    return _arrays(paths, probabilities, -heap[0][0] if heap else 0.0)


def _arrays(paths: list[Path], probabilities: list[float], following: float) -> LikeliestPaths:
    """Sort nodes from the order they were taken in to (depth, path)."""
    taken = sorted(range(len(paths)), key=lambda i: order_key(paths[i]))
    place: dict[Path, int] = {(): 0}
    parents, ranks, sorted_probabilities, added = [-1], [-1], [1.0], [0] * (len(paths) + 1)
    for node, i in enumerate(taken, 1):
        path = paths[i]
        place[path] = node
        parents.append(place[path[:-1]])
        ranks.append(path[-1])
        sorted_probabilities.append(probabilities[i])
        added[i + 1] = node
    return LikeliestPaths(
        np.array(parents), np.array(ranks), np.array(sorted_probabilities), np.array(added), following
    )
