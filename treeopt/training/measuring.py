"""What heads and target are worth so far, on documents that are not learnt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from treeopt.acceptance import AcceptanceTable
from treeopt.calibrate.documents import Continuation
from treeopt.calibrate.observe import RANKS_ONLY, batches, chunk_rows, observe
from treeopt.heads.medusa import MedusaHeads
from treeopt.heads.output import OutputEmbedding
from treeopt.optimize import best_tree
from treeopt.products import argmax
from treeopt.targets.forward import Forward
from treeopt.targets.limits import context_length
from treeopt.trace import RankTrace
from treeopt.training.joint_stage import last_states, logits_of
from treeopt.training.losses import Logits, text_loss
from treeopt.training.samples import Sample, labels_of

__all__ = ["MEASURED_NODES", "Measure", "Speech", "as_served", "measure", "speech"]

MEASURED_NODES = 64
MEASURED_TOKENS = 16384  # what measures is cut to so many tokens: it is done again and again
FORWARD_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Measure:
    """Heads on held-out documents.

    Attributes
    ----------
    accuracies : tuple of float
        Of each head's best guess, in [0, 1].
    expected_accepted : float
        E[L] of the best tree of 64 nodes, root excluded.
    """

    accuracies: tuple[float, ...]
    expected_accepted: float

    def log(self) -> dict[str, object]:
        """Return what is written into a log."""
        return {"accuracies": list(self.accuracies), "expected_accepted": self.expected_accepted}

    def __str__(self) -> str:
        shown = " ".join(f"{accuracy:.3f}" for accuracy in self.accuracies)
        return f"top-1 {shown}, E[L] at {MEASURED_NODES} nodes {self.expected_accepted:.3f}"


@torch.no_grad()
def measure(target: PreTrainedModel, heads: MedusaHeads, samples: Sequence[Sample]) -> Measure:
    """Return the accuracies of heads and E[L] of the best tree that they allow.

    Parameters
    ----------
    target : PreTrainedModel
    heads : MedusaHeads
        In any dtype; they are measured as they are served, in the target's.
    samples : sequence of Sample
    """
    served, forward = as_served(heads, target), Forward(target)
    chosen = {sample.document.prompt_id: sample for sample in _first(samples)}
    ranks = []
    for batch in batches([sample.document for sample in chosen.values()], FORWARD_TOKENS):
        for document, seen in zip(batch, observe(forward, served, batch, RANKS_ONLY)):
            labels = labels_of(chosen[document.prompt_id], heads.num_heads)[:, 1:]
            ranks.append(torch.where(labels >= 0, seen.ranks.cpu(), -1).numpy())
    offsets = np.cumsum([0, *map(len, ranks)])
    trace = RankTrace(np.concatenate(ranks).astype(np.int32), offsets)
    hits, positions = trace.counts()
    # Few documents may be too short for the last heads, which then count as never right.
    table = AcceptanceTable.from_counts(hits, np.maximum(positions, 1))
    accuracies = tuple(float(rate) for rate in table.rates[:, 0])
    return Measure(accuracies, best_tree(table, num_nodes=MEASURED_NODES).expected_accepted)


@dataclass(frozen=True, slots=True)
class Speech:
    """A target on held-out documents.

    Attributes
    ----------
    text_perplexity, prompts_perplexity : float
        Of the text that may be learnt, and of the prompts before it: text that neither the target as it was nor the trained
        one wrote. What frames the prompts' turns counts too.
    agreement : float
        At how many tokens of the text, in [0, 1], the target's greedy choice behind it is the text's.
    """

    text_perplexity: float
    prompts_perplexity: float
    agreement: float


@torch.no_grad()
def speech(target: PreTrainedModel, samples: Sequence[Sample]) -> Speech:
    """Return how likely a target finds text and prompts, and how often it would have said the text.

    Parameters
    ----------
    target : PreTrainedModel
    samples : sequence of Sample
    """
    forward = Forward(target)
    logits, device = logits_of(forward), forward.device
    sums, counts, agreed = [0.0, 0.0], [0, 0], 0
    documents = {sample.document.prompt_id: sample for sample in _first(samples)}
    for batch in batches([sample.document for sample in documents.values()], FORWARD_TOKENS):
        for document in batch:
            states, true = _every_state(forward, document)
            known = [False] * (len(document.prompt) - 1) + list(documents[document.prompt_id].learnt)
            learnt = torch.tensor(known[: len(true)], dtype=torch.bool, device=device)
            for kind, chosen in enumerate((learnt, ~learnt)):
                sums[kind] += float(text_loss(logits, states[chosen], true[chosen]))
                counts[kind] += int(chosen.sum())
            agreed += _agreed(logits, states[learnt], true[learnt])
    text, prompts = (math.exp(total / max(count, 1)) for total, count in zip(sums, counts))
    return Speech(text, prompts, agreed / max(counts[0], 1))


def _agreed(logits: Logits, states: torch.Tensor, true: torch.Tensor) -> int:
    rows = chunk_rows(logits.vocabulary, states.device)
    chunks = [slice(start, start + rows) for start in range(0, len(true), rows)]
    return sum(int((argmax(logits.project(states[chunk])) == true[chunk]).sum()) for chunk in chunks)


def _every_state(forward: Forward, document: Continuation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state before each token but the first, and these tokens, as far as the context goes."""
    known = [*document.prompt, *document.tokens][: context_length(forward.target) + 1]
    ids = torch.tensor([known], device=forward.device)
    rows = torch.arange(ids.shape[1] - 1, device=forward.device)
    return last_states(forward, ids[:, :-1], rows), ids[0, 1:]


def as_served(heads: MedusaHeads, target: nn.Module) -> MedusaHeads:
    """Return a copy of heads in a target's dtype, reading its output embedding."""
    output = OutputEmbedding.of(target)
    with torch.device("meta"):  # no first values: drawing them would move the generator that dropout draws from
        served = MedusaHeads(
            output.module, output.hidden_size, heads.num_heads, heads.num_layers,
            own_lm_heads=heads.lm_heads is not None, columns=heads.columns,
        )  # fmt: skip
    copies = {
        name: value.to(output.device, output.dtype if value.is_floating_point() else value.dtype, copy=True)
        for name, value in heads.state_dict().items()
    }
    served.load_state_dict(copies, assign=True)
    return served.eval()


def _first(samples: Sequence[Sample]) -> list[Sample]:
    chosen: list[Sample] = []
    tokens = 0
    for sample in samples:
        tokens += sample.document.num_inputs
        if chosen and tokens > MEASURED_TOKENS:
            break
        chosen.append(sample)
    return chosen
