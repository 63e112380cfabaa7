"""Heads on a frozen target (Cai et al. 2024, arXiv 2401.10774, section 2.2.1): Medusa-1, and the warm-up of Medusa-2.

Positions of many documents are shuffled together, and the target's states are kept between epochs while they fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from treeopt.calibrate.documents import Continuation
from treeopt.calibrate.observe import batches, document_states
from treeopt.errors import HeadsError
from treeopt.heads.medusa import MedusaHeads
from treeopt.targets.forward import Forward
from treeopt.targets.loading import LoadedTarget
from treeopt.training.losses import heads_loss
from treeopt.training.samples import Sample, labels_of
from treeopt.training.settings import TrainingSettings

__all__ = ["HeadsAlone", "PositionBatches"]

GROUP_TOKENS = 16384  # positions shuffled together
FORWARD_TOKENS = 4096  # padded tokens of one forward of the target
STATE_BYTES = 4 << 30  # hidden states are kept between epochs up to this size, and computed anew beyond

Inputs = dict[str, Tensor]


class HeadsAlone(nn.Module):
    """The loss of heads from states that are given.

    Parameters
    ----------
    heads : MedusaHeads
    """

    def __init__(self, heads: MedusaHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, hidden: Tensor, labels: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """Return the loss; see `heads_loss`."""
        return {"loss": heads_loss(self.heads, hidden, labels, counts)}


class PositionBatches(Dataset[Inputs]):
    """What the heads learn in a whole run, pass after pass.

    Parameters
    ----------
    target : LoadedTarget
    samples : sequence of Sample
    settings : TrainingSettings
    num_heads : int
    size : int
        Processes that take passes in turn: each works within a group of documents of its own.
    vocabulary : int, optional
        Tokens that the heads can guess; all by default.

    Raises
    ------
    HeadsError
        If there is nothing that a head could guess.
    """

    def __init__(
        self,
        target: LoadedTarget,
        samples: Sequence[Sample],
        settings: TrainingSettings,
        num_heads: int,
        size: int = 1,
        vocabulary: int | None = None,
    ) -> None:
        self._states = _States(target, [sample.document for sample in samples])
        self._samples, self._seed, self._num_heads, self._vocabulary = samples, settings.seed, num_heads, vocabulary
        labelled = [int(_labelled(self._labels(sample)).sum()) for sample in samples]
        if not any(labelled):
            raise HeadsError(
                "no document has two tokens in a row to learn, so that heads have nothing to guess; give longer replies or "
                "a larger --max-new-tokens"
            )
        lengths = [len(sample.document.tokens) for sample in samples]
        self._groups = [
            group for epoch in range(settings.epochs) for group in _groups(lengths, settings.seed + epoch, GROUP_TOKENS)
        ]
        pieces = [
            [
                (number, start, start + settings.batch_size)
                for start in range(0, sum(labelled[i] for i in group), settings.batch_size)
            ]
            for number, group in enumerate(self._groups)
        ]
        self._places = list(_interleaved(pieces, size))
        self._shuffled: tuple[int, Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Inputs:
        number, start, end = self._places[index]
        if self._shuffled is None or self._shuffled[0] != number:
            self._shuffled = (number, *self._positions(number))
        _, hidden, labels = self._shuffled
        return {"hidden": hidden[start:end], "labels": labels[start:end]}

    def _positions(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a group's hidden states and the heads' labels, one row a position, shuffled."""
        group = [self._samples[i] for i in self._groups[number]]
        hidden = torch.cat(self._states.of([sample.document for sample in group]))
        labels = torch.cat([self._labels(sample) for sample in group])
        labelled = _labelled(labels).nonzero()[:, 0]
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        order = labelled[torch.randperm(len(labelled), generator=generator)]
        return hidden[order.to(hidden.device)], labels[order].to(hidden.device)

    def _labels(self, sample: Sample) -> Tensor:
        return labels_of(sample, self._num_heads, self._vocabulary)[:, 1:]


def _labelled(labels: Tensor) -> Tensor:
    """Return for each position whether some head learns from it."""
    return (labels >= 0).any(1)


class _States:
    """Hidden states of documents, kept between epochs while they fit."""

    def __init__(self, target: LoadedTarget, documents: Sequence[Continuation]) -> None:
        self.forward = Forward(target.model)
        width = target.model.config.get_text_config().hidden_size * target.model.dtype.itemsize
        fits = sum(len(d.tokens) for d in documents) * width <= STATE_BYTES
        self.kept: dict[str, Tensor] | None = {} if fits else None
        # A state rounds as its company in the batch falls out. These batches are the same wherever a run goes on.
        self._batches = list(batches(documents, FORWARD_TOKENS)) if fits else []
        self._batch_of = {d.prompt_id: i for i, batch in enumerate(self._batches) for d in batch}

    @torch.no_grad()
    def of(self, documents: Sequence[Continuation]) -> list[Tensor]:
        """Return (tokens, hidden) of each document."""
        if self.kept is None:
            found = self._computed(batches(documents, FORWARD_TOKENS))
            return [found[document.prompt_id] for document in documents]
        missing = sorted({self._batch_of[d.prompt_id] for d in documents if d.prompt_id not in self.kept})
        self.kept.update(self._computed(self._batches[i] for i in missing))
        return [self.kept[document.prompt_id] for document in documents]

    def _computed(self, grouped: Iterable[Sequence[Continuation]]) -> dict[str, Tensor]:
        return {
            document.prompt_id: states.clone()
            for batch in grouped
            for document, states in zip(batch, document_states(self.forward, batch))
        }


def _groups(lengths: Sequence[int], seed: int, enough: int) -> Iterator[list[int]]:
    """Yield documents in random order, in groups of `enough` tokens."""
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    group: list[int] = []
    for index in order:
        group.append(index)
        if sum(lengths[i] for i in group) >= enough:
            yield group
            group = []
    if group:
        yield group


def _interleaved(pieces: Sequence[Sequence[tuple[int, int, int]]], size: int) -> Iterator[tuple[int, int, int]]:
    """Yield the pieces of every `size` groups in turn, so that a process that takes each size-th stays in its group."""
    given = [group for group in pieces if group]
    for first in range(0, len(given), size):
        groups = given[first : first + size]
        for place in range(max(map(len, groups))):
            for group in groups:
                yield group[place % len(group)]  # the shorter begin anew
