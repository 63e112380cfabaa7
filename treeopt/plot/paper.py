"""What all figures share: size, type, colours that also differ in grey, and files that are equal for equal figures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from treeopt.errors import PictureError
from treeopt.files import replacing
from treeopt.plot.spacing import spaced

__all__ = [
    "DARK",
    "FAINT",
    "INK",
    "MARKERS",
    "ORDERED",
    "POINTS",
    "SHADES",
    "Figure",
    "beside_lines",
    "figure",
    "headed",
    "mark_budget",
    "marked",
    "picture_kind",
    "plain_axes",
    "powers",
    "save",
]

POINTS = 72.0  # in an inch
DOTS = 160  # of a PNG, in an inch
INK, FAINT, DARK = "#1b1f24", "#c9ced6", "#5a626e"
# From dark to light in one step each, so that copies in grey and eyes without red or green tell them apart.
ORDERED = ("#0b2545", "#235d93", "#2f9488", "#d98a1f", "#f2bd6b", "#d9dde3")
MARKERS = "osD^vPX"  # one more than colours: together they differ for many more lines
SHADES = LinearSegmentedColormap.from_list("path probability", ["#b4c8de", "#7fa3c7", "#2f6499", "#0b2545"])
RIGHT_OF_MARK = 0.66  # of an axis: marks further right have their words at the left

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "treeopt",
    "text.parse_math": False,  # a name may hold any sign
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.0,
    "axes.titlesize": 12.0,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 10.0,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": DARK,
    "xtick.color": DARK,
    "ytick.color": DARK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
    "savefig.facecolor": "white",
}


def figure(draw: Callable[..., None], width: float, height: float, *arguments: Any, **options: Any) -> Figure:
    """Return a figure of a size in inches that a function has drawn on, in the style of all figures."""
    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(width, height), layout=None)
        FigureCanvasAgg(made)
        draw(made, *arguments, **options)
    return made


def save(made: Figure, path: Path) -> None:
    """Write a figure as SVG or PNG, by the name's ending.

    Raises
    ------
    PictureError
        For another ending.
    """
    kind = picture_kind(path)
    metadata: Mapping[str, Any] = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with replacing(path) as temporary, matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # An SVG keeps the letters for the viewer's fonts; a PNG shows a box, which says it better than a warning.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        made.savefig(temporary, format=kind, dpi=DOTS, metadata=metadata)


def picture_kind(path: Path) -> str:
    """Return ``svg`` or ``png``, as the name ends.

    Raises
    ------
    PictureError
        For another ending.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise PictureError(f"`{path}` ends in {path.suffix or 'nothing'!r}; end the name in .svg or .png")
    return kind


def plain_axes(axes: Axes, *, grid: str = "y") -> None:
    """Give axes a faint grid behind what is drawn."""
    axes.grid(axis=grid, color=FAINT, linewidth=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(length=3)


def beside_lines(axes: Axes, labels: Sequence[tuple[float, str, int | None]], *, size: float = 10.0) -> None:
    """Write the name of each line at its right end, moved apart where they would overlap.

    Parameters
    ----------
    axes : Axes
        With its final limits.
    labels : sequence of (float, str, int or None)
        For each line, where it ends in y, its name, and its place in `ORDERED` if it has a marker to be shown again.
    """
    high = axes.figure.get_size_inches()[1] * POINTS * axes.get_position().height  # type: ignore[union-attr]
    shares = axes.transAxes.inverted().transform(axes.transData.transform([(1.0, y) for y, _, _ in labels]))[:, 1]
    order = np.argsort(shares, kind="stable")
    line_height = 1.3 * size * np.array([1 + labels[i][1].count("\n") for i in order])
    places = spaced(shares[order] * high, line_height, 0.0, high)
    for i, place in zip(order.tolist(), places.tolist()):
        _, name, line = labels[i]
        if line is not None:
            offset = ScaledTranslation(12 / POINTS, 0, axes.figure.dpi_scale_trans)
            axes.plot([1.0], [place / high], transform=axes.transAxes + offset, clip_on=False, **marked(line))
        axes.annotate(
            name, (1.0, place / high), xytext=(8 if line is None else 20, 0), xycoords="axes fraction",
            textcoords="offset points", fontsize=size, va="center", annotation_clip=False, linespacing=1.2,
        )  # fmt: skip


def marked(line: int) -> dict[str, Any]:
    """Return the look of the line of a place: its colour, and a marker that tells it in grey."""
    colour, marker = ORDERED[line % len(ORDERED)], MARKERS[line % len(MARKERS)]
    return {"color": colour, "marker": marker, "markeredgecolor": INK, "markeredgewidth": 0.5}


def headed(made: Figure, title: str, told: str) -> None:
    """Write a figure's title and the line below it."""
    height = made.get_size_inches()[1] * POINTS
    made.text(0.02, 1 - 20 / height, title, fontsize=13, fontweight="bold", va="center")
    made.text(0.02, 1 - 39 / height, told, fontsize=10, color=DARK, va="center")


def powers(axes: Axes, largest: int) -> None:
    """Put ticks at powers of two, written out, on a logarithmic axis of nodes."""
    axes.xaxis.set_major_locator(FixedLocator([2**i for i in range(largest.bit_length())]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda nodes, _: f"{nodes:g}"))


def mark_budget(axes: Axes, nodes: float, value: float, text: str) -> None:
    """Mark the point of a curve at a budget, with a line down to the axis and words beside it."""
    low, high = axes.get_ylim()
    axes.plot([nodes, nodes], [low, value], color=INK, linewidth=1.2, linestyle=(0, (1, 2)), zorder=3)
    axes.plot(
        [nodes], [value], marker="o", markersize=9, color=INK, markerfacecolor="white", markeredgewidth=2, zorder=4,
        clip_on=False,
    )  # fmt: skip
    to_the_right = axes.transAxes.inverted().transform(axes.transData.transform((nodes, value)))[0] < RIGHT_OF_MARK
    axes.annotate(
        text, (nodes, low + max(0.42 * (value - low), 0.12 * (high - low))), xytext=(8 if to_the_right else -8, 0), textcoords="offset points",
        va="center", ha="left" if to_the_right else "right", fontsize=10, fontweight="bold", linespacing=1.3, zorder=5,
    )  # fmt: skip
