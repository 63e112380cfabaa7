"""SAM-Decoding: `tree_adj` of its token recycling, or `tree_choices` of its EAGLE drafter."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.engines import eagle1
from treeopt.engines._engine import Engine, Setting, Settings
from treeopt.engines._rules import MaxRank, Rule
from treeopt.engines._siblings import DenseSiblings
from treeopt.engines._texts import list_of_paths, numbers, parse_json, tree_of_children, tree_of_paths, write_json
from treeopt.errors import EngineError
from treeopt.tree import DraftTree

__all__ = ["ENGINES"]

MAX_RANK = 7  # token recycling keeps eight followers of a token


def _rules(settings: Settings) -> Sequence[Rule]:
    return eagle1.rules(settings) if settings["form"] == "choices" else (MaxRank(MAX_RANK), DenseSiblings())


def _write(tree: DraftTree, settings: Settings) -> str:
    if settings["form"] == "choices":
        return write_json({"tree_choices": list_of_paths(tree)})
    children: dict[str, list[int]] = {str(node): [] for node in range(tree.num_nodes)}
    for node, parent in enumerate(tree.parents[1:].tolist(), 1):
        children[str(parent)].append(node)
    return write_json({"tree_adj": children})


def _read(text: str) -> DraftTree:
    data = parse_json(text)
    if not isinstance(data, dict) or list(data) not in (["tree_adj"], ["tree_choices"]):
        raise EngineError("the file must be an object with the key tree_adj or tree_choices")
    if "tree_choices" in data:
        return tree_of_paths(data["tree_choices"])
    children = data["tree_adj"]
    if not isinstance(children, dict) or set(children) != set(map(str, range(len(children)))):
        raise EngineError(
            "`tree_adj` must have every node as a key, numbered from 0 without a gap; childless ones have []"
        )
    return tree_of_children([numbers(children[str(node)], f"tree_adj[{node}]") for node in range(len(children))])


ENGINES = (
    Engine(
        name="sam",
        reader="SAM-Decoding, tree_adj or tree_choices",
        form="a JSON object: children of every node, or paths with form=choices",
        holds="tree",
        counts_root=None,
        write=_write,
        read=_read,
        rules=_rules,
        settings=(
            Setting(
                "form",
                "adj for token recycling, choices for EAGLE",
                choices=("adj", "choices"),
                default="adj",
                limit="with form=choices instead: ranks to 9; depth from 2",
            ),
        ),
    ),
)
