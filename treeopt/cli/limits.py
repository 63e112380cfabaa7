"""Options that limit a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from treeopt.optimize.limits import Limits

__all__ = ["Numbers", "limit_options", "limits_of", "named_limits"]

Command = TypeVar("Command", bound=Callable[..., Any])


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """Whole numbers from 0 with commas between them."""

    name = "N,N,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Read the option's text."""
        if isinstance(value, tuple):
            return value
        entries = [entry.strip() for entry in str(value).split(",")]
        if not all(entry.isdecimal() for entry in entries):
            self.fail(f"{value!r} is no list of whole numbers; write them as 9,4,2", param, ctx)
        return tuple(map(int, entries))


class NodesOrAuto(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A whole number, or auto, which becomes None."""

    name = "INTEGER|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Read the option's text."""
        if value == "auto":
            return None
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither auto nor a whole number", param, ctx)


def limit_options(command: Command) -> Command:
    """Add every option of `Limits`."""
    for option in reversed(
        [
            click.option(
                "--nodes", default="64", show_default=True, type=NodesOrAuto(),
                help="Tokens in one pass, root included; auto takes the number with the most tokens a second on --latency.",
            ),
            click.option("--max-depth", type=int, help="Deepest level.  [default: the number of heads]"),
            click.option(
                "--max-rank", type=int, help="Largest rank in any path: 9 lets every head's ten best guesses in."
            ),
            click.option(
                "--rank-caps", type=Numbers(), default=(),
                help="Largest rank at depths 1, 2, …: 9,4 allows ten guesses of the first head and five of the second.",
            ),
            click.option("--max-children", type=int, help="Most children of any node."),
            click.option(
                "--level-caps", type=Numbers(), default=(), help="Most nodes at depths 1, 2, …: 8,16,8 for example."
            ),
            click.option("--max-leaves", type=int, help="Most leaves, that is, candidate sequences."),
            click.option(
                "--dense-siblings", is_flag=True,
                help="A guess is tried only together with all better ones of its head: what sampling without replacement "
                "and some decoders need.",
            ),
            click.option(
                "--level-regular", is_flag=True,
                help="All nodes of a level have equally many children: what decoders that know only widths need.",
            ),
            click.option(
                "--must-include", type=Numbers(), multiple=True, metavar="PATH",
                help="A path that the tree must hold, with its ancestors: 0,0,0 is three best guesses. May be repeated.",
            ),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


def limits_of(options: dict[str, Any], num_nodes: int) -> Limits:
    """Take the limits out of a command's options."""
    from treeopt.optimize.limits import Limits

    return Limits(num_nodes=num_nodes, **{name: options[name] for name in NAMES})


def named_limits(context: click.Context) -> set[str]:
    """Return the names of the limits that were given: not left at their default, nor to the machine."""
    given = {name for name in ("nodes", *NAMES) if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if context.params.get("nodes") is None:
        given.discard("nodes")
    return {"num_nodes" if name == "nodes" else name for name in given}


NAMES = (
    "max_depth",
    "max_rank",
    "rank_caps",
    "max_children",
    "level_caps",
    "dense_siblings",
    "level_regular",
    "must_include",
    "max_leaves",
)
