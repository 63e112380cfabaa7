"""Sampling: text with exactly the target's own distribution, at any temperature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from treeopt.errors import AcceptanceError
from treeopt.verify.acceptance import AcceptedPaths, NodeScores, walk

__all__ = ["Sample", "draw"]


def draw(scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return one token a row, drawn with the probabilities that the scores have."""
    drawn: Tensor = torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)
    return drawn[:, 0]


@dataclass(frozen=True)
class Sample:
    """Draw the target's next token at each node and follow the child that carries it.

    Parameters
    ----------
    temperature : float
        Above 0.
    top_k : int
        Likeliest tokens kept; 0 keeps all.
    top_p : float
        Likeliest tokens kept until their probabilities reach this; in (0, 1].
    seed : int, optional
        Of the draws; torch's own generator by default.

    Raises
    ------
    AcceptanceError
        If a parameter is out of its range.

    Notes
    -----
    Guesses by rank are no random draws, so the rule of speculative sampling for a drafter with a distribution
    (min(1, p / q)) does not apply to them. Trying the siblings x1, x2, … in turn, accepting each with the probability
    that the target gives it, zeroing and renormalising behind each rejection, accepts x_j with probability p(x_j) and
    draws the rest from the rest of p. One draw from p gives the same law with one random number: it is a sibling or it is
    not.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    name: str = field(default="sample", init=False)
    random: bool = field(default=True, init=False)
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not self.temperature > 0:
            raise AcceptanceError(f"`temperature` is {self.temperature}; give a number above 0, or decode greedily")
        if self.top_k < 0:
            raise AcceptanceError(f"`top_k` is {self.top_k}; give the number of tokens to keep, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise AcceptanceError(f"`top_p` is {self.top_p}; give a number in (0, 1]")

    def accept(self, scores: NodeScores) -> AcceptedPaths:
        """Return the accepted paths."""
        warp = self._warper()
        generator = self._generator(scores.tokens.device)
        return walk(scores, lambda row: draw(warp(row), generator))

    def _warper(self) -> Callable[[Tensor], Tensor]:
        warpers = LogitsProcessorList()
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return lambda row: warpers(None, row)

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if self.seed is None:
            return None
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]
