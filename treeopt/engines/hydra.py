"""Hydra: Medusa's list, whose heads see the tokens drafted before them."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.engines._engine import Engine, Settings
from treeopt.engines._rules import Rule
from treeopt.engines._siblings import DenseSiblings, ParentsFirst
from treeopt.engines._texts import read_paths, write_paths
from treeopt.engines.medusa import HEADS, head_rules

__all__ = ["ENGINES"]


def _rules(settings: Settings) -> Sequence[Rule]:
    # It counts each node's children and how many of them have children, and expands the first so many.
    return (*head_rules(settings), DenseSiblings(), ParentsFirst(level=False))


ENGINES = (
    Engine(
        name="hydra",
        reader="Hydra, hydra_choices",
        form="a JSON list of paths",
        holds="tree",
        counts_root=False,
        write=write_paths,
        read=read_paths,
        rules=_rules,
        settings=(HEADS,),
    ),
)
