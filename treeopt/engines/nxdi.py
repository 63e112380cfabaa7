"""AWS NxD Inference: `--medusa-tree-json`, a list of paths, and `--token-tree-json`, children by node number."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.engines._engine import Engine, Settings
from treeopt.engines._rules import Drafts, Rule
from treeopt.engines._siblings import DenseSiblings, ParentsFirst
from treeopt.engines._texts import parse_json, read_paths, tree_of_children, write_json, write_paths
from treeopt.engines.medusa import HEADS, head_rules
from treeopt.errors import EngineError
from treeopt.tree import DraftTree

__all__ = ["ENGINES"]


def _medusa_notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    return (
        f"give --medusa-speculation-length {tree.num_nodes} (root included) and --num-medusa-heads {tree.max_depth} or more",
    )


def _token_tree_rules(settings: Settings) -> Sequence[Rule]:
    # Children are guesses 0, 1, …, and the n-th node with children is taken for the n-th node of its level.
    return (Drafts(), DenseSiblings(), ParentsFirst(level=True))


def _write_token_tree(tree: DraftTree, settings: Settings) -> str:
    children: dict[str, list[str]] = {}
    for node, parent in enumerate(tree.parents[1:].tolist(), 1):
        children.setdefault(str(parent), []).append(str(node))
    return write_json(children)


def _read_token_tree(text: str) -> DraftTree:
    data = parse_json(text)
    if not isinstance(data, dict):
        raise EngineError(f'the file holds {type(data).__name__}, not an object; write it as {{"0": ["1", "2"]}}')
    children = {_number(key): [_number(child) for child in _list(key, found)] for key, found in data.items()}
    nodes = 1 + max([*children, *(child for found in children.values() for child in found)], default=0)
    if nodes > 1 + sum(map(len, children.values())):
        raise EngineError(
            f"node `{nodes - 1}` is the last, but fewer have a parent; number the nodes 0, 1, 2, … level by level"
        )
    return tree_of_children([children.get(node, []) for node in range(nodes)])


def _list(key: str, found: object) -> list[object]:
    if not isinstance(found, list):
        raise EngineError(f"node `{key}` has the children {found!r}; give a list of node numbers")
    return found


def _number(text: object) -> int:
    if not isinstance(text, str) or not text.isdecimal() or len(text) > 9 or str(int(text)) != text:
        raise EngineError(f'node `{text}` is no node number; write numbers from 0 on as text: "3"')
    return int(text)


ENGINES = (
    Engine(
        name="nxdi-medusa",
        reader="AWS NxD Inference, --medusa-tree-json",
        form="a JSON list of paths",
        holds="tree",
        counts_root=True,
        write=write_paths,
        read=read_paths,
        rules=head_rules,
        settings=(HEADS,),
        notes=_medusa_notes,
    ),
    Engine(
        name="nxdi-token-tree",
        reader="AWS NxD Inference, --token-tree-json",
        form="a JSON object from node numbers to their children's",
        holds="tree",
        counts_root=True,
        write=_write_token_tree,
        read=_read_token_tree,
        rules=_token_tree_rules,
    ),
)
