"""The best tree under constraints that best-first search alone does not obey.

Four methods, the first that is exact for the case:

1. best-first search, where limits only take paths away; under independent heads also with `max_children` and `level_caps`;
2. a table over (level, nodes, leaves), for independent heads with dense siblings or few leaves;
3. an enumeration of level widths, for level-regular trees;
4. a mixed-integer program, for everything else.

A path that the model gives no rate has probability 0. Such nodes are taken only where a limit needs them: to hold
`must_include`, to make siblings dense, to fill a level-regular level.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import ConstraintError
from treeopt.optimize.models import HeadModel, PathModel
from treeopt.tree import Path, format_path, order_key

__all__ = ["Limits", "Solution", "constrained_search"]

CANDIDATES_PER_NODE = 4  # binaries of the first integer program; each further one has four times as many
MAX_CANDIDATES = 16_384  # binaries of the largest integer program; HiGHS still solves its relaxation in seconds
MAX_INNER_PATHS = 65_536  # paths whose children a level-regular search under a general model asks for: some seconds
MAX_TABLE_STEPS = 2_000_000_000  # additions of the table over (level, nodes, leaves): about ten seconds
MILP_SECONDS = 60.0
# HiGHS stops at an absolute gap of 1e-6, which scipy cannot lower; in these units that is 1e-12 of an accepted token.
SCALE = float(1 << 20)
SETTLED = 1e-12  # what nodes outside the integer program may seem to be worth when it proves its tree optimal

Probabilities = dict[Path, float]
Row = tuple[list[tuple[int, int]], int]  # terms (column, factor), and the most they may sum to
Values = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """What a tree may be. Every limit can be combined with every other.

    Attributes
    ----------
    num_nodes : int
        Most nodes, root included.
    max_depth : int, optional
        Deepest level; the model's levels bound it in any case.
    max_rank : int, optional
        Largest rank in any path.
    rank_caps : tuple of int
        Entry d - 1 is the largest rank at depth d; deeper levels have no cap.
    max_children : int, optional
        Most children of any node.
    level_caps : tuple of int
        Entry d - 1 is the largest number of nodes at depth d; deeper levels have no cap.
    dense_siblings : bool
        A node of rank r needs its siblings of ranks 0 … r - 1.
    level_regular : bool
        All nodes of a level have equally many children.
    must_include : tuple of paths
        Nodes that the tree holds, with their ancestors, even at probability 0.
    max_leaves : int, optional
        Most leaves; the root alone is one leaf.

    Raises
    ------
    ConstraintError
        For a value that is no limit, and for `must_include` that contradicts another limit: the text names both.
        No other limits contradict each other, since the root alone obeys them.

    Examples
    --------
    >>> Limits(num_nodes=4, max_depth=1, must_include=((0, 0),))
    Traceback (most recent call last):
    treeopt.errors.ConstraintError: `must_include` holds (0,0), deeper than `max_depth` 1; raise that to 2 or drop the path
    """

    num_nodes: int
    max_depth: int | None = None
    max_rank: int | None = None
    rank_caps: tuple[int, ...] = ()
    max_children: int | None = None
    level_caps: tuple[int, ...] = ()
    dense_siblings: bool = False
    level_regular: bool = False
    must_include: tuple[Path, ...] = ()
    max_leaves: int | None = None

    def __post_init__(self) -> None:
        least = {"num_nodes": 1, "max_depth": 0, "max_rank": 0, "max_children": 0, "max_leaves": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None or name == "num_nodes":
                self._set(name, _whole(name, value, smallest))
        for name in ("rank_caps", "level_caps"):
            caps = _sequence(name, getattr(self, name), "one whole number a depth")
            self._set(name, tuple(_whole(f"{name}[{i}]", cap, 0) for i, cap in enumerate(caps)))
        for name in ("dense_siblings", "level_regular"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ConstraintError(f"`{name}` is {getattr(self, name)!r}; give True or False")
            self._set(name, bool(getattr(self, name)))
        paths = _sequence("must_include", self.must_include, "a list of paths")
        self._set("must_include", tuple(_path(f"must_include[{i}]", path) for i, path in enumerate(paths)))
        for path in self.must_include:
            self._check_path(path)
        self._check_required()

    def rank_cap(self, depth: int) -> int | None:
        """Return the largest rank allowed at a depth, from 1, or None."""
        caps = [cap for cap in (self.max_rank, *self.rank_caps[depth - 1 : depth]) if cap is not None]
        return min(caps, default=None)

    def level_cap(self, depth: int) -> int:
        """Return the largest number of nodes at a depth, from 1, that `level_caps`, `max_leaves` and the budget allow."""
        # No node of a level is below another, so a tree has at least as many leaves as any level has nodes.
        caps = (self.num_nodes - 1, self.max_leaves, *self.level_caps[depth - 1 : depth])
        return min(cap for cap in caps if cap is not None)

    def child_cap(self, depth: int) -> int:
        """Return the largest number of children at a depth, from 1, that one parent can have."""
        return min(self.level_cap(depth), self.num_nodes if self.max_children is None else self.max_children)

    @cached_property
    def required(self) -> frozenset[Path]:
        """Nodes that every tree holds: `must_include`, ancestors and, if siblings are dense, all to the left."""
        return frozenset(
            (*path[:depth], rank)
            for path in self.must_include
            for depth, last in enumerate(path)
            for rank in range(0 if self.dense_siblings else last, last + 1)
        )

    @cached_property
    def required_widths(self) -> tuple[int, ...]:
        """For each level of the required nodes, the most of them below one parent."""
        widths = [0] * max(map(len, self.required), default=0)
        for parent, count in Counter(path[:-1] for path in self.required).items():
            widths[len(parent)] = max(widths[len(parent)], count)
        return tuple(widths)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_path(self, path: Path) -> None:
        named = f"`must_include` holds {format_path(path)}"
        if self.max_depth is not None and len(path) > self.max_depth:
            raise ConstraintError(
                f"{named}, deeper than `max_depth` {self.max_depth}; raise that to {len(path)} or drop the path"
            )
        for depth, rank in enumerate(path, 1):
            if self.max_rank is not None and rank > self.max_rank:
                raise ConstraintError(f"{named}, whose rank {rank} is over `max_rank` {self.max_rank}; raise that")
            cap = self.rank_cap(depth)
            if cap is not None and rank > cap:
                raise ConstraintError(
                    f"{named}, whose rank {rank} at depth {depth} is over `rank_caps` {self.rank_caps}; raise entry {depth}"
                )
        # Before `required` lists them: a path of one large rank needs as many siblings.
        nodes = 1 + (sum(path) if self.dense_siblings else 0) + len(path)
        if nodes > self.num_nodes:
            raise self._contradiction(f"needs {nodes} nodes, root included", "num_nodes")

    def _check_required(self) -> None:
        """Compare the smallest tree that holds the required nodes with every limit: if it obeys, some tree does."""
        levels = Counter(map(len, self.required))
        sizes = [levels[depth] for depth in range(1, len(levels) + 1)]
        leaves = len(self.required - {path[:-1] for path in self.required})
        regular = self.level_regular
        if regular:
            sizes = [math.prod(self.required_widths[: depth + 1]) for depth in range(len(sizes))]
            leaves = sizes[-1] if sizes else 1
        if 1 + sum(sizes) > self.num_nodes:
            raise self._contradiction(f"needs {1 + sum(sizes)} nodes, root included", "num_nodes", regular=regular)
        if self.max_children is not None and max(self.required_widths, default=0) > self.max_children:
            raise self._contradiction(f"needs {max(self.required_widths)} children of one node", "max_children")
        for depth, (size, cap) in enumerate(zip(sizes, self.level_caps), 1):
            if size > cap:
                raise self._contradiction(f"needs {size} nodes at depth {depth}", "level_caps", regular=regular)
        if self.max_leaves is not None and leaves > self.max_leaves:
            raise self._contradiction(f"needs {leaves} leaves", "max_leaves", regular=regular)

    def _contradiction(self, needs: str, name: str, *, regular: bool = False) -> ConstraintError:
        also = [f"`{also}`" for also, on in (("dense_siblings", self.dense_siblings), ("level_regular", regular)) if on]
        subject = " with ".join(["`must_include`", " and ".join(also)] if also else ["`must_include`"])
        return ConstraintError(f"{subject} {needs}, but `{name}` is {getattr(self, name)}; raise that or drop paths")


@dataclass(frozen=True)
class Solution:
    """A tree under limits and how far it is proven.

    Attributes
    ----------
    paths : list of paths
        The nodes without the root, sorted by (depth, path).
    probabilities : list of float
        Probability of each whole path, in [0, 1].
    optimal : bool
        True if no tree under the limits has a larger E[L].
    bound : float
        No tree under the limits has an E[L] above it; E[L] itself where `optimal`.
    """

    paths: list[Path]
    probabilities: list[float]
    optimal: bool
    bound: float

    @property
    def expected_accepted(self) -> float:
        """E[L]: mean number of accepted nodes a step, root excluded."""
        return math.fsum(self.probabilities)


def constrained_search(model: PathModel, limits: Limits) -> Solution:
    """Return the tree with the largest E[L] that obeys the limits.

    Parameters
    ----------
    model : PathModel
    limits : Limits

    Returns
    -------
    Solution
        Optimal unless the model has too many likely paths for the method (`MAX_CANDIDATES`, `MAX_INNER_PATHS`) or HiGHS
        needs longer than `MILP_SECONDS`; then the best tree found, and a bound.

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
    >>> model = HeadModel(AcceptanceTable.from_rates([[0.6, 0.3], [0.5, 0.2]]))
    >>> solution = constrained_search(model, Limits(num_nodes=4, max_children=1))
    >>> solution.paths, solution.optimal
    ([(0,), (0, 0)], True)
    """
    deepest = max(limits.must_include, key=len, default=())
    if len(deepest) > model.num_levels:
        raise ConstraintError(
            f"`must_include` holds {format_path(deepest)} of depth {len(deepest)}, but the model has {model.num_levels} "
            "levels; drop the path"
        )
    families = _Families(model, limits)
    if families.num_levels == 0:
        return _solution({})
    if limits.level_regular:
        return _level_regular(families)
    if families.greedy_is_exact:
        room = {depth: limits.level_cap(depth) for depth in range(1, families.num_levels + 1)}
        return _solution(_best_first(families, limits.num_nodes - 1, room).taken)
    if families.table_steps <= MAX_TABLE_STEPS:
        return _solution(_Table(families).tree())
    return _integer_program(families)


# ---- what may be below a node ----------------------------------------------------------------------------------------


class Child(NamedTuple):
    """A possible child of a path."""

    rate: float
    key: float  # the best rate among it and what needs it: later ranks if siblings are dense, else itself
    rank: int


class _Families:
    """The children that limits allow below a path, in the order in which a search should take them.

    Two exchange arguments shorten the lists. If siblings are dense, a rank beyond `max_children` or the budget has too
    many to its left. Under independent heads with nothing required, a chosen child can be exchanged, with everything
    below it, for a better sibling not chosen: depths, children, leaves and level sizes stay, rank caps look at one depth
    only. So the chosen children of a node are the first of the list, and ranks behind the first `max_children` drop out.
    On the deepest level nothing is below a child, so there it holds under every model.
    """

    def __init__(self, model: PathModel, limits: Limits) -> None:
        self.model, self.limits = model, limits
        self.num_levels = model.num_levels if limits.max_depth is None else min(model.num_levels, limits.max_depth)
        self.independent = isinstance(model, HeadModel)
        self.first_come = limits.dense_siblings or (self.independent and not limits.required)
        self._known: dict[Path | int, list[Child]] = {}

    def __call__(self, path: Path) -> list[Child]:
        if len(path) >= self.num_levels:
            return []
        known = len(path) if self.independent else path
        if known not in self._known:
            self._known[known] = self._dense(path) if self.limits.dense_siblings else self._sorted(path)
        return self._known[known]

    @property
    def greedy_is_exact(self) -> bool:
        """Whether best-first search with full levels left out is optimal.

        Without limits on more than single paths it always is. Under independent heads, let A_d be the best
        `level_cap` children of A_(d - 1): by induction over d the n-th best node of depth d of any tree is no better
        than that of A_d, and the best nodes of all A_d together form a tree.
        """
        limits = self.limits
        free = limits.max_children is None and not limits.level_caps and not limits.dense_siblings
        if limits.required or self.leaves_bind:
            return False
        return free or (self.independent and self._in_order)

    @property
    def leaves_bind(self) -> bool:
        return self.limits.max_leaves is not None and self.limits.max_leaves < self.limits.num_nodes - 1

    @property
    def table_steps(self) -> float:
        """Additions that `_Table` would make; infinite where it does not apply."""
        limits = self.limits
        if limits.required or limits.level_caps or not self.independent:
            return math.inf
        leaves = limits.max_leaves if self.leaves_bind and limits.max_leaves is not None else 0
        num_children = sum(len(self((0,) * depth)) for depth in range(self.num_levels))
        return float(num_children * ((limits.num_nodes + 1) * (leaves + 1)) ** 2)

    @property
    def _in_order(self) -> bool:
        return all(child.rate == child.key for depth in range(self.num_levels) for child in self((0,) * depth))

    def _sorted(self, path: Path) -> list[Child]:
        cap = self.limits.rank_cap(len(path) + 1)
        children = [Child(rate, rate, rank) for rate, rank in self.model.children(path) if cap is None or rank <= cap]
        last = len(path) + 1 == self.num_levels and not self.limits.required
        return children[: self.limits.child_cap(len(path) + 1)] if self.first_come or last else children

    def _dense(self, path: Path) -> list[Child]:
        cap, most = self.limits.rank_cap(len(path) + 1), self.limits.child_cap(len(path) + 1)
        most = most if cap is None else min(most, cap + 1)
        rates = {rank: rate for rate, rank in self.model.children(path) if rank < most}
        found: list[Child] = []
        for rank in range(max(rates, default=-1), -1, -1):
            rate = rates.get(rank, 0.0)
            found.append(Child(rate, max(rate, found[-1].key) if found else rate, rank))
        return found[::-1]


# ---- best-first search -----------------------------------------------------------------------------------------------

# (minus key, depth, path, place among its siblings, probability): the heap's order is the rule for ties.
Entry = tuple[float, int, Path, int, float]


class _Found(NamedTuple):
    """What a best-first search took and what its heap held then: the best of every family that is left out."""

    taken: Probabilities
    keys: list[float]
    left: list[Entry]


def _best_first(families: _Families, count: int, room: dict[int, int] | None = None) -> _Found:
    """Take the `count` nodes of largest key, in order; no more than `room` of a depth.

    A node's key is the largest probability among it and the nodes that need it, so that keys fall along paths and
    siblings.
    """
    found = _Found({}, [], [])
    room = room or dict.fromkeys(range(1, families.num_levels + 1), count)

    def push(parent: Path, probability: float, place: int) -> None:
        family = families(parent)
        if place < len(family) and probability * family[place].key > 0.0:
            rate, key, rank = family[place]
            path = (*parent, rank)
            heappush(found.left, (-(probability * key), len(path), path, place, probability * rate))

    push((), 1.0, 0)
    while found.left and len(found.taken) < count:
        negative, depth, path, place, probability = heappop(found.left)
        if room[depth] == 0:
            continue
        room[depth] -= 1
        found.taken[path] = probability
        found.keys.append(-negative)
        push(path[:-1], found.taken.get(path[:-1], 1.0), place + 1)
        push(path, probability, 0)
    return found


def _free_bound(families: _Families) -> float:
    """Return an E[L] that no tree exceeds: the largest keys, whatever the limits on more than single paths."""
    return math.fsum(_best_first(families, families.limits.num_nodes - 1).keys)


def _solution(chosen: Probabilities, bound: float | None = None) -> Solution:
    paths = sorted(chosen, key=order_key)
    probabilities = [chosen[path] for path in paths]
    value = math.fsum(probabilities)
    return Solution(paths, probabilities, bound is None, value if bound is None else max(bound, value))


# ---- independent heads: a table over (level, nodes, leaves) ------------------------------------------------------------


class _Table:
    """Best subtrees of independent heads by level, most nodes and most leaves, where siblings come first to last.

    values[d][n, l] is the E[L] below a node of depth d, times 1 / its probability, with at most n nodes, it included,
    and at most l leaves. A node's first k children share its nodes as in a knapsack: one max-plus convolution a child.
    Without `max_leaves` the axis of leaves has length 1 and leaves weigh 0. After Chen et al. 2024 (Sequoia, arXiv
    2402.12374, section 4.1), with leaves, and with other rates at every level.
    """

    def __init__(self, families: _Families) -> None:
        self.families, limits = families, families.limits
        self.num_leaves = limits.max_leaves if families.leaves_bind and limits.max_leaves is not None else 0
        self.num_nodes = limits.num_nodes
        self.num_children: list[Places] = []  # for each level: how many children are best
        self.shares: list[list[Places]] = []  # for each level and child: its nodes and leaves, as a flat index
        leaf = np.full((self.num_nodes + 1, self.num_leaves + 1), -np.inf)
        leaf[1:, min(1, self.num_leaves) :] = 0.0
        values = leaf
        for depth in range(families.num_levels - 1, -1, -1):
            values = self._level(leaf, values, [child.rate for child in families((0,) * depth)])
        self.num_children.reverse()
        self.shares.reverse()

    def tree(self) -> Probabilities:
        """Return the best tree of the whole budget."""
        chosen: Probabilities = {}
        self._place(chosen, (), 1.0, self.num_nodes, self.num_leaves)
        return chosen

    def _level(self, leaf: Values, below: Values, rates: list[float]) -> Values:
        values, best = leaf.copy(), np.zeros(leaf.shape, dtype=np.int64)
        shares: list[Places] = []
        children = np.zeros_like(leaf)  # [nodes, leaves] below the node, of its first children
        for count, rate in enumerate(rates, 1):
            block = np.full_like(below, -np.inf)
            np.multiply(1.0 + below, rate, out=block, where=np.isfinite(below))
            children, share = _max_plus(children, block)
            shares.append(share)
            better = children[:-1] > values[1:]
            values[1:][better] = children[:-1][better]
            best[1:][better] = count
        self.num_children.append(best)
        self.shares.append(shares)
        return values

    def _place(self, chosen: Probabilities, path: Path, probability: float, nodes: int, leaves: int) -> None:
        depth = len(path)
        if depth == self.families.num_levels:
            return
        nodes_left = nodes - 1
        for place in range(int(self.num_children[depth][nodes, leaves]) - 1, -1, -1):
            share = int(self.shares[depth][place][nodes_left, leaves])
            child_nodes, child_leaves = divmod(share, self.num_leaves + 1)
            nodes_left, leaves = nodes_left - child_nodes, leaves - child_leaves
            child = self.families(path)[place]
            below = (*path, child.rank)
            chosen[below] = probability * child.rate
            self._place(chosen, below, chosen[below], child_nodes, child_leaves)


def _max_plus(first: Values, second: Values) -> tuple[Values, Places]:
    """Return the two-dimensional max-plus convolution and, flat, the smallest index in `second` that attains it."""
    rows, columns = first.shape
    padded = np.full((2 * rows - 1, 2 * columns - 1), -np.inf)
    padded[rows - 1 :, columns - 1 :] = first
    # windows[n, l, i, j] = first[n - i, l - j]
    windows = np.lib.stride_tricks.sliding_window_view(padded, (rows, columns))[:, :, ::-1, ::-1]
    values, places = np.empty((rows, columns)), np.empty((rows, columns), dtype=np.int64)
    chunk = max(1, (1 << 20) // (rows * columns * columns))  # 8 MiB of sums at a time stay in cache
    for start in range(0, rows, chunk):
        sums = (windows[start : start + chunk] + second).reshape(-1, columns, rows * columns)
        places[start : start + chunk] = sums.argmax(axis=2)
        values[start : start + chunk] = sums.max(axis=2)
    return values, places


# ---- level-regular trees: every vector of widths -----------------------------------------------------------------------

Widths = tuple[int, ...]


def _level_regular(families: _Families) -> Solution:
    """Return the best level-regular tree.

    The widths alone decide nodes, depth, children, level sizes and leaves; given them, each node takes its children on
    its own: those required, and of the others the ones whose rate times (1 + E[L] below) is largest.
    """
    search = _Regular(families)
    chosen: Probabilities = {}
    search.place(chosen, (), 1.0, search.best())
    return _solution(chosen, None if search.complete else _free_bound(families))


class _Regular:
    """Best level-regular subtrees below every path, for all widths at once."""

    def __init__(self, families: _Families) -> None:
        self.families, self.limits = families, families.limits
        self.forced: dict[Path, list[int]] = {}
        for path in sorted(self.limits.required):
            self.forced.setdefault(path[:-1], []).append(path[-1])
        self.inner, self.complete = self._inner_paths()
        self.looked_at = {path for paths in self.inner.values() for path in paths}
        self.widths = self._all_widths()
        self.columns = [{widths: i for i, widths in enumerate(level)} for level in self.widths]
        self._known: dict[Path | int, Values] = {}

    def best(self) -> Widths:
        """Return the best widths of the whole tree; of equally good ones the fewest nodes."""
        ranked = [
            (value, -sum(_level_sizes(widths)), widths)
            for widths, value in zip(self.widths[0], self._values(()).tolist())
        ]
        return max(ranked)[2]

    def place(self, chosen: Probabilities, path: Path, probability: float, widths: Widths) -> None:
        """Add the best nodes of these widths below a path."""
        if not widths:
            return
        forced, free = self._children(path) if probability > 0.0 else self._children_of_none(path)
        if not self.limits.dense_siblings:
            gains = self._gains(path, free)[:, self.columns[len(path) + 1][widths[1:]]].tolist()
            free = [child for _, child in sorted(zip(gains, free), key=lambda pair: -pair[0])]
        rates = {child.rank: child.rate for child in (forced + free)[: widths[0]]}
        rank = 0
        while len(rates) < widths[0]:
            rates.setdefault(rank, 0.0)
            rank += 1
        for rank, rate in rates.items():
            chosen[(*path, rank)] = probability * rate
            self.place(chosen, (*path, rank), probability * rate, widths[1:])

    def _inner_paths(self) -> tuple[dict[int, list[Path]], bool]:
        """Return by depth the paths whose children are looked at, and whether these are all of positive probability."""
        levels = range(self.families.num_levels)
        if self.families.independent:
            return {depth: [(0,) * depth] for depth in levels}, True
        room = {**dict.fromkeys(levels, MAX_INNER_PATHS), self.families.num_levels: 0}
        found = _best_first(self.families, MAX_INNER_PATHS, room)
        inner: dict[int, list[Path]] = {depth: [] for depth in levels}
        for path in [(), *found.taken]:
            inner[len(path)].append(path)
        return inner, all(depth == self.families.num_levels for _, depth, *_ in found.left)

    def _all_widths(self) -> list[list[Widths]]:
        """Return for every depth the widths that a subtree of a node there can have."""
        levels: list[list[Widths]] = [[()]]
        for depth in range(self.families.num_levels - 1, -1, -1):
            needed = self.limits.required_widths[depth] if depth < len(self.limits.required_widths) else 0
            # A wider level would give every parent a child of probability 0 that nothing requires.
            most = needed + max((len(self.families(path)) for path in self.inner[depth]), default=0)
            most, cap = min(most, self.limits.child_cap(depth + 1)), self.limits.rank_cap(depth + 1)
            most = most if cap is None else min(most, cap + 1)
            found: list[Widths] = [] if needed else [()]
            for rest in levels[-1]:
                for width in range(max(needed, 1), most + 1):
                    if not self._fits(depth, (width, *rest)):
                        break
                    found.append((width, *rest))
            levels.append(found)
        return levels[::-1]

    def _fits(self, depth: int, widths: Widths) -> bool:
        sizes = _level_sizes(widths)
        caps = (self.limits.level_cap(below) for below in range(depth + 1, depth + 1 + len(sizes)))
        return depth + 1 + sum(sizes) <= self.limits.num_nodes and all(size <= cap for size, cap in zip(sizes, caps))

    def _values(self, path: Path) -> Values:
        """Return E[L] below a path, times 1 / its probability, for each of its depth's widths."""
        depth = len(path)
        known = depth if self.families.independent and path not in self.limits.required else path
        if known not in self._known:
            self._known[known] = self._computed(path)
        return self._known[known]

    def _computed(self, path: Path) -> Values:
        depth = len(path)
        if depth == self.families.num_levels:
            return np.zeros(1)
        forced, free = self._children(path)
        gains = self._gains(path, free)
        if not self.limits.dense_siblings:
            gains = -np.sort(-gains, axis=0)
        totals = np.concatenate([np.zeros((1, gains.shape[1])), self._gains(path, forced), gains]).cumsum(axis=0)
        values = np.zeros(len(self.widths[depth]))
        for i, widths in enumerate(self.widths[depth]):
            if widths:
                values[i] = totals[min(widths[0], len(totals) - 1), self.columns[depth + 1][widths[1:]]]
        return values

    def _gains(self, path: Path, children: list[Child]) -> Values:
        """Return rate times (1 + E[L] below) of each child, for each of its depth's widths."""
        gains = np.zeros((len(children), len(self.widths[len(path) + 1])))
        for row, (rate, _, rank) in zip(gains, children):
            below = (*path, rank)
            if rate > 0.0 and (self.families.independent or below in self.looked_at):
                row[:] = rate * (1.0 + self._values(below))
            else:
                row[:] = rate
        return gains

    def _children(self, path: Path) -> tuple[list[Child], list[Child]]:
        """Return the required children and the others, in the order in which to take them."""
        ranks = self.forced.get(path, [])
        family = self.families(path)
        rates = {child.rank: child.rate for child in family}
        forced = [Child(rates.get(rank, 0.0), 0.0, rank) for rank in ranks]
        return forced, [child for child in family if child.rank not in ranks]

    def _children_of_none(self, path: Path) -> tuple[list[Child], list[Child]]:
        return [Child(0.0, 0.0, rank) for rank in self.forced.get(path, [])], []


