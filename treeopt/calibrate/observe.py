"""The teacher-forced pass: one forward over each document, then the rank of every true token in every head.

For typical acceptance also what probability the target gives to each head's best guesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from treeopt.attention.passes import Pass
from treeopt.calibrate.documents import Continuation
from treeopt.heads.medusa import MedusaHeads
from treeopt.targets.cache import RowCache
from treeopt.targets.forward import Forward
from treeopt.targets.limits import context_length

__all__ = [
    "OBSERVED_TOKENS",
    "RANKS_ONLY",
    "Candidates",
    "Observation",
    "batches",
    "batches_of",
    "chunk_rows",
    "document_states",
    "observe",
]

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


RANKS_ONLY = Candidates()


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
    reading = _Reading(forward, heads, batch, candidates)
    for rows, states in _pieces(forward, batch):
        reading.take(rows, states)
    lengths = [len(document.tokens) for document in batch]
    found = (torch.split(part, lengths) for part in (reading.ranks, reading.probabilities, reading.entropies))
    return [Observation(*parts) for parts in zip(*found)]


def document_states(forward: Forward, batch: Sequence[Continuation]) -> list[Tensor]:
    """Return each document's hidden states, (tokens, hidden): row i is the state that token i was decided from."""
    pieces = list(_pieces(forward, batch))
    order = torch.cat([rows for rows, _ in pieces]).argsort()
    states = torch.cat([states for _, states in pieces])[order.to(forward.device)]
    return list(torch.split(states, [len(document.tokens) for document in batch]))


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


def _pieces(forward: Forward, batch: Sequence[Continuation]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield hidden states with the tokens decided from them, as numbers over the tokens of all documents in order."""
    context = context_length(forward.target)
    firsts = [0, *accumulate(len(document.tokens) for document in batch)]
    longest = min(OBSERVED_TOKENS, context)
    short = [i for i, document in enumerate(batch) if document.num_inputs <= longest]
    if short:
        hidden = _padded(forward, [_inputs(batch[i]) for i in short])
        spans = [slice(len(batch[i].prompt) - 1, batch[i].num_inputs if batch[i].tokens else 0) for i in short]
        rows = torch.cat([torch.arange(firsts[i], firsts[i + 1]) for i in short])
        yield rows, torch.cat([states[span] for states, span in zip(hidden, spans)])
    for i in sorted(set(range(len(batch))) - set(short)):
        for start, states in _windows(forward, _inputs(batch[i]), len(batch[i].prompt) - 1):
            states = states[: len(batch[i].tokens)]  # of a document without tokens, none
            yield firsts[i] + start + torch.arange(len(states)), states


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
        at = Pass.text(1, chunk.shape[1], device, start)
        states = forward.hidden(chunk, at, cache.at(at))[0]
        cache.lengths[0] = start + chunk.shape[1]
        yield start, states


def chunk_rows(vocabulary: int, device: torch.device, candidates: Candidates = RANKS_ONLY) -> int:
    """Return of how many positions the logits may be in memory at once."""
    on_cuda = CUDA_CHUNK_JUDGED if candidates.num_ranks else CUDA_CHUNK_LOGITS
    return max(1, (on_cuda if device.type == "cuda" else CHUNK_LOGITS) // vocabulary)


class _Reading:
    """What the documents of a batch show, filled in piece by piece; a row for each token of all, in order."""

    def __init__(
        self, forward: Forward, heads: MedusaHeads, batch: Sequence[Continuation], candidates: Candidates
    ) -> None:
        self.forward, self.heads, self.candidates = forward, heads, candidates
        self.tokens = torch.tensor([token for document in batch for token in document.tokens], dtype=torch.int64)
        lengths = [len(document.tokens) for document in batch]
        self.place = torch.tensor([i for length in lengths for i in range(length)], dtype=torch.int64)
        self.left = torch.tensor([length - 1 - i for length in lengths for i in range(length)], dtype=torch.int64)
        shape, device = (sum(lengths), heads.num_heads), forward.device
        self.ranks = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.guesses = torch.full((*shape, candidates.num_ranks), -1, dtype=torch.int64, device=device)
        self.probabilities = torch.zeros((*shape, candidates.num_ranks), device=device)
        self.entropies = torch.zeros(shape[0], device=device)

    def take(self, rows: Tensor, states: Tensor) -> None:
        """Fill in what the states that the tokens `rows` were decided from show."""
        for head in range(self.heads.num_heads):
            self._rank(head, rows, states)
        if self.candidates.num_ranks:
            self._judge(rows, states)

    def _rank(self, head: int, rows: Tensor, states: Tensor) -> None:
        """Count the ranks of one head's true tokens, and note its best guesses."""
        observed = (self.left[rows] > head).nonzero()[:, 0]
        for chunk in torch.split(observed, chunk_rows(self.heads.vocabulary, states.device, self.candidates)):
            at, true = rows[chunk].to(states.device), self.tokens[rows[chunk] + 1 + head].to(states.device)
            logits = self.heads.project(self.heads.blocks[head](states[chunk.to(states.device)]), head)
            self.ranks[at, head] = self.heads.columns.ranks(logits, true).to(at.device)
            if self.candidates.num_ranks:
                guesses = self.heads.columns.guesses(logits, self.candidates.num_ranks)
                self.guesses[at, head] = guesses.to(at.device)

    def _judge(self, rows: Tensor, states: Tensor) -> None:
        """Note what probability the target gives to the guesses for the tokens `rows`, and its entropies."""
        inner = (self.place[rows] > 0).nonzero()[:, 0]
        for chunk in torch.split(inner, chunk_rows(self.forward.vocabulary, states.device, self.candidates)):
            at, device = rows[chunk], states.device
            logits = self.forward.true_logits(states[chunk.to(device)]).float()
            logarithms = (logits / self.candidates.temperature).log_softmax(dim=-1)
            spread = logarithms.exp()
            # A token that the target excludes has probability 0 and logarithm -inf; it adds nothing.
            self.entropies[(at - 1).to(device)] = -(spread * logarithms.clamp_min(-1e4)).sum(dim=-1)
            for head in range(self.heads.num_heads):
                # A head's guess made h + 1 rows before is judged by the distribution that this token came from.
                behind = (self.place[at] > head).nonzero()[:, 0]
                judged = (at[behind] - 1 - head).to(device)
                own = spread[behind.to(device)].gather(1, self.guesses[judged, head])
                self.probabilities[judged, head] = own
