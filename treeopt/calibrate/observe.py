"""The teacher-forced pass: one forward over each document, then the rank of every true token in every head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from treeopt.calibrate.continuations import Continuation
from treeopt.heads.medusa import MedusaHeads
from treeopt.heads.ranking import ranks_of
from treeopt.targets.forward import Forward
from treeopt.targets.limits import check_window

__all__ = ["batches", "document_states", "observe_ranks"]

# Logits alive at once, whatever the vocabulary: 24 MB in float32. Blocks under 32 MB are reused by the allocator of the
# C library instead of being mapped and zeroed anew, which made a chunk of 128 rows twice as fast a row as one of 512.
CHUNK_LOGITS = 6 << 20


def observe_ranks(forward: Forward, heads: MedusaHeads, batch: Sequence[Continuation]) -> list[list[list[int]]]:
    """Return for each document its ranks, (tokens, heads); -1 where the document ends before the guessed token.

    Parameters
    ----------
    forward : Forward
    heads : MedusaHeads
    batch : sequence of Continuation
        Documents that go through the target together.
    """
    found = []
    for document, states in zip(batch, document_states(forward, batch)):
        found.append(_ranks(heads, states, torch.tensor(document.tokens, device=states.device)).tolist())
    return found


def document_states(forward: Forward, batch: Sequence[Continuation]) -> list[Tensor]:
    """Return each document's hidden states, (tokens, hidden): row i is the state that token i was decided from."""
    device = forward.device
    whole = [[*document.prompt, *document.tokens[:-1]] for document in batch]
    width = max(map(len, whole))
    check_window(forward.target, width)
    ids = torch.tensor([row + row[-1:] * (width - len(row)) for row in whole], device=device)
    positions = torch.arange(width, device=device)
    # Padding stands on the right, where no token of the document sees it.
    visible = (positions[None, :] <= positions[:, None]).expand(len(batch), width, width)
    hidden = forward.hidden(ids, positions.expand_as(ids), visible, None)
    return [
        hidden[i, len(document.prompt) - 1 : len(document.prompt) - 1 + len(document.tokens)]
        for i, document in enumerate(batch)
    ]


def batches(documents: Sequence[Continuation], max_tokens: int) -> Iterator[list[Continuation]]:
    """Group documents of similar length so that no padded batch has more than `max_tokens` tokens."""
    group: list[Continuation] = []
    for document in sorted(documents, key=lambda d: len(d.prompt) + len(d.tokens)):
        width = len(document.prompt) + len(document.tokens)
        if group and width * (len(group) + 1) > max_tokens:
            yield group
            group = []
        group.append(document)
    if group:
        yield group


def _ranks(heads: MedusaHeads, states: Tensor, tokens: Tensor) -> Tensor:
    num_tokens = len(tokens)
    ranks = torch.full((num_tokens, heads.num_heads), -1, dtype=torch.int64, device=tokens.device)
    for head, block in enumerate(heads.blocks):
        observed = max(0, num_tokens - 1 - head)
        rows = max(1, CHUNK_LOGITS // heads.vocabulary)
        for start in range(0, observed, rows):
            end = min(start + rows, observed)
            logits = heads.project(block(states[start:end]), head)
            ranks[start:end, head] = ranks_of(logits, tokens[start + 1 + head : end + 1 + head])
    return ranks
