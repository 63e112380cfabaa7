"""Which token of the target each column of a head's logits stands for.

Three numbers must be told apart: the rows of the target's output embedding, often padded to a round number; the tokens
that its tokenizer knows; and the rows of the heads' own output embeddings. Columns from the number of tokens on are pads:
the target never means them, so no head may guess them, whatever logit they have. A head with fewer columns than that
brings a map. A token without a column is one that the head cannot guess: its rank lies beyond every tree's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treeopt.errors import HeadsError
from treeopt.heads.ranking import ranks_of, top_ranked
from treeopt.trace import NO_GUESS

if TYPE_CHECKING:
    from treeopt.heads.medusa import MedusaHeads

__all__ = ["Columns", "in_target_ids", "is_padding", "mapped_ids", "require_equal_vocabularies"]

PADDED_TO = (8, 16, 32, 64, 128, 256, 512)


class Columns(nn.Module):
    """The columns of every head's logits.

    Parameters
    ----------
    num_columns : int
        Columns that stand for tokens; what lies behind them is padding.
    ids : Tensor of int64, shape (num_columns,), optional
        The target's token of each column, rising, so that equal logits go to the lowest token. Column i is token i by
        default.
    """

    places: Tensor | None

    def __init__(self, num_columns: int, ids: Tensor | None = None) -> None:
        super().__init__()
        self.num_columns = num_columns
        # A parameter, not a buffer: heads that differ in their map alone have different fingerprints.
        self.ids = None if ids is None else nn.Parameter(ids, requires_grad=False)
        places: Tensor | None = None
        if ids is not None:
            places = torch.full((int(ids[-1]) + 1,), -1, device=ids.device)
            places[ids] = torch.arange(num_columns, device=ids.device)
        self.register_buffer("places", places, persistent=False)

    def tokens(self, columns: Tensor) -> Tensor:
        """Return the target's token of each column."""
        return columns if self.ids is None else self.ids[columns.to(self.ids.device)]

    def guesses(self, logits: Tensor, num_ranks: int) -> Tensor:
        """Return the target's tokens at ranks 0 … num_ranks - 1, shape (..., num_ranks).

        Raises
        ------
        HeadsError
            If there are fewer columns.
        """
        self.require_ranks(num_ranks)
        return self.tokens(top_ranked(logits, num_ranks))

    def ranks(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the rank of each row's token among its guesses; `treeopt.trace.NO_GUESS` where no column stands for it.

        Parameters
        ----------
        logits : Tensor, shape (rows, num_columns)
        tokens : Tensor of int64, shape (rows,)
            The target's.
        """
        tokens = tokens.to(logits.device)
        if self.places is None:
            known, columns = tokens < self.num_columns, tokens.clamp(max=self.num_columns - 1)
        else:
            inside = tokens < len(self.places)
            columns = torch.where(inside, self.places[tokens.clamp(max=len(self.places) - 1)], -1)
            known = columns >= 0
        return torch.where(known, ranks_of(logits, columns.clamp(min=0)), NO_GUESS)

    def require_ranks(self, num_ranks: int) -> None:
        """Raise HeadsError unless there are as many guesses."""
        if num_ranks > self.num_columns:
            raise HeadsError(
                f"`rank {num_ranks - 1}` is asked for, but the heads have {self.num_columns} guesses; prune the tree or "
                "ask for less"
            )


Draft = Callable[["MedusaHeads", Tensor, Sequence[int]], list[Tensor]]


def in_target_ids(draft: Draft) -> Draft:
    """Turn a method that drafts columns into one that drafts the target's tokens, on the device of the hidden states."""

    @wraps(draft)
    def drafted(heads: MedusaHeads, hidden: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        heads.columns.require_ranks(max(ranks, default=0))
        return [heads.columns.tokens(columns).to(hidden.device) for columns in draft(heads, hidden, ranks)]

    return drafted


def mapped_ids(source: object, maps: Mapping[str, Tensor]) -> Tensor | None:
    """Return the target's token of each draft token, or None without a map.

    Parameters
    ----------
    source : object
        The file, for error texts.
    maps : mapping of str to Tensor
        ``token_map`` holds tokens; ``d2t`` what is to be added to the draft token's own number; ``t2d`` says of each of
        the target's tokens whether a draft token stands for it, and must agree.

    Raises
    ------
    HeadsError
        If a map holds no integers, names a token twice or below 0, or two maps contradict each other.
    """
    found: dict[str, Tensor] = {}
    for kind in ("token_map", "d2t"):
        if kind in maps:
            values = maps[kind]
            if values.ndim != 1 or not len(values) or values.is_floating_point() or values.dtype == torch.bool:
                raise HeadsError(
                    f"`{source}`: `{kind}` has shape {tuple(values.shape)} and dtype {values.dtype}; give a list of integers"
                )
            offset = 0 if kind == "token_map" else torch.arange(len(values))
            found[kind] = values.to(torch.int64) + offset
            _check_ids(source, kind, found[kind])
    if len(found) == 2 and not torch.equal(*found.values()):
        raise HeadsError(f"`{source}`: `token_map` and `d2t` name different tokens; keep the right one")
    ids = next(iter(found.values()), None)
    if "t2d" in maps:
        _check_flags(source, maps["t2d"], ids)
    return ids


def _check_ids(source: object, kind: str, ids: Tensor) -> None:
    if int(ids.min()) < 0:
        draft = int(ids.argmin())
        raise HeadsError(f"`{source}`: `{kind}` sends draft token {draft} to {int(ids[draft])}; tokens start at 0")
    order = ids.argsort(stable=True)
    twice = (ids[order[1:]] == ids[order[:-1]]).nonzero()
    if len(twice):
        first, second = order[int(twice[0])], order[int(twice[0]) + 1]
        raise HeadsError(
            f"`{source}`: `{kind}` sends draft tokens {int(first)} and {int(second)} both to {int(ids[first])}; "
            "every draft token needs its own"
        )


def _check_flags(source: object, flags: Tensor, ids: Tensor | None) -> None:
    if ids is None or not torch.equal(flags.reshape(-1).nonzero()[:, 0], ids.sort().values):
        raise HeadsError(f"`{source}`: `t2d` marks other tokens than `d2t` names; get the checkpoint again")


def is_padding(rows: int, tokens: int) -> bool:
    """Return whether so many rows are so many tokens, rounded up to a power of two from 8 to 512."""
    return any(rows == -(-tokens // unit) * unit for unit in PADDED_TO)


def require_equal_vocabularies(source: object, own_rows: int, target_rows: int, num_tokens: int) -> None:
    """Refuse heads whose output embeddings and the target's are more than padding apart.

    Parameters
    ----------
    source : object
        The file, for error texts.
    own_rows, target_rows : int
        Rows of the heads' and the target's output embedding.
    num_tokens : int
        Tokens that the target's tokenizer knows.

    Raises
    ------
    HeadsError
        Naming the sizes.
    """
    for size in (target_rows, num_tokens):
        if own_rows == size or is_padding(max(own_rows, size), min(own_rows, size)):
            return
    raise HeadsError(
        f"`{source}`: the heads guess {own_rows} tokens, the target has {num_tokens} in {target_rows} rows, and there is no "
        "`token_map` or `d2t`; these heads belong to another target, or their map is missing"
    )
