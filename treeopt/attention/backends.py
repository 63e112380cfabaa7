"""The attention backends: what each is, what it cannot do, and which one serves a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from treeopt.attention import dense, flex, streamed
from treeopt.attention.passes import Pass
from treeopt.errors import TargetError

__all__ = ["AUTO", "BACKENDS", "NATIVE", "Backend", "Needs", "choose"]

AUTO = "auto"
NATIVE = "native"  # the target's own attention, handed an additive mask


@dataclass(frozen=True, slots=True)
class Needs:
    """What a target asks of attention.

    Attributes
    ----------
    device : torch.device
    dtype : torch.dtype
    head_dim : int
    window : int or None
        The sliding window, where the texts to come are longer than it.
    softcap : bool
        Whether scores are soft-capped.
    sinks : bool
        Whether the softmax has a learnt sink.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    window: int | None = None
    softcap: bool = False
    sinks: bool = False


class Attend(Protocol):
    """Attention of one layer."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, at: Pass, *, scaling: float, window: int | None, **extra: Any
    ) -> Tensor:
        """Return (rows, tokens, heads, head_dim) from (rows, heads, tokens | span, head_dim)."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute attention.

    Attributes
    ----------
    attend : callable
        See `Attend`.
    refusal : callable
        Says why a target cannot be served, or returns None.
    """

    attend: Attend
    refusal: Callable[[Needs], str | None]


BACKENDS: Mapping[str, Backend] = {
    "triton": Backend(streamed.attend, streamed.refusal),
    "flex": Backend(flex.attend, flex.refusal),
    "sdpa": Backend(dense.attend, dense.refusal),
    "eager": Backend(dense.attend_eagerly, dense.refusal_eagerly),
}
"""In the order in which they are tried."""


def choose(needs: Needs, name: str = AUTO) -> tuple[str, dict[str, str]]:
    """Return the backend that serves a target, and why those before it do not.

    Parameters
    ----------
    needs : Needs
    name : {'auto', 'triton', 'flex', 'sdpa', 'eager', 'native'}
        The first to be tried; those behind it follow.

    Raises
    ------
    TargetError
        If there is no such backend.
    """
    if name == NATIVE:
        return NATIVE, {}
    if name != AUTO and name not in BACKENDS:
        raise TargetError(f"`attention` is {name!r}; use {AUTO}, {', '.join(BACKENDS)} or {NATIVE}")
    names = list(BACKENDS)
    refused: dict[str, str] = {}
    for candidate in names[0 if name == AUTO else names.index(name) :]:
        reason = BACKENDS[candidate].refusal(needs)
        if reason is None:
            return candidate, refused
        refused[candidate] = reason
    raise AssertionError("eager attention serves every target")
