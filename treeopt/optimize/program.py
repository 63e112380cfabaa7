"""The best tree under any limits and for any objective: a mixed-integer program.

One binary a candidate node, and for each level one integer that counts nodes outside.

The candidates are the required nodes and, for each family of the objective, the `count` of largest key. What a tree has
outside them is a number of nodes z_d of each depth d, each worth at most outside[d]: the largest key at depth d or above
that was left out, since keys fall along paths and siblings. Cutting those nodes off leaves a tree under the limits: none
grows by pruning, dense siblings stay dense, since with a node its left siblings are candidates, and required nodes are
candidates. Hence the program, with z_d counted against budget and level sizes but free of parents and leaves, bounds
every tree; and when its optimum has nothing outside, that is a tree, and optimal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from treeopt.optimize.families import best_first
from treeopt.optimize.limits import Limits
from treeopt.optimize.objectives import Columns, Nodes, Objective, Row, alike
from treeopt.paths import Path, order_key

__all__ = ["Proven", "best_by_program"]

CANDIDATES_PER_NODE = 4  # binaries of the first program; each further one has four times as many
MAX_CANDIDATES = 16_384  # binaries of the largest program; HiGHS still solves its relaxation in seconds
PROGRAM_SECONDS = 60.0
# HiGHS stops at an absolute gap of 1e-6, which scipy cannot lower; in these units that is 1e-12 of an accepted token.
SCALE = float(1 << 20)
# Up to scipy 1.14, HiGHS's presolve lost optima of max-min programs: of 1,313 random ones 20 had a wrong answer or none,
# and no one without it. In later versions it is sound, and tiny programs take three times as long without it.
SOUND_PRESOLVE = (1, 15)
SETTLED = 1e-12  # what nodes outside the program may seem to be worth when it proves its tree optimal


class Proven(NamedTuple):
    """Nodes of a tree, root excluded, and a value that no tree exceeds: None if that is the tree's own."""

    nodes: Nodes
    bound: float | None


def best_by_program(objective: Objective, limits: Limits, *, seconds: float | None = None) -> Proven:
    """Solve with the likeliest nodes alone, and with more of them until the others are seen not to matter."""
    until = time.monotonic() + (PROGRAM_SECONDS if seconds is None else seconds)
    free = objective.bound()
    count = CANDIDATES_PER_NODE * limits.num_nodes
    answers: list[_Answer] = []
    while True:
        program = _Program(objective, limits, min(count, MAX_CANDIDATES))
        answers.append(program.solve(until))
        last = answers[-1].stopped or count >= MAX_CANDIDATES
        if last and not answers[-1].settled:
            answers.append(program.solve(until, outside=False))  # nodes outside took room that candidates can use
        best = max(answers, key=lambda answer: answer.value)
        bound = min(free, *(answer.bound for answer in answers))
        needed = _needed(best.nodes, limits)
        if answers[-1].settled or bound <= best.value + SETTLED:
            return Proven(needed, None)
        if last:
            return Proven(needed, bound)
        count *= 4


class _Answer(NamedTuple):
    nodes: Nodes
    value: float
    bound: float
    settled: bool  # no node outside the program can matter
    stopped: bool  # HiGHS did not finish


def _needed(nodes: Nodes, limits: Limits) -> Nodes:
    """Return the nodes without those of probability 0 that no other node and no limit needs."""
    kept: dict[Path, tuple[float, ...]] = {}
    parents: set[Path] = set()
    for path in sorted(nodes, key=order_key, reverse=True):
        right = (*path[:-1], path[-1] + 1)
        held = path in parents or path in limits.required or (limits.dense_siblings and right in kept)
        if held or any(nodes[path]):
            kept[path] = nodes[path]
            parents.add(path[:-1])
    return kept


