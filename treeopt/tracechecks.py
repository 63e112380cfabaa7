"""What the arrays of a trace must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt.errors import TraceError

__all__ = ["UNOBSERVED", "check_offsets", "checked_probabilities", "checked_prompts", "whole_numbers"]

UNOBSERVED = -1


def check_offsets(ranks: NDArray[Any], documents: NDArray[Any], domains: Sequence[str] | None) -> None:
    """Refuse ranks, offsets and domains that do not fit together."""
    if ranks.ndim != 2 or ranks.shape[1] == 0 or not np.issubdtype(ranks.dtype, np.integer):
        raise TraceError(f"`ranks` has shape {ranks.shape} and dtype {ranks.dtype}; give integers (positions, heads)")
    if ranks.size and (int(ranks.min()) < UNOBSERVED or int(ranks.max()) > np.iinfo(np.int32).max):
        raise TraceError(f"`ranks` holds {ranks.min()} … {ranks.max()}; ranks are 32 bits from 0, and -1 not observed")
    if documents.ndim != 1 or not len(documents) or not np.issubdtype(documents.dtype, np.integer):
        raise TraceError(f"`documents` has shape {documents.shape}; give offsets, one more than there are documents")
    if documents[0] != 0 or documents[-1] != len(ranks) or bool((np.diff(documents) < 0).any()):
        raise TraceError(
            f"`documents` must rise from 0 to the {len(ranks)} positions; got {documents[0]} … {documents[-1]}"
        )
    if domains is not None and len(domains) != len(documents) - 1:
        raise TraceError(f"`domains` has {len(domains)} entries for {len(documents) - 1} documents; give one each")


def checked_probabilities(
    topk_probs: ArrayLike | None, entropies: ArrayLike | None, ranks: NDArray[Any]
) -> tuple[NDArray[np.float16] | None, NDArray[np.float32] | None]:
    """Return probabilities and entropies as read-only arrays, or None for both."""
    if topk_probs is None and entropies is None:
        return None, None
    if topk_probs is None or entropies is None:
        raise TraceError("`topk_probs` and `entropies` belong together; give both or neither")
    probs, entropy = np.array(topk_probs, dtype=np.float16), np.array(entropies, dtype=np.float32)
    if probs.shape[:2] != ranks.shape or probs.ndim != 3 or entropy.shape != ranks.shape[:1]:
        raise TraceError(
            f"`topk_probs` has shape {probs.shape} and `entropies` {entropy.shape}; give (positions, heads, R) and "
            f"(positions,) for ranks of shape {ranks.shape}"
        )
    if not (((probs >= 0) & (probs <= 1)).all() and (np.isfinite(entropy) & (entropy >= 0)).all()):
        raise TraceError("`topk_probs` must lie in [0, 1] and `entropies` be finite from 0 on; calibrate again")
    for array in (probs, entropy):
        array.setflags(write=False)
    return probs, entropy


def whole_numbers(values: ArrayLike, name: str) -> NDArray[Any]:
    """Return an array whose integers are all signed 64-bit ones: unsigned differences would wrap around."""
    array = np.asarray(values)
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise TraceError(f"`{name}` holds {array.max()}; give integers of 64 bits")
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array


def checked_prompts(prompts: ArrayLike | None, num_documents: int) -> NDArray[np.int64] | None:
    """Return one key for each document, or None."""
    if prompts is None:
        return None
    keys = whole_numbers(prompts, "prompts")
    if keys.shape != (num_documents,) or keys.dtype != np.int64:
        raise TraceError(
            f"`prompts` has shape {keys.shape} and dtype {keys.dtype} for {num_documents} documents; give one integer each"
        )
    keys = keys.copy()
    keys.setflags(write=False)
    return keys
