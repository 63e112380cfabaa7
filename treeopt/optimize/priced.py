"""Trees that came from elsewhere: what an acceptance model says of them, or that nothing is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from treeopt.optimize.build import best_tree_under, by_probability, likeliest_left_out
from treeopt.optimize.built import BuiltTree, Certificate, expected_accepted
from treeopt.optimize.limits import Limits
from treeopt.optimize.models import PathModel, path_probabilities
from treeopt.tree import DraftTree

__all__ = ["priced", "states_probabilities", "unpriced"]

KEY, UNKNOWN = "probabilities", "unknown"  # in the provenance of a tree that states none
ROUNDING = 1e-12  # between the sums of one set of nodes found by two ways


def priced(tree: DraftTree, model: PathModel, *, provenance: Mapping[str, str] | None = None) -> BuiltTree:
    """Return a given tree with its path probabilities under a model, and how good the best of its size would be.

    Parameters
    ----------
    tree : DraftTree
    model : PathModel
    provenance : mapping of str to str, optional

    Raises
    ------
    TreeError
        If the model knows fewer levels than the tree has.

    Examples
    --------
    >>> from treeopt.optimize import HeadModel
    >>> from treeopt.acceptance import AcceptanceTable
    >>> built = priced(DraftTree.from_paths([(1,)]), HeadModel(AcceptanceTable.from_rates([[0.5, 0.25]])))
    >>> built.expected_accepted, built.certificate.bound, built.certificate.optimal
    (0.25, 0.5, False)
    """
    tree.require_heads(model.num_levels)
    limits = Limits(tree.num_nodes)
    probabilities = path_probabilities(model, tree)
    best = best_tree_under(limits, model).certificate
    left_out = likeliest_left_out(model, limits, set(tree.paths))
    built = _built(tree, probabilities, limits, provenance)
    value = built.expected_accepted
    equal = value >= best.value - ROUNDING
    certificate = replace(
        built.certificate,
        bound=value if equal and best.optimal else max(value, best.bound),
        optimal=equal and best.optimal,
        first_excluded=left_out[1] if left_out else 0.0,
        unconstrained=max(value, best.value),
    )
    return replace(built, certificate=certificate)


def unpriced(tree: DraftTree, *, provenance: Mapping[str, str] | None = None) -> BuiltTree:
    """Return a tree of which nothing is known: 0 stands for every path probability, the provenance says so.

    E[L] then is the smallest that it can be, and the certificate's bound the largest.

    Examples
    --------
    >>> built = unpriced(DraftTree.from_paths([(0,), (0, 0)]))
    >>> built.expected_accepted, built.certificate.bound, states_probabilities(built)
    (0.0, 2.0, False)
    """
    probabilities = np.zeros(tree.num_nodes)
    probabilities[0] = 1.0
    built = _built(tree, probabilities, Limits(tree.num_nodes), {**(provenance or {}), KEY: UNKNOWN})
    bound = float(tree.num_nodes - 1)
    certificate = replace(
        built.certificate, bound=bound, optimal=bound == 0.0, first_excluded=float(bound > 0), unconstrained=bound
    )
    return replace(built, certificate=certificate)


def states_probabilities(built: BuiltTree) -> bool:
    """Tell whether a tree's path probabilities mean anything: `unpriced` ones do not."""
    return built.provenance.get(KEY) != UNKNOWN


def _built(
    tree: DraftTree,
    probabilities: np.ndarray[tuple[int], np.dtype[np.float64]],
    limits: Limits,
    provenance: Mapping[str, str] | None,
) -> BuiltTree:
    added = by_probability(probabilities)
    value = expected_accepted(probabilities, added)
    certificate = Certificate(
        objective="expected_accepted",
        value=value,
        bound=value,
        optimal=False,
        nested=False,
        first_excluded=0.0,
        unconstrained=value,
    )
    return BuiltTree(tree, probabilities, added, limits, certificate, dict(provenance or {}))
