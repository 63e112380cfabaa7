"""What a training says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from treeopt.training.measuring import MEASURED_NODES
from treeopt.training.run import Trained
from treeopt.training.samples import Sample, samples_hash
from treeopt.version import __version__

__all__ = ["describe", "summary"]

STAGES = {"heads": "heads alone", "joint": "with the target"}


def summary(trained: Trained, samples: Sequence[Sample], recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the first line of a log: recipe, data and result.

    Parameters
    ----------
    trained : Trained
    samples : sequence of Sample
    recipe : dict
        What would do the same again.
    """
    import accelerate
    import torch
    import transformers

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
