"""NVIDIA Model Optimizer: `tree_paths`, a list of paths."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.engines._engine import Engine, Settings
from treeopt.engines._rules import Drafts, Rule
from treeopt.engines._texts import read_paths, write_paths
from treeopt.tree import DraftTree

__all__ = ["ENGINES"]


def _rules(settings: Settings) -> Sequence[Rule]:
    return (Drafts(),)


def _notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    return ("its mask is inverted, True being masked: build it there, do not carry one over",)


ENGINES = (
    Engine(
        name="modelopt",
        reader="NVIDIA Model Optimizer, tree_paths",
        form="a JSON list of paths",
        holds="tree",
        counts_root=False,
        write=write_paths,
        read=read_paths,
        rules=_rules,
        notes=_notes,
    ),
)