def _level_sizes(widths: Widths) -> list[int]:
    return list(accumulate(widths, operator.mul))


# ---- everything else: a mixed-integer program --------------------------------------------------------------------------


def _integer_program(families: _Families) -> Solution:
    """Solve with the likeliest nodes alone, and with more of them until the others are seen not to matter."""
    limits, free = families.limits, _free_bound(families)
    count = CANDIDATES_PER_NODE * limits.num_nodes
    answers: list[_Answer] = []
    while True:
        program = _Program(families, min(count, MAX_CANDIDATES))
        answers.append(program.solve())
        last = answers[-1].stopped or count >= MAX_CANDIDATES
        if last and not answers[-1].settled:
            answers.append(program.solve(outside=False))  # nodes outside took room that candidates can use
        best = max(answers, key=lambda answer: answer.value).chosen
        bound = min(free, *(answer.bound for answer in answers))
        if answers[-1].settled or bound <= math.fsum(best.values()) + SETTLED:
            return _solution(_needed(best, limits))
        if last:
            return _solution(_needed(best, limits), bound)
        count *= 4


def _needed(chosen: Probabilities, limits: Limits) -> Probabilities:
    """Return the nodes without those of probability 0 that no other node and no limit needs."""
    kept: Probabilities = {}
    parents: set[Path] = set()
    for path in sorted(chosen, key=order_key, reverse=True):
        right = (*path[:-1], path[-1] + 1)
        held = path in parents or path in limits.required or (limits.dense_siblings and right in kept)
        if held or chosen[path] > 0.0:
            kept[path] = chosen[path]
            parents.add(path[:-1])
    return kept


