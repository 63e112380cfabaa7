"""The target's own continuations of prompts, kept in a file that an interrupted run goes on with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from treeopt.calibrate.store import DocumentStore
from treeopt.errors import TraceError
from treeopt.progress import Progress
from treeopt.prompts import Prompt
from treeopt.targets.greedy import greedy_continuations
from treeopt.targets.limits import room_for
from treeopt.targets.loading import LoadedTarget, eos_ids, fingerprint

__all__ = ["Continuation", "continue_prompts", "dataset_continuations", "documents_hash"]

SCHEMA = "treeopt.continuations/1"


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and what follows it, as token ids.

    Attributes
    ----------
    prompt_id : str
    domain : str or None
    prompt : tuple of int
        Chat template included.
    tokens : tuple of int
        The continuation, up to and including the end-of-sequence token if it was reached.
    """

    prompt_id: str
    domain: str | None
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def continue_prompts(
    target: LoadedTarget,
    prompts: Sequence[Prompt],
    store: Path,
    *,
    max_new_tokens: int = 128,
    batch_size: int = 32,
) -> list[Continuation]:
    """Continue each prompt greedily, or take its continuation from `store` if an earlier run left it there.

    Parameters
    ----------
    target : LoadedTarget
    prompts : sequence of Prompt
    store : Path
        JSON lines: a header that names target and settings, then one line per finished document. Every line is on
        disk before the next document is begun, so that an interrupted run loses the current batch at most.
    max_new_tokens : int
    batch_size : int

    Returns
    -------
    list of Continuation
        In the order of `prompts`.

    Raises
    ------
    TraceError
        If `store` was made by another target or with other settings.
    """
    ids = [tuple(target.prompt_ids(prompt.messages)) for prompt in prompts]
    header = {
        "schema": SCHEMA,
        "target": fingerprint(target.model),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        # The tokens rather than the text: a changed tokenizer or chat template asks for other continuations.
        "prompts": hashlib.sha256(repr([(p.id, i) for p, i in zip(prompts, ids)]).encode()).hexdigest(),
        "eos": sorted(eos_ids(target.model)),
        "max_new_tokens": max_new_tokens,
    }
    with DocumentStore(store, header) as kept, torch.inference_mode():
        waiting = [i for i, prompt in enumerate(prompts) if prompt.id not in kept.done]
        stream = greedy_continuations(
            target.model,
            [ids[i] for i in waiting],
            max_new_tokens=max_new_tokens,
            eos_ids=eos_ids(target.model),
            batch_size=batch_size,
        )
        with Progress("continuations", total=len(prompts), done=len(prompts) - len(waiting)) as progress:
            for index, tokens in stream:
                kept.append(prompts[waiting[index]].id, tokens)
                progress.add(documents=1, tokens=len(tokens))
        return [Continuation(p.id, p.domain, i, tuple(kept.done[p.id])) for p, i in zip(prompts, ids)]


def dataset_continuations(
    target: LoadedTarget, prompts: Sequence[Prompt], *, max_new_tokens: int = 128
) -> list[Continuation]:
    """Take each prompt's own reply as its continuation, cut to `max_new_tokens`.

    Raises
    ------
    TraceError
        If a prompt has no reply.
    """
    found = []
    for prompt in prompts:
        if prompt.reply is None:
            raise TraceError(
                f"prompt `{prompt.id}` has no reply to take; give an assistant turn or use --continuations generated"
            )
        ids = tuple(target.prompt_ids(prompt.messages))
        tokens = target.reply_ids(prompt.reply)[: room_for(target.model, len(ids), max_new_tokens)]
        found.append(Continuation(prompt.id, prompt.domain, ids, tuple(tokens)))
    return found


def documents_hash(documents: Sequence[Continuation]) -> str:
    """Return the sha256 over the token ids of documents, in their order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(repr((document.prompt_id, document.prompt, document.tokens)).encode())
    return digest.hexdigest()
