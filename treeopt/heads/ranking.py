"""The order of a head's guesses: by logit, equal logits by lowest token id, everywhere.

Calibration counts ranks with it and drafting picks tokens with it, so that rank r means the same token in both.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ranks_of", "top_ranked"]

READS_FLAGS = ("cpu",)  # devices on which reading a value does not wait for work that is under way
SPARE = 16  # places beyond the last rank that are looked at for ties
BLOCK_LOGITS = 1 << 20  # compared at once on a CPU: 4 MB in float32, beside which their comparison stays in the cache


def ranks_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the rank of each row's token: how many tokens come before it.

    Parameters
    ----------
    logits : Tensor, shape (rows, vocabulary)
    tokens : Tensor of int64, shape (rows,)

    Returns
    -------
    Tensor of int64, shape (rows,)
        From 0. Two comparisons a logit, no sort and no copy of the logits.
    """
    own = logits.gather(1, tokens[:, None])
    rows = max(1, BLOCK_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    counts = [_counts(logits[i : i + rows], own[i : i + rows]) for i in range(0, len(logits), rows)]
    if not counts:
        return tokens.new_empty(0)
    not_before, behind = (torch.cat(parts) for parts in zip(*counts))
    # Not "how many are greater": nothing compares with NaN, and a token whose own logit is NaN must come last, not first.
    ranks = logits.shape[1] - not_before
    tied = (not_before - behind != 1).nonzero()[:, 0]
    if len(tied):
        before = torch.arange(logits.shape[1], device=logits.device) < tokens[tied, None]
        ranks[tied] += (before & (logits[tied] == own[tied])).sum(dim=1)
    return ranks


def _counts(logits: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Count the logits of each row that are at most, and below, its own."""
    # On a CPU comparisons written as floats and added up take a third of the time of booleans; float32 is exact to 2^24.
    dtype = torch.float32 if logits.device.type == "cpu" else torch.bool
    compared = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    not_before = torch.le(logits, own, out=compared).sum(dim=1).to(torch.int64)
    return not_before, torch.lt(logits, own, out=compared).sum(dim=1).to(torch.int64)


def top_ranked(logits: Tensor, num_ranks: int) -> Tensor:
    """Return the tokens at ranks 0 … num_ranks - 1.

    Parameters
    ----------
    logits : Tensor, shape (..., vocabulary)
    num_ranks : int

    Returns
    -------
    Tensor of int64, shape (..., num_ranks)
    """
    if logits.device.type in READS_FLAGS and num_ranks:
        # A bare topk is four times as fast. With places to spare every tie at the last rank is in sight, as a rule.
        best = logits.topk(min(num_ranks + SPARE, logits.shape[-1]), dim=-1)
        if best.indices.shape[-1] == logits.shape[-1] or bool(
            (best.values[..., num_ranks - 1] > best.values[..., -1]).all()
        ):
            ids, order = best.indices.sort(dim=-1)
            values = best.values.gather(-1, order)
            return ids.gather(-1, values.sort(dim=-1, descending=True, stable=True).indices[..., :num_ranks])
    # topk leaves the order of equal values open, so the token id is made part of the value: an integer that orders as
    # the float does in the upper half, the id, falling, in the lower.
    bits = (logits.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0 in bits as well
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    vocabulary = logits.shape[-1]
    falling = torch.arange(vocabulary - 1, -1, -1, device=logits.device)
    keys = (ordered << 32) + falling
    tokens = keys.topk(num_ranks, dim=-1).values
    return vocabulary - 1 - (tokens & 0xFFFFFFFF)
