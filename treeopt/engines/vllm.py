"""vLLM until 2026: `speculative_token_tree`, a string of tuples in the speculative configuration."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.engines._engine import Engine, Setting, Settings, Versions
from treeopt.engines._rules import Drafts, Rule
from treeopt.engines._siblings import Regular
from treeopt.engines._texts import parse_json, parse_literal, tree_of_paths, write_json
from treeopt.errors import EngineError
from treeopt.tree import DraftTree

__all__ = ["ENGINES"]


def _rules(settings: Settings) -> Sequence[Rule]:
    # It divides the nodes of a level among those of the level above, and drafts that many best guesses of each.
    return (Drafts(), Regular())


def _write(tree: DraftTree, settings: Settings) -> str:
    model = {"model": settings["model"]} if "model" in settings else {}
    return write_json(
        {
            "method": settings["method"],
            **model,
            "num_speculative_tokens": tree.num_nodes - 1,
            "speculative_token_tree": str(list(tree.paths[1:])),
        }
    )


def _read(text: str) -> DraftTree:
    if not text.lstrip().startswith("{"):
        return tree_of_paths(parse_literal(text))
    tree = parse_json(text).get("speculative_token_tree")
    if not isinstance(tree, str):
        raise EngineError("`speculative_token_tree` is missing or no text; give the string of tuples")
    return tree_of_paths(parse_literal(tree))


def _notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    return ("pass the file's text as --speculative-config",)


ENGINES = (
    Engine(
        name="vllm",
        reader="vLLM, speculative_token_tree",
        form="a JSON speculative configuration with a string of tuples",
        holds="tree",
        counts_root=False,
        write=_write,
        read=_read,
        rules=_rules,
        settings=(
            Setting("method", "method of the configuration", default="eagle"),
            Setting("model", "draft model of the configuration; left out if not given"),
        ),
        versions=Versions("0.10.1 to 0.20; removed by PR #42121, May 2026", (0, 10, 1), (0, 20)),
        notes=_notes,
    ),
)
