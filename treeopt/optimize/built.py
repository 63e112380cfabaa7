"""The result of a search: a tree with the probabilities that chose it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treeopt.optimize.certificate import Noise
from treeopt.tree import DraftTree

__all__ = ["BuiltTree", "Constraints", "expected_accepted"]


@dataclass(frozen=True, slots=True)
class Constraints:
    """Limits that a search obeyed; None where it had none.

    Attributes
    ----------
    num_nodes : int
        Budget asked for, root included.
    max_depth : int or None
    max_rank : int or None
    """

    num_nodes: int
    max_depth: int | None = None
    max_rank: int | None = None


@dataclass(frozen=True, eq=False)
class BuiltTree:
    """A tree and what its acceptance model says of it.

    Attributes
    ----------
    tree : DraftTree
    path_probabilities : ndarray of float64, shape (num_nodes,)
        Probability that the whole path to a node is accepted, in [0, 1]; 1 for the root.
    added : ndarray of int64, shape (num_nodes,)
        Nodes in the order in which the search took them, the root first. The first n are the best tree of n nodes.
    constraints : Constraints
    first_excluded : float
        Probability of the best node left out under the constraints; 0 if none is left.
    unconstrained : float
        E[L] of the best tree of as many nodes without limits on depth and rank.
    provenance : mapping of str to str
        Where the acceptance model came from.
    noise : Noise or None
        Spread of E[L] over samples of documents; None for accuracies without a trace.
    """

    tree: DraftTree
    path_probabilities: NDArray[np.float64]
    added: NDArray[np.int64]
    constraints: Constraints
    first_excluded: float
    unconstrained: float
    provenance: Mapping[str, str] = field(default_factory=dict)
    noise: Noise | None = None

    @property
    def curve(self) -> NDArray[np.float64]:
        """E[L] of the best tree of 1, 2, …, num_nodes nodes, root included in the count; shape (num_nodes,)."""
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
    def cap_cost(self) -> float:
        """E[L] lost to the limits on depth and rank; 0 when none binds."""
        return max(0.0, self.unconstrained - self.expected_accepted)

    @property
    def last_included(self) -> float:
        """Smallest path probability in the tree."""
        return float(self.path_probabilities[self.added[-1]])


def expected_accepted(path_probabilities: NDArray[np.float64], added: NDArray[np.int64]) -> float:
    """Return E[L]: the sum of the nodes' path probabilities without the root's, in the order they were added."""
    # cumsum adds one after the other, as the curve does; sum would add in pairs and round otherwise.
    return float(path_probabilities[added[1:]].cumsum()[-1]) if len(added) > 1 else 0.0
