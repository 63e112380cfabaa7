"""JSON read strictly: what two parsers could read differently is refused."""

from __future__ import annotations

import json
from typing import Any, NoReturn

__all__ = ["parse"]


def parse(text: str | bytes) -> Any:
    """Parse JSON text.

    Raises
    ------
    ValueError
        In one line, for text that is no JSON, repeated keys, NaN and infinities, numbers of thousands of digits, and
        nesting that exhausts the stack.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
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
            raise ValueError(f"`{key}` is given twice; delete one of the two")
        found[key] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"`{name}` is no JSON number; every value is finite")
