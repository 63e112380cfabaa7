"""The target's own continuations of prompts, kept in files that an interrupted run goes on with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from treeopt.calibrate.documents import Continuation, Documents, documents_hash
from treeopt.calibrate.finishing import Finished, finish
from treeopt.calibrate.processes import Processes
from treeopt.errors import TraceError
from treeopt.prompts import Prompt
from treeopt.targets.greedy import greedy_continuations
from treeopt.targets.limits import room_for
from treeopt.targets.loading import LoadedTarget, eos_ids, fingerprint

__all__ = [
    "Continuation",
    "continue_prompts",
    "dataset_continuations",
    "dataset_documents",
    "decoding_groups",
    "documents_hash",
    "generated_documents",
]

SCHEMA = "treeopt.continuations/1"
MOST_BATCHES = 4  # of one group: rows that end early are refilled within it
GROUPS = 32  # a run has at least so many groups before one takes more than a batch: a lost group is little of it


def continue_prompts(
    target: LoadedTarget,
    prompts: Sequence[Prompt],
    store: Path,
    *,
    max_new_tokens: int = 128,
    batch_size: int = 32,
) -> list[Continuation]:
    """Return `generated_documents` in memory."""
    return list(
        generated_documents(target, prompts, store, Processes(), max_new_tokens=max_new_tokens, batch_size=batch_size)
    )


def generated_documents(
    target: LoadedTarget,
    prompts: Sequence[Prompt],
    store: Path,
    processes: Processes,
    *,
    max_new_tokens: int,
    batch_size: int,
) -> Documents:
    """Continue each prompt greedily, or take its continuation from `store` if an earlier run left it there.

    Parameters
    ----------
    target : LoadedTarget
    prompts : sequence of Prompt
    store : Path
        Of a `DocumentStore`. Every document is on disk before the next is begun, so that an interrupted run loses each
        process's unfinished documents at most.
    processes : Processes
    max_new_tokens : int
    batch_size : int

    Returns
    -------
    Documents
        In the order of `prompts`, while the store is there.

    Raises
    ------
    TraceError
        If `store` was made by another target or with other settings.
    TargetError
        If a prompt fills the context, or a text is longer than the target's sliding window.
    """
    lengths, digest = _survey(target, prompts, max_new_tokens)
    header = {
        "schema": SCHEMA,
        "target": fingerprint(target.model),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        # The tokens rather than the text: a changed tokenizer or chat template asks for other continuations.
        "prompts": digest,
        "eos": sorted(eos_ids(target.model)),
        "max_new_tokens": max_new_tokens,
    }

    def work(group: Sequence[int]) -> Finished:
        stream = greedy_continuations(
            target.model,
            [target.prompt_ids(prompts[i].messages) for i in group],
            max_new_tokens=max_new_tokens,
            eos_ids=eos_ids(target.model),
            batch_size=batch_size,
        )
        for index, tokens in stream:
            yield group[index], tokens, len(tokens)

    names, groups = [prompt.id for prompt in prompts], decoding_groups(lengths, batch_size)
    with torch.inference_mode():
        kept = finish(store, header, names, groups, work, processes, "continuations")
    return Documents(prompts, lambda prompt: target.prompt_ids(prompt.messages), lambda prompt: kept[prompt.id])


def decoding_groups(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Form groups of prompts of similar length that are decoded together, the longest first.

    Parameters
    ----------
    lengths : sequence of int
        Tokens of each prompt.
    batch_size : int
        Rows decoded at once. A group is one batch, and up to `MOST_BATCHES` in a run of very many prompts.

    Returns
    -------
    list of list of int
        Indices of prompts; the groups' sizes differ by one at most.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches = max(1, min(MOST_BATCHES, len(order) // (batch_size * GROUPS)))
    count = -(-len(order) // (batch_size * batches))
    bounds = [i * len(order) // count for i in range(count + 1)] if count else [0]
    return [order[start:end] for start, end in pairwise(bounds)]


def _survey(target: LoadedTarget, prompts: Sequence[Prompt], max_new_tokens: int) -> tuple[list[int], str]:
    """Return the number of tokens of each prompt and a hash of all; refuse what does not fit before any is decoded."""
    lengths, digest = [], hashlib.sha256()
    for prompt in prompts:
        ids = target.prompt_ids(prompt.messages)
        room_for(target.model, len(ids), max_new_tokens)
        lengths.append(len(ids))
        digest.update(repr((prompt.id, ids)).encode())
    return lengths, digest.hexdigest()


def dataset_documents(target: LoadedTarget, prompts: Sequence[Prompt], *, max_new_tokens: int) -> Documents:
    """Take each prompt's own reply as its continuation, cut to `max_new_tokens`; it may be longer than the context.

    Raises
    ------
    TraceError
        If a prompt has no reply.
    """
    for prompt in prompts:
        if prompt.reply is None:
            raise TraceError(
                f"prompt `{prompt.id}` has no reply to take; give an assistant turn or use --continuations generated"
            )
    return Documents(
        prompts,
        lambda prompt: _at_least_one(target, prompt),
        lambda prompt: target.reply_ids(prompt.reply or "")[:max_new_tokens],
    )


def dataset_continuations(
    target: LoadedTarget, prompts: Sequence[Prompt], *, max_new_tokens: int = 128
) -> list[Continuation]:
    """Return `dataset_documents` in memory."""
    return list(dataset_documents(target, prompts, max_new_tokens=max_new_tokens))


def _at_least_one(target: LoadedTarget, prompt: Prompt) -> list[int]:
    ids = target.prompt_ids(prompt.messages)
    room_for(target.model, min(len(ids), 1), 1)  # refuses a prompt without tokens
    return ids
