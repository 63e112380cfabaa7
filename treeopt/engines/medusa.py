"""Medusa: `medusa_choices`, a list of paths."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.engines._engine import Engine, Setting, Settings
from treeopt.engines._rules import Drafts, MaxDepth, MaxRank, Rule
from treeopt.engines._texts import read_paths, write_paths
from treeopt.tree import DraftTree

__all__ = ["ENGINES", "HEADS", "MAX_RANK", "head_rules"]

MAX_RANK = 9  # `tree_indices` is rank + 10·(depth - 1) + 1: rank 10 would read the next head's first guess
HEADS = Setting("heads", "heads that the model has", least=1, limit="depth to heads, if given")


def head_rules(settings: Settings) -> Sequence[Rule]:
    """Return the rules of decoders with Medusa's table of guesses."""
    heads = settings.get("heads")
    deep = [MaxDepth(heads, ", the number of heads")] if isinstance(heads, int) else []
    return (Drafts(), *deep, MaxRank(MAX_RANK))


def _notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    return (f"pass the list as medusa_choices to medusa_generate; the model needs {tree.max_depth} heads",)


ENGINES = (
    Engine(
        name="medusa",
        reader="Medusa, medusa_choices",
        form="a JSON list of paths",
        holds="tree",
        counts_root=False,
        write=write_paths,
        read=read_paths,
        rules=head_rules,
        settings=(HEADS,),
        notes=_notes,
    ),
)
