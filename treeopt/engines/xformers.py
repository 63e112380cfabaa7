"""xformers: `tree_choices` of its tree attention, a Python list of tuples."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.engines._engine import Engine, Settings
from treeopt.engines._rules import Drafts, Rule
from treeopt.engines._texts import parse_literal, tree_of_paths
from treeopt.tree import DraftTree

__all__ = ["ENGINES"]


def _rules(settings: Settings) -> Sequence[Rule]:
    return (Drafts(),)


def _write(tree: DraftTree, settings: Settings) -> str:
    return f"{list(tree.paths[1:])}\n"


def _read(text: str) -> DraftTree:
    return tree_of_paths(parse_literal(text))


ENGINES = (
    Engine(
        name="xformers",
        reader="xformers, TreeAttnMetadata.from_tree_choices",
        form="a Python list of tuples",
        holds="tree",
        counts_root=False,
        write=_write,
        read=_read,
        rules=_rules,
    ),
)
