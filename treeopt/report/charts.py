"""The charts of a report."""

from __future__ import annotations

import numpy as np

from treeopt.budget import BudgetChoice
from treeopt.curves import NodeCurve, RankCurves
from treeopt.latency import LatencyCurve
from treeopt.report.chart import Axis, Line, Mark, line_chart
from treeopt.report.markup import Markup

__all__ = ["accuracy_charts", "node_chart", "speed_chart", "step_chart"]

PERCENT_TICKS = tuple(factor * power for power in (1e-4, 1e-3, 1e-2, 1e-1, 1.0) for factor in (1, 2, 5))
NODES = "nodes in one verification pass, root included"


def accuracy_charts(alone: RankCurves, together: RankCurves) -> list[Markup]:
    """Return two charts: one guess by its rank, and any of the first k guesses."""
    positive = alone.rates[alone.rates > 0]
    lowest = max(1e-4, 0.7 * float(positive.min())) if positive.size else 1e-4
    ranks = np.arange(alone.rates.shape[1], dtype=np.float64)
    rank_axis = Axis("rank of the guess (0: the head's first)", -0.4, ranks[-1] + 0.4, ticks=tuple(ranks.tolist()))
    first_axis = Axis("k", 0.6, len(ranks) + 0.4, ticks=tuple((ranks + 1).tolist()))
    shares = Axis("guesses that are right", lowest, 1.2 * float(alone.high.max()), True, PERCENT_TICKS, _percent)
    sums = Axis("positions", 0.0, 1.05 * float(together.high.max()), written=_percent)
    return [
        line_chart("One guess, by its rank", rank_axis, shares, _head_lines(alone, ranks, lowest)),
        line_chart("Any of the first k guesses is right", first_axis, sums, _head_lines(together, ranks + 1, 0.0)),
    ]


def node_chart(curve: NodeCurve, chosen: int) -> Markup:
    """Return tokens a step against nodes, predicted and replayed, with a budget marked."""
    x = curve.nodes.astype(np.float64)
    highest = max(float(curve.predicted.max()), float(curve.high.max()), 1.001)
    value = float(curve.replayed[chosen - 1])
    return line_chart(
        "Tokens per step of the best tree of each size",
        _node_axis(int(curve.nodes[-1])),
        Axis("tokens per step", 1.0, 1.0 + 1.08 * (highest - 1.0)),
        [
            Line(x, curve.predicted, "predicted\n1 + E[L]", 3, dashed=True),
            Line(x, curve.replayed, "replayed\nexact steps", 0, low=curve.low, high=curve.high),
        ],
        Mark(
            chosen,
            value,
            f"{chosen} node{'s' * (chosen != 1)}\n{value:.3f} replayed\n{curve.predicted[chosen - 1]:.3f} predicted",
        ),
    )


def step_chart(curve: LatencyCurve) -> Markup:
    """Return the time of a verification pass against nodes."""
    every = np.arange(curve.nodes[0], curve.max_nodes + 1)
    times = 1e3 * curve.at(every)
    name = f"after {curve.context:,}\ntoken{'s' * (curve.context != 1)}"
    axis = Axis("ms", 0.0, 1.08 * float(times.max()))
    line = Line(every.astype(np.float64), times, name)
    return line_chart("Time of one verification pass", _node_axis(curve.max_nodes), axis, [line])


def speed_chart(choice: BudgetChoice, largest: int) -> Markup:
    """Return tokens a second against nodes, with the budget that has the most marked."""
    x, speeds = choice.nodes.astype(np.float64), choice.tokens_per_second
    if len(x) == 1:
        x, speeds = np.array([1.0, float(largest)]), np.repeat(speeds, 2)
    plain, best = np.full(2, float(speeds[0])), float(speeds[choice.best])
    return line_chart(
        "Tokens per second of one sequence",
        _node_axis(largest),
        Axis("tokens / s", 0.0, 1.12 * best),
        [
            Line(np.array([1.0, x[-1]]), plain, "plain\ndecoding", 3, dashed=True),
            Line(x, speeds, "best tree of\neach size", 0),
        ],
        Mark(
            choice.num_nodes,
            best,
            f"most: {choice.num_nodes} node{'s' * (choice.num_nodes != 1)}\n{best:.4g} tokens/s\n{choice.speedup:.2f} × plain",
        ),
    )


def _head_lines(curves: RankCurves, x: np.ndarray, lowest: float) -> list[Line]:
    """Return a line a head, each a little beside the others so that their bars can be told apart."""
    num_heads = len(curves.rates)
    return [
        Line(
            x + 0.4 * ((head + 0.5) / num_heads - 0.5), np.maximum(rates, lowest), f"head {head}", head, dotted=True,
            low=np.maximum(curves.low[head], lowest), high=np.maximum(curves.high[head], lowest),
        )
        for head, rates in enumerate(curves.rates)
    ]  # fmt: skip


def _node_axis(largest: int) -> Axis:
    return Axis(NODES, 1.0, max(2.0, largest), True, tuple(2.0**i for i in range(largest.bit_length())))


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
