"""Defects of a tree file: whatever follows from its paths is worked out again and compared, node by node."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treeopt.checking.claims import claim_defects
from treeopt.checking.lists import is_number, path_defects, spelled
from treeopt.document import KEYS, MAX_DENSE_NODES, SCHEMA, TOLERANCE
from treeopt.paths import Path, format_path, order_key

__all__ = ["tree_file_defects"]

WORD_BITS = 64


def tree_file_defects(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield every defect of a parsed tree file that can be told apart, one line each."""
    if data["schema"] != SCHEMA:
        yield f"`schema` is {data['schema']!r}, not {SCHEMA!r}; this treeopt reads no other"
    for key in sorted(set(data) - set(KEYS)):
        yield f"`{key}` is not a key of {SCHEMA}; delete it"
    for key in KEYS:
        if key not in data:
            yield f"`{key}` is missing; write the file with treeopt.write_tree"
    for where, value in _not_finite(data, ""):
        yield f"`{where}` is {spelled(value)}, no JSON number; every value is finite"
    complaints = list(_path_defects(data.get("paths")))
    yield from complaints
    paths = _paths(data.get("paths"))
    if paths is None:
        yield from _parents_alone(data)
    else:
        yield from _derived(data, paths)
        yield from _probabilities(data, paths)
    yield from claim_defects(data, None if complaints or paths is None else paths)


