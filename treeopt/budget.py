"""The number of nodes that a machine should verify: tokens a step against the time of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt.errors import ConstraintError
from treeopt.latency import LatencyCurve

__all__ = ["BudgetChoice", "choose_budget"]

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class BudgetChoice:
    """Budgets beside each other on one latency curve.

    Attributes
    ----------
    nodes : ndarray of int64
        Budgets, root included; the first is 1, plain decoding.
    tokens_per_step : ndarray of float64
    seconds : ndarray of float64
        One step, drafting included, in s.
    depths : ndarray of int64
        Levels drafted.
    """

    nodes: NDArray[np.int64]
    tokens_per_step: Values
    seconds: Values
    depths: NDArray[np.int64]

    @property
    def tokens_per_second(self) -> Values:
        """Tokens of one sequence a second, at every budget."""
        return self.tokens_per_step / self.seconds

    @property
    def best(self) -> int:
        """Index of the budget with the most tokens a second; the smaller of two that are equal."""
        return int(self.tokens_per_second.argmax())

    @property
    def num_nodes(self) -> int:
        """The chosen budget, root included; 1 means not to speculate."""
        return int(self.nodes[self.best])

    @property
    def speedup(self) -> float:
        """Tokens a second over those of plain decoding, predicted."""
        rates = self.tokens_per_second
        return float(rates[self.best] / rates[0])


def choose_budget(curve: LatencyCurve, nodes: ArrayLike, tokens_per_step: ArrayLike, depths: ArrayLike) -> BudgetChoice:
    """Compare budgets by tokens a second: every one is looked at, since measured curves have stairs.

    Parameters
    ----------
    curve : LatencyCurve
    nodes : array_like of int
        Budgets, root included, ascending; 1 is added. Those beyond the curve are left out.
    tokens_per_step : array_like of float
        Of the tree at each budget.
    depths : array_like of int
        Of the tree at each budget: how many levels are drafted.

    Raises
    ------
    ConstraintError
        If the lists have different lengths.

    Examples
    --------
    >>> flat = LatencyCurve.of([1, 4], [1.0, 1.0])
    >>> choose_budget(flat, [2, 3, 4], [1.5, 1.7, 1.8], [1, 1, 1]).num_nodes
    4
    >>> steep = LatencyCurve.of([1, 4], [1.0, 4.0])
    >>> choose_budget(steep, [2, 3, 4], [1.5, 1.7, 1.8], [1, 1, 1]).num_nodes
    1
    """
    budgets, gains, levels = np.asarray(nodes), np.asarray(tokens_per_step, dtype=np.float64), np.asarray(depths)
    if not budgets.shape == gains.shape == levels.shape:
        raise ConstraintError(
            f"`nodes`, `tokens_per_step` and `depths` have lengths {budgets.size}, {gains.size} and {levels.size}; "
            "give one of each for every budget"
        )
    kept = (budgets > 1) & (budgets <= curve.max_nodes)
    budgets, gains, levels = budgets[kept], gains[kept], levels[kept]
    seconds = curve.at(budgets) + curve.drafting(levels)
    return BudgetChoice(
        np.concatenate([[1], budgets]),
        np.concatenate([[1.0], gains]),
        np.concatenate([[curve.plain_seconds], seconds]),
        np.concatenate([[0], levels]),
    )
