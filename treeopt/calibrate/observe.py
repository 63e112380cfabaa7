"""The teacher-forced pass: one forward over each document, then the rank of every true token in every head.

For typical acceptance also what probability the target gives to each head's best guesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeopt.calibrate.documents import Continuation
from treeopt.heads.medusa import MedusaHeads
from treeopt.heads.ranking import ranks_of, top_ranked
from treeopt.targets.cache import RowCache
from treeopt.targets.forward import Forward
from treeopt.targets.limits import check_window, context_length

__all__ = ["OBSERVED_TOKENS", "Candidates", "Observation", "batches", "batches_of", "document_states", "observe"]

OBSERVED_TOKENS = 4096  # padded tokens of one teacher-forced forward, at most
ENOUGH_TOKENS, MOST_PADDING = 512, 17 / 16

# Logits alive at once, whatever the vocabulary: 24 MB in float32. Blocks under 32 MB are reused by the allocator of the
# C library instead of being mapped and zeroed anew, which made a chunk of 128 rows twice as fast a row as one of 512.
CHUNK_LOGITS = 6 << 20
# On a GPU a product needs some hundreds of rows before reading the embedding no longer bounds it: 512 at a vocabulary of
# 128k, 128 MB of logits in bfloat16 and about four times that with what ranking them takes. Judging guesses takes more a
# logit, so fewer stand there at once.
CUDA_CHUNK_LOGITS, CUDA_CHUNK_JUDGED = 64 << 20, 16 << 20


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
    readings = [_Reading(forward, heads, len(document.tokens), candidates) for document in batch]
    for number, start, states in _pieces(forward, batch):
        readings[number].take(start, states, batch[number].tokens)
    return [Observation(reading.ranks, reading.probabilities, reading.entropies) for reading in readings]


def document_states(forward: Forward, batch: Sequence[Continuation]) -> list[Tensor]:
    """Return each document's hidden states, (tokens, hidden): row i is the state that token i was decided from."""
    found: list[list[Tensor]] = [[] for _ in batch]
    for number, _, states in _pieces(forward, batch):
        found[number].append(states)
    return [torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in found]


def batches(documents: Sequence[Continuation], max_tokens: int) -> Iterator[list[Continuation]]:
    """Group documents of similar length so that no padded batch has more than `max_tokens` tokens."""
    for group in batches_of([document.num_inputs for document in documents], max_tokens):
        yield [documents[i] for i in group]