def _not_finite(value: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _not_finite(entry, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for place, entry in enumerate(value):
            yield from _not_finite(entry, f"{where}[{place}]")


def _path_defects(found: Any) -> Iterator[str]:
    if found is None:
        return
    if not isinstance(found, list):
        yield f"`paths` is {found!r:.40}; give a list of lists of ranks that begins with [], the root"
        return
    if not found or found[0] != []:
        yield "`paths` must begin with [], the root; put it first"
    for place, path in enumerate(found):
        if not isinstance(path, list):
            yield f"`paths[{place}]` is {path!r}; give a list of ranks"
        elif path == [] and place > 0:
            yield f"`paths[{place}]` is [], the root, a second time; delete it"
        elif wrong := [rank for rank in path if type(rank) is not int]:
            yield f"`paths[{place}]` holds {wrong[0]!r}; ranks are whole numbers"
    paths = [tuple(path) for path in found if isinstance(path, list) and path and all(type(r) is int for r in path)]
    yield from path_defects(paths)
    for before, after in itertools.pairwise(paths):
        if order_key(after) < order_key(before):
            yield f"node `{format_path(after)}` stands behind `{format_path(before)}`; sort nodes by depth, then path"


def _paths(found: Any) -> list[Path] | None:
    """Return the paths in the file's order, if every node has one and no two the same."""
    if not isinstance(found, list) or not found or found[0] != []:
        return None
    if not all(isinstance(path, list) and all(type(rank) is int for rank in path) for path in found):
        return None
    paths = [tuple(path) for path in found]
    return paths if len(set(paths)) == len(paths) else None


def _parents_alone(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with parents in themselves, where paths do not say what they should be."""
    found = data.get("parents")
    for node, parent in enumerate(found if isinstance(found, list) else []):
        if type(parent) is int and parent >= max(node, 1):
            yield f"`parents[{node}]` is {parent}: a parent comes before its children; sort nodes by depth, then path"


def _derived(data: Mapping[str, Any], paths: Sequence[Path]) -> Iterator[str]:
    place = {path: node for node, path in enumerate(paths)}
    depth = max(map(len, paths))
    for key, count in (("num_nodes", len(paths)), ("max_depth", depth)):
        if key in data and (type(data[key]) is not int or data[key] != count):
            yield f"`{key}` is {data[key]!r}, but `paths` make it {count}; write the file again"
    expected: dict[str, list[int | None]] = {
        "parents": [-1, *(place.get(path[:-1]) for path in paths[1:])],
        "depths": [len(path) for path in paths],
        "ranks": [-1, *(path[-1] for path in paths[1:])],
        "position_ids": [len(path) for path in paths],
    }
    for key, values in expected.items():
        yield from _column(data, key, values, paths)
    seen = [{place[path[:length]] for length in range(len(path) + 1) if path[:length] in place} for path in paths]
    yield from _dense_mask(data, seen, paths)
    yield from _packed_mask(data, seen, paths)
    yield from _retrieve(data, seen, paths, depth)


def _column(data: Mapping[str, Any], key: str, expected: Sequence[int | None], paths: Sequence[Path]) -> Iterator[str]:
    found = data.get(key, expected)
    if not isinstance(found, list) or len(found) != len(expected):
        yield f"`{key}` must hold {len(expected)} whole numbers, one a node; write the file again"
        return
    for node, (value, right) in enumerate(zip(found, expected)):
        named = f"`{key}[{node}]`, of node `{format_path(paths[node])}`, is {value!r}"
        if type(value) is not int:
            yield f"{named}; give a whole number"
        elif key == "parents" and value >= max(node, 1):
            yield f"{named}: a parent comes before its children; sort nodes by depth, then path"
        elif right is not None and value != right:
            yield f"{named}, but its path makes it {right}; write the file again"


def _dense_mask(data: Mapping[str, Any], seen: Sequence[set[int]], paths: Sequence[Path]) -> Iterator[str]:
    found = data.get("attention_mask")
    if "attention_mask" not in data:
        return
    if found is None:
        if len(paths) <= MAX_DENSE_NODES:
            yield f"`attention_mask` is null, which is for more than {MAX_DENSE_NODES} nodes; write the file again"
        return
    if len(paths) > MAX_DENSE_NODES:
        yield f"`attention_mask` must be null for more than {MAX_DENSE_NODES} nodes; write the file again"
    if not isinstance(found, list) or len(found) != len(paths):
        yield f"`attention_mask` must have {len(paths)} rows, one a node; write the file again"
        return
    for node, row in enumerate(found):
        if (
            not isinstance(row, list)
            or len(row) != len(paths)
            or not all(type(bit) is int and bit in (0, 1) for bit in row)
        ):
            yield f"`attention_mask[{node}]` must hold {len(paths)} numbers, each 0 or 1; write the file again"
            continue
        yield from _row(f"attention_mask[{node}]", {j for j, bit in enumerate(row) if bit}, seen[node], paths[node])


def _packed_mask(data: Mapping[str, Any], seen: Sequence[set[int]], paths: Sequence[Path]) -> Iterator[str]:
    if "packed_mask" not in data:
        return
    found, words = data["packed_mask"], -(-len(paths) // WORD_BITS)
    if not isinstance(found, list) or len(found) != len(paths):
        yield f"`packed_mask` must have {len(paths)} rows, one a node; write the file again"
        return
    for node, row in enumerate(found):
        whole = isinstance(row, list) and len(row) == words
        if not whole or not all(isinstance(word, str) and re.fullmatch("[0-9a-f]{16}", word) for word in row):
            yield f"`packed_mask[{node}]` must hold {words} words of 16 lower-case hex digits; write the file again"
            continue
        packed = sum(int(word, 16) << WORD_BITS * place for place, word in enumerate(row))
        if packed != sum(1 << j for j in seen[node]):
            shown = {j for j in range(WORD_BITS * words) if packed >> j & 1}
            yield from _row(f"packed_mask[{node}]", shown, seen[node], paths[node])


def _row(where: str, found: set[int], right: set[int], path: Path) -> Iterator[str]:
    if found == right:
        return
    parts = [
        f"{verb} {', '.join(map(str, sorted(nodes)))}"
        for verb, nodes in (("shows", found - right), ("hides", right - found))
        if nodes
    ]
    yield f"`{where}`, of node `{format_path(path)}`, {' and '.join(parts)}, against its path; write the file again"


def _retrieve(data: Mapping[str, Any], seen: Sequence[set[int]], paths: Sequence[Path], depth: int) -> Iterator[str]:
    parents = {path[:-1] for path in paths[1:]}
    rows = [sorted(seen[node]) for node, path in enumerate(paths) if path not in parents]
    expected = {
        "retrieve": [row + [-1] * (depth + 1 - len(row)) for row in rows],
        "retrieve_valid": [[1] * len(row) + [0] * (depth + 1 - len(row)) for row in rows],
    }
    for key, right in expected.items():
        found = data.get(key, right)
        if not isinstance(found, list) or len(found) != len(right):
            yield f"`{key}` must have {len(right)} rows, one a leaf; write the file again"
            continue
        for leaf, (row, wanted) in enumerate(zip(found, right)):
            if row != wanted or any(type(entry) is not int for entry in row):
                yield f"`{key}[{leaf}]` is {row!r:.60}, but the path to that leaf makes it {wanted}; write the file again"


def _probabilities(data: Mapping[str, Any], paths: Sequence[Path]) -> Iterator[str]:
    found = data.get("path_probabilities")
    if "path_probabilities" not in data:
        return
    if not isinstance(found, list) or len(found) != len(paths):
        yield f"`path_probabilities` must hold {len(paths)} numbers, one a node; write the file again"
        return
    place = {path: node for node, path in enumerate(paths)}
    for node, value in enumerate(found):
        named = f"`path_probabilities[{node}]`, of node `{format_path(paths[node])}`, is {value!r:.40}"
        if isinstance(value, float) and not math.isfinite(value):
            continue  # said already
        if not is_number(value):
            yield f"{named}; give a number"
        elif node == 0 and value != 1:
            yield f"{named}; the root's is 1"
        elif not 0 <= value <= 1:
            yield f"{named}; probabilities lie in [0, 1]"
        elif node > 0 and paths[node][:-1] in place:
            above = found[place[paths[node][:-1]]]
            if is_number(above) and 0 <= above <= 1 and value > above:
                yield f"{named}, likelier than its parent with {above}; probabilities fall along a path"
    yield from _sums(data, found)


def _sums(data: Mapping[str, Any], found: Sequence[Any]) -> Iterator[str]:
    """Yield sums that do not follow from probabilities which are sound."""
    if not all(is_number(value) and 0 <= value <= 1 for value in found):
        return
    order = sorted(range(1, len(found)), key=lambda node: (-found[node], node))
    curve = [0.0, *itertools.accumulate(float(found[node]) for node in order)]
    if data.get("added", [0, *order]) != [0, *order]:
        yield "`added` must name each node once, the root first, then by falling probability, ties by number; write the file again"
    stated = data.get("curve", curve)
    if not isinstance(stated, list) or len(stated) != len(curve) or not all(map(_near, stated, curve)):
        yield "`curve` does not follow from `path_probabilities`; write the file again"
    for key, right in (("expected_accepted", curve[-1]), ("tokens_per_step", 1 + curve[-1])):
        if key in data and not _near(data[key], right):
            yield f"`{key}` is {data[key]!r}, but `path_probabilities` make it {right!r}; write the file again"


def _near(value: Any, right: float) -> bool:
    return is_number(value) and bool(abs(value - right) <= TOLERANCE)
