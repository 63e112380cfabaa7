"""What engines ask of a tree: a complaint that names a node, a mend, and the limits that keep a search within."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from treeopt.optimize.limits import Limits
from treeopt.paths import Path, closed, format_path
from treeopt.tree import DraftTree, chain

__all__ = ["Chain", "Drafts", "MaxDepth", "MaxRank", "MinDepth", "Rule", "Unlimited", "Weights"]

Weights = Mapping[Path, float]  # what a node is worth: its path probability, or 1


class Rule(Protocol):
    """One thing that an engine asks of a tree."""

    @property
    def text(self) -> str:
        """The rule in a few words."""

    def complaint(self, tree: DraftTree) -> str | None:
        """Return what breaks the rule, naming a node, or None."""

    def mend(self, tree: DraftTree, weights: Weights) -> DraftTree | None:
        """Return the tree made to obey at the least cost, or None where nothing helps."""

    @property
    def limits(self) -> Mapping[str, Any]:
        """Fields of `Limits` under which every tree obeys; {} where no such limits exist."""

    def variants(self, limits: Limits) -> Iterator[Limits]:
        """Yield limits that each make a tree obey and together allow the best tree that does."""


@dataclass(frozen=True)
class Unlimited:
    """A rule that no search need be limited by."""

    @property
    def limits(self) -> Mapping[str, Any]:
        return {}

    def variants(self, limits: Limits) -> Iterator[Limits]:
        return iter(())


@dataclass(frozen=True)
class Drafts(Unlimited):
    """There is something to draft."""

    @property
    def text(self) -> str:
        return "a node beside the root"

    def complaint(self, tree: DraftTree) -> str | None:
        if tree.num_nodes > 1:
            return None
        return "the tree is node `()` alone, the root, so nothing is drafted: switch speculation off there, or build more nodes"

    def mend(self, tree: DraftTree, weights: Weights) -> DraftTree | None:
        return None


@dataclass(frozen=True)
class MaxRank(Unlimited):
    """No rank is over `most`."""

    most: int

    @property
    def text(self) -> str:
        return f"ranks to {self.most}"

    def complaint(self, tree: DraftTree) -> str | None:
        path = next((path for path in tree.paths[1:] if path[-1] > self.most), None)
        if path is None:
            return None
        return f"node `{format_path(path)}` has rank {path[-1]}, and ranks end at {self.most}: drop it"

    def mend(self, tree: DraftTree, weights: Weights) -> DraftTree | None:
        return tree.prune(max_rank=self.most)

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"max_rank": self.most}


@dataclass(frozen=True)
class MaxDepth(Unlimited):
    """No node is deeper than `most`."""

    most: int
    why: str = ""

    @property
    def text(self) -> str:
        return f"depth to {self.most}"

    def complaint(self, tree: DraftTree) -> str | None:
        path = next((path for path in tree.paths if len(path) > self.most), None)
        if path is None:
            return None
        return f"node `{format_path(path)}` has depth {len(path)}, and depth ends at {self.most}{self.why}: drop it"

    def mend(self, tree: DraftTree, weights: Weights) -> DraftTree | None:
        return tree.prune(max_depth=self.most)

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"max_depth": self.most}


@dataclass(frozen=True)
class MinDepth(Unlimited):
    """Some node has at least depth `least`."""

    least: int

    @property
    def text(self) -> str:
        return f"depth from {self.least}"

    def complaint(self, tree: DraftTree) -> str | None:
        if tree.max_depth >= self.least:
            return None
        return f"the deepest node, `{format_path(tree.paths[-1])}`, has depth {tree.max_depth}, and depth starts at {self.least}: add a deeper one"

    def mend(self, tree: DraftTree, weights: Weights) -> DraftTree | None:
        likeliest = max(tree.paths, key=lambda path: (len(path), weights.get(path, 0.0)))
        return DraftTree.from_paths({*tree.paths[1:], *closed([(*likeliest, *[0] * (self.least - len(likeliest)))])})

    def variants(self, limits: Limits) -> Iterator[Limits]:
        yield replace(limits, must_include=(*limits.must_include, (0,) * self.least))


@dataclass(frozen=True)
class Chain(Unlimited):
    """The tree is a chain of first guesses."""

    @property
    def text(self) -> str:
        return "first guesses only"

    def complaint(self, tree: DraftTree) -> str | None:
        path = next((path for path in tree.paths[1:] if any(path)), None)
        return (
            None
            if path is None
            else f"node `{format_path(path)}` is no first guess, and nothing else is drafted: drop it"
        )

    def mend(self, tree: DraftTree, weights: Weights) -> DraftTree | None:
        return chain(max((len(path) for path in tree.paths if not any(path)), default=0))

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"max_rank": 0}
