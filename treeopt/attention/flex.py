"""Attention through torch's FlexAttention: the mask is a function of ancestor bits, and no mask is laid out in memory."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treeopt.attention import dense
from treeopt.attention.passes import Pass

if TYPE_CHECKING:
    from treeopt.attention.backends import Needs

__all__ = ["attend", "mask_function", "refusal"]

MIN_HEAD_DIM = 16


def refusal(needs: Needs) -> str | None:
    """Say why FlexAttention cannot serve."""
    if needs.device.type != "cuda":
        return "it is for CUDA devices"
    if needs.softcap or needs.sinks:
        return "soft-capping and sinks are left to eager attention"
    if needs.window is not None:
        return f"the texts are longer than the sliding window of {needs.window}"
    if needs.head_dim < MIN_HEAD_DIM:
        return f"its heads have at least {MIN_HEAD_DIM} entries, these {needs.head_dim}"
    return None


def attend(
    query: Tensor, key: Tensor, value: Tensor, at: Pass, *, scaling: float, window: int | None, **_: Any
) -> Tensor:
    """Attend through FlexAttention; see `backends.Attend`."""
    if at.is_whole_text:
        return dense.attend(query, key, value, at, scaling=scaling, window=window)
    output: Tensor = _compiled()(
        query,
        key,
        value,
        block_mask=_block_mask(at, query.device),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous()


def mask_function(at: Pass, device: torch.device) -> Any:
    """Return the function of (row, head, token, slot) on a device that says whether the slot is seen."""
    starts, words, num_tokens = at.starts.to(device), at.packed().to(device), at.num_tokens

    def sees(row: Tensor, head: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        offset = slot - starts[row]
        new = offset.clamp(0, num_tokens - 1)
        bit = (words[token, new // 64] >> (new % 64)) & 1
        return (offset < 0) | ((offset < num_tokens) & (bit == 1))

    return sees


def _block_mask(at: Pass, device: torch.device) -> Any:
    """Return the blocks to be looked at, made once for all layers of a forward."""
    from torch.nn.attention.flex_attention import create_block_mask

    return at.once(
        ("blocks", device),
        lambda: create_block_mask(
            mask_function(at, device), len(at.starts), None, at.num_tokens, at.span, device=str(device)
        ),
    )


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