def batches_of(sizes: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Group documents of these sizes as `batches` does; yield their indices.

    A group that is large enough for its products takes no more padding than a sixteenth. The groups depend on the sizes
    alone: not on what is done already, nor on how many processes there are.
    """
    group: list[int] = []
    real = 0
    for index in sorted(range(len(sizes)), key=lambda i: (sizes[i], i)):
        padded, enough = sizes[index] * (len(group) + 1), group and sizes[group[-1]] * len(group) >= ENOUGH_TOKENS
        if group and (padded > max_tokens or (enough and padded > (real + sizes[index]) * MOST_PADDING)):
            yield group
            group, real = [], 0
        group.append(index)
        real += sizes[index]
    if group:
        yield group


def _pieces(forward: Forward, batch: Sequence[Continuation]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield hidden states as (number of the document, its token decided from the first row, rows)."""
    context = context_length(forward.target)
    check_window(forward.target, min(context, max(document.num_inputs for document in batch)))
    longest = min(OBSERVED_TOKENS, context)
    short = [i for i, document in enumerate(batch) if document.num_inputs <= longest]
    if short:
        hidden = _padded(forward, [_inputs(batch[i]) for i in short])
        for row, i in enumerate(short):
            start, count = len(batch[i].prompt) - 1, len(batch[i].tokens)
            yield i, 0, hidden[row, start : start + count]
    for i in sorted(set(range(len(batch))) - set(short)):
        for start, states in _windows(forward, _inputs(batch[i]), len(batch[i].prompt) - 1):
            yield i, start, states


def _inputs(document: Continuation) -> list[int]:
    return [*document.prompt, *document.tokens[:-1]]


def _padded(forward: Forward, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the hidden states of texts that go through the target together, (texts, longest, hidden)."""
    width = max(map(len, rows))
    # Padding stands on the right, where no token of the document sees it: the target's own causal mask serves, and
    # with it the attention kernels that need none in memory.
    ids = torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in rows], device=forward.device)
    positions = torch.arange(width, device=forward.device).expand_as(ids)
    hidden: Tensor = forward.decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    return hidden


def _windows(forward: Forward, ids: Sequence[int], first: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the states of a long text from position `first` on, each position once, as (position - first, rows).

    A text within the context is read once, in chunks behind a cache. One beyond it is read in windows as long as the
    context, each half a context further: a position is seen from the first window that holds it, behind its whole
    prefix in the first window and behind at least half a context in the others.
    """
    context = context_length(forward.target)
    seen = first
    for end in _ends(len(ids), context, first):
        begin = max(0, end - context)
        for place, states in _chunks(forward, ids[begin:end]):
            start = begin + place
            fresh = max(seen - start, 0)
            if fresh < len(states):
                yield start + fresh - first, states[fresh:]
                seen = start + len(states)


def _ends(length: int, context: int, first: int) -> list[int]:
    """Return where windows end so that each position from `first` on is in one."""
    step = max(1, context // 2)
    ends = [min(length, context)]
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + step))
    return [end for end in ends if end > first]


def _chunks(forward: Forward, ids: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield the states of a text of at most a context as (position, rows), chunk after chunk behind one cache."""
    rows = max(1, min(OBSERVED_TOKENS // 4, OBSERVED_TOKENS**2 // len(ids)))
    cache, device = RowCache(forward.target, 1, len(ids)), forward.device
    for start in range(0, len(ids), rows):
        chunk = torch.tensor([ids[start : start + rows]], device=device)
        positions = torch.arange(start, start + chunk.shape[1], device=device)
        slots = torch.arange(start + chunk.shape[1], device=device)
        visible = (slots[None, :] <= positions[:, None])[None]
        states = forward.hidden(chunk, positions[None], visible, cache.at(start, chunk.shape[1]))[0]
        cache.lengths[0] = start + chunk.shape[1]
        yield start, states


def _chunk_rows(vocabulary: int, device: torch.device, candidates: Candidates) -> int:
    on_cuda = CUDA_CHUNK_JUDGED if candidates.num_ranks else CUDA_CHUNK_LOGITS
    return max(1, (on_cuda if device.type == "cuda" else CHUNK_LOGITS) // vocabulary)


class _Reading:
    """What one document shows, filled in piece by piece."""

    def __init__(self, forward: Forward, heads: MedusaHeads, num_tokens: int, candidates: Candidates) -> None:
        self.forward, self.heads, self.candidates = forward, heads, candidates
        shape, device = (num_tokens, heads.num_heads), forward.device
        self.ranks = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.guesses = torch.full((*shape, candidates.num_ranks), -1, dtype=torch.int64, device=device)
        self.probabilities = torch.zeros((*shape, candidates.num_ranks), device=device)
        self.entropies = torch.zeros(num_tokens, device=device)

    def take(self, first: int, states: Tensor, tokens: Sequence[int]) -> None:
        """Fill in what the states of tokens `first` … show."""
        true = torch.tensor(tokens[first : first + len(states) + self.heads.num_heads], device=states.device)
        for head in range(self.heads.num_heads):
            self._rank(head, first, states, true[1 + head :])
        if self.candidates.num_ranks:
            self._judge(first, states)

    def _rank(self, head: int, first: int, states: Tensor, true: Tensor) -> None:
        """Count the ranks of one head's true tokens, and note its best guesses."""
        rows = _chunk_rows(self.heads.vocabulary, states.device, self.candidates)
        for start in range(0, min(len(states), len(true)), rows):
            own = true[start : start + rows][: len(states) - start]
            at = slice(first + start, first + start + len(own))
            logits = self.heads.project(self.heads.blocks[head](states[start : start + len(own)]), head)
            self.ranks[at, head] = ranks_of(logits, own)
            if self.candidates.num_ranks:
                self.guesses[at, head] = top_ranked(logits, self.candidates.num_ranks)

    def _judge(self, first: int, states: Tensor) -> None:
        """Note what probability the target gives to the guesses for the tokens `first` …, and its entropies."""
        rows = _chunk_rows(self.forward.vocabulary, states.device, self.candidates)
        for start in range(max(first, 1), first + len(states), rows):
            end = min(start + rows, first + len(states))
            logits = self.forward.true_logits(states[start - first : end - first]).float()
            logarithms = (logits / self.candidates.temperature).log_softmax(dim=-1)
            spread = logarithms.exp()
            # A token that the target excludes has probability 0 and logarithm -inf; it adds nothing.
            self.entropies[start - 1 : end - 1] = -(spread * logarithms.clamp_min(-1e4)).sum(dim=-1)
            for head in range(self.heads.num_heads):
                # Row i of head h is judged by the distribution that row i + h + 1 came from.
                judged = slice(max(start, head + 1) - head - 1, end - head - 1)
                if judged.start < judged.stop:
                    own = spread[judged.start + head + 1 - start :].gather(1, self.guesses[judged, head])
                    self.probabilities[judged, head] = own
