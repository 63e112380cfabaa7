"""The picture of a tree: a level a row, a node's size and shade its path probability, its rank inside."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import EllipseCollection, LineCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from treeopt.plot.layout import Layout, drawn_part, lay_out
from treeopt.plot.paper import DARK, FAINT, INK, POINTS, SHADES, figure
from treeopt.tree import DraftTree

__all__ = ["draw_tree"]

WIDTH, HEIGHT = 10.0, 5.6  # inches
LEFT, RIGHT, TOP, BOTTOM = 112.0, 10.0, 92.0, 78.0  # points around the nodes
LARGEST = 30.0  # diameter of the likeliest node, in points
SMALL, TEXT = 9.0, 10.0  # font sizes
LINK = "#8b94a1"
BARE = 4.0  # smaller nodes have no outline, in points
BEFORE_NUMBER = 4.5  # between a circle of the scale and its number, in points

Values = NDArray[np.float64]


def draw_tree(tree: DraftTree, probabilities: Values) -> Figure:
    """Return the figure of a tree, 10 × 5.6 inches.

    Parameters
    ----------
    tree : DraftTree
        Of more than 512 nodes the likeliest are drawn.
    probabilities : ndarray of float64, shape (num_nodes,)
        That the whole path to a node is accepted, in [0, 1].
    """
    return figure(_draw, WIDTH, HEIGHT, tree, probabilities)


def _draw(made: Figure, whole: DraftTree, probabilities: Values) -> None:
    axes = made.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, WIDTH * POINTS), ylim=(HEIGHT * POINTS, 0))
    axes.axis("off")
    tree, shown = drawn_part(whole, probabilities)
    width, height = WIDTH * POINTS - LEFT - RIGHT, HEIGHT * POINTS - TOP - BOTTOM
    layout = lay_out(tree, shown, width=width, height=height, largest=LARGEST, font_size=SMALL)
    part = "" if tree.num_nodes == whole.num_nodes else f" (its {tree.num_nodes:,} likeliest are drawn)"
    tokens = 1.0 + float(probabilities[1:].sum())
    _titles(axes, f"Draft tree of {_counted(whole.num_nodes)}{part}: {tokens:.3f} tokens per step expected", layout)
    _levels(axes, whole, probabilities, np.linspace(TOP, TOP + height, tree.max_depth + 1))
    _nodes(axes, tree, layout, _shades(shown))
    _scale(axes, shown, layout)


def _shades(probabilities: Values) -> Values:
    """Return each node's place between the palest and the darkest shade, by the logarithm of its probability."""
    logs = np.log(np.maximum(probabilities, 1e-12))
    lowest, highest = float(logs[1:].min(initial=0.0)), float(logs[1:].max(initial=-30.0))
    places = np.clip((logs - lowest) / max(highest - lowest, 1e-9), 0.0, 1.0)
    places[0] = 1.0
    return places


def _levels(axes: Axes, tree: DraftTree, probabilities: Values, places: Values) -> None:
    """Name each level at its left, with how many nodes it has and what they add."""
    for depth, y in enumerate(places.tolist()):
        on_level = tree.depths == depth
        axes.plot([LEFT, WIDTH * POINTS - RIGHT], [y, y], color=FAINT, linewidth=0.6, zorder=0)
        count = int(on_level.sum())
        name, *told = (
            (f"head {depth - 1}: token {depth + 1}", _counted(count), f"add {probabilities[on_level].sum():.3f} tokens")
            if depth
            else ("root: token 1", "decided already", "")
        )
        axes.text(10, y - 4, name, fontsize=TEXT, fontweight="bold", va="bottom")
        axes.text(10, y - 1, "\n".join(told), fontsize=SMALL, color=DARK, va="top", linespacing=1.15)


def _counted(count: int) -> str:
    return f"{count:,} node{'s' * (count != 1)}"


def _nodes(axes: Axes, tree: DraftTree, layout: Layout, shades: Values) -> None:
    places = np.stack([LEFT + layout.x, TOP + layout.y], axis=1)
    edges = np.stack([places[tree.parents[1:]], places[1:]], axis=1)
    thin = float(np.clip(48 / tree.num_nodes, 0.18, 0.6))
    axes.add_collection(LineCollection(list(edges), colors=LINK, linewidths=thin, zorder=1))
    _circles(axes, places[1:], layout.diameters[1:], shades[1:])
    axes.plot(*places[0], marker="s", markersize=11, markerfacecolor="white", markeredgecolor=INK, markeredgewidth=2)
    for node in np.flatnonzero(layout.labelled):
        _inside(axes, places[node], str(tree.ranks[node]), shades[node])


def _circles(axes: Axes, places: Values, diameters: Values, shades: Values) -> None:
    axes.add_collection(
        EllipseCollection(
            diameters,
            diameters,
            np.zeros(len(diameters)),
            units="xy",
            offsets=places,
            offset_transform=axes.transData,
            facecolors=SHADES(shades),
            edgecolors=INK,
            linewidths=np.where(diameters < BARE, 0.0, 0.6),
            zorder=2,
        )
    )


def _inside(axes: Axes, place: Values, text: str, shade: float) -> None:
    colour = "white" if shade > 0.45 else INK
    axes.text(place[0], place[1], text, fontsize=SMALL, color=colour, ha="center", va="center_baseline", zorder=3)


def _titles(axes: Axes, title: str, layout: Layout) -> None:
    axes.text(10, 24, title, fontsize=13, fontweight="bold")
    missing = "" if layout.labelled[1:].all() else "; numbers that do not fit are left out"
    axes.text(
        10, 49,
        "A step checks all nodes at once and keeps the longest path that the target model agrees with.\n"
        f"The number in a node is the rank of its guess: 0 is the head's first{missing}.",
        fontsize=SMALL + 0.5, color=DARK, va="center", linespacing=1.3,
    )  # fmt: skip


def _scale(axes: Axes, probabilities: Values, layout: Layout) -> None:
    """Draw circles of some probabilities, as they are in the tree."""
    chosen = _samples(probabilities)
    if not chosen:
        return
    y, x = HEIGHT * POINTS - 24.0, 10.0
    axes.text(x, y, "Probability that the whole path down to a node is right:", fontsize=TEXT, va="center_baseline")
    x += 290.0
    shades = _shades(probabilities)
    for node in chosen:
        diameter = float(layout.diameters[node])
        x += diameter / 2
        _circles(axes, np.array([[x, y]]), np.array([diameter]), shades[[node]])
        axes.text(
            x + diameter / 2 + BEFORE_NUMBER,
            y,
            _percent(float(probabilities[node])),
            fontsize=TEXT,
            va="center_baseline",
        )
        x += diameter / 2 + 52.0


def _percent(probability: float) -> str:
    """Write a probability with two digits that count: 29 %, 0.37 %, 0.0032 %."""
    digits = max(0, 1 - math.floor(math.log10(100 * probability))) if probability > 0 else 0
    return f"{100 * probability:.{digits}f} %"


def _samples(probabilities: Values, count: int = 5) -> list[int]:
    """Return nodes whose probabilities stand at equal steps of the logarithm, the likeliest first."""
    if len(probabilities) < 2:
        return []
    logs = np.log(np.maximum(probabilities[1:], 1e-12))
    nearest = [int(np.abs(logs - goal).argmin()) + 1 for goal in np.linspace(logs.max(), logs.min(), count)]
    return list(dict.fromkeys(nearest))