class _Program:
    def __init__(self, objective: Objective, limits: Limits, count: int) -> None:
        self.objective, self.limits = objective, limits
        self.num_levels = objective.families[0].num_levels
        found = [best_first(families, count) for families in objective.families]
        paths = {path for one in found for path in one.taken} | limits.required
        self.nodes: dict[Path, tuple[float, ...]] = {}
        for path in sorted(paths, key=order_key):
            self.nodes[path] = tuple(self._probability(i, path, one.taken.get(path)) for i, one in enumerate(found))
        self.column = {path: i for i, path in enumerate(self.nodes)}
        self.outside = np.array(
            [
                [max((-entry[0] for entry in one.left if entry[1] <= depth), default=0.0) for depth in self._depths]
                for one in found
            ]
        )
        self.children: dict[Path, list[int]] = {}
        self.levels: list[list[int]] = [[len(self.nodes) + i] for i in range(self.num_levels)]
        for path, i in self.column.items():
            self.children.setdefault(path[:-1], []).append(i)
            self.levels[len(path) - 1].append(i)

    @property
    def _depths(self) -> range:
        return range(1, self.num_levels + 1)

    def _probability(self, place: int, path: Path, known: float | None) -> float:
        if known is not None:
            return known
        above = self.nodes[path[:-1]][place] if len(path) > 1 else 1.0
        rates = {rank: rate for rate, _, rank in self.objective.families[place](path[:-1])} if above > 0.0 else {}
        return above * rates.get(path[-1], 0.0)

    def solve(self, until: float, *, outside: bool = True) -> _Answer:
        """Return the best tree of candidates and, unless the nodes outside are left out, a bound of every tree."""
        # Here, not above: building a tree without such limits must not wait for scipy.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csc_array

        num_nodes, num_outside = len(self.nodes), self.num_levels
        worth = self.outside if outside else np.zeros_like(self.outside)
        columns = self.objective.columns(self.nodes, worth)
        num_leaves = num_nodes if self.limits.max_leaves is not None else 0
        gain = np.array([*columns.gain, *[0.0] * num_leaves])
        lower, upper = np.zeros(len(gain)), np.ones(len(gain))
        lower[[self.column[path] for path in self.limits.required]] = 1.0
        upper[num_nodes : num_nodes + num_outside] = np.where(worth.any(axis=0), self.limits.num_nodes, 0.0)
        upper[num_nodes + num_outside : len(columns.gain)] = columns.upper
        rows = list(self._rows(columns))
        entries = [(row, column, value) for row, (terms, _) in enumerate(rows) for column, value in terms]
        row, column, value = map(np.array, zip(*entries))
        # scipy 1.11 hands the indices to HiGHS as they are, and HiGHS takes 32 bits.
        places = (row.astype(np.int32), column.astype(np.int32))
        matrix = csc_array((value.astype(float), places), shape=(len(rows), len(gain)))
        result = milp(
            -SCALE * gain,
            integrality=(np.arange(len(gain)) < num_nodes + num_outside).astype(int),
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(matrix, -np.inf, np.array([most for _, most in rows], dtype=float)),
            options={
                "mip_rel_gap": 0.0,
                "time_limit": max(0.0, until - time.monotonic()),
                "presolve": _scipy_version() >= SOUND_PRESOLVE,
            },
        )
        answer = self._answer(result, worth)
        return answer if outside else answer._replace(bound=math.inf, settled=False)

    def _answer(self, result: Any, worth: np.ndarray[Any, np.dtype[np.float64]]) -> _Answer:
        num_nodes = len(self.nodes)
        stopped = result.status != 0
        if result.x is None:
            chosen: Nodes = {path: self.nodes[path] for path in self.limits.required}
            return _Answer(chosen, self.objective.value(chosen), math.inf, settled=False, stopped=True)
        chosen = {path: probabilities for (path, probabilities), x in zip(self.nodes.items(), result.x) if x > 0.5}
        hidden = float((worth @ result.x[num_nodes : num_nodes + self.num_levels]).max())
        bound = math.inf if result.mip_dual_bound is None else -float(result.mip_dual_bound) / SCALE
        settled = not stopped and hidden <= SETTLED
        return _Answer(chosen, self.objective.value(chosen), bound, settled=settled, stopped=stopped)

    def _rows(self, columns: Columns) -> Iterator[Row]:
        """Give each row's terms and the most they may sum to."""
        limits = self.limits
        yield [(i, 1) for level in self.levels for i in level], limits.num_nodes - 1
        for path, i in self.column.items():
            if len(path) > 1:
                yield [(i, 1), (self.column[path[:-1]], -1)], 0
        yield from columns.rows
        yield from self._sibling_rows()
        for depth in self._depths:
            yield [(i, 1) for i in self.levels[depth - 1]], limits.level_cap(depth)
        if limits.max_children is not None and limits.max_children < limits.num_nodes - 1:
            yield from self._children_rows(limits.max_children)
        if limits.max_leaves is not None:
            yield from self._leaf_rows(limits.max_leaves, len(columns.gain))

    def _sibling_rows(self) -> Iterator[Row]:
        """A dense sibling needs the one to its left; where nodes are alike, a sibling not required the better one."""
        if self.limits.dense_siblings:
            for path, i in self.column.items():
                if path[-1] > 0:
                    yield [(i, 1), (self.column[(*path[:-1], path[-1] - 1)], -1)], 0
        elif alike(self.objective):
            for parent in self.children:
                # Exchanging a child and all below it for a better sibling keeps every limit, if nothing there is required.
                siblings = ((*parent, rank) for _, _, rank in self.objective.families[0](parent))
                free = [
                    self.column[path] for path in siblings if path in self.column and path not in self.limits.required
                ]
                for better, worse in pairwise(free):
                    yield [(worse, 1), (better, -1)], 0

    def _children_rows(self, most: int) -> Iterator[Row]:
        for parent, children in self.children.items():
            if parent:
                yield [*((i, 1) for i in children), (self.column[parent], -most)], 0
        yield [(i, 1) for i in self.levels[0]], most
        for above, below in pairwise(self.levels):
            yield [*((i, 1) for i in below), *((i, -most) for i in above)], 0

    def _leaf_rows(self, most: int, first: int) -> Iterator[Row]:
        """One number a node, 1 if it is in the tree without children; pruning never makes more leaves."""
        yield [(first + i, 1) for i in range(len(self.nodes))], most
        for depth in self._depths:
            # Nodes outside at one depth, and candidates that pruning leaves without children from there on down: none is
            # below another.
            deep = [(first + i, 1) for path, i in self.column.items() if len(path) >= depth]
            yield [(len(self.nodes) + depth - 1, 1), *deep], most
        for path, i in self.column.items():
            yield [(i, 1), *((child, -1) for child in self.children.get(path, [])), (first + i, -1)], 0


def _scipy_version() -> tuple[int, int]:
    import scipy

    major, minor = scipy.__version__.split(".")[:2]
    return int(major), int(minor)
