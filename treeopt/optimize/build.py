"""From a path model to a tree with its certificate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt.acceptance import AcceptanceTable
from treeopt.optimize.built import SUMS, BuiltTree, Certificate, expected_accepted
from treeopt.optimize.families import Families, best_first
from treeopt.optimize.large import likeliest_paths
from treeopt.optimize.limits import Limits
from treeopt.optimize.models import HeadModel, PathModel
from treeopt.optimize.noise import Sample, sampling_noise
from treeopt.optimize.search import search
from treeopt.paths import Path
from treeopt.tree import DraftTree, frozen

__all__ = [
    "Acceptance",
    "arrays",
    "as_model",
    "best_tree",
    "best_tree_under",
    "by_probability",
    "certified",
    "likeliest_left_out",
    "with_costs",
]

# Above either, array operations beat the heap; their fixed cost of one to four ms grows with the rates in the table.
VECTORISED_NODES = 1024
VECTORISED_NODES_PER_RATE = 5
SIMPLE_LIMITS = {"max_depth", "max_rank", "rank_caps"}  # take only paths away

Acceptance = AcceptanceTable | PathModel | ArrayLike


def best_tree(
    acceptance: Acceptance,
    num_nodes: int = 64,
    *,
    max_depth: int | None = None,
    max_rank: int | None = None,
    rank_caps: Sequence[int] = (),
    max_children: int | None = None,
    level_caps: Sequence[int] = (),
    dense_siblings: bool = False,
    level_regular: bool = False,
    must_include: Sequence[Path] = (),
    max_leaves: int | None = None,
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
    max_depth, max_rank, rank_caps, max_children, level_caps, dense_siblings, level_regular, must_include, max_leaves
        See `Limits`; they can be combined freely.
    provenance : mapping of str to str, optional
        Kept in the result.

    Returns
    -------
    BuiltTree

    Raises
    ------
    ConstraintError
        For a value that is no limit, and for limits that contradict each other.

    Examples
    --------
    >>> built = best_tree([[0.6, 0.2], [0.5, 0.1]], num_nodes=4)
    >>> built.tree.paths
    ((), (0,), (1,), (0, 0))
    >>> round(built.tokens_per_step, 3)
    2.1
    """
    limits = Limits(
        num_nodes, max_depth, max_rank, tuple(rank_caps), max_children, tuple(level_caps), dense_siblings, level_regular,
        tuple(must_include), max_leaves,
    )  # fmt: skip
    return best_tree_under(limits, acceptance, provenance=provenance)


def best_tree_under(
    limits: Limits, acceptance: Acceptance, *, provenance: Mapping[str, str] | None = None
) -> BuiltTree:
    """Return the tree with the largest E[L] under limits; see `best_tree`."""
    model = as_model(acceptance)
    found = _largest_total(model, limits)
    certificate = Certificate(
        objective="expected_accepted",
        value=found.value,
        bound=found.bound,
        optimal=found.optimal,
        nested=found.nested,
        first_excluded=found.left_out,
        unconstrained=found.value,
    )
    certificate = with_costs(certificate, limits, lambda other: _largest_total(model, other).value)
    return _built(found, limits, certificate, provenance)


def certified(built: BuiltTree, model: PathModel, samples: Sequence[Sample], *, seed: int = 0) -> BuiltTree:
    """Return a tree with the sampling noise of its E[L].

    Parameters
    ----------
    built : BuiltTree
    model : PathModel
        That its path probabilities come from.
    samples : sequence of Sample
        The documents that the model was counted on.
    seed : int
        Of the bootstrap over documents.
    """
    left_out = likeliest_left_out(model, built.constraints, set(built.tree.paths))
    noise = sampling_noise(samples, built.tree, left_out[0] if left_out else None, seed=seed)
    if noise is not None and built.certificate.objective not in SUMS:
        noise = replace(noise, nodes_within_noise=None)
    return replace(built, certificate=replace(built.certificate, noise=noise))


