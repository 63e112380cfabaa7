"""The way into a transformers model: for the length of one forward its layers call a backend of ours.

transformers looks the attention of a layer up by the name in its configuration. The name is changed for the forward and
put back; which pass is being served is kept beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig

from treeopt.attention.backends import Backend
from treeopt.attention.passes import Pass
from treeopt.errors import TargetError

__all__ = ["Served", "serving"]

NAME = "treeopt"
IN_USE = "the target is decoding in another thread; give each thread a model of its own"


@dataclass(slots=True)
class Served:
    """What the layers of one forward asked for.

    Attributes
    ----------
    calls : int
        Layers that came here.
    windows : set of int
        Sliding windows they named.
    """

    backend: Backend
    at: Pass
    calls: int = 0
    windows: set[int] = field(default_factory=set)


_guard, _busy = Lock(), set[int]()  # configurations in use, by id
_current: ContextVar[Served | None] = ContextVar("served", default=None)


@contextmanager
def serving(config: PretrainedConfig, backend: Backend, at: Pass) -> Iterator[Served]:
    """Let the layers of a forward attend through a backend.

    Parameters
    ----------
    config : PretrainedConfig
        The one that the layers hold.
    backend : Backend
    at : Pass

    Raises
    ------
    TargetError
        If another thread is in a forward of the same target.
    """
    with _guard:
        if id(config) in _busy:
            raise TargetError(IN_USE)
        _busy.add(id(config))
    served = Served(backend, at)
    token = _current.set(served)
    former = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield served
    finally:
        config._attn_implementation = former
        _current.reset(token)
        with _guard:
            _busy.discard(id(config))


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    served = _current.get()
    if served is None:
        raise TargetError(IN_USE)
    served.calls += 1
    if sliding_window is not None:
        served.windows.add(sliding_window)
    output = served.backend.attend(
        query,
        key,
        value,
        served.at,
        scaling=1 / math.sqrt(query.shape[-1]) if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output, None


AttentionInterface.register(NAME, _attend)
