"""Options that name another decoder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from treeopt.cli.recipes import TableRecipe, TraceRecipe
    from treeopt.engines import Engine, Settings
    from treeopt.optimize import BuiltTree
    from treeopt.optimize.limits import Limits

__all__ = ["EngineLimits", "engine_of", "set_option", "settings_given"]

set_option = click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE",
    help="What the engine needs and the tree does not say; see treeopt export --list. May be repeated.",
)  # fmt: skip


def engine_of(name: str) -> Engine:
    """Return the engine of a name, an unknown one being a usage error."""
    from treeopt.engines import engine_named
    from treeopt.errors import EngineError

    try:
        return engine_named(name)
    except EngineError as error:
        raise click.UsageError(str(error)) from error


def settings_given(pairs: Sequence[str]) -> dict[str, str]:
    """Read the values of --set."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise click.UsageError(f"--set {pair} is not of the form NAME=VALUE; write heads=4 for example")
        if name in found:
            raise click.UsageError(f"--set {name} is given twice; delete one of the two")
        found[name] = value
    return found


@dataclass(frozen=True)
class EngineLimits:
    """What `build --for` asks for; nothing without it.

    Attributes
    ----------
    engine : Engine or None
    settings : mapping
    """

    engine: Engine | None
    settings: Settings

    @classmethod
    def of(cls, name: str | None, pairs: Sequence[str]) -> EngineLimits:
        """Read --for and --set."""
        if name is None:
            if pairs:
                raise click.UsageError("--set is that of --for; give both or neither")
            return cls(None, {})
        engine = engine_of(name)
        return cls(engine, engine.settings_of(settings_given(pairs), writing=False))

    def join(self, limits: Limits, given: Collection[str]) -> Limits:
        """Return limits joined with the engine's; what was given may not contradict them."""
        from treeopt.engines import constrained

        return limits if self.engine is None else constrained(self.engine, self.settings, limits, given)

    def build(self, recipe: TraceRecipe | TableRecipe, num_nodes: int) -> tuple[BuiltTree, list[str]]:
        """Build the best tree of a budget that the engine takes, and say what was mended."""
        from dataclasses import replace

        from treeopt.engines import best_for

        if self.engine is None:
            return recipe.build(num_nodes, certify=True), []

        def build(limits: Limits, certify: bool) -> BuiltTree:
            recipe.limits = limits
            return recipe.build(limits.num_nodes, certify=certify)

        limits = self.join(replace(recipe.limits, num_nodes=num_nodes), ())
        built, note = best_for(self.engine, self.settings, limits, build)
        return built, [f"within what {self.engine.name} takes"] + ([note] if note is not None else [])
