"""Pictures of a machine: what a step costs, and how many nodes give the most tokens a second."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from treeopt.budget import BudgetChoice
from treeopt.latency import LatencyCurve
from treeopt.plot.paper import ORDERED, SHADES, beside_lines, figure, headed, mark_budget, plain_axes, powers

__all__ = ["draw_steps"]

MAX_DOTS = 16  # measured budgets; more would hide the line
NODES = "nodes in one verification pass, root included"


def draw_steps(curves: Sequence[LatencyCurve], about: str, choice: BudgetChoice | None = None) -> Figure:
    """Return the figure of step times against nodes, and below it of tokens a second, 8 × 4.6 or 8 × 7.4 inches.

    Parameters
    ----------
    curves : sequence of LatencyCurve
        Of one batch size, a line each.
    about : str
        The machine, for the line below the title.
    choice : BudgetChoice, optional
        On the first of the curves; it gives the second part.
    """
    return figure(_draw, 8.0, 4.6 if choice is None else 7.4, curves, about, choice)


def _draw(made: Figure, curves: Sequence[LatencyCurve], about: str, choice: BudgetChoice | None) -> None:
    bars = "bars: middle half of whole steps, drafting included" if any(curve.quartiles for curve in curves) else ""
    if choice is None:
        headed(made, "Time of one verification pass", about)
        times = made.add_axes((0.09, 0.13, 0.67, 0.65 if bars else 0.7))
        times.set_title(bars.capitalize(), fontsize=10, fontweight="normal")
        _times(times, curves)
        return
    headed(made, _verdict(choice), about)
    times = made.add_axes((0.09, 0.55, 0.67, 0.31))
    times.set_title("; ".join(filter(None, ("Time of one verification pass", bars))), fontsize=10, fontweight="normal")
    _times(times, curves)
    _speeds(made.add_axes((0.09, 0.08, 0.67, 0.36)), choice, curves[0].max_nodes)


def _times(axes: Axes, curves: Sequence[LatencyCurve]) -> None:
    """Draw a line a context, the longer the darker, with dots where passes were measured."""
    shades = np.linspace(1.0, 0.25, len(curves))[::-1] if len(curves) > 1 else [1.0]
    highest, dotted = 0.0, max(len(curve.nodes) for curve in curves) <= MAX_DOTS
    for curve, shade in zip(curves, shades):
        every = np.arange(curve.nodes[0], curve.max_nodes + 1)
        axes.plot(every, 1e3 * curve.at(every), color=SHADES(shade))
        if dotted:
            axes.plot(curve.nodes, 1e3 * curve.seconds, "o", markersize=4, color=SHADES(shade), clip_on=False)
        for nodes, (low, high) in zip(curve.nodes.tolist(), curve.quartiles):
            axes.plot(
                [nodes, nodes], [1e3 * low, 1e3 * high], color=SHADES(shade), linewidth=3, alpha=0.5, clip_on=False
            )
        highest = max(highest, float(curve.seconds.max()), *(high for _, high in curve.quartiles))
    _node_axis(axes, max(curve.max_nodes for curve in curves))
    axes.set(ylabel="ms", ylim=(0, 1.08e3 * highest))
    beside_lines(axes, [(1e3 * float(curve.seconds[-1]), _named(curve), None) for curve in curves])


def _named(curve: LatencyCurve) -> str:
    many = f",\nbatch of {curve.batch}" if curve.batch > 1 else ""
    return f"after {curve.context:,} token{'s' * (curve.context != 1)}{many}"


def _speeds(axes: Axes, choice: BudgetChoice, largest: int) -> None:
    speeds = choice.tokens_per_second
    axes.plot(choice.nodes, speeds, color=ORDERED[0])
    axes.axhline(speeds[0], color=ORDERED[3], linestyle=(0, (5, 2)))
    _node_axis(axes, largest)
    axes.set(xlabel=NODES, ylabel="tokens / s", ylim=(0, 1.15 * float(speeds.max())))
    axes.set_title("Tokens per second of one sequence", fontsize=10, fontweight="normal")
    plain = f"- - plain decoding:\n{speeds[0]:.4g} tokens/s"
    beside_lines(
        axes, [(float(speeds[-1]), "— with the best tree\nof each size", None), (float(speeds[0]), plain, None)]
    )
    best = float(speeds[choice.best])
    mark_budget(
        axes, choice.num_nodes, best,
        f"most: {choice.num_nodes} node{'s' * (choice.num_nodes != 1)}\n{best:.4g} tokens/s\n{choice.speedup:.2f} × plain",
    )  # fmt: skip


def _node_axis(axes: Axes, largest: int) -> None:
    axes.set(xscale="log", xlim=(1, max(2, largest)), xlabel=NODES)
    powers(axes, largest)
    plain_axes(axes)


def _verdict(choice: BudgetChoice) -> str:
    if choice.num_nodes == 1:
        return "Do not speculate here: plain decoding gives the most tokens per second"
    return f"{choice.num_nodes} nodes give the most tokens per second here"
