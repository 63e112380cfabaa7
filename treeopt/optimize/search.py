"""The best tree under limits: the first method that is exact for the case.

1. Best-first search, where limits only take paths away; under independent heads also with `max_children` and `level_caps`.
2. A table over (level, nodes, leaves), for independent heads with dense siblings or few leaves.
3. An enumeration of level widths, for level-regular trees.
4. A mixed-integer program, for everything else and for objectives that are not a sum over nodes.

A path that the model gives no rate has probability 0. Such nodes are taken only where a limit needs them: to hold
`must_include`, to make siblings dense, to fill a level-regular level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from treeopt.errors import ConstraintError
from treeopt.optimize.families import Families, Probabilities, best_first, free_bound
from treeopt.optimize.limits import Limits
from treeopt.optimize.models import PathModel
from treeopt.optimize.objectives import Objective, Total
from treeopt.optimize.program import best_by_program
from treeopt.optimize.regular import Regular
from treeopt.optimize.table import Table, table_steps
from treeopt.paths import Path, format_path, order_key

__all__ = ["Solution", "search", "search_objective"]

MAX_TABLE_STEPS = 2_000_000_000  # additions of the table over (level, nodes, leaves): about ten seconds


@dataclass(frozen=True)
class Solution:
    """A tree under limits and how far it is proven.

    Attributes
    ----------
    paths : list of paths
        The nodes without the root, sorted by (depth, path).
    probabilities : list of float
        Probability of each whole path, in [0, 1].
    value : float
        What the objective gives the tree; E[L] for the sum over nodes.
    optimal : bool
        True if no tree under the limits has a larger value.
    bound : float
        No tree under the limits has a value above it; the value itself where `optimal`.
    nested : bool
        True if the nodes by falling probability give the best tree at every smaller budget too.
    left_out : float or None
        Probability of the likeliest path left out, where the search knows it.
    """

    paths: list[Path]
    probabilities: list[float]
    value: float
    optimal: bool = True
    bound: float = math.nan
    nested: bool = False
    left_out: float | None = None


def search(model: PathModel, limits: Limits) -> Solution:
    """Return the tree with the largest E[L] that obeys the limits.

    Parameters
    ----------
    model : PathModel
    limits : Limits

    Returns
    -------
    Solution
        Optimal unless the model has too many likely paths for the method (`MAX_CANDIDATES`, `MAX_INNER_PATHS`) or HiGHS
        needs longer than `PROGRAM_SECONDS`; then the best tree found, and a bound.

    Raises
    ------
    ConstraintError
        If `must_include` is deeper than the model.

    Notes
    -----
    Ties: best-first search takes the larger probability, then the smaller depth, then the smaller path. The other methods
    take, among siblings that a model cannot tell apart, the smallest ranks (independent heads; elsewhere not promised),
    and never a node of probability 0 that no limit needs; which of two equally good shapes they return is not promised,
    but equal inputs give equal trees.

    Examples
    --------
    >>> from treeopt.acceptance import AcceptanceTable
    >>> from treeopt.optimize.models import HeadModel
    >>> model = HeadModel(AcceptanceTable.from_rates([[0.6, 0.3], [0.5, 0.2]]))
    >>> solution = search(model, Limits(num_nodes=4, max_children=1))
    >>> solution.paths, solution.optimal
    ([(0,), (0, 0)], True)
    """
    objective = Total.of(model, limits)
    families = objective.families[0]
    _check_depth(families, limits)
    if families.num_levels == 0:
        return _solution({}, nested=True)
    if limits.level_regular:
        regular = Regular(families)
        chosen = regular.tree()
        bound = regular.bound(math.fsum(chosen.values()))
        return _solution(chosen, None if bound is None else min(bound, free_bound(families)))
    if families.greedy_is_exact:
        levels = range(1, families.num_levels + 1)
        room = {depth: limits.level_cap(depth) for depth in levels} if limits.level_caps else None
        found = best_first(families, limits.num_nodes - 1, room)
        left = -found.left[0][0] if found.left else 0.0
        simple = (
            not (limits.level_caps or limits.dense_siblings) and limits.max_children is None
        )  # else the heap lacks what these keep out
        return _solution(found.taken, nested=True, left_out=left if simple else None)
    if table_steps(families) <= MAX_TABLE_STEPS:
        return _solution(Table(families).tree())
    nodes, bound = best_by_program(objective, limits)
    return _solution({path: probability for path, (probability,) in nodes.items()}, bound)


def search_objective(objective: Objective, limits: Limits) -> Solution:
    """Return the tree that is worth most to an objective that is no sum over nodes.

    Probabilities are those of the objective's first family.

    Raises
    ------
    ConstraintError
        If `must_include` is deeper than the model, or trees shall be level-regular.
    """
    families = objective.families[0]
    _check_depth(families, limits)
    if limits.level_regular:
        raise ConstraintError(
            "`level_regular` is exact for expected acceptance alone and cannot be combined with another `objective`; "
            "drop one of the two"
        )
    if families.num_levels == 0:
        return Solution([], [], 0.0, bound=0.0)
    nodes, bound = best_by_program(objective, limits)
    paths = sorted(nodes, key=order_key)
    value = objective.value(nodes)
    return Solution(
        paths, [nodes[path][0] for path in paths], value, bound is None, value if bound is None else max(bound, value)
    )


def _check_depth(families: Families, limits: Limits) -> None:
    deepest = max(limits.must_include, key=len, default=())
    if len(deepest) > families.model.num_levels:
        raise ConstraintError(
            f"`must_include` holds {format_path(deepest)} of depth {len(deepest)}, but the model has "
            f"{families.model.num_levels} levels; drop the path"
        )


def _solution(
    chosen: Probabilities, bound: float | None = None, *, nested: bool = False, left_out: float | None = None
) -> Solution:
    paths = sorted(sorted(chosen), key=len)  # the order of `order_key`, faster
    probabilities = [chosen[path] for path in paths]
    value = math.fsum(probabilities)
    proven = value if bound is None else max(bound, value)
    return Solution(paths, probabilities, value, bound is None, proven, nested, left_out)
