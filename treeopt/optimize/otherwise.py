"""Trees for objectives that are not a sum over nodes: the worst domain, typical acceptance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from treeopt.optimize.build import Acceptance, arrays, as_model, by_probability, likeliest_left_out, with_costs
from treeopt.optimize.built import BuiltTree, Certificate
from treeopt.optimize.limits import Limits
from treeopt.optimize.models import PathModel, path_probabilities
from treeopt.optimize.objectives import Coverage, Objective, Worst
from treeopt.optimize.passing import PassingModel
from treeopt.optimize.search import search_objective
from treeopt.tree import DraftTree, frozen

__all__ = ["chosen_otherwise", "robust_tree", "typical_tree"]


def robust_tree(
    limits: Limits,
    domains: Mapping[str, Acceptance],
    acceptance: Acceptance,
    *,
    provenance: Mapping[str, str] | None = None,
) -> BuiltTree:
    """Return the tree whose worst domain has the largest E[L].

    Parameters
    ----------
    limits : Limits
    domains : mapping of str to AcceptanceTable, PathModel or array_like
        The acceptance of each domain.
    acceptance : AcceptanceTable, PathModel or array_like
        Of all domains together: what `path_probabilities` of the result are, not what the tree is chosen by.
    provenance : mapping of str to str, optional

    Returns
    -------
    BuiltTree
        Its certificate's value is the smallest E[L], `parts` holds every domain's.
    """
    models = {name: as_model(given) for name, given in domains.items()}
    built = _by_objective(
        "robust", limits, lambda under: Worst.of(list(models.values()), under), as_model(acceptance), provenance
    )
    parts = {name: float(path_probabilities(model, built.tree)[1:].sum()) for name, model in models.items()}
    return replace(built, certificate=replace(built.certificate, parts=parts))


def typical_tree(
    limits: Limits, passing: PassingModel, acceptance: Acceptance, *, provenance: Mapping[str, str] | None = None
) -> BuiltTree:
    """Return the tree that typical acceptance follows furthest on a trace.

    Parameters
    ----------
    limits : Limits
    passing : PassingModel
        Which guesses pass at which position.
    acceptance : AcceptanceTable, PathModel or array_like
        Of the heads under greedy acceptance: what `path_probabilities` of the result are.
    provenance : mapping of str to str, optional

    Returns
    -------
    BuiltTree
        Its certificate's value is E[L] under typical acceptance.
    """
    return _by_objective("typical", limits, lambda under: Coverage.of(passing, under), as_model(acceptance), provenance)


def chosen_otherwise(
    tree: DraftTree,
    model: PathModel,
    limits: Limits,
    objective: str,
    value: float,
    bound: float | None,
    *,
    provenance: Mapping[str, str] | None = None,
) -> BuiltTree:
    """Return a tree that was not chosen by a sum over its nodes, with its path probabilities under a model.

    Parameters
    ----------
    tree : DraftTree
    model : PathModel
    limits : Limits
        That it obeys.
    objective : str
        What it was chosen by.
    value : float
        Of the objective.
    bound : float or None
        A value that no tree under the limits exceeds; None if the tree is proven optimal.
    provenance : mapping of str to str, optional
    """
    probabilities = path_probabilities(model, tree)
    likeliest = likeliest_left_out(model, limits, set(tree.paths))
    certificate = Certificate(
        objective=objective,
        value=value,
        bound=value if bound is None else bound,
        optimal=bound is None,
        nested=False,
        first_excluded=likeliest[1] if likeliest else 0.0,
        unconstrained=value,
    )
    return BuiltTree(tree, probabilities, by_probability(probabilities), limits, certificate, dict(provenance or {}))


def _by_objective(
    name: str,
    limits: Limits,
    objective: Callable[[Limits], Objective],
    model: PathModel,
    provenance: Mapping[str, str] | None,
) -> BuiltTree:
    solution = search_objective(objective(limits), limits)
    tree = DraftTree(*map(frozen, arrays(solution.paths)))
    built = chosen_otherwise(
        tree, model, limits, name, solution.value, None if solution.optimal else solution.bound, provenance=provenance
    )
    certificate = with_costs(built.certificate, limits, lambda other: search_objective(objective(other), other).value)
    return replace(built, certificate=certificate)
