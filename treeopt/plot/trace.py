"""Pictures of a trace: how often heads are right, and what more nodes bring."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from treeopt.curves import NodeCurve, RankCurves
from treeopt.plot.paper import DARK, ORDERED, beside_lines, figure, headed, mark_budget, marked, plain_axes, powers

__all__ = ["draw_accuracies", "draw_nodes"]


def draw_accuracies(alone: RankCurves, together: RankCurves, about: str) -> Figure:
    """Return the figure of accuracies by rank, alone and summed up, 9 × 4.6 inches.

    Parameters
    ----------
    alone, together : RankCurves
        Of the same trace; see `treeopt.curves.rank_curves`.
    about : str
        What the trace was taken from, for the line below the title.
    """
    return figure(_accuracies, 9.0, 4.6, alone, together, about)


def draw_nodes(curve: NodeCurve, chosen: int, about: str, *, why: str = "") -> Figure:
    """Return the figure of tokens a step against nodes, 8 × 4.6 inches.

    Parameters
    ----------
    curve : NodeCurve
    chosen : int
        The budget to mark, root included.
    about : str
        What the trace was taken from, for the line below the title.
    why : str
        Stands beside the mark.
    """
    return figure(_node_curve, 8.0, 4.6, curve, chosen, about, why)


def _accuracies(made: Figure, alone: RankCurves, together: RankCurves, about: str) -> None:
    left, right = made.add_axes((0.08, 0.13, 0.35, 0.64)), made.add_axes((0.5, 0.13, 0.33, 0.64))
    headed(
        made,
        "How often the heads guess the right token",
        f"{about}. Bars: 95 % intervals.",
    )
    made.text(0.985, 0.048, "token 1 is the target's own", fontsize=9.5, color=DARK, ha="right", va="baseline")
    ranks = np.arange(alone.rates.shape[1])
    for axes, curves, places in ((left, alone, ranks), (right, together, ranks + 1)):
        _bars(axes, curves, places)
    left.set_title("One guess, by its rank", fontsize=11, fontweight="normal")
    left.set(xlabel="rank of the guess (0: the head's first)", ylabel="guesses that are right", yscale="log")
    left.yaxis.set_major_locator(FixedLocator([0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]))
    left.yaxis.set_minor_locator(NullLocator())
    right.set_title("Any of the first k guesses", fontsize=11, fontweight="normal")
    right.set(xlabel="k", ylim=(0, min(1.0, 1.05 * float(together.high.max()))))
    for axes in (left, right):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    ends = enumerate(together.rates[:, -1].tolist())
    beside_lines(right, [(rate, f"head {head}: token {head + 2}", head) for head, rate in ends])


def _bars(axes: Axes, curves: RankCurves, places: NDArray[np.int64]) -> None:
    """Draw a line a head with its intervals, the heads a little beside each other."""
    num_heads = len(curves.rates)
    for head, (rates, low, high) in enumerate(zip(curves.rates, curves.low, curves.high)):
        moved = places + 0.4 * ((head + 0.5) / num_heads - 0.5)
        spread = np.maximum(np.stack([rates - low, high - rates]), 0.0)
        shown = np.where(rates > 0, rates, np.nan)
        axes.errorbar(moved, shown, yerr=spread, elinewidth=1.2, linewidth=1.2, markersize=4.5, **marked(head))
    plain_axes(axes)
    axes.xaxis.set_major_locator(FixedLocator(places.tolist()))


def _node_curve(made: Figure, curve: NodeCurve, chosen: int, about: str, why: str) -> None:
    axes = made.add_axes((0.09, 0.13, 0.67, 0.7))
    headed(made, "Tokens per step against nodes in the tree", f"{about}. Band: 95 % interval.")
    axes.fill_between(curve.nodes, curve.low, curve.high, color=ORDERED[1], alpha=0.22, linewidth=0)
    axes.plot(curve.nodes, curve.predicted, color=ORDERED[3], linestyle=(0, (5, 2)))
    axes.plot(curve.nodes, curve.replayed, color=ORDERED[0])
    axes.set(xscale="log", xlim=(1, max(2, curve.nodes[-1])), xlabel="nodes in one verification pass, root included")
    axes.set_ylabel("tokens per step")
    axes.set_ylim(1.0, 1.0 + 1.08 * max(float(curve.predicted[-1] - 1), float(curve.high.max() - 1), 1e-3))
    powers(axes, int(curve.nodes[-1]))
    plain_axes(axes)
    beside_lines(
        axes,
        [
            (float(curve.predicted[-1]), "- - predicted: 1 + E[L],\nall positions alike", None),
            (float(curve.replayed[-1]), "— replayed: exact steps\nof greedy decoding", None),
        ],
    )
    replayed, predicted = float(curve.replayed[chosen - 1]), float(curve.predicted[chosen - 1])
    mark_budget(
        axes,
        chosen,
        replayed,
        f"{chosen} node{'s' * (chosen != 1)}{why}\n{replayed:.3f} replayed\n{predicted:.3f} predicted",
    )
    if chosen > 1:
        axes.annotate("1: plain decoding", (1, 1), xytext=(30, 5), textcoords="offset points", fontsize=9.5)
