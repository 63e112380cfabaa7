"""Typical acceptance: a guess passes when the target gives it enough probability; the longest passing path is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from treeopt.typical import DELTA, EPSILON, check_thresholds
from treeopt.verify.acceptance import AcceptedPaths, NodeScores, deepest, standing
from treeopt.verify.sampling import Sample, draw

__all__ = ["Typical"]


@dataclass(frozen=True)
class Typical:
    """Accept the longest path whose every token has more probability than min(ε, δ · exp(−H)).

    Of several paths of that length the likeliest is taken. The token behind it is drawn from those that pass there.

    Parameters
    ----------
    epsilon, delta : float
        In (0, 1).
    temperature : float
        Of the target's distribution, above 0.
    seed : int, optional
        Of the draws; torch's own generator by default.

    Raises
    ------
    AcceptanceError
        If a parameter is out of its range.

    Notes
    -----
    Cai et al. 2024 (Medusa, arXiv 2401.10774, section 2.3.1); H is the entropy in nats. The text does not have the
    target's distribution: what is unlikely is left out.
    """

    epsilon: float = EPSILON
    delta: float = DELTA
    temperature: float = 1.0
    seed: int | None = None
    name: str = field(default="typical", init=False)
    random: bool = field(default=True, init=False)
    _sample: Sample = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_thresholds(self.epsilon, self.delta)
        object.__setattr__(self, "_sample", Sample(self.temperature, seed=self.seed))

    def accept(self, scores: NodeScores) -> AcceptedPaths:
        """Return the accepted paths."""
        index, tokens = scores.index, scores.tokens
        rows = torch.arange(len(tokens), device=tokens.device)
        passes = torch.ones(tokens.shape, dtype=torch.bool, device=tokens.device)
        likelihood = torch.zeros(tokens.shape, device=tokens.device)
        for node, children in index.inner:
            logarithms = self._logarithms(scores.at(torch.full_like(rows, node)))
            threshold = self._threshold(logarithms)
            guessed = logarithms.gather(1, tokens[:, children])
            passes[:, children] = guessed.exp() > threshold[:, None]
            likelihood[:, children] = likelihood[:, node, None] + guessed.float()
        stands = standing(passes, index)
        length = index.depths[deepest(stands, index)]
        longest = stands & (index.depths == length[:, None])
        nodes = torch.where(longest, likelihood, float("-inf")).argmax(dim=-1)
        last = self._logarithms(scores.at(nodes))
        kept = torch.where(last.exp() > self._threshold(last)[:, None], last, float("-inf"))
        return AcceptedPaths(nodes, length, draw(kept, self._sample._generator(tokens.device)))

    def _logarithms(self, scores: Tensor) -> Tensor:
        return (scores / self.temperature).log_softmax(dim=-1)

    def _threshold(self, logarithms: Tensor) -> Tensor:
        # A token that the target excludes has probability 0 and logarithm -inf; it adds nothing to the entropy.
        entropy = -(logarithms.exp() * logarithms.clamp_min(-1e4)).sum(dim=-1)
        return (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
