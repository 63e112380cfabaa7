"""TensorRT-LLM until 2026: choices as a list, in the options of its LLM API, or in a Triton model's configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from treeopt.engines._engine import Engine, Setting, Settings, Versions
from treeopt.engines._rules import Drafts, MaxDepth, MaxRank, Rule
from treeopt.engines._siblings import DenseSiblings, MaxNodes
from treeopt.engines._texts import list_of_paths, parse_json, tree_of_paths, write_paths
from treeopt.errors import EngineError
from treeopt.tree import DraftTree

__all__ = ["ENGINES", "VERSIONS", "rules"]

MAX_RANK = 15
MAX_DEPTH = 8
DENSE_DEPTH = 1  # deeper siblings may have gaps
VERSIONS = Versions(
    "to 1.x; medusa_choices went with the TensorRT backend (PR #15918), eagle_choices with PR #18210, both in 2026",
    (),
    (1,),
)
DECODING = Setting("decoding", "kind of the drafter", choices=("medusa", "eagle", "eagle3"), default="medusa")
DRAFT_LENGTH = Setting(
    "max_draft_len",
    "max_draft_len that the engine was built with",
    least=1,
    limit="nodes to max_draft_len, if given, root not counted",
)
PLAIN = re.compile(r"[\w./-]+")


def rules(settings: Settings) -> Sequence[Rule]:
    """Return what TensorRT-LLM asks of a tree."""
    dense = DenseSiblings(DENSE_DEPTH)
    most = settings.get("max_draft_len")
    few = [MaxNodes(most, "max_draft_len", dense)] if isinstance(most, int) else []
    return (Drafts(), MaxDepth(MAX_DEPTH), MaxRank(MAX_RANK), dense, *few)


def _write(tree: DraftTree, settings: Settings) -> str:
    if settings["form"] == "list":
        return write_paths(tree)
    decoding = str(settings["decoding"])
    draft = str(settings.get("draft", "DRAFT"))
    lines = {
        "decoding_type": decoding.capitalize(),
        "speculative_model_dir": draft if PLAIN.fullmatch(draft) else json.dumps(draft),
    }
    if decoding == "medusa":
        lines |= {"max_draft_len": str(tree.num_nodes - 1), "num_medusa_heads": str(tree.max_depth)}
        lines |= {"medusa_choices": json.dumps(list_of_paths(tree))}
    else:
        lines |= {"max_draft_len": str(tree.max_depth), "eagle_choices": json.dumps(list_of_paths(tree))}
        lines |= {"eagle3_one_model": "false", "use_dynamic_tree": "false"}
    return "speculative_config:\n" + "".join(f"  {name}: {value}\n" for name, value in lines.items())


def _read(text: str) -> DraftTree:
    if text.lstrip().startswith("["):
        return tree_of_paths(parse_json(text), leaves_only=True)
    found = re.findall(r"^\s*(?:medusa|eagle)_choices:\s*(\[.*\])\s*(?:#.*)?$", text, re.MULTILINE)
    if len(found) != 1:
        raise EngineError(
            f"the file has {len(found)} lines of medusa_choices or eagle_choices; give one, with the list on it"
        )
    return tree_of_paths(parse_json(found[0]), leaves_only=True)


def _write_triton(tree: DraftTree, settings: Settings) -> str:
    decoding = str(settings["decoding"]).rstrip("3")
    choices = ", ".join("{" + ", ".join(map(str, path)) + "}" for path in tree.paths[1:])
    values = {"decoding_mode": decoding, f"{decoding}_choices": choices}
    return "".join(
        f'parameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n' for key, value in values.items()
    )


def _read_triton(text: str) -> DraftTree:
    found = re.findall(r'key:\s*"(?:medusa|eagle)_choices"\s*value:\s*\{\s*string_value:\s*"([^"]*)"', text)
    if len(found) > 1:
        raise EngineError(f"the file has {len(found)} parameters of choices; delete all but one")
    choices = found[0] if found else text.strip()
    if not re.fullmatch(r"\s*\{[\d\s,]*\}(?:\s*,\s*\{[\d\s,]*\})*\s*", choices):
        raise EngineError("the choices are no groups of ranks in braces, and JSON is not read there; write {0}, {0, 0}")
    groups = [group.replace(",", " ").split() for group in re.findall(r"\{([^}]*)\}", choices)]
    return tree_of_paths([[int(rank) for rank in group] for group in groups], leaves_only=True)


def _notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    return (f"the engine must be built with --max_draft_len {tree.num_nodes - 1} or more (root not counted)",)


ENGINES = (
    Engine(
        name="trtllm",
        reader="TensorRT-LLM, LLM API and run.py --medusa_choices",
        form="a JSON list of paths, or YAML options with form=yaml",
        holds="tree",
        counts_root=False,
        write=_write,
        read=_read,
        rules=rules,
        settings=(
            Setting(
                "form", "list for run.py, yaml for the LLM API's options", choices=("list", "yaml"), default="list"
            ),
            DECODING,
            Setting("draft", "directory of the drafter, in the YAML options"),
            DRAFT_LENGTH,
        ),
        versions=VERSIONS,
        notes=_notes,
    ),
    Engine(
        name="trtllm-triton",
        reader="TensorRT-LLM under Triton, config.pbtxt",
        form="two parameters of a config.pbtxt",
        holds="tree",
        counts_root=False,
        write=_write_triton,
        read=_read_triton,
        rules=rules,
        settings=(DECODING, DRAFT_LENGTH),
        versions=VERSIONS,
        notes=_notes,
    ),
)
