"""Whether heads guess on new text as they did on the text that a tree was calibrated with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import TraceError
from treeopt.heldout import Estimate, rebuilding_gain
from treeopt.intervals import bootstrap_weights, percentiles
from treeopt.optimize.limits import Limits
from treeopt.trace import RankTrace
from treeopt.walk import document_of_position

__all__ = ["Drift", "HeadDrift", "measure_drift"]

TOPS = (1, 3, 10)
PERMUTATIONS = 2000

Values = NDArray[np.float64]


@dataclass(frozen=True)
class HeadDrift:
    """How one head's accuracies on the new trace differ from the reference's.

    Attributes
    ----------
    head : int
    differences : tuple of (float, float, float)
        Top-1, top-3 and top-10 accuracy, new minus reference, each with its 95 % interval over documents of both.
    effect_size : float
        Cohen's h of top-1 accuracy: the difference of 2·asin(√p). About 0.2 is small, 0.5 medium, 0.8 large.
    p_value : float
        Of a permutation test: how often the largest of the three differences is as large if documents are shuffled
        between the traces.
    """

    head: int
    differences: tuple[tuple[float, float, float], ...]
    effect_size: float
    p_value: float


@dataclass(frozen=True)
class Drift:
    """All heads, and what a tree built anew would gain.

    Attributes
    ----------
    heads : tuple of HeadDrift
    gain : Estimate
        Replayed tokens a step on the new trace of trees built from it, on documents left out, minus those of the tree
        that was built from the reference.
    """

    heads: tuple[HeadDrift, ...]
    gain: Estimate

    @property
    def significant(self) -> tuple[int, ...]:
        """Heads whose difference is beyond chance at 5 %, divided by the number of heads."""
        return tuple(head.head for head in self.heads if head.p_value < 0.05 / len(self.heads))


def measure_drift(reference: RankTrace, trace: RankTrace, limits: Limits, *, seed: int = 0) -> Drift:
    """Compare the ranks of two traces, head by head, and a tree of the one with trees of the other.

    Parameters
    ----------
    reference, trace : RankTrace
        Of the same heads.
    limits : Limits
        Of the trees.
    seed : int
        Of bootstrap and permutations.

    Raises
    ------
    TraceError
        If the traces have different numbers of heads, or one has a single document.
    """
    if reference.num_heads != trace.num_heads:
        raise TraceError(
            f"the reference has {reference.num_heads} heads and the trace {trace.num_heads}; compare traces of the same heads"
        )
    if min(reference.num_documents, trace.num_documents) < 2:
        raise TraceError("a trace of a single document shows no spread; calibrate on more prompts")
    sides = [_counts(one) for one in (reference, trace)]
    weights = [
        bootstrap_weights(one.num_documents, seed=seed + i).astype(np.float64)
        for i, one in enumerate((reference, trace))
    ]
    heads = tuple(_head(head, sides, weights, seed) for head in range(trace.num_heads))
    return Drift(heads, rebuilding_gain(reference, trace, limits, seed=seed))


def _counts(trace: RankTrace) -> tuple[Values, Values]:
    """Return per document hits (documents, heads, tops) and observed positions (documents, heads)."""
    document = document_of_position(trace)
    hits = np.zeros((trace.num_documents, trace.num_heads, len(TOPS)))
    observed = np.zeros((trace.num_documents, trace.num_heads))
    for head, column in enumerate(trace.ranks.T):
        observed[:, head] = np.bincount(document[column >= 0], minlength=trace.num_documents)
        for i, top in enumerate(TOPS):
            right = (column >= 0) & (column < top)
            hits[:, head, i] = np.bincount(document[right], minlength=trace.num_documents)
    return hits, observed


def _head(head: int, sides: list[tuple[Values, Values]], weights: list[Values], seed: int) -> HeadDrift:
    before, after = ((hits[:, head], observed[:, head]) for hits, observed in sides)
    difference = _rates(*after, np.ones((1, len(after[1])))) - _rates(*before, np.ones((1, len(before[1]))))
    resampled = _rates(*after, weights[1]) - _rates(*before, weights[0])
    low, high = percentiles(resampled)
    top1 = [float(_rates(*side, np.ones((1, len(side[1]))))[0, 0]) for side in (before, after)]
    angles = [2 * np.arcsin(np.sqrt(rate)) for rate in top1]
    return HeadDrift(
        head,
        tuple(zip(difference[0].tolist(), low.tolist(), high.tolist())),
        float(angles[1] - angles[0]),
        _p_value(before, after, float(np.abs(difference).max()), seed),
    )


def _rates(hits: Values, observed: Values, weights: Values) -> Values:
    """Return the accuracies for rows of weights of the documents, (rows, tops)."""
    rates: Values = (weights @ hits) / np.maximum(weights @ observed, 1.0)[:, None]
    return rates


def _p_value(before: tuple[Values, Values], after: tuple[Values, Values], found: float, seed: int) -> float:
    hits, observed = (np.concatenate(part) for part in zip(before, after))
    rng = np.random.default_rng(seed)
    second = np.zeros((PERMUTATIONS, len(observed)))
    for row in second:
        row[rng.permutation(len(observed))[: len(after[1])]] = 1.0
    shuffled = np.abs(_rates(hits, observed, second) - _rates(hits, observed, 1.0 - second)).max(axis=1)
    return float((1 + (shuffled >= found - 1e-12).sum()) / (1 + PERMUTATIONS))
