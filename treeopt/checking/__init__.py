"""Every defect of a file, where a reader stops at the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt import strictjson
from treeopt.acceptance import AcceptanceTable
from treeopt.checking.lists import path_list_defects, rate_defects
from treeopt.checking.tree_file import tree_file_defects
from treeopt.document import MAX_BYTES, from_json
from treeopt.errors import DocumentError, TreeoptError
from treeopt.optimize.built import BuiltTree
from treeopt.optimize.priced import states_probabilities
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree

__all__ = ["Report", "check_file"]


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes
    ----------
    defects : tuple of str
        One line each; empty for a sound file.
    summary : str
        What a sound file holds.
    """

    defects: tuple[str, ...]
    summary: str = ""


def check_file(path: str | Path) -> Report:
    """Check a tree file, a list of paths, a table of accuracies or a trace, told apart by what the file holds.

    Raises
    ------
    DocumentError
        If the file cannot be read at all.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()[:1]
        if start not in (b"{", b"["):
            return _sound(lambda: RankTrace.read(path))
        size = path.stat().st_size
        if size > MAX_BYTES:
            return Report((f"the file has {size} bytes; a reader takes at most {MAX_BYTES}: build fewer nodes",))
        content = path.read_bytes()
    except OSError as error:
        raise DocumentError(f"`{path}` cannot be read: {error.strerror}; give a tree, a table or a trace") from error
    try:
        data, repeated = strictjson.parse_leniently(content)
    except (ValueError, OverflowError) as error:
        return Report((f"the file is {error}; mend it or make it again",))
    found = [*repeated, *_defects(data)]
    return Report(tuple(found)) if found else _sound(lambda: _read(data))


def _defects(data: Any) -> Iterator[str]:
    if isinstance(data, dict) and str(data.get("schema")).startswith("treeopt.tree/"):
        yield from tree_file_defects(data)
    elif _are_paths(data):
        yield from path_list_defects(data)
    else:
        yield from rate_defects(data)


def _are_paths(data: Any) -> bool:
    """Tell paths from rates: ranks are whole numbers."""
    if not isinstance(data, list) or not all(isinstance(row, list) for row in data):
        return False
    return all(type(entry) is int for row in data for entry in row)


def _read(data: Any) -> BuiltTree | DraftTree | AcceptanceTable:
    if _are_paths(data):
        return DraftTree.from_paths(data)
    if isinstance(data, dict) and str(data.get("schema")).startswith("treeopt.tree/"):
        return from_json(data)
    return AcceptanceTable.from_json(data)


def _sound(read: Any) -> Report:
    """Report what is read, or the one defect that stops a reader."""
    try:
        return Report((), _summary(read()))
    except (TreeoptError, ValueError, OverflowError) as error:
        return Report((str(error),))


def _summary(found: BuiltTree | DraftTree | AcceptanceTable | RankTrace) -> str:
    if isinstance(found, RankTrace):
        return f"a trace of {found.num_documents} documents, {found.num_positions} positions, {found.num_heads} heads"
    if isinstance(found, AcceptanceTable):
        return f"a table of {found.num_heads} heads and {found.num_ranks} ranks"
    tree = found.tree if isinstance(found, BuiltTree) else found
    text = f"a tree of {tree.num_nodes} nodes (root included), depth {tree.max_depth}"
    if isinstance(found, DraftTree):
        return f"a list of paths, {text}"
    return f"{text}, E[L] {found.expected_accepted:.4f}" if states_probabilities(found) else f"{text}, E[L] unknown"
