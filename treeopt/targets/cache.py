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

from treeopt.attention.passes import Pass
from treeopt.targets.limits import head_dim
from treeopt.targets.placement import is_spread

__all__ = ["RowCache", "bytes_per_token", "cache_keyword"]


def cache_keyword(model: torch.nn.Module) -> str:
    """Return the name under which the model's forward takes a cache: it was renamed within transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class _Place:
    """Where the next forward writes, shared by all layers."""

    def __init__(self) -> None:
        self.rows: Tensor | slice = slice(None)  # the rows of the buffers that take part
        self.at: Pass | None = None

    @property
    def start(self) -> int:
        """What `get_seq_length` answers: only shapes of masks that are not used are made from it."""
        at = self.at
        return 0 if at is None else at.span - at.num_tokens if at.start is None else at.start


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    is_sliding = False
    is_compileable = False

    def __init__(self, keys: Tensor, values: Tensor, place: _Place) -> None:
        super().__init__()
        self.keys, self.values, self.place = keys, values, place
        self.is_initialized = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the buffers exist from the start."""

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return _write(self.keys, keys, self.place), _write(self.values, values, self.place)

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return 0 if self.place.at is None else self.place.at.span, 0

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.place.start

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length  # its name up to transformers 5.0


def _write(buffer: Tensor, new: Tensor, place: _Place) -> Tensor:
    at = place.at
    assert at is not None
    rows = place.rows if isinstance(place.rows, slice) else place.rows.to(buffer.device)
    if at.start is not None:
        buffer[rows, :, at.start : at.start + new.shape[2]] = new
    else:
        index = torch.arange(buffer.shape[0], device=buffer.device)[rows]
        # [rows, tokens, kv_heads, head_dim]
        buffer[index[:, None], :, at.slots.to(buffer.device)] = new.transpose(1, 2)
    return buffer[rows, :, : at.span]


class RowCache:
    """Keys and values of every layer in buffers of a fixed capacity.

    Parameters
    ----------
    target : PreTrainedModel
        Gives the number of layers, KV heads and the head size.
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
        self._place = _Place()
        config: PretrainedConfig = target.config.get_text_config()
        devices = _layer_devices(target, config.num_hidden_layers)
        # One buffer a device, keys and values of all its layers in it, so that keeping an accepted path is one gather.
        # Zeros, not empty: a NaN in a masked slot would poison the whole row.
        shape = (num_rows, _num_kv_heads(config), capacity, head_dim(config))
        self._stacks = {
            device: torch.zeros((2 * devices.count(device), *shape), dtype=target.dtype, device=device)
            for device in dict.fromkeys(devices)
        }
        self._layers = []
        for layer, device in enumerate(devices):
            place = 2 * devices[:layer].count(device)
            keys, values = self._stacks[device][place], self._stacks[device][place + 1]
            self._layers.append(_Layer(keys, values, self._place))
        self._cache = Cache(layers=list(self._layers))

    @property
    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, (rows, kv_heads, capacity, head_dim)."""
        return [(layer.keys, layer.values) for layer in self._layers]

    def at(self, at: Pass, rows: Tensor | slice | None = None) -> Cache:
        """Return the cache set up for a pass.

        Parameters
        ----------
        at : Pass
            Says to which slots the next forward writes its tokens.
        rows : slice or Tensor of int64, optional
            The rows that take part; all by default. A slice needs no copy of what they hold.
        """
        self._place.rows, self._place.at = slice(None) if rows is None else rows, at
        return self._cache

    def rest(self) -> None:
        """Let go of the last pass: a long text's mask is as large as its square."""
        self._place.at = None

    def clear(self) -> None:
        """Zero everything: not even a number that is no number stays in a slot that is masked."""
        for stack in self._stacks.values():
            stack.zero_()

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's prefix from slot `length` on; a longer `length` changes nothing."""
        self.lengths[row] = min(self.lengths[row], length)

    def keep(self, kept: Tensor, start: Tensor) -> None:
        """Move the slots in `kept` to consecutive slots, in the first rows: one gather over all layers, then a write.

        Parameters
        ----------
        kept : Tensor of int64, shape (rows, depth)
            Slots to keep, in order; a row that keeps fewer repeats any of its own slots at the end.
        start : Tensor of int64, shape (rows,)
            The slot that a row's first kept slot moves to. Slots before it are not touched.
        """
        rows = torch.arange(len(kept), device=kept.device)[:, None]
        to = start[:, None] + torch.arange(kept.shape[1], device=kept.device)
        for device, stack in self._stacks.items():
            row, source, goal = rows.to(device), kept.to(device), to.to(device)
            stack[:, row, :, goal] = stack[:, row, :, source]

    def move(self, source: int, goal: int) -> None:
        """Put one row in the place of another, whose contents are forgotten."""
        length = self.lengths[source]
        for stack in self._stacks.values():
            stack[:, goal, :, :length] = stack[:, source, :, :length]
        self.lengths[goal] = length


def bytes_per_token(target: PreTrainedModel) -> int:
    """Return the size of one token's keys and values over all layers, in bytes."""
    config: Any = target.config.get_text_config()
    return int(2 * config.num_hidden_layers * _num_kv_heads(config) * head_dim(config) * target.dtype.itemsize)


def _num_kv_heads(config: PretrainedConfig) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _layer_devices(target: PreTrainedModel, num_layers: int) -> list[torch.device]:
    """Return the device of each layer: one, unless the target was spread over several."""
    if not is_spread(target):
        return [target.device] * num_layers
    layers = next(m for m in target.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers)
    return [next(layer.parameters()).device for layer in layers]
