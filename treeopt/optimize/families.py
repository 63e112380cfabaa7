"""What may be below a node of a tree under limits, and best-first search over it."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import NamedTuple

from treeopt.optimize.limits import Limits
from treeopt.optimize.models import HeadModel, PathModel
from treeopt.paths import Path

__all__ = ["Child", "Families", "Found", "Probabilities", "best_first", "free_bound"]

Probabilities = dict[Path, float]


# A possible child of a path: its rate; its key, the best rate among it and what needs it (later ranks if siblings are
# dense, else itself); its rank. A plain tuple, since a tree of 64 nodes would spend a tenth of its time on naming fields.
Child = tuple[float, float, int]


class Families:
    """The children that limits allow below a path, in the order in which a search should take them.

    Two exchange arguments shorten the lists. If siblings are dense, a rank beyond `max_children` or the budget has too
    many to its left. Under independent heads with nothing required, a chosen child can be exchanged, with everything
    below it, for a better sibling not chosen: depths, children, leaves and level sizes stay, rank caps look at one depth
    only. So the chosen children of a node are the first of the list, and ranks behind the first `max_children` drop out.
    On the deepest level nothing is below a child, so there it holds under every model. All this is so where nodes simply
    add up; `additive` is False where they do not, and then only dense siblings shorten the lists.
    """

    def __init__(self, model: PathModel, limits: Limits, *, additive: bool = True) -> None:
        self.model, self.limits, self.additive = model, limits, additive
        self.num_levels = model.num_levels if limits.max_depth is None else min(model.num_levels, limits.max_depth)
        self.alike = isinstance(model, HeadModel)  # all nodes of a depth have the same children
        self.independent = self.alike and additive
        self.first_come = limits.dense_siblings or (self.independent and not limits.required)
        self._known: dict[Path | int, list[Child]] = {}

    def __call__(self, path: Path) -> list[Child]:
        """Return the children of a path."""
        if len(path) >= self.num_levels:
            return []
        known = len(path) if self.alike else path
        found = self._known.get(known)
        if found is None:
            found = self._known[known] = self._dense(path) if self.limits.dense_siblings else self._sorted(path)
        return found

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
        """Whether `max_leaves` asks for more than the budget does."""
        return self.limits.max_leaves is not None and self.limits.max_leaves < self.limits.num_nodes - 1

    @property
    def _in_order(self) -> bool:
        return all(rate == key for depth in range(self.num_levels) for rate, key, _ in self((0,) * depth))

    def _sorted(self, path: Path) -> list[Child]:
        cap = self.limits.rank_cap(len(path) + 1)
        pairs = self.model.children(path)
        if cap is not None:
            pairs = [(rate, rank) for rate, rank in pairs if rank <= cap]
        last = self.additive and len(path) + 1 == self.num_levels and not self.limits.required
        if self.first_come or last:
            most = self.limits.child_cap(len(path) + 1)
            # One more than the budget holds: the likeliest path left out is to be known.
            pairs = pairs[: most + 1 if most == self.limits.num_nodes - 1 else most]
        return [(rate, rate, rank) for rate, rank in pairs]

    def _dense(self, path: Path) -> list[Child]:
        cap, most = self.limits.rank_cap(len(path) + 1), self.limits.child_cap(len(path) + 1)
        most = most if cap is None else min(most, cap + 1)
        rates = {rank: rate for rate, rank in self.model.children(path) if rank < most}
        found: list[Child] = []
        for rank in range(max(rates, default=-1), -1, -1):
            rate = rates.get(rank, 0.0)
            found.append((rate, max(rate, found[-1][1]) if found else rate, rank))
        return found[::-1]


# (minus key, depth, path, place among its siblings, their parent's probability, they themselves): the heap's order is the
# rule for ties, and never looks behind the path.
Entry = tuple[float, int, Path, int, float, list[Child]]


class Found(NamedTuple):
    """What a best-first search took and what its heap held then: the best of every family that is left out."""

    taken: Probabilities
    keys: list[float]
    left: list[Entry]


def best_first(families: Families, count: int, room: dict[int, int] | None = None) -> Found:
    """Take the `count` nodes of largest key, in order; no more than `room` of a depth.

    A node's key is the largest probability among it and the nodes that need it, so that keys fall along paths and
    siblings.
    """
    taken: Probabilities = {}
    keys: list[float] = []
    left: list[Entry] = []
    # Where all nodes of a depth have the same children, no family is looked up by its path.
    levels = [families((0,) * depth) for depth in range(families.num_levels + 1)] if families.alike else None
    first = families(())
    if first and first[0][1] > 0.0:
        _, key, rank = first[0]
        left.append((-key, 1, (rank,), 0, 1.0, first))
    while left and len(taken) < count:
        negative, depth, path, place, above, family = heappop(left)
        if room is not None:
            if room[depth] == 0:
                continue
            room[depth] -= 1
        probability = above * family[place][0]
        taken[path] = probability
        keys.append(-negative)
        place += 1
        if place < len(family):
            _, key, rank = family[place]
            if above * key > 0.0:
                heappush(left, (-(above * key), depth, (*path[:-1], rank), place, above, family))
        below = levels[depth] if levels else families(path)
        if below:
            _, key, rank = below[0]
            if probability * key > 0.0:
                heappush(left, (-(probability * key), depth + 1, (*path, rank), 0, probability, below))
    return Found(taken, keys, left)


def free_bound(families: Families) -> float:
    """Return an E[L] that no tree exceeds: the largest keys, whatever the limits on more than single paths."""
    return math.fsum(best_first(families, families.limits.num_nodes - 1).keys)
