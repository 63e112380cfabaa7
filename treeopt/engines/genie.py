"""Qualcomm Genie: `branches` of a dialog, one width a level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from treeopt.engines._engine import Engine, Setting, Settings
from treeopt.engines._rules import Drafts, Rule
from treeopt.engines._siblings import Regular
from treeopt.engines._texts import numbers, parse_json, write_json
from treeopt.errors import EngineError
from treeopt.tree import DraftTree, dense_tree

__all__ = ["ENGINES"]

KIND = "ssd-q1"
MAX_NODES = 1 << 16  # of a file read: widths of a few digits could ask for more memory than there is


def _rules(settings: Settings) -> Sequence[Rule]:
    return (Drafts(),) if settings["form"] == "eaglet" else (Drafts(), Regular())


def _write(tree: DraftTree, settings: Settings) -> str:
    body = _eaglet(tree) if settings["form"] == "eaglet" else _forecast(tree, settings)
    return write_json({"dialog": {"version": 1, "type": settings["form"], settings["form"]: body}})


def _eaglet(tree: DraftTree) -> dict[str, object]:
    return {
        "version": 1,
        "eaglet-version": 1,
        "draft-len": tree.max_depth,
        "n-branches": tree.max_rank + 1,
        "max-tokens-target-can-evaluate": tree.num_nodes,
        "draft-kv-cache": True,
    }


def _forecast(tree: DraftTree, settings: Settings) -> dict[str, object]:
    nodes = (1, *tree.level_widths)
    prefix = {"forecast-prefix": settings["forecast_prefix"]} if "forecast_prefix" in settings else {}
    return {
        "version": 1,
        "ssd-version": 1,
        "forecast-token-count": settings.get("forecast_token_count", tree.max_depth),
        **prefix,
        "forecast-prefix-name": settings["forecast_prefix_name"],
        "branches": [below // above for above, below in pairwise(nodes)],
        "n-streams": 1,
        "p-threshold": 0.0,
    }


def _read(text: str) -> DraftTree:
    found = parse_json(text)
    for key in ("dialog", KIND, "branches"):
        if not isinstance(found, dict) or key not in found:
            raise EngineError(f"`{key}` is missing; only a dialog of type {KIND} determines a tree, by its branches")
        found = found[key]
    widths = numbers(found, "branches")
    nodes = level = 1
    for width in widths:
        level *= max(width, 0)
        nodes += level
        if nodes > MAX_NODES:
            raise EngineError(f"`branches` is {widths!r}, more than {MAX_NODES} nodes; give smaller widths")
    return dense_tree(widths)


def _notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    if settings["form"] == "eaglet":
        return ("eaglet takes only these numbers and grows a tree of its own",)
    missing = "" if "forecast_prefix" in settings else "; forecast-prefix, which belongs to the model, is left to add"
    return (f"put the object into the dialog's configuration{missing}",)


ENGINES = (
    Engine(
        name="genie",
        reader="Qualcomm Genie, dialog configuration",
        form="a JSON dialog with one width a level, or eaglet's numbers with form=eaglet",
        holds="tree",
        counts_root=None,
        write=_write,
        read=_read,
        rules=_rules,
        settings=(
            Setting(
                "form",
                f"{KIND} holds the widths, eaglet only a shape",
                choices=(KIND, "eaglet"),
                default=KIND,
                limit="with form=eaglet only the first",
            ),
            Setting("forecast_token_count", "forecast tokens of the model; as many as levels if not given", least=1),
            Setting("forecast_prefix", "length of the model's forecast prefix", least=0),
            Setting("forecast_prefix_name", "its name", default="forecast-prefix"),
        ),
        notes=_notes,
    ),
)
