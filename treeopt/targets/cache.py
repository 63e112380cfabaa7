"""A preallocated KV cache whose rows have lengths of their own.

transformers' own caches grow by concatenation and know one length for the whole batch. A tree pass needs neither: its
nodes go to slots that the caller names, and after acceptance a gather keeps the slots of the accepted path.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["RowCache", "bytes_per_token", "cache_keyword"]


def cache_keyword(model: torch.nn.Module) -> str:
    """Return the name under which the model's forward takes a cache: it was renamed within transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class _Slots:
    """Where the next forward writes, shared by all layers: rows, one slot per new token, and the span to read back."""

    def __init__(self) -> None:
        self.rows: Tensor | slice = slice(None)  # the rows of the buffers that take part
        self.slots: Tensor | int = 0  # [rows, tokens], or one start for all rows
        self.span = 0  # slots visible to attention
        self.past = 0  # what get_seq_length answers


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    is_sliding = False
    is_compileable = False

    def __init__(self, keys: Tensor, values: Tensor, shared: _Slots) -> None:
        super().__init__()
        self.keys, self.values, self.shared = keys, values, shared
        self.is_initialized = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the buffers exist from the start."""

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return _write(self.keys, keys, self.shared), _write(self.values, values, self.shared)

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self.shared.span, 0

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.shared.past

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length  # its name up to transformers 5.0


def _write(buffer: Tensor, new: Tensor, at: _Slots) -> Tensor:
    if isinstance(at.slots, int):
        buffer[at.rows, :, at.slots : at.slots + new.shape[2]] = new
    else:
        rows = torch.arange(buffer.shape[0], device=buffer.device) if isinstance(at.rows, slice) else at.rows
        buffer[rows[:, None], :, at.slots] = new.transpose(1, 2)  # [rows, tokens, kv_heads, head_dim]
    return buffer[at.rows, :, : at.span]


class RowCache:
    """Keys and values of every layer in buffers of a fixed capacity.

    Parameters
    ----------
    target : PreTrainedModel
        Gives the number of layers, KV heads and the head size, per layer where they differ.
    num_rows : int
        Batch size.
    capacity : int
        Slots a row can hold: prefix plus the nodes of one pass.

    Attributes
    ----------
    lengths : list of int
        Per row, the number of slots that hold the prefix. Slots beyond it are scratch and must be masked.
    """

    def __init__(self, target: PreTrainedModel, num_rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = [0] * num_rows
        self._shared = _Slots()
        config: PretrainedConfig = target.config.get_text_config()
        # Zeros, not empty: a NaN in a masked slot would poison the whole row.
        shape = (num_rows, _num_kv_heads(config), capacity, _head_dim(config))
        self._layers = [
            _Layer(
                torch.zeros(shape, dtype=target.dtype, device=target.device),
                torch.zeros(shape, dtype=target.dtype, device=target.device),
                self._shared,
            )
            for _ in range(config.num_hidden_layers)
        ]
        self._cache = Cache(layers=list(self._layers))

    @property
    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, (rows, kv_heads, capacity, head_dim)."""
        return [(layer.keys, layer.values) for layer in self._layers]

    def at(self, slots: Tensor | int, num_tokens: int, rows: Tensor | None = None) -> Cache:
        """Return the cache set up so that the next forward writes its tokens to `slots`.

        Parameters
        ----------
        slots : Tensor of int64, shape (rows, tokens), or int
            A slot for each new token, or the first slot when it is the same in every row.
        num_tokens : int
            Number of new tokens per row.
        rows : Tensor of int64, optional
            The rows that take part; all by default.
        """
        shared = self._shared
        shared.rows = slice(None) if rows is None else rows
        shared.slots = slots
        shared.past = slots if isinstance(slots, int) else int(slots.min())
        shared.span = slots + num_tokens if isinstance(slots, int) else int(slots.max()) + 1
        return self._cache

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's prefix from slot `length` on; a longer `length` changes nothing."""
        self.lengths[row] = min(self.lengths[row], length)

    def keep(self, kept: Tensor, rows: Tensor, start: Tensor) -> None:
        """Move the slots in `kept` to consecutive slots: a gather over each layer, then a write.

        Parameters
        ----------
        kept : Tensor of int64, shape (rows, depth)
            Slots to keep, in order; a row that keeps fewer repeats any of its own slots at the end.
        rows : Tensor of int64, shape (rows,)
        start : Tensor of int64, shape (rows,)
            The slot that a row's first kept slot moves to. Slots before it are not touched.
        """
        to = start[:, None] + torch.arange(kept.shape[1], device=kept.device)
        for keys, values in self.buffers:
            keys[rows[:, None], :, to] = keys[rows[:, None], :, kept]
            values[rows[:, None], :, to] = values[rows[:, None], :, kept]


def bytes_per_token(target: PreTrainedModel) -> int:
    """Return the size of one token's keys and values over all layers, in bytes."""
    config: Any = target.config.get_text_config()
    return int(2 * config.num_hidden_layers * _num_kv_heads(config) * _head_dim(config) * target.dtype.itemsize)


def _num_kv_heads(config: PretrainedConfig) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
