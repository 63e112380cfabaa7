"""Attention through the project's own Triton kernels: no mask in memory, the prefix read once, its length on the device."""

from __future__ import annotations

import importlib.util
import math
import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treeopt.attention import dense
from treeopt.attention.passes import Pass

if TYPE_CHECKING:
    from treeopt.attention.backends import Needs

__all__ = ["Launch", "attend", "refusal"]

HEAD_DIMS = (16, 256)
PRECISE_HEAD_DIM = 128  # larger float32 heads do not fit the registers
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SLOTS_A_SPLIT = 1024  # of capacity: enough splits to fill a device where the rows are few
MOST_SPLITS = 16


def refusal(needs: Needs) -> str | None:
    """Say why the kernels cannot serve."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if needs.device.type != "cuda" and not interpreted:
        return "it is for CUDA devices"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if needs.softcap or needs.sinks:
        return "soft-capping and sinks are left to eager attention"
    if needs.window is not None:
        return f"the texts are longer than the sliding window of {needs.window}"
    if not HEAD_DIMS[0] <= needs.head_dim <= HEAD_DIMS[1]:
        return f"its heads have {HEAD_DIMS[0]} to {HEAD_DIMS[1]} entries, these {needs.head_dim}"
    if needs.dtype == torch.float32 and needs.head_dim > PRECISE_HEAD_DIM:
        return f"its float32 heads have up to {PRECISE_HEAD_DIM} entries, these {needs.head_dim}"
    if needs.dtype not in DTYPES or (interpreted and needs.dtype == torch.bfloat16):
        return f"it does not take {str(needs.dtype).removeprefix('torch.')}"
    return None


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch shape of the kernels for one kind of query.

    Attributes
    ----------
    block_rows, block_slots : int
        Packed query rows and slots that a program takes at once.
    num_splits : int
        Parts of the prefix.
    num_warps, num_stages : int
    precise : bool
        Whether products are of float32 numbers, as exact as three products of tf32 parts are.
    """

    block_rows: int
    block_slots: int
    num_splits: int
    num_warps: int
    num_stages: int
    precise: bool

    @classmethod
    def of(cls, num_packed: int, head_dim: int, span: int, dtype: torch.dtype) -> Launch:
        """Return the shape for `num_packed` query rows over at most `span` slots."""
        precise = dtype == torch.float32
        # Compiled ahead of time for sm_80 and sm_90, these are the largest blocks that spill no registers.
        if precise:
            block_rows, block_slots, num_warps = (32 if num_packed > 16 and head_dim <= 64 else 16), 32, 4
        else:
            block_rows = 16 if num_packed <= 16 else 32 if num_packed <= 32 else 64
            block_slots = 32 if head_dim > 128 else 64
            num_warps = 8 if head_dim > 128 or (head_dim > 64 and block_rows > 32) else 4
        num_splits = max(1, min(MOST_SPLITS, span // SLOTS_A_SPLIT))
        return cls(block_rows, block_slots, num_splits, num_warps, 2, precise)


def attend(
    query: Tensor, key: Tensor, value: Tensor, at: Pass, *, scaling: float, window: int | None, **_: Any
) -> Tensor:
    """Attend through the kernels; see `backends.Attend`."""
    if at.is_whole_text:
        return dense.attend(query, key, value, at, scaling=scaling, window=window)
    # Triton launches on the current device, which need not be that of a target on several.
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        return _launched(query.to(key.dtype), key, value, at, scaling)


def _launched(query: Tensor, key: Tensor, value: Tensor, at: Pass, scaling: float) -> Tensor:
    from treeopt.attention.kernels import merge_splits, tree_attention

    if query.stride(-1) != 1:
        query = query.contiguous()
    num_rows, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    num_packed = groups * num_tokens
    launch = Launch.of(num_packed, head_dim, at.span, query.dtype)
    parts = launch.num_splits + 1
    padded_dim = 1 << (head_dim - 1).bit_length()
    pairs = num_rows * num_kv_heads
    # The same memory for every layer: a layer has merged its parts before the next writes its own.
    total, maximum, weight = at.once(
        ("parts", query.device, pairs, parts, num_packed, head_dim),
        lambda: (
            torch.empty((pairs, parts, num_packed, head_dim), dtype=torch.float32, device=query.device),
            torch.empty((pairs, parts, num_packed), dtype=torch.float32, device=query.device),
            torch.empty((pairs, parts, num_packed), dtype=torch.float32, device=query.device),
        ),
    )
    words, starts = at.packed().to(query.device), at.starts.to(query.device)
    tree_attention[(-(-num_packed // launch.block_rows), pairs, parts)](
        query, key, value, words, starts, total, maximum, weight,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        scaling * math.log2(math.e),
        num_tokens, num_packed, words.shape[1], num_kv_heads,
        groups=groups, head_dim=head_dim, padded_dim=padded_dim,
        block_rows=launch.block_rows, block_slots=launch.block_slots, num_splits=launch.num_splits,
        precise=launch.precise, num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    output = torch.empty((num_rows, num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    merge_splits[(num_packed, pairs)](
        total, maximum, weight, output, *output.stride()[:3],
        num_tokens, num_packed, num_kv_heads,
        groups=groups, head_dim=head_dim, padded_dim=padded_dim, num_parts=parts,
    )  # fmt: skip
    return output
