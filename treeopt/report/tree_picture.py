"""The tree of a report: nodes that tell what they are when they are pointed at or reached with the keyboard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.paths import format_path
from treeopt.plot.layout import Layout, drawn_part, lay_out
from treeopt.report.markup import Markup, element, joined, number, table
from treeopt.tree import DraftTree

__all__ = ["NodeFacts", "ShownTree", "node_facts", "tree_picture"]

WIDTH, MARGIN, LEVEL_HEIGHT = 700.0, 8.0, 92.0
TOP, BOTTOM = 40.0, 30.0
FONT_SIZE, LARGEST = 11.5, 36.0
BARE = 2.0  # radius below which nodes have no outline
LEGEND = (
    "The number in a node is the rank of its guess, 0 being the head's first; size and shade tell the probability that the "
    "whole path down to it is right."
)
MAX_NAMED = 8  # children whose ranks are listed
SHADES = 6  # of the style sheet

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ShownTree:
    """A tree of the report.

    Attributes
    ----------
    tree : DraftTree
    probabilities : ndarray of float64, shape (num_nodes,)
        That the whole path to a node is accepted, in [0, 1].
    notes : sequence of str
        What its file says of it, a line each.
    """

    tree: DraftTree
    probabilities: Values
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class NodeFacts:
    """What is said of one node, a line each: where it is, how likely, what it adds, its children."""

    path: str
    head: str
    probability: float
    place: int
    before: float
    children: tuple[int, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """The facts in words."""
        if not self.place:
            return ("root: the token that the target has decided already", self._children())
        return (
            f"path {self.path}: {self.head}",
            f"the whole path is right with probability {self.probability:.4g}",
            f"adds {self.probability:.4f} tokens per step, as node {self.place + 1} in order of probability: "
            f"{1 + self.before:.4f} → {1 + self.before + self.probability:.4f}",
            self._children(),
        )

    def _children(self) -> str:
        if not self.children:
            return "no children"
        named = ", ".join(map(str, self.children[:MAX_NAMED])) + (", …" if len(self.children) > MAX_NAMED else "")
        return f"{len(self.children)} child{'ren' * (len(self.children) != 1)}: rank{'s' * (len(self.children) != 1)} {named}"


def node_facts(tree: DraftTree, probabilities: Values) -> list[NodeFacts]:
    """Return the facts of every node; nodes are counted by falling probability, parents first."""
    order = np.argsort(-probabilities, kind="stable")
    place = np.empty(tree.num_nodes, dtype=np.int64)
    place[order] = np.arange(tree.num_nodes)
    sums = np.concatenate([[0.0, 0.0], np.cumsum(probabilities[order[1:]])])
    children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
    for parent, rank in zip(tree.parents[1:].tolist(), tree.ranks[1:].tolist()):
        children[parent].append(rank)
    return [
        NodeFacts(
            format_path(path), f"guess {path[-1]} of head {len(path) - 1} for token {len(path) + 1}" if path else "",
            float(probabilities[node]), int(place[node]), float(sums[place[node]]), tuple(children[node]),
        )
        for node, path in enumerate(tree.paths)
    ]  # fmt: skip


def tree_picture(name: str, shown: ShownTree, prefix: str) -> Markup:
    """Return the picture, the place where facts are shown, the notes, and all nodes as a table.

    Parameters
    ----------
    name : str
    shown : ShownTree
    prefix : str
        Of the nodes' ids, unlike any other tree's of the page.
    """
    tree, probabilities = shown.tree, shown.probabilities
    drawn, likeliest = drawn_part(tree, probabilities)
    height = LEVEL_HEIGHT * max(1, drawn.max_depth)
    layout = lay_out(
        drawn, likeliest, width=WIDTH - 2 * MARGIN, height=height, largest=LARGEST, font_size=FONT_SIZE
    )  # fmt: skip
    facts = node_facts(drawn, likeliest)
    told = f"{tree.num_nodes:,} node{'s' * (tree.num_nodes != 1)}, {1 + float(probabilities[1:].sum()):.3f} tokens per step expected"
    svg = element(
        "svg", _links(drawn, layout), _levels(tree, probabilities, layout.y[np.searchsorted(drawn.depths, np.arange(drawn.max_depth + 1))]), _nodes(drawn, likeliest, layout, facts, prefix),
        viewBox=f"0 0 {number(WIDTH)} {number(height + TOP + BOTTOM)}", role="group", aria_label=f"{name}: {told}", class_="tree",
    )  # fmt: skip
    missing = "" if drawn.num_nodes == tree.num_nodes else f" Its {drawn.num_nodes:,} likeliest nodes are drawn."
    return joined(
        [
            element("figure", element("figcaption", f"{told}.{missing} {LEGEND}"), svg),
            element(
                "p",
                "Point at a node, or reach it with Tab and move with the arrow keys.",
                class_="detail",
                aria_live="polite",
            ),
            *([element("ul", *(element("li", note) for note in shown.notes), class_="note")] if shown.notes else []),
            _table(drawn, facts),
        ],
        "\n",
    )


def _links(tree: DraftTree, layout: Layout) -> Markup:
    x, y = MARGIN + layout.x, TOP + layout.y
    steps = "".join(
        f"M{number(x[parent])} {number(y[parent])}L{number(x[node])} {number(y[node])}"
        for node, parent in enumerate(tree.parents[1:].tolist(), 1)
    )
    return element(
        "path", d=steps or "M0 0", class_="links", stroke_width=float(np.clip(60 / tree.num_nodes, 0.25, 0.9))
    )


def _levels(tree: DraftTree, probabilities: Values, places: Values) -> Markup:
    parts = []
    for depth, y in enumerate((TOP + places).tolist()):
        on_level = tree.depths == depth
        count = int(on_level.sum())
        told = (
            f"head {depth - 1}, token {depth + 1}: {count} node{'s' * (count != 1)} add {probabilities[on_level].sum():.3f} tokens"
            if depth
            else "root, token 1: decided"
        )
        parts.append(element("text", told, x=MARGIN, y=y - 24, class_="level"))
    return joined(parts)


def _nodes(tree: DraftTree, probabilities: Values, layout: Layout, facts: list[NodeFacts], prefix: str) -> Markup:
    shades = _shades(probabilities)
    return joined(
        (
            _node(tree, layout, node, f"s{shades[node]}", facts[node], prefix)
            for node in range(tree.num_nodes)
        ),
        "\n",
    )  # fmt: skip


def _node(tree: DraftTree, layout: Layout, node: int, shade: str, facts: NodeFacts, prefix: str) -> Markup:
    x, y, radius = MARGIN + layout.x[node], TOP + layout.y[node], layout.diameters[node] / 2
    parent = f"{prefix}{tree.parents[node]}" if node else None
    shape = (
        element("circle", cx=x, cy=y, r=radius, class_="dot" if radius < BARE else None)
        if node
        else element("rect", x=x - 8, y=y - 8, width=16.0, height=16.0)
    )
    rank = [element("text", str(tree.ranks[node]), x=x, y=y + 0.36 * FONT_SIZE)] if layout.labelled[node] else []
    return element(
        "g", element("title", "\n".join(facts.lines)), shape, *rank, id=f"{prefix}{node}", class_=f"node {shade}" if node else "node root",
        tabindex="0", role="img", aria_label="; ".join(facts.lines), data_parent=parent, data_depth=str(tree.depths[node]),
    )  # fmt: skip


def _shades(probabilities: Values) -> NDArray[np.int64]:
    """Return each node's shade, 0 the palest, by the logarithm of its probability."""
    logs = np.log(np.maximum(probabilities, 1e-12))
    lowest, highest = float(logs[1:].min(initial=0.0)), float(logs[1:].max(initial=-30.0))
    share = (logs - lowest) / max(highest - lowest, 1e-9)
    return np.clip(np.floor(share * SHADES), 0, SHADES - 1).astype(np.int64)


def _table(tree: DraftTree, facts: list[NodeFacts]) -> Markup:
    order = sorted(range(1, tree.num_nodes), key=lambda node: facts[node].place)
    rows = [
        [
            facts[node].path, str(tree.depths[node] - 1), f"{facts[node].probability:.5f}",
            f"{1 + facts[node].before + facts[node].probability:.4f}", str(len(facts[node].children)),
        ]
        for node in order
    ]  # fmt: skip
    header = ["path", "head", "probability = tokens added", "tokens per step up to here", "children"]
    inner = table(header, rows, caption="Nodes by falling probability of their path, root left out")
    return element("details", element("summary", "All nodes as a table"), inner)
