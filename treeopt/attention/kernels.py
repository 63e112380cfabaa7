"""Triton kernels of tree attention: the prefix is streamed in splits without a mask, the tree masked by ancestor bits.

A program takes a block of query rows (the query heads that share a key head lie under one another) and one split. Splits
0 … num_splits - 1 divide the prefix of the row, whose length is read on the device, so that one launch shape serves every
length; the last split is the tree itself. Each split leaves an unnormalised sum with its maximum and its weight, and a
second kernel merges them.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["merge_splits", "tree_attention"]


@triton.jit
def _take(query, keys, values, maximum, weight, total, scores, precise: tl.constexpr):
    """Add a block of slots to a running softmax (base 2)."""
    highest = tl.maximum(maximum, tl.max(scores, 1))
    # A row that has seen nothing yet keeps -inf; 0 in its place keeps the differences below finite.
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(maximum - safe)
    weights = tl.exp2(scores - safe[:, None])
    weight = weight * shrink + tl.sum(weights, 1)
    if precise:
        total = total * shrink[:, None] + tl.dot(weights, values.to(tl.float32), input_precision="tf32x3")
    else:
        total = total * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
    return highest, weight, total


@triton.jit
def tree_attention(
    query_ptr, key_ptr, value_ptr, words_ptr, starts_ptr, total_ptr, maximum_ptr, weight_ptr,
    query_row, query_head, query_token,
    key_row, key_head, key_slot,
    value_row, value_head, value_slot,
    scale,
    num_tokens, num_packed, num_words,
    num_kv_heads,
    groups: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr,
    block_rows: tl.constexpr, block_slots: tl.constexpr, num_splits: tl.constexpr, precise: tl.constexpr,
):  # fmt: skip
    """Attend from a block of packed query rows to one split; see the module."""
    block, pair, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, kv_head = pair // num_kv_heads, pair % num_kv_heads
    packed = block * block_rows + tl.arange(0, block_rows)
    there = packed < num_packed
    token = packed % num_tokens
    head = kv_head * groups + packed // num_tokens
    dims = tl.arange(0, padded_dim)
    within = dims < head_dim

    query = tl.load(
        query_ptr + row * query_row + head[:, None] * query_head + token[:, None] * query_token + dims[None, :],
        mask=there[:, None] & within[None, :], other=0.0,
    )  # fmt: skip
    keys_at = key_ptr + row.to(tl.int64) * key_row + kv_head * key_head
    values_at = value_ptr + row.to(tl.int64) * value_row + kv_head * value_head
    prefix = tl.load(starts_ptr + row).to(tl.int32)

    maximum = tl.full([block_rows], float("-inf"), tl.float32)
    weight = tl.zeros([block_rows], tl.float32)
    total = tl.zeros([block_rows, padded_dim], tl.float32)

    in_tree = split == num_splits
    # Whole blocks a split, so that only the last block of the prefix is ragged.
    share = tl.cdiv(tl.cdiv(prefix, num_splits), block_slots) * block_slots
    first = tl.where(in_tree, prefix, tl.minimum(split * share, prefix))
    last = tl.where(in_tree, prefix + num_tokens, tl.minimum(split * share + share, prefix))
    for begin in range(first, last, block_slots):
        slots = begin + tl.arange(0, block_slots)
        inside = slots < last
        keys = tl.load(
            keys_at + slots[None, :] * key_slot + dims[:, None], mask=inside[None, :] & within[:, None], other=0.0
        )
        if precise:
            scores = tl.dot(query.to(tl.float32), keys.to(tl.float32), input_precision="tf32x3") * scale
        else:
            scores = tl.dot(query, keys) * scale
        seen = inside[None, :] & there[:, None]
        if in_tree:
            new = tl.maximum(slots - prefix, 0)
            words = tl.load(
                words_ptr + token[:, None] * num_words + (new // 64)[None, :], mask=inside[None, :], other=0
            )
            seen = seen & (((words >> (new % 64).to(tl.int64)[None, :]) & 1) == 1)
        scores = tl.where(seen, scores, float("-inf"))
        values = tl.load(
            values_at + slots[:, None] * value_slot + dims[None, :], mask=inside[:, None] & within[None, :], other=0.0
        )
        maximum, weight, total = _take(query, keys, values, maximum, weight, total, scores, precise)

    place = (pair * (num_splits + 1) + split) * num_packed + packed
    tl.store(maximum_ptr + place, maximum, mask=there)
    tl.store(weight_ptr + place, weight, mask=there)
    tl.store(
        total_ptr + place[:, None].to(tl.int64) * head_dim + dims[None, :], total,
        mask=there[:, None] & within[None, :],
    )  # fmt: skip


@triton.jit
def merge_splits(
    total_ptr, maximum_ptr, weight_ptr, output_ptr,
    output_row, output_token, output_head,
    num_tokens, num_packed, num_kv_heads,
    groups: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr, num_parts: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one packed query row and write it in the model's layout."""
    packed, pair = tl.program_id(0), tl.program_id(1)
    row, kv_head = pair // num_kv_heads, pair % num_kv_heads
    token, head = packed % num_tokens, kv_head * groups + packed // num_tokens
    dims = tl.arange(0, padded_dim)
    within = dims < head_dim
    highest = tl.load(maximum_ptr + (pair * num_parts) * num_packed + packed)
    for part in range(1, num_parts):
        highest = tl.maximum(highest, tl.load(maximum_ptr + (pair * num_parts + part) * num_packed + packed))
    weight = 0.0
    total = tl.zeros([padded_dim], tl.float32)
    for part in range(0, num_parts):
        place = (pair * num_parts + part) * num_packed + packed
        shrink = tl.exp2(tl.load(maximum_ptr + place) - highest)
        weight += tl.load(weight_ptr + place) * shrink
        total += tl.load(total_ptr + place.to(tl.int64) * head_dim + dims, mask=within, other=0.0) * shrink
    tl.store(
        output_ptr + row * output_row + token * output_token + head * output_head + dims,
        (total / weight).to(output_ptr.dtype.element_ty), mask=within,
    )  # fmt: skip
