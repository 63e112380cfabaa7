"""Decoders that grow a tree of their own at every step: they take only its depth, width and size."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.engines._engine import Engine, Settings
from treeopt.engines._rules import Drafts, Rule
from treeopt.engines._texts import write_json
from treeopt.tree import DraftTree

__all__ = ["ENGINES"]


def _rules(settings: Settings) -> Sequence[Rule]:
    return (Drafts(),)


def _width(tree: DraftTree) -> int:
    """Return how many best guesses of a node the tree draws on."""
    return tree.max_rank + 1


def _drafted(tree: DraftTree) -> int:
    """Return the nodes to verify, root not counted, as far as a beam of `_width` nodes a level has so many."""
    width = _width(tree)
    return min(tree.num_nodes - 1, width + (tree.max_depth - 1) * width**2)


def _sglang(tree: DraftTree, settings: Settings) -> str:
    return (
        f"--speculative-algorithm EAGLE3 --speculative-num-steps {tree.max_depth} "
        f"--speculative-eagle-topk {_width(tree)} --speculative-num-draft-tokens {_drafted(tree) + 1}\n"
    )


def _eagle2(tree: DraftTree, settings: Settings) -> str:
    # Its depth leaves out the first level, its total takes the root in.
    return write_json({"total_token": _drafted(tree) + 1, "depth": tree.max_depth - 1, "top_k": _width(tree)})


def _trtllm(tree: DraftTree, settings: Settings) -> str:
    width, drafted = _width(tree), tree.num_nodes - 1
    return write_json(
        {
            "decoding_type": "Eagle3",
            "use_dynamic_tree": True,
            # It refuses totals over width · depth, so a bushy tree asks for more levels than it has.
            "max_draft_len": max(tree.max_depth, -(-drafted // width)),
            "dynamic_tree_max_topK": width,
            "max_total_draft_tokens": drafted,
        }
    )


def _openvino(tree: DraftTree, settings: Settings) -> str:
    return write_json(
        {"tree_depth": tree.max_depth, "branching_factor": _width(tree), "num_assistant_tokens": _drafted(tree)}
    )


def _notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    cut = tree.num_nodes - 1 - _drafted(tree)
    return (
        "it grows a tree of its own from the drafter's confidence: only the depth, width and size of this one are passed on, "
        "and E[L] is not that of its trees",
        *(
            [f"{cut} nodes more than {_width(tree)} guesses of {_width(tree)} nodes a level can give are left out"]
            if cut
            else []
        ),
    )


def _trtllm_notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    deeper = max(0, -(-(tree.num_nodes - 1) // _width(tree)) - tree.max_depth)
    more = (
        [f"max_draft_len is {deeper} over the tree's depth: the total may not exceed topK times it"] if deeper else []
    )
    return (_notes(tree, settings)[0], *more)


ENGINES = tuple(
    Engine(name, reader, form, "shape", counts_root, write, rules=_rules, notes=notes)
    for name, reader, form, counts_root, write, notes in (
        ("eagle2", "EAGLE-2 and EAGLE-3", "JSON of three parameters", True, _eagle2, _notes),
        ("openvino", "OpenVINO GenAI", "JSON of three parameters", False, _openvino, _notes),
        ("sglang", "SGLang, EAGLE", "command line options", True, _sglang, _notes),
        ("trtllm-dynamic", "TensorRT-LLM, dynamic trees", "JSON of its options", False, _trtllm, _trtllm_notes),
    )
)
