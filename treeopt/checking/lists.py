"""Defects of lists of paths and of tables of accuracies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from treeopt.paths import MAX_RANK, Path, format_path, order_key

__all__ = ["is_number", "path_defects", "path_list_defects", "rate_defects", "spelled"]

MAX_WHOLE = 1 << 53  # beyond, a whole number may be too large for a float, and no value of a file is near


def path_list_defects(paths: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield the defects of a list of paths, in any order, root excluded."""
    for place, path in enumerate(paths):
        if not path:
            yield f"path `{place}` is [], the root, which every tree has; leave it out"
    yield from path_defects([tuple(path) for path in paths if path])


def path_defects(paths: Sequence[Path]) -> Iterator[str]:
    """Yield ranks that are none, nodes given twice and nodes without a parent."""
    held: set[Path] = {()}
    for path in paths:
        if min(path) < 0:
            yield f"node `{format_path(path)}` has a negative rank; ranks start at 0"
        if max(path) > MAX_RANK:
            yield f"a node at depth `{len(path)}` has a rank of {max(path).bit_length()} bits; ranks end at {MAX_RANK}"
        if path in held:
            yield f"node `{format_path(path)}` is given twice; delete one of the two"
        held.add(path)
    for path in sorted(held - {()}, key=order_key):
        if path[:-1] not in held:
            yield f"node `{format_path(path)}` has no parent; add `{format_path(path[:-1])}` or delete the node"


def rate_defects(data: Any) -> Iterator[str]:
    """Yield the rates of a table that are no accuracies; what else may be wrong with it is for its reader."""
    rows = data.get("rates") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        return
    for head, row in enumerate(rows):
        for rank, rate in enumerate(row if isinstance(row, list) else []):
            if isinstance(rate, float) and not math.isfinite(rate):
                yield f"head `{head}` has {spelled(rate)} at rank {rank}; every value is finite"
            elif not is_number(rate):
                yield f"head `{head}` has {rate!r:.40} at rank {rank}; give a number"
            elif not 0 <= rate <= 1:
                yield f"head `{head}` has rate {rate} at rank {rank}; accuracies lie in [0, 1]"


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number that can be reckoned with."""
    if type(value) is int:
        return -MAX_WHOLE < value < MAX_WHOLE
    return isinstance(value, float) and math.isfinite(value)


def spelled(value: float) -> str:
    """Write NaN and infinities as JSON files do."""
    return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
