"""Options that name a latency curve, and what budgets on it look like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from treeopt.budget import BudgetChoice
    from treeopt.latency import LatencyCurve

__all__ = ["curve_of", "describe_choice", "latency_options"]

Command = TypeVar("Command", bound=Callable[..., Any])


def latency_options(command: Command) -> Command:
    """Add --latency, --latency-model, --batch and --context."""
    for option in reversed(
        [
            click.option(
                "--latency", type=click.Path(dir_okay=False), metavar="FILE",
                help="Step times of a machine: of treeopt profile, or a CSV with nodes and seconds.",
            ),
            click.option("--latency-model", metavar="NAME", help="Which model, if the latency file holds several."),
            click.option(
                "--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences decoded together."
            ),
            click.option(
                "--context", type=click.IntRange(0), help="Tokens before the tree; the nearest measured is taken.  "
                "[default: the shortest]",
            ),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


def curve_of(latency: str, model: str | None, batch: int, context: int | None) -> LatencyCurve:
    """Read the curve that the options name, and say which it is."""
    from treeopt.latency import LatencyTable

    curve = LatencyTable.read(Path(latency), model=model).curve(batch, context)
    click.echo(f"step times at batch {curve.batch}, context {curve.context}, up to {curve.max_nodes} nodes", err=True)
    return curve


def describe_choice(choice: BudgetChoice) -> str:
    """Return a line for each of some budgets, and the verdict in words."""
    from treeopt.show import aligned

    header = ["nodes", "tokens/step", "ms a step", "tokens/s", "times plain"]
    rates = choice.tokens_per_second
    shown = [i for i, n in enumerate(choice.nodes.tolist()) if n & (n - 1) == 0 or i in (choice.best, len(rates) - 1)]
    rows = [
        [
            f"{choice.nodes[i]}{'  <' if i == choice.best else ''}",
            f"{choice.tokens_per_step[i]:.3f}",
            f"{1e3 * choice.seconds[i]:.2f}",
            f"{rates[i]:.1f}",
            f"{rates[i] / rates[0]:.3f}",
        ]
        for i in shown
    ]
    if choice.num_nodes == 1:
        verdict = "do not speculate: on this machine plain decoding gives more tokens a second than any tree"
    else:
        depth = int(choice.depths[choice.best])
        shape = f"a chain of {depth} guesses" if choice.num_nodes == depth + 1 else f"{choice.num_nodes} nodes"
        verdict = f"{shape}: predicted {choice.speedup:.3f} times the tokens a second of plain decoding"
    return "\n".join([*aligned([header, *rows]), verdict])
