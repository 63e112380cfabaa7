"""Reading and writing that several forms share."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

from treeopt import strictjson
from treeopt.errors import EngineError
from treeopt.paths import closed
from treeopt.tree import DraftTree

__all__ = [
    "list_of_paths",
    "numbers",
    "parse_json",
    "parse_literal",
    "read_paths",
    "tree_of_children",
    "tree_of_paths",
    "write_json",
    "write_paths",
]


def list_of_paths(tree: DraftTree) -> list[list[int]]:
    """Return the paths of all nodes but the root, sorted by depth, then path."""
    return [list(path) for path in tree.paths[1:]]


def write_json(value: Any) -> str:
    """Return JSON on one line."""
    return json.dumps(value) + "\n"


def write_paths(tree: DraftTree, settings: object = None) -> str:
    """Return the paths as a JSON list of lists."""
    return write_json(list_of_paths(tree))


def read_paths(text: str) -> DraftTree:
    """Return the tree of a list of paths: JSON, or Python's with tuples, as in the engines' own sources.

    Raises
    ------
    EngineError
        Also for tuples among lists: Python cannot sort them, so no engine reads them. See `tree_of_paths`.
    """
    data = parse_literal(text) if "(" in text else parse_json(text)
    kinds = [type(path) for path in data] if isinstance(data, list) else []
    odd = next((place for place, kind in enumerate(kinds) if kind in (list, tuple) and kind is not kinds[0]), None)
    if odd is not None:
        raise EngineError(
            f"`path {odd}` is a {kinds[odd].__name__} where path 0 is a {kinds[0].__name__}, and the two cannot be sorted; "
            "write all as lists"
        )
    return tree_of_paths(data)


def parse_json(text: str) -> Any:
    """Parse JSON strictly.

    Raises
    ------
    EngineError
        See `strictjson.parse`.
    """
    try:
        return strictjson.parse(text)
    except ValueError as error:
        raise EngineError(f"the file is {error}; mend it or export it again") from error


def parse_literal(text: str) -> Any:
    """Parse a Python literal.

    Raises
    ------
    EngineError
        For text that is none.
    """
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise EngineError("the text is no Python list of tuples; write it as [(0,), (0, 0)]") from error


def tree_of_paths(data: Any, *, leaves_only: bool = False) -> DraftTree:
    """Return the tree of a list of paths, in any order.

    Parameters
    ----------
    data : object
        Of a parsed file.
    leaves_only : bool
        Whether ancestors may be left out.

    Raises
    ------
    EngineError
        If it is no list of lists of whole numbers.
    TreeError
        If the paths make no tree.
    """
    if not isinstance(data, (list, tuple)):
        raise EngineError(f"the file holds {type(data).__name__}, not a list of paths; write it as [[0], [0, 0]]")
    paths = [tuple(numbers(path, f"path {place}")) for place, path in enumerate(data)]
    if leaves_only and all(paths) and all(min(path) >= 0 for path in paths):
        paths = [*paths, *(closed(paths) - set(paths))]
    return DraftTree.from_paths(paths)


def numbers(data: Any, what: str) -> list[int]:
    """Return a list of whole numbers, checked.

    Raises
    ------
    EngineError
        If it is none.
    """
    if not isinstance(data, (list, tuple)) or not all(type(entry) is int for entry in data):
        raise EngineError(f"`{what}` is {data!r}; give a list of whole numbers")
    return list(data)


def tree_of_children(children: Sequence[Sequence[int]]) -> DraftTree:
    """Return the tree whose nodes have these children, a node's i-th child having rank i.

    Parameters
    ----------
    children : sequence of sequences of int
        Of node 0, the root, of node 1, …; nodes must be numbered level by level.

    Raises
    ------
    EngineError
        If a node is nobody's child, two nodes', or numbered otherwise.
    """
    parents, ranks = [-1], [-1]
    for node, found in enumerate(children):
        for rank, child in enumerate(found):
            if child != len(parents):
                raise EngineError(
                    f"node `{node}` has the child {child}, and level by level {len(parents)} is next; number the nodes anew"
                )
            parents.append(node)
            ranks.append(rank)
        if node + 1 == len(parents) and node + 1 < len(children):
            break
    if len(parents) > len(children):
        raise EngineError(
            f"node `{len(children)}` is a child without an entry of its own; give it one, [] if it has no children"
        )
    if len(parents) < len(children):
        raise EngineError(f"node `{len(parents)}` is no node's child; name its parent or delete it")
    return DraftTree.from_parents(parents, ranks)
