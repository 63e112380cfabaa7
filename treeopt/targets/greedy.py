"""Batched greedy decoding of many prompts: the text that calibration and training are about."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treeopt.attention.passes import Pass
from treeopt.targets.cache import RowCache
from treeopt.targets.forward import Forward
from treeopt.targets.limits import check_frequencies, room_for

__all__ = ["greedy_continuations"]


class _Row:
    """One prompt being continued in one row of the batch."""

    def __init__(self, document: int, prompt: Sequence[int]) -> None:
        self.document = document
        self.prompt = list(prompt)
        self.tokens: list[int] = []


def greedy_continuations(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    batch_size: int,
) -> Iterator[tuple[int, list[int]]]:
    """Continue every prompt greedily; yield each as it ends, in no fixed order.

    A row whose prompt has ended takes the next prompt, so a batch stays full whatever the lengths.

    Parameters
    ----------
    target : PreTrainedModel
    prompts : sequence of sequences of int
        Token ids of each prompt, at least one each.
    max_new_tokens : int
        Most tokens generated for a prompt, the end-of-sequence token included; fewer where the context ends.
    eos_ids : collection of int
        Tokens that end a continuation.
    batch_size : int
        Rows decoded together.

    Yields
    ------
    tuple of (int, list of int)
        Index of the prompt and the new tokens; equal logits go to the lowest id.

    Raises
    ------
    TargetError
        If a prompt fills the context, or a text is longer than the target's sliding window.
    """
    # Longest first: the rows that take longest to fill start together, and the span shrinks towards the end.
    waiting = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    if not waiting:
        return
    limits = [room_for(target, len(prompt), max_new_tokens) for prompt in prompts]
    rows: list[_Row | None] = [None] * min(batch_size, len(waiting))
    capacity = max(len(prompt) + limit for prompt, limit in zip(prompts, limits))
    forward, cache = Forward(target), RowCache(target, len(rows), capacity)
    forward.reserve(capacity)
    check_frequencies(target, min(map(len, prompts)), capacity)
    while waiting or any(rows):
        free = [i for i, row in enumerate(rows) if row is None]
        # Refill in groups: one padded prefill of several rows costs little more than one of a single row.
        if waiting and (len(free) >= max(1, len(rows) // 8) or len(free) == len(rows)):
            fresh = free[: len(waiting)]
            for i in fresh:
                document = waiting.pop()
                rows[i] = _Row(document, prompts[document])
            tokens = _prefill(forward, cache, rows, fresh)
        else:
            fresh = [i for i, row in enumerate(rows) if row is not None]
            tokens = _step(forward, cache, rows, fresh)
        for i, token in zip(fresh, tokens.tolist()):
            row = rows[i]
            assert row is not None
            row.tokens.append(token)
            if token in eos_ids or len(row.tokens) == limits[row.document]:
                rows[i] = None
                yield row.document, row.tokens


def _prefill(forward: Forward, cache: RowCache, rows: list[_Row | None], fresh: list[int]) -> Tensor:
    prompts = [row.prompt for i in fresh if (row := rows[i]) is not None]
    width = max(map(len, prompts))
    device = forward.device
    ids = torch.tensor([prompt + prompt[-1:] * (width - len(prompt)) for prompt in prompts], device=device)
    # Right padding: a pad's slot lies beyond the row's length and is overwritten by the row's own tokens.
    at = Pass.text(len(fresh), width, device)
    hidden = forward.hidden(ids, at, cache.at(at, torch.tensor(fresh, device=device)))
    for i, prompt in zip(fresh, prompts):
        cache.lengths[i] = len(prompt)
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    return forward.exact(forward.logits(hidden[torch.arange(len(fresh), device=device), last])).argmax(-1)


def _step(forward: Forward, cache: RowCache, rows: list[_Row | None], active: list[int]) -> Tensor:
    device = forward.device
    ids = torch.tensor([[row.tokens[-1]] for i in active if (row := rows[i]) is not None], device=device)
    lengths = [cache.lengths[i] for i in active]
    at = Pass.next_token(torch.tensor(lengths, device=device), max(lengths) + 1)
    index = None if len(active) == len(rows) else torch.tensor(active, device=device)
    hidden = forward.hidden(ids, at, cache.at(at, index))
    for i in active:
        cache.lengths[i] += 1
    return forward.exact(forward.logits(hidden[:, -1])).argmax(-1)