class _Answer(NamedTuple):
    chosen: Probabilities
    bound: float
    settled: bool  # no node outside the program can matter
    stopped: bool  # HiGHS did not finish

    @property
    def value(self) -> float:
        return math.fsum(self.chosen.values())


class _Program:
    """One binary a candidate node, and for each level one integer that counts nodes outside.

    The candidates are the required nodes and the `count` of largest key. What a tree has outside them is a number of nodes
    z_d of each depth d, each worth at most outside[d]: the largest key at depth d or above that was left out, since keys
    fall along paths and siblings. Cutting those nodes off leaves a tree under the limits: none grows by pruning, a
    right sibling's key is no larger than its left one's, so dense siblings stay dense, and required nodes are candidates.
    Hence the program, with z_d counted against budget and level sizes but free of parents and leaves, bounds every tree;
    and when its optimum has nothing outside, that is a tree, and optimal.
    """

    def __init__(self, families: _Families, count: int) -> None:
        self.families, self.limits = families, families.limits
        found = _best_first(families, count)
        self.nodes = dict(found.taken)
        for path in sorted(self.limits.required, key=order_key):
            above = self.nodes.get(path[:-1], 1.0)
            rates = {child.rank: child.rate for child in families(path[:-1])} if above > 0.0 else {}
            self.nodes[path] = above * rates.get(path[-1], 0.0)
        self.column = {path: i for i, path in enumerate(self.nodes)}
        keys = [max((-entry[0] for entry in found.left if entry[1] <= depth), default=0.0) for depth in self._depths]
        self.outside = np.array(keys)
        self.children: dict[Path, list[int]] = {}
        self.levels: list[list[int]] = [[len(self.nodes) + i] for i in range(len(keys))]
        for path, i in self.column.items():
            self.children.setdefault(path[:-1], []).append(i)
            self.levels[len(path) - 1].append(i)

    @property
    def _depths(self) -> range:
        return range(1, self.families.num_levels + 1)

    def solve(self, *, outside: bool = True) -> _Answer:
        """Return the best tree of candidates and, unless the nodes outside are left out, a bound of every tree."""
        # Here, not above: building a tree without such limits must not wait for scipy.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csc_array

        num_nodes, num_outside = len(self.nodes), len(self.outside)
        worth = self.outside if outside else np.zeros(num_outside)
        num_leaves = num_nodes if self.limits.max_leaves is not None else 0
        gain = np.concatenate([list(self.nodes.values()), worth, np.zeros(num_leaves)])
        lower, upper = np.zeros(len(gain)), np.ones(len(gain))
        lower[[self.column[path] for path in self.limits.required]] = 1.0
        upper[num_nodes : num_nodes + num_outside] = np.where(worth > 0.0, self.limits.num_nodes, 0.0)
        rows = list(self._rows())
        entries = [(row, column, value) for row, (terms, _) in enumerate(rows) for column, value in terms]
        # scipy 1.11 hands the indices to HiGHS as they are, and HiGHS takes 32 bits.
        row, column, value = np.array(entries, dtype=np.int64).T
        places = (row.astype(np.int32), column.astype(np.int32))
        matrix = csc_array((value.astype(float), places), shape=(len(rows), len(gain)))
        result = milp(
            -SCALE * gain,
            integrality=(np.arange(len(gain)) < num_nodes + num_outside).astype(int),
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(matrix, -np.inf, np.array([most for _, most in rows], dtype=float)),
            options={"mip_rel_gap": 0.0, "time_limit": MILP_SECONDS},
        )
        answer = self._answer(result, worth)
        return answer if outside else answer._replace(bound=math.inf, settled=False)

    def _answer(self, result: Any, worth: Values) -> _Answer:
        num_nodes = len(self.nodes)
        stopped = result.status != 0
        if result.x is None:
            chosen = {path: self.nodes[path] for path in self.limits.required}
            return _Answer(chosen, math.inf, settled=False, stopped=True)
        chosen = {path: probability for (path, probability), x in zip(self.nodes.items(), result.x) if x > 0.5}
        hidden = float(worth @ result.x[num_nodes : num_nodes + len(worth)])
        bound = math.inf if result.mip_dual_bound is None else -float(result.mip_dual_bound) / SCALE
        return _Answer(chosen, bound, settled=not stopped and hidden <= SETTLED, stopped=stopped)

    def _rows(self) -> Iterator[Row]:
        """Give each row's terms and the most they may sum to."""
        limits = self.limits
        yield [(i, 1) for level in self.levels for i in level], limits.num_nodes - 1
        for path, i in self.column.items():
            if len(path) > 1:
                yield [(i, 1), (self.column[path[:-1]], -1)], 0
        yield from self._sibling_rows()
        for depth in self._depths:
            yield [(i, 1) for i in self.levels[depth - 1]], limits.level_cap(depth)
        if limits.max_children is not None and limits.max_children < limits.num_nodes - 1:
            yield from self._children_rows(limits.max_children)
        if limits.max_leaves is not None:
            yield from self._leaf_rows(limits.max_leaves)

    def _sibling_rows(self) -> Iterator[Row]:
        """A dense sibling needs the one to its left; under independent heads, a sibling not required the better one."""
        if self.limits.dense_siblings:
            for path, i in self.column.items():
                if path[-1] > 0:
                    yield [(i, 1), (self.column[(*path[:-1], path[-1] - 1)], -1)], 0
        elif self.families.independent:
            for parent in self.children:
                # Exchanging a child and all below it for a better sibling keeps every limit, if nothing there is required.
                siblings = ((*parent, child.rank) for child in self.families(parent))
                free = [
                    self.column[path] for path in siblings if path in self.column and path not in self.limits.required
                ]
                yield from (([(worse, 1), (better, -1)], 0) for better, worse in pairwise(free))

    def _children_rows(self, most: int) -> Iterator[Row]:
        for parent, children in self.children.items():
            if parent:
                yield [*((i, 1) for i in children), (self.column[parent], -most)], 0
        yield [(i, 1) for i in self.levels[0]], most
        for above, below in pairwise(self.levels):
            yield [*((i, 1) for i in below), *((i, -most) for i in above)], 0

    def _leaf_rows(self, most: int) -> Iterator[Row]:
        """One number a node, 1 if it is in the tree without children; pruning never makes more leaves."""
        first = len(self.nodes) + len(self.outside)
        yield [(first + i, 1) for i in range(len(self.nodes))], most
        for depth in self._depths:
            # Nodes outside at one depth, and candidates that pruning leaves without children from there on down: none is
            # below another.
            deep = [(first + i, 1) for path, i in self.column.items() if len(path) >= depth]
            yield [(len(self.nodes) + depth - 1, 1), *deep], most
        for path, i in self.column.items():
            yield [(i, 1), *((child, -1) for child in self.children.get(path, [])), (first + i, -1)], 0


# ---- values given ------------------------------------------------------------------------------------------------------


def _whole(name: str, value: Any, smallest: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = smallest - 1
    if number < smallest or isinstance(value, (bool, np.bool_)):
        raise ConstraintError(f"`{name}` is {value!r}; give a whole number from {smallest} on")
    return number


def _sequence(name: str, value: Any, what: str) -> Sequence[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        raise ConstraintError(f"`{name}` is {value!r}; give {what}")
    return list(value)


def _path(name: str, given: Any) -> Path:
    ranks = _sequence(name, given, "a path such as (0,) or (0, 1)")
    if not ranks:
        raise ConstraintError(f"`{name}` is the root, which every tree has; leave it out")
    return tuple(_whole(f"{name}[{depth}]", rank, 0) for depth, rank in enumerate(ranks))
