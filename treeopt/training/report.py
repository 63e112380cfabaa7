"""What a training leaves, and what it says of itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from treeopt.files import replacing
from treeopt.training.checkpoints import forget
from treeopt.training.measuring import MEASURED_NODES
from treeopt.training.run import Trained
from treeopt.training.samples import Sample, samples_hash
from treeopt.version import __version__

__all__ = ["describe", "summary", "write"]

STAGES = {"heads": "heads alone", "joint": "with the target"}


def write(
    trained: Trained,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    output: Path,
    work: Path,
    recipe: dict[str, Any],
) -> None:
    """Write heads, target and log, each of which appears whole; delete what the training itself needed.

    Parameters
    ----------
    trained : Trained
    tokenizer : PreTrainedTokenizerBase
        Of the target, written beside it.
    samples : sequence of Sample
    output : Path
        Directory for the heads; the target goes into its folder ``target``.
    work : Path
        The training's folder. The text that the target wrote stays there.
    recipe : dict
        What would do the same again.
    """
    if trained.target is not None:
        # Within the output, which may be a file system of its own: a rename does not lead out of one.
        merged = output / ".target.part"
        shutil.rmtree(merged, ignore_errors=True)
        trained.target.save_pretrained(merged)
        tokenizer.save_pretrained(merged)
        shutil.rmtree(output / "target", ignore_errors=True)
        merged.replace(output / "target")
    trained.heads.save(output, dtype=torch.bfloat16)
    with replacing(output / "training.jsonl") as temporary:
        lines = [summary(trained, samples, recipe), *trained.log]
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf8")
    for name in ("heads", "joint"):
        forget(work / name)
        with suppress(OSError):  # what else reported there stays
            (work / name).rmdir()
    for name in ("heads.safetensors", "heads.json", "training.json"):
        (work / name).unlink(missing_ok=True)


def summary(trained: Trained, samples: Sequence[Sample], recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the first line of a log: recipe, data and result.

    Parameters
    ----------
    trained : Trained
    samples : sequence of Sample
    recipe : dict
        What would do the same again.
    """
    return {
        "schema": "treeopt.training/1",
        "recipe": recipe,
        "documents": len(samples),
        "tokens": _num_learnt(samples),
        "documents_hash": samples_hash(samples),
        "measures": {stage: asdict(found) for stage, found in trained.measures.items()},
        "speech": {when: asdict(found) for when, found in trained.speech.items()},
        "versions": {
            "treeopt": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
        },
    }  # fmt: skip


def describe(trained: Trained, samples: Sequence[Sample]) -> str:
    """Return the result for people."""
    lines = [f"{len(samples)} documents, {_num_learnt(samples)} tokens; on held-out documents:"]
    for stage, found in trained.measures.items():
        heads = "  ".join(f"head {head} {accuracy:.3f}" for head, accuracy in enumerate(found.accuracies))
        lines.append(f"{STAGES[stage]:>15}: {heads}  E[L] at {MEASURED_NODES} nodes {found.expected_accepted:.3f}")
    if trained.speech:
        before, after = trained.speech["before"], trained.speech["after"]
        for what in ("text", "prompts"):
            old, new = (getattr(found, f"{what}_perplexity") for found in (before, after))
            lines.append(
                f"the target's perplexity of the {what}: {old:.3f} before, {new:.3f} after ({new / old - 1:+.1%})"
            )
        lines.append(f"it would say the text's token at {before.agreement:.1%} before, {after.agreement:.1%} after")
    return "\n".join(lines)


def _num_learnt(samples: Sequence[Sample]) -> int:
    return sum(sum(sample.learnt) for sample in samples)
