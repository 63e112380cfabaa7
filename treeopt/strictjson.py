"""JSON read strictly: what two parsers could read differently is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["parse", "parse_leniently"]

REPEATED = "`{}` is given twice; delete one of the two"


def parse(text: str | bytes) -> Any:
    """Parse JSON text.

    Raises
    ------
    ValueError
        In one line, for text that is no JSON, repeated keys, NaN and infinities, numbers of thousands of digits, and
        nesting that exhausts the stack.
    """
    return _loads(text, _unique, _refuse_constant)


def parse_leniently(text: str | bytes) -> tuple[Any, list[str]]:
    """Parse JSON text and say what `parse` would refuse beside its form: repeated keys. NaN and infinities are kept.

    Of a repeated key the first value is kept.

    Raises
    ------
    ValueError
        In one line, for text that is no JSON, numbers of thousands of digits, and nesting that exhausts the stack.
    """
    defects: list[str] = []

    def first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                defects.append(REPEATED.format(key))
            found.setdefault(key, value)
        return found

    return _loads(text, first, float), defects


def _loads(
    text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]], constant: Callable[[str], Any]
) -> Any:
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(REPEATED.format(key))
        found[key] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"`{name}` is no JSON number; every value is finite")
