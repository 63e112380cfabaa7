"""Line charts as SVG that takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.plot.spacing import spaced
from treeopt.report.markup import Markup, element, joined, number

__all__ = ["Axis", "Line", "Mark", "line_chart"]

WIDTH, HEIGHT = 470.0, 300.0
LEFT, TOP, BOTTOM = 54.0, 16.0, 44.0
LINE_HEIGHT = 15.0
SIGN_WIDTH = 6.6  # of the labels' letters, about
COLOURS = 5  # of the style sheet
SIGNS = (  # from the middle: circle, square, diamond, triangles up and down, cross
    "m-3.3 0a3.3 3.3 0 1 0 6.6 0a3.3 3.3 0 1 0 -6.6 0z",
    "m-3 -3h6v6h-6z",
    "m0 -4.2l4.2 4.2l-4.2 4.2l-4.2 -4.2z",
    "m0 -4.2l4 7h-8z",
    "m0 4.2l4 -7h-8z",
    "m-1.3 -3.9h2.6v2.6h2.6v2.6h-2.6v2.6h-2.6v-2.6h-2.6v-2.6h2.6z",
)

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Line:
    """One line of a chart, with its name at the right end.

    Attributes
    ----------
    x, y : ndarray of float64
    name : str
        A line break makes two lines.
    colour : int
        From 0 on; the style sheet has five.
    dashed, dotted : bool
        Broken strokes; a dot at every point.
    low, high : ndarray of float64, optional
        Interval at each point: bars if `dotted`, else a band.
    """

    x: Values
    y: Values
    name: str
    colour: int = 0
    dashed: bool = False
    dotted: bool = False
    low: Values | None = None
    high: Values | None = None


@dataclass(frozen=True)
class Axis:
    """Scale of one direction.

    Attributes
    ----------
    label : str
        With the unit.
    low, high : float
    logarithmic : bool
    ticks : tuple of float
        Those outside are left out; empty for round ones.
    written : callable
        Writes a tick.
    """

    label: str
    low: float
    high: float
    logarithmic: bool = False
    ticks: tuple[float, ...] = ()
    written: Callable[[float], str] = "{:g}".format

    def share(self, values: Values | float) -> Values:
        """Return where values stand between both ends, 0 … 1."""
        low, high, found = self.low, self.high, np.asarray(values, dtype=np.float64)
        if self.logarithmic:
            low, high, found = math.log(low), math.log(high), np.log(found)
        return np.asarray((found - low) / (high - low), dtype=np.float64)

    def shown(self) -> list[float]:
        """Return the ticks."""
        ticks = self.ticks or _round_ticks(self.low, self.high)
        return [tick for tick in ticks if self.low - 1e-9 <= tick <= self.high * (1 + 1e-9)]


@dataclass(frozen=True)
class Mark:
    """A point that is pointed out, with a line down to the axis and words beside it."""

    x: float
    y: float
    text: str


def line_chart(title: str, x_axis: Axis, y_axis: Axis, lines: Sequence[Line], mark: Mark | None = None) -> Markup:
    """Return a chart with its title as a figure.

    Parameters
    ----------
    title : str
    x_axis, y_axis : Axis
    lines : sequence of Line
    mark : Mark, optional
    """
    right = 28 + SIGN_WIDTH * max(len(part) for line in lines for part in line.name.split("\n"))
    width, height = WIDTH - LEFT - right, HEIGHT - TOP - BOTTOM

    def place(x: Values | float, y: Values | float) -> list[tuple[float, float]]:
        across, up = LEFT + width * x_axis.share(x), TOP + height * (1 - y_axis.share(y))
        return list(zip(np.atleast_1d(across).tolist(), np.atleast_1d(up).tolist()))

    parts = [*_axes(x_axis, y_axis, place), *(_line(line, place) for line in lines)]
    parts += [_names(lines, place, width, height), *([_mark(mark, y_axis, place, width)] if mark else [])]
    told = f"{title}: {y_axis.label} against {x_axis.label}"
    svg = element("svg", *parts, viewBox=f"0 0 {number(WIDTH)} {number(HEIGHT)}", role="img", aria_label=told)
    return element("figure", element("figcaption", title), svg, class_="chart")


Place = Callable[[Values | float, Values | float], list[tuple[float, float]]]


def _axes(x_axis: Axis, y_axis: Axis, place: Place) -> list[Markup]:
    (left, bottom), (right, top) = place(x_axis.low, y_axis.low)[0], place(x_axis.high, y_axis.high)[0]
    parts = []
    for tick in y_axis.shown():
        y = place(x_axis.low, tick)[0][1]
        parts.append(element("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(element("text", y_axis.written(tick), x=left - 6, y=y + 4, class_="end"))
    for tick in x_axis.shown():
        x = place(tick, y_axis.low)[0][0]
        parts.append(element("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(element("text", x_axis.written(tick), x=x, y=bottom + 17, class_="mid"))
    parts.append(element("path", d=f"M{number(left)} {number(top)}V{number(bottom)}H{number(right)}", class_="axis"))
    parts.append(element("text", x_axis.label, x=(left + right) / 2, y=HEIGHT - 8, class_="mid"))
    turned = f"translate(13 {number((top + bottom) / 2)}) rotate(-90)"
    parts.append(element("text", y_axis.label, transform=turned, class_="mid"))
    return parts


def _line(line: Line, place: Place) -> Markup:
    colour = f"c{line.colour % COLOURS}"
    parts = []
    points = place(line.x, line.y)
    if line.low is not None and line.high is not None:
        low, high = place(line.x, line.low), place(line.x, line.high)
        if line.dotted:
            bars = zip(low, high)
            parts += [element("line", x1=a[0], x2=a[0], y1=a[1], y2=b[1], class_="bar") for a, b in bars]
        else:
            parts.append(element("polygon", points=_points([*low, *reversed(high)]), class_="band"))
    parts.append(element("polyline", points=_points(points), class_="dashed" if line.dashed else None))
    if line.dotted:
        parts += [_marker(x, y, line.colour) for x, y in points]
    return element("g", *parts, class_=f"line {colour}")


def _marker(x: float, y: float, colour: int) -> Markup:
    """Return a sign at a point, another one for each colour, so that lines can be told apart in grey."""
    return element("path", d=f"M{number(x)} {number(y)}{SIGNS[colour % len(SIGNS)]}", class_="sign")


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{number(x)},{number(y)}" for x, y in points)


def _names(lines: Sequence[Line], place: Place, width: float, height: float) -> Markup:
    """Write the names at the lines' right ends, apart from each other."""
    ends = np.array([place(line.x[-1], line.y[-1])[0][1] for line in lines])
    order = np.argsort(ends, kind="stable")
    sizes = LINE_HEIGHT * np.array([1 + lines[i].name.count("\n") for i in order])
    places = spaced(ends[order], sizes, TOP - 8, TOP + height + 8)
    x = LEFT + width + 8
    parts = []
    for i, y in zip(order.tolist(), places.tolist()):
        line = lines[i]
        signed = line.dotted and len(lines) > 1
        if signed:
            parts.append(element("g", _marker(x + 4, y, line.colour), class_=f"line c{line.colour % COLOURS}"))
        parts.append(_text(line.name, x + 12 * signed, y, "name"))
    return joined(parts)


def _text(text: str, x: float, middle: float, name: str) -> Markup:
    rows = text.split("\n")
    first = middle - LINE_HEIGHT * (len(rows) - 1) / 2 + 4
    spans = [element("tspan", row, x=x, y=first + LINE_HEIGHT * i) for i, row in enumerate(rows)]
    return element("text", *spans, class_=name)


def _mark(mark: Mark, y_axis: Axis, place: Place, width: float) -> Markup:
    (x, y), (_, bottom) = place(mark.x, mark.y)[0], place(mark.x, y_axis.low)[0]
    to_the_right = x < LEFT + 0.6 * width
    return joined(
        [
            element("line", x1=x, x2=x, y1=y, y2=bottom, class_="drop"),
            element("circle", cx=x, cy=y, r=5, class_="mark"),
            _text(
                mark.text,
                x + (7 if to_the_right else -7),
                bottom - 0.42 * (bottom - y),
                "told" if to_the_right else "told end",
            ),
        ]
    )


def _round_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return about five ticks at multiples of 1, 2, 2.5 or 5 times a power of ten."""
    rough = max(high - low, 1e-12) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return tuple(round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1))
