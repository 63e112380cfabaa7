"""Target and heads together: Medusa-2 (Cai et al. 2024, arXiv 2401.10774, section 2.2.2), and self-distillation (2.3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from treeopt.calibrate.documents import Continuation
from treeopt.calibrate.observe import batches_of
from treeopt.errors import HeadsError
from treeopt.heads.medusa import MedusaHeads
from treeopt.targets.forward import Forward
from treeopt.targets.limits import context_length
from treeopt.training.backbone import Backbone
from treeopt.training.losses import Logits, divergence, heads_loss, text_loss
from treeopt.training.samples import Sample, labels_of
from treeopt.training.settings import JointSettings

__all__ = ["DocumentBatches", "Together"]

Inputs = dict[str, Tensor]


class Together(nn.Module):
    """The loss of target and heads: L_LM + λ0 Σ 0.8^h L_h.

    Parameters
    ----------
    backbone : Backbone
    heads : MedusaHeads
    settings : JointSettings

    Attributes
    ----------
    progress : float
        How much of the training is done, in [0, 1]; λ0 may rise with it.
    """

    def __init__(self, backbone: Backbone, heads: MedusaHeads, settings: JointSettings) -> None:
        super().__init__()
        self.target: Any = backbone.target
        self.heads = heads
        self.progress = 0.0
        self._backbone, self._settings = backbone, settings
        heads.share(self.target.get_output_embeddings())

    def forward(self, input_ids: Tensor, rows: Tensor, labels: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """Return the loss.

        Parameters
        ----------
        input_ids : Tensor of int64, shape (documents, longest)
            Padded on the right, where no token of the document sees it.
        rows : Tensor of int64, shape (positions,)
            Which of the flattened states are learnt from.
        labels : Tensor of int64, shape (positions, 1 + heads)
            As `labels_of` gives them.
        counts : Tensor, shape (1 + heads,)
            What each sum is divided by.
        """
        forward = self._backbone.forward
        states, own = last_states(forward, input_ids, rows), logits_of(forward)
        spoken = labels[:, 0] >= 0
        if self._settings.distill:
            before = self._states_before(input_ids, rows)[spoken]
            loss = divergence(own, states[spoken], self._original_logits(own), before)
        else:
            loss = text_loss(own, states[spoken], labels[spoken, 0])
        guessed = heads_loss(self.heads, states, labels[:, 1:], counts[1:])
        return {"loss": loss / counts[0].clamp_min(1) + self.heads_weight * guessed}

    @torch.no_grad()
    def _states_before(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        with self._backbone.original() as original:
            original.target.eval()  # no dropout in what is kept to
            states = last_states(original, input_ids, rows)
        self.target.train(self.training)
        return states

    def _original_logits(self, own: Logits) -> Logits:
        def project(states: Tensor) -> Tensor:
            with self._backbone.original() as original:
                return original.true_logits(states)

        return Logits(project, own.vocabulary)

    def advance(self, progress: float) -> None:
        """Note how much of the training is done."""
        self.progress = progress

    @property
    def heads_weight(self) -> float:
        """λ0 at this point of the training."""
        ramp = math.sin(math.pi / 2 * self.progress) if self._settings.ramp == "sine" else 1.0
        return self._settings.heads_weight * ramp


def last_states(forward: Forward, input_ids: Tensor, rows: Tensor) -> Tensor:
    """Return the last hidden states of some places of padded documents, (rows, hidden)."""
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    hidden: Tensor = forward.decoder(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[rows]


def logits_of(forward: Forward) -> Logits:
    """Return how the target's logits come from its states, scales and soft-caps included."""
    trained = tuple(parameter for parameter in forward.lm_head.parameters() if parameter.requires_grad)
    return Logits(forward.true_logits, forward.vocabulary, trained)


class DocumentBatches(Dataset[Inputs]):
    """What target and heads learn in a whole run, pass after pass: documents of similar length together.

    Parameters
    ----------
    target : PreTrainedModel
    samples : sequence of Sample
    settings : JointSettings
    num_heads : int
    seed : int
        Of the order of the passes.
    vocabulary : int, optional
        Tokens that the heads can guess; all by default.

    Raises
    ------
    HeadsError
        If a document of `max_length` tokens does not fit the target.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        samples: Sequence[Sample],
        settings: JointSettings,
        num_heads: int,
        seed: int,
        vocabulary: int | None = None,
    ) -> None:
        longest = min(settings.max_length, context_length(target))
        self._samples = [cut for sample in samples if (cut := _cut(sample, longest))]
        if not self._samples:
            raise HeadsError(f"no document has anything to learn within {longest} tokens; give a larger --max-length")
        self._num_heads, self._vocabulary = num_heads, vocabulary
        groups = list(batches_of([sample.document.num_inputs for sample in self._samples], settings.batch_tokens))
        self._order: list[list[int]] = []
        for epoch in range(settings.epochs):
            generator = torch.Generator().manual_seed(seed + epoch)
            self._order += [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Inputs:
        batch = [self._samples[i] for i in self._order[index]]
        width = max(sample.document.num_inputs for sample in batch)
        ids, rows, labels = [], [], []
        for place, sample in enumerate(batch):
            document = sample.document
            inputs = [*document.prompt, *document.tokens[:-1]]
            ids.append([*inputs, *[inputs[-1]] * (width - len(inputs))])
            first = place * width + len(document.prompt) - 1
            rows.append(torch.arange(first, first + len(document.tokens)))
            labels.append(labels_of(sample, self._num_heads, self._vocabulary))
        where, what = torch.cat(rows), torch.cat(labels)
        learnt = what[:, 0] >= 0
        return {"input_ids": torch.tensor(ids), "rows": where[learnt], "labels": what[learnt]}


def _cut(sample: Sample, longest: int) -> Sample | None:
    """Return a sample whose input has at most `longest` tokens, if anything to learn is left."""
    document = sample.document
    keep = longest + 1 - len(document.prompt)
    if keep < 1 or not any(sample.learnt[:keep]):
        return None
    kept = Continuation(document.prompt_id, document.domain, document.prompt, document.tokens[:keep])
    return Sample(kept, sample.learnt[:keep])
