"""The result of a search: a tree, the probabilities that chose it and what is proven of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treeopt.optimize.limits import Limits
from treeopt.optimize.noise import Noise
from treeopt.tree import DraftTree

__all__ = ["SUMS", "BuiltTree", "Certificate", "expected_accepted"]

SUMS = ("expected_accepted", "mixture")  # objectives whose value is E[L], the sum of path probabilities


@dataclass(frozen=True)
class Certificate:
    """What a search proved.

    Attributes
    ----------
    objective : str
        What was maximised: ``expected_accepted``, ``mixture``, ``robust``, ``typical`` or ``tokens_per_step``.
    value : float
        What the objective gives the tree, in accepted nodes a step.
    bound : float
        No tree under the constraints has a larger value, under the same model; `value` itself where `optimal`.
    optimal : bool
        Whether that is proven.
    nested : bool
        Whether the first n nodes of `added` are the best tree of n nodes, for every n.
    first_excluded : float
        Probability of the likeliest path left out that depth and rank limits allow; 0 if none is left.
    unconstrained : float
        Value of the best tree of as many nodes without any other limit.
    constraint_costs : mapping of str to float
        For each limit given, how much more a tree without it, found under all the others, is worth.
    parts : mapping of str to float
        Of `robust` and `mixture`: E[L] in each domain.
    noise : Noise or None
        Spread of E[L] over samples of documents; None for accuracies without a trace.
    """

    objective: str
    value: float
    bound: float
    optimal: bool
    nested: bool
    first_excluded: float
    unconstrained: float
    constraint_costs: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    noise: Noise | None = None


@dataclass(frozen=True, eq=False)
class BuiltTree:
    """A tree and what its acceptance model says of it.

    Attributes
    ----------
    tree : DraftTree
    path_probabilities : ndarray of float64, shape (num_nodes,)
        Probability that the whole path to a node is accepted, in [0, 1]; 1 for the root.
    added : ndarray of int64, shape (num_nodes,)
        Nodes by falling probability, ties by depth and path; the root first. Where the certificate says `nested`, the
        first n are the best tree of n nodes.
    constraints : Limits
    certificate : Certificate
    provenance : mapping of str to str
        Where the acceptance model came from.
    """

    tree: DraftTree
    path_probabilities: NDArray[np.float64]
    added: NDArray[np.int64]
    constraints: Limits
    certificate: Certificate
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def curve(self) -> NDArray[np.float64]:
        """E[L] of the first 1, 2, …, num_nodes nodes of `added`; shape (num_nodes,)."""
        return np.concatenate([[0.0], np.cumsum(self.path_probabilities[self.added[1:]])])

    @property
    def expected_accepted(self) -> float:
        """E[L]: mean number of accepted nodes a step, root excluded."""
        return expected_accepted(self.path_probabilities, self.added)

    @property
    def tokens_per_step(self) -> float:
        """1 + E[L]: what papers call acceleration rate or tau."""
        return 1.0 + self.expected_accepted

    @property
    def last_included(self) -> float:
        """Smallest path probability in the tree."""
        return float(self.path_probabilities[self.added[-1]])


def expected_accepted(path_probabilities: NDArray[np.float64], added: NDArray[np.int64]) -> float:
    """Return E[L]: the sum of the nodes' path probabilities without the root's, in the order they were added."""
    # cumsum adds one after the other, as the curve does; sum would add in pairs and round otherwise.
    return float(path_probabilities[added[1:]].cumsum()[-1]) if len(added) > 1 else 0.0
