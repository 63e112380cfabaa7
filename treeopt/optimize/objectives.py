"""What a tree is chosen for, as the integer program sees it.

An objective states what chosen nodes are worth through columns and rows of its own. `Total` adds up path probabilities;
`Worst` is the smallest of several totals, one a domain; `Coverage` counts positions at which some node of a depth passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treeopt.optimize.families import Families, free_bound
from treeopt.optimize.limits import Limits
from treeopt.optimize.models import PathModel
from treeopt.optimize.passing import PassingModel
from treeopt.paths import Path

__all__ = ["Columns", "Coverage", "Nodes", "Objective", "Row", "Total", "Worst"]

Nodes = Mapping[Path, tuple[float, ...]]  # each node's probability in each of the objective's families
Row = tuple[list[tuple[int, float]], float]  # terms (column, factor), and the most they may sum to
Values = NDArray[np.float64]

# HiGHS holds a row to 1e-7, which scipy cannot lower; in these units that is 1e-13 of an accepted token.
ROW_SCALE = float(1 << 20)


@dataclass(frozen=True)
class Columns:
    """Worth of one unit of each column, and what the columns beyond nodes and nodes outside are.

    Attributes
    ----------
    gain : list of float
        Of the nodes, then of the nodes outside at each depth, then of the further columns.
    upper : list of float
        Largest value of each further column, from 0.
    rows : list of rows
    """

    gain: list[float]
    upper: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


class Objective(Protocol):
    """What the integer program asks of an objective."""

    @property
    def families(self) -> tuple[Families, ...]:
        """Who says which nodes there are, likeliest first; one for each kind of probability a node has."""

    def bound(self) -> float:
        """Return a value that no tree exceeds."""

    def value(self, nodes: Nodes) -> float:
        """Return what a tree is worth."""

    def columns(self, nodes: Nodes, outside: Values) -> Columns:
        """Return the program's columns; `outside` is the largest probability left out, (families, depths)."""


@dataclass(frozen=True)
class Total:
    """E[L] under one model: the sum of path probabilities."""

    families: tuple[Families]

    @classmethod
    def of(cls, model: PathModel, limits: Limits) -> Total:
        """Build for a model under limits."""
        return cls((Families(model, limits),))

    def bound(self) -> float:
        """See `Objective.bound`."""
        return free_bound(self.families[0])

    def value(self, nodes: Nodes) -> float:
        """See `Objective.value`."""
        return math.fsum(probability for (probability,) in nodes.values())

    def columns(self, nodes: Nodes, outside: Values) -> Columns:
        """See `Objective.columns`."""
        return Columns([*(probability for (probability,) in nodes.values()), *outside[0].tolist()])


@dataclass(frozen=True)
class Worst:
    """The smallest E[L] of several models: what the worst domain gets."""

    families: tuple[Families, ...]

    @classmethod
    def of(cls, models: Sequence[PathModel], limits: Limits) -> Worst:
        """Build for the models of several domains under limits."""
        return cls(tuple(Families(model, limits, additive=False) for model in models))

    def bound(self) -> float:
        """See `Objective.bound`."""
        return min(free_bound(families) for families in self.families)

    def value(self, nodes: Nodes) -> float:
        """See `Objective.value`."""
        if not nodes:
            return 0.0
        return min(math.fsum(probabilities) for probabilities in zip(*nodes.values()))

    def columns(self, nodes: Nodes, outside: Values) -> Columns:
        """See `Objective.columns`: one further column, no larger than any domain's sum."""
        worst = len(nodes) + outside.shape[1]
        rows: list[Row] = []
        for sums, left in zip(zip(*nodes.values()), outside.tolist()):
            terms = [(i, -ROW_SCALE * probability) for i, probability in enumerate((*sums, *left)) if probability]
            rows.append(([(worst, 1.0), *terms], 0.0))
        return Columns([0.0] * worst + [1 / ROW_SCALE], [ROW_SCALE * outside.shape[1]], rows)


@dataclass(frozen=True)
class Coverage:
    """E[L] where several siblings may pass: at how many positions some node of each depth passes, on a trace.

    A path passes at a position when the guess of every head at its rank passes there. Adding up path probabilities would
    count a position twice where two nodes of a depth pass.
    """

    families: tuple[Families]
    passing: PassingModel

    @classmethod
    def of(cls, passing: PassingModel, limits: Limits) -> Coverage:
        """Build for a trace's passing guesses under limits."""
        return cls((Families(passing, limits, additive=False),), passing)

    def bound(self) -> float:
        """See `Objective.bound`: no more than the sum, nor than what the tree of all paths covers."""
        deepest = self.families[0].num_levels
        return min(free_bound(self.families[0]), float(self.passing.reachable[:deepest].sum()))

    def value(self, nodes: Nodes) -> float:
        """See `Objective.value`."""
        return self.passing.covered(nodes)

    def columns(self, nodes: Nodes, outside: Values) -> Columns:
        """See `Objective.columns`: one further column for each set of nodes that pass at a position and depth together."""
        column = {path: i for i, path in enumerate(nodes)}
        first = len(nodes) + outside.shape[1]
        gain = [0.0] * len(nodes) + outside[0].tolist()
        rows: list[Row] = []
        for members, share in self.passing.together(list(nodes)):
            if len(members) == 1:
                gain[column[members[0]]] += share
                continue
            rows.append(([(first + len(rows), 1.0), *((column[path], -1.0) for path in members)], 0.0))
            gain.append(share)
        return Columns(gain, [1.0] * len(rows), rows)


def alike(objective: Objective) -> bool:
    """Whether a better sibling can always take a node's place: independent heads whose probabilities add up."""
    return all(family.independent for family in objective.families)
