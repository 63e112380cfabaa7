"""Calibration from prompts to a trace, in two phases that both resume."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from treeopt.calibrate.continuations import dataset_documents, generated_documents
from treeopt.calibrate.documents import Documents
from treeopt.calibrate.finishing import Finished, finish
from treeopt.calibrate.observe import OBSERVED_TOKENS, Candidates, Observation, batches_of, observe
from treeopt.calibrate.processes import Processes
from treeopt.errors import TargetError, TraceError
from treeopt.heads.medusa import MedusaHeads
from treeopt.prompts import Prompt, evenly, prompt_key, prompts_hash
from treeopt.targets.cache import bytes_per_token
from treeopt.targets.forward import Forward
from treeopt.targets.loading import LoadedTarget, fingerprint
from treeopt.trace import RankTrace
from treeopt.version import __version__

__all__ = ["OBSERVED_TOKENS", "CalibrationSettings", "auto_batch_size", "calibrate", "calibrate_together", "spread"]

MAX_BATCH_SIZE = 64
TYPICAL_PROMPT = 128  # tokens

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
    trace = calibrate_together(target, heads, prompts, output, settings, Processes(), heads_name=heads_name)
    assert trace is not None
    return trace


def calibrate_together(
    target: LoadedTarget,
    heads: MedusaHeads,
    prompts: Sequence[Prompt],
    output: Path,
    settings: CalibrationSettings,
    processes: Processes,
    *,
    heads_name: str = "",
) -> RankTrace | None:
    """Do with several processes what `calibrate` does with one; the file is the same, byte for byte.

    Every process calls this with arguments that are equal but for its device, within `joined`. The first one writes the
    trace and returns it; the others return None. What each has finished is kept in files of its own, from which a later
    run goes on with any number of processes.

    Raises
    ------
    TraceError, TargetError
        As `calibrate`, and if the device's memory does not suffice.
    OtherProcessError
        If another process failed.
    """
    work = Path(f"{output.resolve()}.partial")
    try:
        documents = _documents(target, prompts, work / "continuations.jsonl", settings, processes)
        metadata = _metadata(target, heads, prompts, settings, heads_name)
        kept = _observe_all(target, heads, documents, settings.candidates, work / "ranks.jsonl", metadata, processes)
    except torch.OutOfMemoryError as error:
        raise TargetError(
            f"`{target.name}` and what it computes do not fit {target.model.device}: give a smaller --batch-size than "
            f"{settings.batch_size}; finished documents are kept"
        ) from error
    trace = None
    if processes.rank == 0:
        trace = assemble(prompts, kept, heads.num_heads, settings.candidates.num_ranks, metadata)
        trace.write(output)
        shutil.rmtree(work, ignore_errors=True)
    processes.meet()
    return trace


def assemble(
    prompts: Sequence[Prompt],
    observed: Mapping[str, Kept],
    num_heads: int,
    num_candidates: int,
    metadata: dict[str, str],
) -> RankTrace:
    """Join what was observed, in the order of the prompts, into one trace."""
    ranks, probs, entropies = [], [], []
    for prompt in prompts:
        kept = observed[prompt.id]
        ranks.append(np.array(kept[0], dtype=np.int32).reshape(-1, num_heads))
        if num_candidates:
            probs.append(_decoded(kept[1], np.float16).reshape(-1, num_heads, num_candidates))
            entropies.append(_decoded(kept[2], np.float32))
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ranks])])
    domains = [prompt.domain or "" for prompt in prompts] if any(prompt.domain for prompt in prompts) else None
    judged = (np.concatenate(probs), np.concatenate(entropies)) if num_candidates else (None, None)
    keys = [prompt_key(prompt, with_reply=metadata["continuations"] == "dataset") for prompt in prompts]
    trace = RankTrace(np.concatenate(ranks), offsets, domains, metadata, judged[0], judged[1], keys)
    if not (trace.ranks >= 0).any(axis=0).all():
        raise TraceError("the last head saw no token: the continuations are too short; raise --max-new-tokens")
    return trace


def spread(prompts: Sequence[Prompt], settings: CalibrationSettings, max_tokens: int | None) -> list[Prompt]:
    """Choose prompts, evenly over the file, so that all their continuations hold at most `max_tokens` tokens."""
    if max_tokens is None:
        return list(prompts)
    return evenly(prompts, max(1, max_tokens // settings.max_new_tokens))


def auto_batch_size(model: PreTrainedModel, max_new_tokens: int) -> int:
    """Return how many rows fit in a quarter of what the weights leave of a GPU, or in 1 GiB of a CPU's, at most 64.

    Beyond that the products are no longer bound by reading the weights, and a larger batch gains little. What happens
    to be free is not asked for: the same machine gives the same batches, and so the same trace, every time.
    """
    room = 1 << 30
    if model.device.type == "cuda":
        weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        room = max(0, torch.cuda.get_device_properties(model.device).total_memory - weights) // 4
    return max(1, min(MAX_BATCH_SIZE, room // (bytes_per_token(model) * (max_new_tokens + TYPICAL_PROMPT))))


def _documents(
    target: LoadedTarget,
    prompts: Sequence[Prompt],
    store: Path,
    settings: CalibrationSettings,
    processes: Processes,
) -> Documents:
    if settings.continuations == "dataset":
        return dataset_documents(target, prompts, max_new_tokens=settings.max_new_tokens)
    return generated_documents(
        target, prompts, store, processes, max_new_tokens=settings.max_new_tokens, batch_size=settings.batch_size
    )


def _observe_all(
    target: LoadedTarget,
    heads: MedusaHeads,
    documents: Documents,
    candidates: Candidates,
    store: Path,
    metadata: dict[str, str],
    processes: Processes,
) -> Mapping[str, Kept]:
    """Observe every document that is not in the store yet; return what all processes have observed."""
    sizes, digest = documents.survey()
    header = {
        "schema": "treeopt.ranks/2",
        "target": metadata["target_hash"],
        "heads": metadata["heads_hash"],
        "documents": digest,
        "candidates": f"{candidates.num_ranks} at temperature {candidates.temperature}",
    }
    forward = Forward(target.model)

    def work(group: Sequence[int]) -> Finished:
        batch = [documents[i] for i in group]
        for i, document, observation in zip(group, batch, observe(forward, heads, batch, candidates)):
            yield i, _kept(observation), len(document.tokens)

    names, groups = [prompt.id for prompt in documents.prompts], list(batches_of(sizes, OBSERVED_TOKENS))
    with torch.inference_mode():
        return finish(store, header, names, groups, work, processes, "ranks")


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
