"""The teacher-forced pass: one forward over each document, then the rank of every true token in every head.

For typical acceptance also what probability the target gives to each head's best guesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeopt.attention.passes import Pass
from treeopt.calibrate.continuations import Continuation
from treeopt.heads.medusa import MedusaHeads
from treeopt.targets.forward import Forward

__all__ = ["Candidates", "Observation", "batches", "document_states", "observe"]

# Logits alive at once, whatever the vocabulary: 24 MB in float32. Blocks under 32 MB are reused by the allocator of the
# C library instead of being mapped and zeroed anew, which made a chunk of 128 rows twice as fast a row as one of 512.
CHUNK_LOGITS = 6 << 20


@dataclass(frozen=True)
class Candidates:
    """Which guesses the target's probability is recorded of.

    Attributes
    ----------
    num_ranks : int
        Best guesses of each head; 0 records none.
    temperature : float
        Of the target's distribution.
    """

    num_ranks: int = 0
    temperature: float = 1.0


@dataclass(frozen=True, eq=False)
class Observation:
    """What one document shows.

    Attributes
    ----------
    ranks : Tensor of int64, shape (tokens, heads)
        -1 where the document ends before the guessed token.
    topk_probs : Tensor of float32, shape (tokens, heads, num_ranks)
        The target's probability of each head's guesses, behind the document's own text; 0 where not observed.
    entropies : Tensor of float32, shape (tokens,)
        Of the target's distribution after each token, in nats; 0 after the last.
    """

    ranks: Tensor
    topk_probs: Tensor
    entropies: Tensor


def observe(
    forward: Forward, heads: MedusaHeads, batch: Sequence[Continuation], candidates: Candidates
) -> list[Observation]:
    """Return what each document shows.

    Parameters
    ----------
    forward : Forward
    heads : MedusaHeads
    batch : sequence of Continuation
        Documents that go through the target together.
    candidates : Candidates
    """
    found = []
    for document, states in zip(batch, document_states(forward, batch)):
        tokens = torch.tensor(document.tokens, device=states.device)
        ranks, guesses = _ranks(heads, states, tokens, candidates.num_ranks)
        probabilities, entropies = _judged(forward, states, guesses, candidates.temperature)
        found.append(Observation(ranks, probabilities, entropies))
    return found


def document_states(forward: Forward, batch: Sequence[Continuation]) -> list[Tensor]:
    """Return each document's hidden states, (tokens, hidden): row i is the state that token i was decided from."""
    device = forward.device
    whole = [[*document.prompt, *document.tokens[:-1]] for document in batch]
    width = max(map(len, whole))
    ids = torch.tensor([row + row[-1:] * (width - len(row)) for row in whole], device=device)
    # Padding stands on the right, where no token of the document sees it.
    hidden = forward.hidden(ids, Pass.text(len(batch), width, device), None)
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


def _ranks(heads: MedusaHeads, states: Tensor, tokens: Tensor, num_guesses: int) -> tuple[Tensor, Tensor]:
    """Return ranks (tokens, heads) and each head's best guesses (tokens, heads, num_guesses), -1 where not observed."""
    num_tokens = len(tokens)
    guesses = torch.full((num_tokens, heads.num_heads, num_guesses), -1, dtype=torch.int64, device=tokens.device)
    ranks = torch.full((num_tokens, heads.num_heads), -1, dtype=torch.int64, device=tokens.device)
    for head, block in enumerate(heads.blocks):
        observed = max(0, num_tokens - 1 - head)
        rows = max(1, CHUNK_LOGITS // heads.vocabulary)
        for start in range(0, observed, rows):
            end = min(start + rows, observed)
            logits = heads.project(block(states[start:end]), head)
            ranks[start:end, head] = heads.columns.ranks(logits, tokens[start + 1 + head : end + 1 + head])
            if num_guesses:
                guesses[start:end, head] = heads.columns.guesses(logits, num_guesses)
    return ranks, guesses


def _judged(forward: Forward, states: Tensor, guesses: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the target's probability of each guess, shaped as `guesses`, and its entropy after each token."""
    num_tokens, num_heads, num_guesses = guesses.shape
    probabilities = torch.zeros(guesses.shape, device=guesses.device)
    entropies = torch.zeros(num_tokens, device=guesses.device)
    if not num_guesses:
        return probabilities, entropies
    rows = max(1, CHUNK_LOGITS // forward.vocabulary)
    for start in range(1, num_tokens, rows):
        end = min(start + rows, num_tokens)
        logarithms = (forward.true_logits(states[start:end]).float() / temperature).log_softmax(dim=-1)
        spread = logarithms.exp()
        # A token that the target excludes has probability 0 and logarithm -inf; it adds nothing.
        entropies[start - 1 : end - 1] = -(spread * logarithms.clamp_min(-1e4)).sum(dim=-1)
        for head in range(num_heads):
            first = max(start, head + 1)  # row i of head h is judged by the distribution that row i + h + 1 came from
            if first < end:
                judged = guesses[first - head - 1 : end - head - 1, head]
                probabilities[first - head - 1 : end - head - 1, head] = spread[first - start :].gather(1, judged)
    return probabilities, entropies
