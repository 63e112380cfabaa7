"""A tree made to obey an engine's rules, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treeopt.engines._engine import Engine, Settings
from treeopt.engines._rules import Weights
from treeopt.errors import EngineError
from treeopt.paths import Path, format_path
from treeopt.tree import DraftTree

__all__ = ["Fitted", "broken", "fit"]

MAX_ROUNDS = 100  # mending one rule may break another; none of the engines' rules go round in circles
MAX_NAMED = 8


@dataclass(frozen=True, eq=False)
class Fitted:
    """A tree that obeys, and how it came about.

    Attributes
    ----------
    tree : DraftTree
    original : DraftTree
    complaints : tuple of str
        What was mended, in order.
    probabilities : mapping of path to float, or None
        Path probabilities of the original, where they are known.
    """

    tree: DraftTree
    original: DraftTree
    complaints: tuple[str, ...] = ()
    probabilities: Weights | None = None

    @property
    def dropped(self) -> tuple[Path, ...]:
        """Nodes left out."""
        held = set(self.tree.paths)
        return tuple(path for path in self.original.paths if path not in held)

    @property
    def added(self) -> tuple[Path, ...]:
        """Nodes put in."""
        held = set(self.original.paths)
        return tuple(path for path in self.tree.paths if path not in held)

    @property
    def expected_before(self) -> float | None:
        """E[L] of the original; None where its probabilities are unknown."""
        return None if self.probabilities is None else _sum(self.probabilities, self.original.paths)

    @property
    def expected_after(self) -> float | None:
        """E[L] of the tree, added nodes counted as never accepted: a lower bound if there are any."""
        return None if self.probabilities is None else _sum(self.probabilities, self.tree.paths)

    @property
    def cost(self) -> str:
        """What the mend changes, in words."""
        changes = [
            f"{verb} {len(paths)} node{'s' * (len(paths) > 1)}, {_named(paths)}"
            for verb, paths in (("drops", self.dropped), ("adds", self.added))
            if paths
        ]
        sizes = f"{self.original.num_nodes} nodes (root included) become {self.tree.num_nodes}"
        return f"{' and '.join(changes)}; {sizes}; {self._value()}"

    def _value(self) -> str:
        before, after = self.expected_before, self.expected_after
        if before is None or after is None:
            return "what that costs in E[L] is unknown, for the tree states no probabilities"
        lower = "at least " if self.added else ""
        return f"E[L] {before:.4f} becomes {lower}{after:.4f}"


def broken(engine: Engine, tree: DraftTree, settings: Settings) -> str | None:
    """Return the first complaint about a tree, or None where it obeys."""
    complaints = (rule.complaint(tree) for rule in engine.rules(settings))
    return next((complaint for complaint in complaints if complaint is not None), None)


def fit(
    engine: Engine,
    tree: DraftTree,
    settings: Settings,
    *,
    repair: bool = False,
    probabilities: Weights | None = None,
) -> Fitted:
    """Check a tree against an engine's rules, and mend it on demand.

    Parameters
    ----------
    engine : Engine
    tree : DraftTree
    settings : mapping
        See `Engine.settings_of`.
    repair : bool
        Mend what can be mended. Siblings that are missing are added, what is beyond a limit is dropped, and so are the
        descendants of nodes that stand behind a childless one. Of the trees of widths inside a tree the one with the
        largest E[L] is kept; of nodes over a number the least likely go.
    probabilities : mapping of path to float, optional
        Path probabilities; without them nodes count alike.

    Raises
    ------
    EngineError
        For a tree that does not obey, naming a node, the remedy and what repairing costs, unless it was repaired.
    """
    if broken(engine, tree, settings) is None:
        return Fitted(tree, tree, (), probabilities)
    mended, complaints = _mend(engine, tree, settings, probabilities)
    if mended is None:
        nothing = "; no mend leaves a node to draft" if len(complaints) > 1 else ""
        raise EngineError(f"`{engine.name}` cannot take the tree: {complaints[0]}{nothing}")
    fitted = Fitted(mended, tree, tuple(complaints), probabilities)
    if repair or engine.summarises:
        return fitted
    raise EngineError(
        f"`{engine.name}` cannot take the tree: {complaints[0]}; build with --for {engine.name}, or --repair, which {fitted.cost}"
    )


def _mend(
    engine: Engine, tree: DraftTree, settings: Settings, probabilities: Weights | None
) -> tuple[DraftTree | None, list[str]]:
    weights = dict.fromkeys(tree.paths, 1.0) if probabilities is None else probabilities
    complaints: list[str] = []
    for _ in range(MAX_ROUNDS):
        found = next((rule for rule in engine.rules(settings) if rule.complaint(tree) is not None), None)
        if found is None:
            return tree, complaints
        complaints.append(found.complaint(tree) or "")
        mended = found.mend(tree, weights)
        if mended is None:
            return None, complaints
        tree = mended
    raise AssertionError(f"the rules of {engine.name} cannot be met together")


def _sum(probabilities: Weights, paths: Iterable[Path]) -> float:
    return sum(probabilities.get(path, 0.0) for path in paths if path)


def _named(paths: Sequence[Path]) -> str:
    named = " ".join(format_path(path) for path in paths[:MAX_NAMED])
    return named + (" …" if len(paths) > MAX_NAMED else "")
