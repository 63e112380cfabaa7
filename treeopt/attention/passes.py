"""What the new tokens of one forward may attend to, said once and read by every attention backend."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Pass", "words_of"]

WORD_BITS = 64


@dataclass(frozen=True, eq=False)
class Pass:
    """The new tokens of one forward: where they stand and whom they see.

    Token i of row b is written to slot ``starts[b] + i`` and stands at position ``starts[b] + depths[i]``. It sees every
    slot before ``starts[b]`` and those new tokens that `visible` names.

    Attributes
    ----------
    starts : Tensor of int64, shape (rows,)
        Prefix length of each row.
    depths : Tensor of int64, shape (tokens,)
    visible : Tensor of bool, shape (tokens, tokens), or None
        True where the row's token may attend to the column's; None for a text, see `among`.
    span : int
        Slots handed to attention, at least ``max(starts) + tokens``.
    start : int or None
        The prefix length, where it is the same in every row and known on the host.
    causal : bool
        Whether `visible` is a lower triangle and `depths` count up: a text, not a tree.
    words : Tensor of int64, shape (tokens, ceil(tokens / 64)), or None
        `visible` packed, bit ``j % 64`` of word ``j // 64``; made when a backend asks for it.
    """

    starts: Tensor
    depths: Tensor
    visible: Tensor | None
    span: int
    start: int | None = None
    causal: bool = False
    words: Tensor | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def text(cls, num_rows: int, num_tokens: int, device: torch.device, start: int = 0) -> Pass:
        """Return the pass of texts that go on at slot `start`; what pads them stands on the right."""
        places = torch.arange(num_tokens, device=device)
        return cls(
            starts=torch.full((num_rows,), start, dtype=torch.int64, device=device),
            depths=places,
            visible=None,
            span=start + num_tokens,
            start=start,
            causal=True,
        )

    @classmethod
    def next_token(cls, starts: Tensor, span: int, start: int | None = None) -> Pass:
        """Return the pass of one new token a row."""
        one = torch.zeros(1, dtype=torch.int64, device=starts.device)
        return cls(starts, one, None, span, start, causal=True)

    @property
    def num_tokens(self) -> int:
        """New tokens of each row."""
        return self.depths.shape[0]

    @property
    def sees_all(self) -> bool:
        """Whether every slot of the span is seen by every token, so that no mask is needed."""
        return self.num_tokens == 1 and self.start is not None and self.span == self.start + 1

    @property
    def slots(self) -> Tensor:
        """Slot of each new token, (rows, tokens)."""
        return self.starts[:, None] + torch.arange(self.num_tokens, device=self.starts.device)

    def positions(self, context: int) -> Tensor:
        """Return the position of each new token, (rows, tokens), held below the target's context."""
        # A node beyond the context is never kept: decoding ends there. Its position only has to exist.
        return (self.starts[:, None] + self.depths).clamp(max=context - 1)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` gives, made by the first layer and shared by all others of the forward."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @property
    def among(self) -> Tensor:
        """`visible`, that of a text made when it is asked for: for long texts it is large, and rarely needed."""
        if self.visible is not None:
            return self.visible
        lower: Tensor = self.once("among", lambda: self.depths[None, :] <= self.depths[:, None])
        return lower

    @property
    def is_whole_text(self) -> bool:
        """Whether texts are read from their beginning, so that causal attention needs no mask."""
        return self.causal and self.start == 0 and self.num_tokens == self.span

    def packed(self) -> Tensor:
        """Return `words`."""
        words: Tensor = self.once("words", lambda: words_of(self.among)) if self.words is None else self.words
        return words

    def seen(self, window: int | None = None) -> Tensor:
        """Return which slots each token sees, (rows, tokens, span) of bool.

        Parameters
        ----------
        window : int, optional
            Positions a token looks back, itself included; nothing farther is seen.
        """
        slot = torch.arange(self.span, device=self.starts.device)
        offset = slot - self.starts[:, None]  # [rows, span]; the new token of each slot
        new = offset.clamp(0, self.num_tokens - 1)
        inside = (offset >= 0) & (offset < self.num_tokens)
        among = self.among[:, new].movedim(0, 1)  # [rows, tokens, span]
        seen = torch.where(inside[:, None], among, (offset < 0)[:, None])
        if window is not None:
            # By position, not by slot: nodes of one depth stand in many slots.
            there = torch.where(inside, self.starts[:, None] + self.depths[new], slot)
            here = self.starts[:, None] + self.depths
            seen = seen & (here[:, :, None] - there[:, None, :] < window)
        return seen

    def bias(self, dtype: torch.dtype, device: torch.device, window: int | None = None, groups: int = 1) -> Tensor:
        """Return the additive mask, (rows, 1, groups · tokens, span): 0 where seen, the dtype's minimum elsewhere.

        `groups` repeats it for query heads that share keys.
        """

        def make() -> Tensor:
            # Not a bool mask: eager attention would add it as 0 and 1. Not -inf: a row of them would be NaN.
            bias = torch.zeros((len(self.starts), self.num_tokens, self.span), dtype=dtype, device=self.starts.device)
            bias.masked_fill_(~self.seen(window), torch.finfo(dtype).min)
            return bias.repeat(1, groups, 1)[:, None].to(device)

        bias: Tensor = self.once((dtype, device, window, groups), make)
        return bias


def words_of(visible: Tensor) -> Tensor:
    """Pack rows of booleans into words of 64 bits, (tokens, words)."""
    num_tokens = visible.shape[1]
    num_words = -(-num_tokens // WORD_BITS)
    padded = torch.zeros((visible.shape[0], num_words * WORD_BITS), dtype=torch.int64, device=visible.device)
    padded[:, :num_tokens] = visible
    bits = torch.arange(WORD_BITS, device=visible.device)
    # The bits are disjoint, so the sum is their union; bit 63 is the sign and wraps as it should.
    return (padded.view(-1, num_words, WORD_BITS) << bits).sum(dim=-1)
