"""The host's side of a decode: the texts, when each ends, and how rows of a tensor become texts and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treeopt.verify.acceptance import Processors

__all__ = ["Decoded", "Heard", "Stop", "Texts", "padded", "paths_of", "unpadded"]

Stop = Callable[[int, list[int]], bool]
"""Takes a row and its new tokens so far; says whether the row ends with the last of them."""

Heard = Callable[[int, list[int]], None]
"""Takes a row and its new tokens as soon as they are decided."""


@dataclass(slots=True)
class Decoded:
    """What a decode of one prompt gave.

    Attributes
    ----------
    tokens : list of int
        New tokens, up to and including the end-of-sequence token.
    accepted : list of int
        Tokens of each step less one: the accepted nodes, root excluded, up to the end of the text. The first token
        comes from the prompt's own pass, not from a step.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Verification passes."""
        return len(self.accepted)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that the steps gave, over their number."""
        return (len(self.tokens) - 1) / self.num_steps if self.accepted else 1.0


class Texts:
    """The texts of a batch, and when each ends.

    Parameters
    ----------
    prompts : sequence of sequences of int
    shown : sequence of sequences of int
        What processors see in the place of each prompt.
    limits : sequence of int
        Most new tokens of each.
    eos : collection of int
        Tokens that end a text.
    processors : callable or None
        Logits processors, for which `before` makes texts.
    stop : Stop or None
    heard : Heard or None
    device : torch.device
        Of the texts that processors see.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        shown: Sequence[Sequence[int]],
        limits: Sequence[int],
        eos: Collection[int],
        processors: Processors | None,
        stop: Stop | None,
        heard: Heard | None,
        device: torch.device,
    ) -> None:
        self.prompts, self.shown, self.limits, self.eos = prompts, shown, limits, eos
        self.processors, self.stop, self.heard = processors, stop, heard
        self.device = device
        self.rows = [Decoded() for _ in prompts]
        self.ended = [False] * len(prompts)

    def take(self, row: int, path: Sequence[int]) -> int:
        """Append tokens up to the end of the text; return how many were."""
        decoded, first = self.rows[row], not self.rows[row].tokens
        taken: list[int] = []
        for token in path:
            taken.append(token)
            decoded.tokens.append(token)
            if self._ends(row, decoded.tokens):
                self.ended[row] = True
                break
        if not first:
            decoded.accepted.append(len(taken) - 1)
        if self.heard is not None:
            self.heard(row, taken)
        return len(taken)

    def before(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the text before the root of each row, where processors ask for it."""
        if self.processors is None:
            return []
        return [torch.tensor([*self.shown[i], *self.rows[i].tokens[:-1]], device=self.device) for i in rows]

    def _ends(self, row: int, tokens: list[int]) -> bool:
        if len(tokens) >= self.limits[row] or tokens[-1] in self.eos:
            return True
        return self.stop is not None and self.stop(row, tokens)


def paths_of(table: Tensor) -> Iterator[list[int]]:
    """Yield each row's accepted tokens followed by the bonus token: the step's one transfer to the host."""
    for row in table.tolist():
        yield [*row[2 : 2 + row[0]], row[1]]


def unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return the tokens of each row that are no padding."""
    kept = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    return [row[mask].tolist() for row, mask in zip(input_ids, kept)]


def padded(input_ids: Tensor, new: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Return prompts and new tokens as one tensor, short rows filled up."""
    width = max(map(len, new))
    rows = [[*tokens, *[pad] * (width - len(tokens))] for tokens in new]
    return torch.cat([input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
