"""The losses, a few rows of logits at a time: neither (positions, vocabulary) nor its gradient is ever in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from treeopt.calibrate.observe import chunk_rows
from treeopt.heads.medusa import MedusaHeads

__all__ = ["HEAD_DECAY", "Logits", "chunked", "divergence", "heads_loss", "text_loss"]

HEAD_DECAY = 0.8

Compute = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True)
class Logits:
    """How logits come from states.

    Attributes
    ----------
    project : callable
        Gives the logits, (rows, vocabulary), of states, (rows, hidden).
    vocabulary : int
    trained : tuple of Tensor
        What of `project` is trained.
    """

    project: Callable[[Tensor], Tensor]
    vocabulary: int
    trained: tuple[Tensor, ...] = ()


def heads_loss(heads: MedusaHeads, hidden: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Return the sum over heads of 0.8^h times the mean cross-entropy of head h, in nats.

    Parameters
    ----------
    heads : MedusaHeads
    hidden : Tensor, shape (positions, hidden)
        The target's last hidden states.
    labels : Tensor of int64, shape (positions, heads)
        Token that each head should guess; -1 where there is none.
    counts : Tensor, shape (heads,)
        What each head's sum is divided by: its own labelled positions, in all passes of the optimiser step.

    Returns
    -------
    Tensor of float32, shape ()
    """
    total = torch.zeros((), device=hidden.device)
    for head in range(heads.num_heads):
        labelled = labels[:, head] >= 0
        loss = text_loss(_logits(heads, head), _states(heads, head, hidden[labelled]), labels[labelled, head])
        total = total + loss * (HEAD_DECAY**head / counts[head].clamp_min(1))
    return total


def text_loss(logits: Logits, states: Tensor, true: Tensor) -> Tensor:
    """Return the summed cross-entropy of the tokens `true`, in nats.

    Parameters
    ----------
    logits : Logits
    states : Tensor, shape (rows, hidden)
    true : Tensor of int64, shape (rows,)
    """

    def compute(piece: Tensor, rows: slice) -> Tensor:
        found: Tensor = _CrossEntropy.apply(logits.project(piece), true[rows])  # type: ignore[no-untyped-call]
        return found

    return chunked(compute, states, logits.trained, rows=chunk_rows(logits.vocabulary, states.device))


def divergence(logits: Logits, states: Tensor, original: Logits, before: Tensor) -> Tensor:
    """Return the summed Kullback-Leibler divergence of the distributions from the original ones, in nats.

    Parameters
    ----------
    logits : Logits
    states : Tensor, shape (rows, hidden)
    original : Logits
        What `logits` were.
    before : Tensor, shape (rows, hidden)
        What `states` were.
    """

    def compute(piece: Tensor, rows: slice) -> Tensor:
        with torch.no_grad():
            goal = original.project(before[rows]).float().log_softmax(-1)
        return functional.kl_div(logits.project(piece).float().log_softmax(-1), goal, reduction="sum", log_target=True)

    return chunked(compute, states, logits.trained, rows=chunk_rows(2 * logits.vocabulary, states.device))


def chunked(compute: Compute, states: Tensor, trained: Iterable[Tensor], *, rows: int) -> Tensor:
    """Return the sum of `compute(states[rows], rows)` over chunks of rows; each chunk's gradient is taken at once.

    Parameters
    ----------
    compute : callable
        Gives a scalar from a chunk of states and the slice of rows that it is.
    states : Tensor, shape (positions, hidden)
    trained : iterable of Tensor
        What `compute` trains beside.
    rows : int
        Of a chunk.
    """
    needed = (states, *trained) if torch.is_grad_enabled() else (states.detach(),)
    found: Tensor = _Chunked.apply(compute, rows, *needed)  # type: ignore[no-untyped-call]
    return found


class _Chunked(torch.autograd.Function):
    """Gradients are formed in the forward pass, where the logits stand, and scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, rows: int, states: Tensor, *trained: Tensor) -> Tensor:
        needed = ctx.needs_input_grad[2:]
        inputs = (states, *trained)
        gradients = [torch.zeros_like(given) if need else None for given, need in zip(inputs, needed)]
        total = torch.zeros((), device=states.device)
        for start in range(0, len(states), rows):
            chunk = slice(start, start + rows)
            piece = states[chunk].detach().requires_grad_(needed[0])
            with torch.set_grad_enabled(any(needed)):
                loss = compute(piece, chunk)
                total += loss.detach()
                wanted = [given for given, need in zip((piece, *trained), needed) if need]
                found = iter(torch.autograd.grad(loss, wanted) if wanted else ())
            for i, gradient in enumerate(gradients):
                if gradient is not None:
                    (gradient if i else gradient[chunk]).add_(next(found))
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, each: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if gradient is None else gradient * each.to(gradient.dtype) for gradient in ctx.saved_tensors)
        return (None, None, *scaled)


class _CrossEntropy(torch.autograd.Function):
    """Summed cross-entropy whose gradient takes the place of the probabilities: a third of the memory traffic."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, true: Tensor) -> Tensor:
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        ctx.save_for_backward(probabilities, true)
        ctx.dtype = logits.dtype
        found = probabilities.gather(1, true[:, None]).clamp_min(torch.finfo(torch.float32).tiny)
        return -found.log().sum()

    @staticmethod
    def backward(ctx: Any, each: Tensor) -> tuple[Tensor, None]:
        probabilities, true = ctx.saved_tensors
        probabilities.scatter_add_(1, true[:, None], probabilities.new_full((len(true), 1), -1.0))
        return probabilities.mul_(each).to(ctx.dtype), None


def _states(heads: MedusaHeads, head: int, hidden: Tensor) -> Tensor:
    """Return what a head's output embedding reads; a residual block may be trained in another dtype than the target's."""
    block: Any = heads.blocks[head]
    own: Any = heads.lm_heads[head] if heads.lm_heads is not None else None
    states: Tensor = block(hidden.to(block[0].linear.weight.dtype))
    return states.to(hidden.dtype if own is None else own.weight.dtype)


def _logits(heads: MedusaHeads, head: int) -> Logits:
    trained = tuple(parameter for parameter in heads.output(head).parameters() if parameter.requires_grad)
    return Logits(partial(heads.project, head=head), heads.vocabulary, trained)