def as_model(acceptance: Acceptance) -> PathModel:
    """Return the path model that is meant: tables and arrays of rates are independent heads."""
    if hasattr(acceptance, "children"):
        return cast(PathModel, acceptance)
    if isinstance(acceptance, AcceptanceTable):
        return HeadModel(acceptance)
    return HeadModel(AcceptanceTable.from_rates(acceptance))


@dataclass(frozen=True, eq=False)
class _Found:
    """A solution as arrays, root included, nodes sorted by (depth, path)."""

    parents: NDArray[np.int64]
    ranks: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    added: NDArray[np.int64]
    value: float
    bound: float
    optimal: bool
    nested: bool
    left_out: float


def _largest_total(model: PathModel, limits: Limits) -> _Found:
    if _vectorised(model, limits):
        found = likeliest_paths(_allowed_rates(cast(HeadModel, model), limits), limits.num_nodes)
        value = expected_accepted(found.probabilities, found.added)
        return _Found(
            found.parents, found.ranks, found.probabilities, found.added, value, value, True, True, found.following
        )
    solution = search(model, limits)
    parents, ranks = arrays(solution.paths)
    probabilities = np.array([1.0, *solution.probabilities])
    added = by_probability(probabilities)
    value = expected_accepted(probabilities, added)
    bound = value if solution.optimal else solution.bound
    left_out = solution.left_out
    if left_out is None:
        likeliest = likeliest_left_out(model, limits, {(), *solution.paths})
        left_out = likeliest[1] if likeliest else 0.0
    return _Found(parents, ranks, probabilities, added, value, bound, solution.optimal, solution.nested, left_out)


def _vectorised(model: PathModel, limits: Limits) -> bool:
    if not isinstance(model, HeadModel) or not SIMPLE_LIMITS.issuperset(limits.active):
        return False
    return limits.num_nodes > min(VECTORISED_NODES, VECTORISED_NODES_PER_RATE * model.table.rates.size)


def _allowed_rates(model: HeadModel, limits: Limits) -> NDArray[np.float64]:
    rates = model.table.rates[: limits.max_depth].copy()
    for depth, row in enumerate(rates, 1):
        cap = limits.rank_cap(depth)
        if cap is not None:
            row[cap + 1 :] = 0.0
    return rates


def _built(found: _Found, limits: Limits, certificate: Certificate, provenance: Mapping[str, str] | None) -> BuiltTree:
    return BuiltTree(
        tree=DraftTree(frozen(found.parents), frozen(found.ranks)),
        path_probabilities=found.probabilities,
        added=found.added,
        constraints=limits,
        certificate=certificate,
        provenance=dict(provenance or {}),
    )


def with_costs(certificate: Certificate, limits: Limits, value: Callable[[Limits], float]) -> Certificate:
    """Solve again without each limit, and without any, to say what they cost."""
    if not limits.active:
        return certificate
    values = {name: value(limits.without(name)) for name in limits.active}
    only = len(limits.active) == 1
    free = values[limits.active[0]] if only else value(limits.without(*limits.active))
    costs = {name: max(0.0, without - certificate.value) for name, without in values.items()}
    return replace(certificate, unconstrained=max(free, certificate.value), constraint_costs=costs)


def likeliest_left_out(model: PathModel, limits: Limits, held: set[Path]) -> tuple[Path, float] | None:
    """Return the likeliest path outside a tree that depth and rank limits allow, and its probability."""
    alone = Limits(len(held) + 1, limits.max_depth, limits.max_rank, limits.rank_caps)
    taken = best_first(Families(model, alone), len(held)).taken
    return next(((path, probability) for path, probability in taken.items() if path not in held), None)


def arrays(paths: Sequence[Path]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return parents and ranks of paths sorted by (depth, path), with the root before them."""
    place = {path: node for node, path in enumerate(paths, 1)}
    place[()] = 0
    parents = [place[path[:-1]] for path in paths]
    return np.array([-1, *parents]), np.array([-1, *[path[-1] for path in paths]])


def by_probability(probabilities: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return nodes by falling probability, the root first; equal ones by (depth, path), which is their order already."""
    return np.concatenate([[0], 1 + np.argsort(-probabilities[1:], kind="stable")])
