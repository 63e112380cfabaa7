"""Attention with an additive mask: through torch's fused kernels, or step by step for what those do not offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treeopt.attention.passes import Pass

if TYPE_CHECKING:
    from treeopt.attention.backends import Needs

__all__ = ["attend", "attend_eagerly", "refusal", "refusal_eagerly"]


def refusal(needs: Needs) -> str | None:
    """Say why torch's fused attention cannot serve."""
    if needs.softcap:
        return "it has no soft-capping"
    if needs.sinks:
        return "it has no sinks"
    return None


def attend(
    query: Tensor, key: Tensor, value: Tensor, at: Pass, *, scaling: float, window: int | None, **_: Any
) -> Tensor:
    """Attend through torch's fused kernels; see `backends.Attend`."""
    if at.is_whole_text and (window is None or window >= at.span):
        groups = query.shape[1] // key.shape[1]
        output = scaled_dot_product_attention(
            query, key, value, is_causal=at.span > 1, scale=scaling, enable_gqa=groups > 1
        )
        return output.transpose(1, 2).contiguous()
    packed = _pack(query, key)
    output = scaled_dot_product_attention(packed, key, value, attn_mask=_mask(packed, key, at, window), scale=scaling)
    return _unpack(output, query)


def refusal_eagerly(_: Needs) -> str | None:
    """Return None: plain products and a softmax serve everything."""
    return None


def attend_eagerly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    at: Pass,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attend by plain products and a softmax; see `backends.Attend`.

    Parameters
    ----------
    softcap : float, optional
        Scores become softcap · tanh(score / softcap).
    sinks : Tensor, shape (heads,), optional
        A further score of each head, whose weight goes nowhere.
    """
    packed = _pack(query, key)
    scores = (packed @ key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = _mask(packed, key, at, window)
    scores = scores if mask is None else scores + mask
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if sinks is not None:
        per_row = sinks.view(1, key.shape[1], -1, 1).expand(-1, -1, -1, query.shape[2]).flatten(2)
        scores = torch.cat([scores, per_row[..., None].expand(len(scores), -1, -1, -1).to(scores.dtype)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(query.dtype)
    return _unpack(weights @ value, query)


def _pack(query: Tensor, key: Tensor) -> Tensor:
    """Lay the query heads that share keys under one another, so that keys need not be repeated."""
    return query.reshape(len(query), key.shape[1], -1, query.shape[3])  # [rows, kv_heads, groups · tokens, head_dim]


def _unpack(output: Tensor, query: Tensor) -> Tensor:
    num_rows, num_heads, num_tokens, _ = query.shape
    return output.reshape(num_rows, num_heads, num_tokens, -1).transpose(1, 2).contiguous()


def _mask(packed: Tensor, key: Tensor, at: Pass, window: int | None) -> Tensor | None:
    if at.sees_all and (window is None or window >= at.span):
        return None
    return at.bias(packed.dtype, packed.device, window, groups=packed.shape[2] // at.num_tokens)
