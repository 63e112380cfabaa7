"""Servers that take only a number of guessed tokens: the text generation inference server, vLLM's Medusa."""

from __future__ import annotations

import re
from collections.abc import Sequence

from treeopt.engines._engine import Engine, Setting, Settings
from treeopt.engines._rules import Chain, Drafts, Rule
from treeopt.engines._texts import parse_json, write_json
from treeopt.errors import EngineError
from treeopt.tree import DraftTree, chain

__all__ = ["ENGINES"]

MAX_LENGTH = 1 << 10


def _rules(settings: Settings) -> Sequence[Rule]:
    return (Chain(), Drafts())


def _write(tree: DraftTree, settings: Settings) -> str:
    if settings["server"] == "tgi":
        return f"--speculate {tree.max_depth}\n"
    return write_json({"method": "medusa", "num_speculative_tokens": tree.max_depth})


def _read(text: str) -> DraftTree:
    option = re.fullmatch(r"\s*--speculate[ =](\d{1,9})\s*", text)
    if option is not None:
        return _chain(int(option[1]))
    data = parse_json(text)
    length = data.get("num_speculative_tokens") if isinstance(data, dict) else data
    if type(length) is not int:
        raise EngineError("`num_speculative_tokens` is missing or no whole number; give it, or --speculate N")
    return _chain(length)


def _chain(length: int) -> DraftTree:
    if not 1 <= length <= MAX_LENGTH:
        raise EngineError(f"`{length}` guessed tokens are no chain; give 1 to {MAX_LENGTH}")
    return chain(length)


ENGINES = (
    Engine(
        name="chain",
        reader="TGI --speculate, vLLM method medusa",
        form="the number of guessed tokens, which are first guesses",
        holds="number",
        counts_root=False,
        write=_write,
        read=_read,
        rules=_rules,
        settings=(Setting("server", "whose form the number has", choices=("vllm", "tgi"), default="vllm"),),
        summarises=True,
    ),
)
