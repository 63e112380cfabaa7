"""Calibration from prompts to a trace, in two phases that both resume."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from treeopt.calibrate.continuations import (
    Continuation,
    continue_prompts,
    dataset_continuations,
    documents_hash,
)
from treeopt.calibrate.observe import Candidates, Observation, batches, observe
from treeopt.calibrate.store import DocumentStore
from treeopt.errors import TraceError
from treeopt.heads.medusa import MedusaHeads
from treeopt.progress import Progress
from treeopt.prompts import Prompt, evenly, prompts_hash
from treeopt.targets.cache import bytes_per_token
from treeopt.targets.forward import Forward
from treeopt.targets.loading import LoadedTarget, fingerprint
from treeopt.trace import RankTrace
from treeopt.version import __version__

__all__ = ["CalibrationSettings", "auto_batch_size", "calibrate", "spread"]

MAX_BATCH_SIZE = 64
TYPICAL_PROMPT = 128  # tokens
OBSERVED_TOKENS = 4096  # padded tokens of one teacher-forced forward

Kept = list[Any]  # of one document: its ranks, and the bytes of its probabilities and entropies in base 64


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """How a calibration is run.

    Attributes
    ----------
    continuations : {'generated', 'dataset'}
        Text of the target's own, or the replies in the prompt file.
    max_new_tokens : int
        Most tokens of one document.
    batch_size : int
        Prompts continued together.
    seed : int
        Of the bootstrap that prints intervals; everything else is deterministic.
    candidates : Candidates
        Guesses whose probability under the target is recorded too: what typical acceptance needs.
    """

    continuations: str = "generated"
    max_new_tokens: int = 128
    batch_size: int = 32
    seed: int = 0
    candidates: Candidates = field(default_factory=Candidates)


def calibrate(
    target: LoadedTarget,
    heads: MedusaHeads,
    prompts: Sequence[Prompt],
    output: Path,
    settings: CalibrationSettings,
    *,
    heads_name: str = "",
) -> RankTrace:
    """Record every head's rank of every token that follows the prompts, and write the trace to `output`.

    Finished documents are kept in ``<output>.partial/`` until the trace is written, so that an interrupted run goes on
    where it was.

    Parameters
    ----------
    target : LoadedTarget
    heads : MedusaHeads
    prompts : sequence of Prompt
    output : Path
        The `.safetensors` file.
    settings : CalibrationSettings
    heads_name : str
        Where the heads came from, for the metadata.

    Raises
    ------
    TraceError
        If a partial run with other settings is in the way, or no head sees a token.
    """
    work = Path(f"{output.resolve()}.partial")
    if settings.continuations == "dataset":
        documents = dataset_continuations(target, prompts, max_new_tokens=settings.max_new_tokens)
    else:
        documents = continue_prompts(
            target,
            prompts,
            work / "continuations.jsonl",
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
        )
    metadata = _metadata(target, heads, prompts, settings, heads_name)
    header = {
        "schema": "treeopt.ranks/2",
        "target": metadata["target_hash"],
        "heads": metadata["heads_hash"],
        "documents": documents_hash(documents),
        "candidates": f"{settings.candidates.num_ranks} at temperature {settings.candidates.temperature}",
    }
    observed = _observe_all(target, heads, documents, settings.candidates, work / "ranks.jsonl", header)
    trace = assemble(documents, observed, heads.num_heads, settings.candidates.num_ranks, metadata)
    trace.write(output)
    shutil.rmtree(work, ignore_errors=True)
    return trace


def assemble(
    documents: Sequence[Continuation],
    observed: dict[str, Kept],
    num_heads: int,
    num_candidates: int,
    metadata: dict[str, str],
) -> RankTrace:
    """Join what was observed, in the order of the documents, into one trace."""
    rows = [np.array(observed[d.prompt_id][0], dtype=np.int32).reshape(-1, num_heads) for d in documents]
    probs = entropies = None
    if num_candidates:
        shape = (-1, num_heads, num_candidates)
        probs = np.concatenate([_decoded(observed[d.prompt_id][1], np.float16).reshape(shape) for d in documents])
        entropies = np.concatenate([_decoded(observed[d.prompt_id][2], np.float32) for d in documents])
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    domains = [d.domain or "" for d in documents] if any(d.domain for d in documents) else None
    trace = RankTrace(np.concatenate(rows), offsets, domains, metadata, probs, entropies)
    if not (trace.ranks >= 0).any(axis=0).all():
        raise TraceError("the last head saw no token: the continuations are too short; raise --max-new-tokens")
    return trace


def spread(prompts: Sequence[Prompt], settings: CalibrationSettings, max_tokens: int | None) -> list[Prompt]:
    """Choose prompts, evenly over the file, so that all their continuations hold at most `max_tokens` tokens."""
    if max_tokens is None:
        return list(prompts)
    return evenly(prompts, max(1, max_tokens // settings.max_new_tokens))


def auto_batch_size(model: PreTrainedModel, max_new_tokens: int) -> int:
    """Return how many rows fit in a quarter of the free memory of a GPU, or in 1 GiB of a CPU's, at most 64.

    Beyond that the products are no longer bound by reading the weights, and a larger batch gains little.
    """
    room = torch.cuda.mem_get_info(model.device)[0] // 4 if model.device.type == "cuda" else 1 << 30
    return max(1, min(MAX_BATCH_SIZE, room // (bytes_per_token(model) * (max_new_tokens + TYPICAL_PROMPT))))


def _observe_all(
    target: LoadedTarget,
    heads: MedusaHeads,
    documents: Sequence[Continuation],
    candidates: Candidates,
    store: Path,
    header: dict[str, str],
) -> dict[str, Kept]:
    forward = Forward(target.model)
    with DocumentStore(store, header) as kept, torch.inference_mode():
        waiting = [document for document in documents if document.prompt_id not in kept.done]
        done = len(documents) - len(waiting)
        with Progress("ranks", total=len(documents), done=done) as progress:
            for batch in batches(waiting, OBSERVED_TOKENS):
                for document, observation in zip(batch, observe(forward, heads, batch, candidates)):
                    kept.append(document.prompt_id, _kept(observation))
                progress.add(documents=len(batch), tokens=sum(len(document.tokens) for document in batch))
        return kept.done


def _kept(observation: Observation) -> Kept:
    ranks: list[list[int]] = observation.ranks.tolist()
    probs, entropies = observation.topk_probs.cpu().numpy(), observation.entropies.cpu().numpy()
    return [ranks, _encoded(probs.astype(np.float16)), _encoded(entropies.astype(np.float32))]


def _encoded(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _decoded(text: str, dtype: type[np.floating[Any]]) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)


def _metadata(
    target: LoadedTarget,
    heads: MedusaHeads,
    prompts: Sequence[Prompt],
    settings: CalibrationSettings,
    heads_name: str,
) -> dict[str, str]:
    return {
        "target": target.name,
        "target_hash": fingerprint(target.model),
        "heads": heads_name,
        "heads_hash": fingerprint(heads),
        "prompts_hash": "sha256:" + prompts_hash(prompts),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "continuations": settings.continuations,
        "max_new_tokens": str(settings.max_new_tokens),
        "seed": str(settings.seed),
        "acceptance_rule": "greedy",
        **({"temperature": str(settings.candidates.temperature)} if settings.candidates.num_ranks else {}),
        "treeopt": __version__,
    }
