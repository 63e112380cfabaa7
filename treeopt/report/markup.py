"""HTML and SVG as text in which everything that is not markup is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["Markup", "element", "estimate", "joined", "number", "table"]

EMPTY = frozenset({"meta", "line", "circle", "rect", "path", "polyline", "polygon"})  # written without an end tag
HTML_EMPTY = frozenset({"meta"})
LONG = 12  # signs of a row's name, or of a heading's word, that fits without ado


class Markup(str):
    """Text that is markup already; any other text is escaped when it is put into an element."""

    __slots__ = ()


def element(name: str, /, *content: str | Markup, **attributes: str | float | None) -> Markup:
    """Return an element.

    Parameters
    ----------
    name : str
    *content : str or Markup
        Plain text is escaped.
    **attributes : str, float or None
        Underscores become hyphens, a trailing one is dropped (``class_``); None leaves the attribute out.

    Examples
    --------
    >>> element("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value if isinstance(value, str) else number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in EMPTY and not content:
        return Markup(f"<{name}{written}{'' if name in HTML_EMPTY else '/'}>")
    return Markup(f"<{name}{written}>{joined(content)}</{name}>")


def joined(parts: Iterable[str | Markup], between: str = "") -> Markup:
    """Return parts one after the other, plain text escaped."""
    return Markup(between.join(part if isinstance(part, Markup) else escape(part) for part in parts))


def number(value: float) -> str:
    """Write a coordinate: at most two digits behind the point, none where they are 0."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def estimate(value: float, low: float, high: float, sign: str = "") -> str:
    """Write a value with its interval; a line never breaks inside the brackets."""
    return f"{value:{sign}.3f} ({low:{sign}.3f}\u00a0…\u00a0{high:{sign}.3f})"


def table(
    header: Sequence[str | Markup], rows: Sequence[Sequence[str | Markup]], *, caption: str, text_columns: int = 1
) -> Markup:
    """Return a table whose first columns hold text and whose others hold numbers; a long one may scroll sideways."""
    kinds = [None if i < text_columns else "n" for i in range(len(header))]
    long = "long" if any(len(row[0]) > LONG for row in rows) else None
    heads = [" ".join(filter(None, (kind, _long_word(cell)))) or None for cell, kind in zip(header, kinds)]
    head = element("tr", *(element("th", cell, scope="col", class_=kind) for cell, kind in zip(header, heads)))
    body = joined(
        (
            element(
                "tr",
                element("th", row[0], scope="row", class_=long),
                *(element("td", cell, class_=kind) for cell, kind in zip(row[1:], kinds[1:])),
            )
            for row in rows
        ),
        "\n",
    )
    inner = element("table", element("caption", caption), element("thead", head), "\n", element("tbody", body))
    return element("div", inner, class_="wide")


def _long_word(text: str) -> str | None:
    """Return the class of headings that must break within a word to fit on paper."""
    return "long" if any(len(word) > LONG for word in text.split()) else None
