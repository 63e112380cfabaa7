"""EAGLE-1: Medusa's list, whose guesses stand in one row of ten for each node that has children."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.engines._engine import Engine, Settings
from treeopt.engines._rules import Drafts, MaxRank, MinDepth, Rule
from treeopt.engines._texts import read_paths, write_paths
from treeopt.tree import DraftTree

__all__ = ["ENGINES", "rules"]

MAX_RANK = 9  # ten guesses a node
MIN_DEPTH = 2  # the drafter makes its buffers of the levels below the first


def rules(settings: Settings) -> Sequence[Rule]:
    """Return what EAGLE-1's buffers ask of a tree."""
    return (Drafts(), MaxRank(MAX_RANK), MinDepth(MIN_DEPTH))


def _notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    return ("pass the list as tree_choices, and put it in the drafter too: it grows a tree of its own otherwise",)


ENGINES = (
    Engine(
        name="eagle1",
        reader="EAGLE-1, tree_choices",
        form="a JSON list of paths",
        holds="tree",
        counts_root=False,
        write=write_paths,
        read=read_paths,
        rules=rules,
        notes=_notes,
    ),
)
