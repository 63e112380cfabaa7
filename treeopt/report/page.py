"""The whole report: one HTML page that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources

import numpy as np

from treeopt.auto import auto_budget, nested_tree
from treeopt.budget import BudgetChoice
from treeopt.curves import NodeCurve, node_curve
from treeopt.drift import measure_drift
from treeopt.latency import LatencyCurve
from treeopt.optimize import Limits, best_tree
from treeopt.report import sections
from treeopt.report.markup import Markup, element, joined
from treeopt.report.tree_picture import ShownTree, tree_picture
from treeopt.sidebyside import TreeRow, compare_trees
from treeopt.trace import RankTrace
from treeopt.tree import chain
from treeopt.version import __version__

__all__ = ["ReportInputs", "report_page"]

BUDGETS = (16, 32, 64, 128, 256)
STANDARD = 64
LARGEST = 512


@dataclass(frozen=True)
class ReportInputs:
    """What a report is made of.

    Attributes
    ----------
    name : str
        Of the trace's file.
    trace : RankTrace
    trees : mapping of str to ShownTree
        By name; without any the best tree of the trace is shown.
    curve : LatencyCurve, optional
        Step times of the machine.
    machine : mapping of str to str
        What they were measured on.
    reference : (str, RankTrace), optional
        Name and trace that the ranks are compared with.
    commands : sequence of str
        That make the page again.
    seed : int
        Of the intervals.
    """

    name: str
    trace: RankTrace
    trees: Mapping[str, ShownTree] = field(default_factory=dict)
    curve: LatencyCurve | None = None
    machine: Mapping[str, str] = field(default_factory=dict)
    reference: tuple[str, RankTrace] | None = None
    commands: Sequence[str] = ()
    seed: int = 0


def report_page(inputs: ReportInputs) -> str:
    """Return the page; equal inputs give equal text.

    Raises
    ------
    TraceError
        If the trace has fewer than two documents with observed tokens, or does not fit the reference.
    TreeError
        If a tree is deeper than the trace has heads.
    """
    largest = max(LARGEST, inputs.curve.max_nodes if inputs.curve else 0)
    curve = node_curve(inputs.trace, largest, seed=inputs.seed)
    choice = _choice(inputs)
    chosen = min(STANDARD if choice is None else choice.num_nodes, curve.built.tree.num_nodes)
    rows = _rows(inputs, curve, chosen)
    title = f"Draft trees for {inputs.trace.metadata.get('target') or inputs.name}"
    parts = [
        element("h1", title),
        _lead(curve, chosen, rows),
        sections.calibrated(inputs.name, inputs.trace),
        sections.accuracies(inputs.trace, inputs.seed),
        sections.nodes(curve, chosen),
        *([sections.machine(inputs.curve, choice, inputs.machine)] if inputs.curve and choice else []),
        *_trees(inputs, curve, chosen),
        sections.comparison(rows),
        *_drift(inputs),
        *([sections.commands(inputs.commands)] if inputs.commands else []),
        element("p", f"Made by treeopt {__version__}.", class_="note"),
    ]
    return _document(title, parts)


def _choice(inputs: ReportInputs) -> BudgetChoice | None:
    if inputs.curve is None:
        return None
    return auto_budget(partial(best_tree, inputs.trace.table()), inputs.curve, inputs.trace)


def _rows(inputs: ReportInputs, curve: NodeCurve, chosen: int) -> list[TreeRow]:
    """Replay the given trees beside a chain, the best dense tree, and the best trees of several sizes."""
    depth = inputs.trace.num_heads
    dense = best_tree(inputs.trace.table(), STANDARD, level_regular=True).tree
    widths = np.array(dense.level_widths) // np.array([1, *dense.level_widths[:-1]])
    ours = sorted({chosen, *BUDGETS} & set(range(1, curve.built.tree.num_nodes + 1)))
    trees = {
        f"chain of {depth} first guesses": chain(depth),
        f"best dense tree, {' × '.join(map(str, widths))}": dense,
        **{_best_name(n): nested_tree(curve.built, n) for n in ours},
        **{name: shown.tree for name, shown in inputs.trees.items()},
    }
    return compare_trees(trees, inputs.trace, curve=inputs.curve, seed=inputs.seed)


def _best_name(num_nodes: int) -> str:
    return f"best tree, {num_nodes} node{'s' * (num_nodes != 1)}"


def _lead(curve: NodeCurve, chosen: int, rows: Sequence[TreeRow]) -> Markup:
    i = chosen - 1
    return element(
        "p",
        f"Checking {chosen} node{'s' * (chosen != 1)} at once, the target gives {curve.replayed[i]:.3f} tokens per step "
        f"({curve.low[i]:.3f} … {curve.high[i]:.3f}) on this trace. Plain decoding gives 1, a {rows[0].name} "
        f"{rows[0].tokens_per_step:.3f}.",
        class_="lead",
    )


def _trees(inputs: ReportInputs, curve: NodeCurve, chosen: int) -> list[Markup]:
    kept = np.sort(curve.built.added[:chosen])
    best = ShownTree(nested_tree(curve.built, chosen), curve.built.path_probabilities[kept])
    shown = inputs.trees or {_best_name(chosen): best}
    return [
        sections.section(f"Tree: {name}", tree_picture(name, one, f"t{i}n"))
        for i, (name, one) in enumerate(shown.items())
    ]


def _drift(inputs: ReportInputs) -> list[Markup]:
    if inputs.reference is None:
        return []
    name, reference = inputs.reference
    return [
        sections.drifted(name, measure_drift(reference, inputs.trace, Limits(STANDARD), seed=inputs.seed), STANDARD)
    ]


def _document(title: str, parts: Sequence[Markup]) -> str:
    folder = resources.files("treeopt.report")
    style, script = ((folder / f"page.{kind}").read_text(encoding="utf8") for kind in ("css", "js"))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        # Both are the package's own and hold no markup; inside these elements nothing may be escaped.
        element("style", Markup(style)),
    )
    body = element("body", element("main", joined(parts, "\n")), element("script", Markup(script)))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"
