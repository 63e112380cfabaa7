"""What engines ask of siblings and levels."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treeopt.engines._rules import Unlimited, Weights
from treeopt.optimize.limits import Limits
from treeopt.paths import Path, format_path
from treeopt.tree import DraftTree, dense_tree

__all__ = ["DenseSiblings", "MaxNodes", "ParentsFirst", "Regular"]

MAX_ADDED = 1 << 20  # siblings that a mend would have to look at; a rank of a billion is no tree's


@dataclass(frozen=True)
class DenseSiblings(Unlimited):
    """A node of rank r stands beside its siblings of ranks 0 … r - 1, at one depth or at all."""

    depth: int | None = None

    @property
    def text(self) -> str:
        where = "" if self.depth is None else f" at depth {self.depth}"
        return f"siblings from rank 0 without a gap{where}"

    def complaint(self, tree: DraftTree) -> str | None:
        held = set(tree.paths)
        for path in tree.paths[1:]:
            left = (*path[:-1], path[-1] - 1)
            if path[-1] > 0 and left not in held and self.depth in (None, len(path)):
                return f"node `{format_path(path)}` lacks its left sibling: add `{format_path(left)}`"
        return None

    def mend(self, tree: DraftTree, weights: Weights) -> DraftTree | None:
        moved = [path for path in tree.paths[1:] if self.depth in (None, len(path))]
        if sum(path[-1] for path in moved) > MAX_ADDED:
            return None
        left = [(*path[:-1], rank) for path in moved for rank in range(path[-1])]
        return DraftTree.from_paths({*tree.paths[1:], *left})

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"dense_siblings": True} if self.depth is None else {}

    def variants(self, limits: Limits) -> Iterator[Limits]:
        """Yield one for each number of nodes at depth 1: exactly the ranks below it."""
        assert self.depth == 1, "other depths have no such short list"
        most = limits.rank_cap(1)
        for rank in range(limits.num_nodes - 1 if most is None else min(most + 1, limits.num_nodes - 1)):
            caps = (rank, *limits.rank_caps[1:])
            needed = tuple((left,) for left in range(rank + 1))
            yield replace(limits, rank_caps=caps, must_include=(*limits.must_include, *needed))


@dataclass(frozen=True)
class ParentsFirst(Unlimited):
    """Nodes with children come before nodes without, among siblings or on the whole level."""

    level: bool

    @property
    def text(self) -> str:
        return f"nodes with children first {'on their level' if self.level else 'among siblings'}"

    def complaint(self, tree: DraftTree) -> str | None:
        parents = {path[:-1] for path in tree.paths[1:]}
        for group in self._groups(tree):
            childless = next((path for path in group if path not in parents), None)
            late = next(
                (path for path in group if path in parents and childless is not None and path > childless), None
            )
            if late is not None and childless is not None:
                return (
                    f"node `{format_path(childless)}` has no children but comes before `{format_path(late)}`, which has: "
                    "give it one or drop those of the other"
                )
        return None

    def mend(self, tree: DraftTree, weights: Weights) -> DraftTree | None:
        children: dict[Path, list[Path]] = {path: [] for path in tree.paths}
        for path in tree.paths[1:]:
            children[path[:-1]].append(path)
        kept: list[Path] = []
        level = children[()]
        while level:
            kept += level
            below: list[Path] = []
            closed = set()  # groups in which a childless node was met
            for path in level:
                group = () if self.level else path[:-1]
                if not children[path]:
                    closed.add(group)
                elif group not in closed:
                    below += children[path]
            level = below
        return DraftTree.from_paths(kept)

    def _groups(self, tree: DraftTree) -> Iterator[Sequence[Path]]:
        groups: dict[int | Path, list[Path]] = {}
        for path in tree.paths[1:]:
            groups.setdefault(len(path) if self.level else path[:-1], []).append(path)
        yield from groups.values()


@dataclass(frozen=True)
class Regular(Unlimited):
    """Every node of a level has equally many children, of ranks 0, 1, …: the tree is its list of widths."""

    @property
    def text(self) -> str:
        return "equally many children, ranks 0, 1, …, of all nodes of a level"

    def complaint(self, tree: DraftTree) -> str | None:
        dense = DenseSiblings().complaint(tree)
        if dense is not None:
            return dense
        counts = _child_counts(tree)
        for depth in range(tree.max_depth + 1):
            level = [path for path in tree.paths if len(path) == depth]
            other = next((path for path in level if counts[path] != counts[level[0]]), None)
            if other is not None:
                return (
                    f"level {depth} is uneven, node `{format_path(level[0])}` having {counts[level[0]]} children and "
                    f"`{format_path(other)}` {counts[other]}: give all nodes of a level equally many"
                )
        return None

    def mend(self, tree: DraftTree, weights: Weights) -> DraftTree | None:
        counts = _dense_counts(tree)
        best: tuple[float, tuple[int, ...]] = (0.0, ())

        def grow(widths: tuple[int, ...], level: list[Path], worth: float) -> None:
            nonlocal best
            best = max(best, (worth, widths))
            below, total = [], worth
            for rank in range(min(counts[path] for path in level)):
                added = [(*path, rank) for path in level]
                below += added
                total += sum(weights.get(path, 0.0) for path in added)
                grow((*widths, rank + 1), sorted(below), total)

        grow((), [()], 0.0)
        return dense_tree(best[1])

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"dense_siblings": True, "level_regular": True}


@dataclass(frozen=True)
class MaxNodes(Unlimited):
    """At most `most` nodes, the root not counted; what `beside` asks for stays as it is."""

    most: int
    name: str
    beside: DenseSiblings

    @property
    def text(self) -> str:
        return f"nodes to {self.most} beside the root"

    def complaint(self, tree: DraftTree) -> str | None:
        if tree.num_nodes - 1 <= self.most:
            return None
        path = tree.paths[self.most + 1]
        return f"node `{format_path(path)}` is number {self.most + 1} of {tree.num_nodes - 1}, and {self.name} is {self.most}: drop nodes"

    def mend(self, tree: DraftTree, weights: Weights) -> DraftTree | None:
        held = set(tree.paths[1:])
        num_children = _child_counts(tree)

        def key(path: Path) -> tuple[float, int, list[int], Path]:
            """The least likely first; of equals the deepest, then the last."""
            return weights.get(path, 0.0), -len(path), [-rank for rank in path], path

        free = [key(path) for path in held if not num_children[path] and not self._needed(path, held)]
        heapq.heapify(free)
        while len(held) > self.most:
            path = heapq.heappop(free)[-1]
            held.remove(path)
            num_children[path[:-1]] -= 1
            bound = [(*path[:-1], path[-1] - 1)] if self.beside.depth in (None, len(path)) else []
            for other in (path[:-1], *bound):
                if other in held and not num_children[other] and not self._needed(other, held):
                    heapq.heappush(free, key(other))
        return DraftTree.from_paths(held)

    def _needed(self, path: Path, held: set[Path]) -> bool:
        return self.beside.depth in (None, len(path)) and (*path[:-1], path[-1] + 1) in held

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"num_nodes": self.most + 1}


def _child_counts(tree: DraftTree) -> dict[Path, int]:
    counts = dict.fromkeys(tree.paths, 0)
    for path in tree.paths[1:]:
        counts[path[:-1]] += 1
    return counts


def _dense_counts(tree: DraftTree) -> dict[Path, int]:
    """Return for each node how many of its children have ranks 0, 1, … without a gap."""
    counts = dict.fromkeys(tree.paths, 0)
    for path in tree.paths[1:]:  # siblings come by rising rank
        counts[path[:-1]] += counts[path[:-1]] == path[-1]
    return counts
