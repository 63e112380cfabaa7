"""Typical acceptance: a guess passes when the target gives it enough probability, less where the target is unsure."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt.errors import AcceptanceError, TraceError
from treeopt.trace import RankTrace

__all__ = ["DELTA", "EPSILON", "check_thresholds", "entropy", "passing_guesses", "typical_threshold"]

EPSILON, DELTA = 0.09, 0.3  # the values that Medusa was published with


def entropy(probabilities: ArrayLike) -> NDArray[np.float64]:
    """Return the entropy of distributions, in nats; a probability of 0 adds nothing.

    Parameters
    ----------
    probabilities : array_like of float, shape (..., tokens)
        In [0, 1], each row summing to 1.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    total: NDArray[np.float64] = -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1)
    return total


def typical_threshold(entropies: ArrayLike, epsilon: float = EPSILON, delta: float = DELTA) -> NDArray[np.float64]:
    """Return the probability that a guess must exceed: min(ε, δ · exp(−H)).

    Parameters
    ----------
    entropies : array_like of float
        H of the target's distribution, in nats.
    epsilon, delta : float
        In (0, 1).

    Notes
    -----
    Cai et al. 2024 (Medusa, arXiv 2401.10774, section 2.3.1). With δ below 1 the likeliest token always passes, since no
    distribution gives all its tokens less than exp(−H).

    Examples
    --------
    >>> typical_threshold(entropy([0.7, 0.2, 0.05, 0.05]), 0.3, 0.09).round(4).item()
    0.0377
    """
    check_thresholds(epsilon, delta)
    return np.minimum(epsilon, delta * np.exp(-np.asarray(entropies, dtype=np.float64)))


def check_thresholds(epsilon: float, delta: float) -> None:
    """Refuse thresholds outside (0, 1).

    Raises
    ------
    AcceptanceError
        Naming the value.
    """
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < value < 1:
            raise AcceptanceError(f"`{name}` is {value}; give a number between 0 and 1")


def passing_guesses(trace: RankTrace, epsilon: float = EPSILON, delta: float = DELTA) -> NDArray[np.bool_]:
    """Return which guesses pass typical acceptance at the positions where every head has an observed token.

    A guess is judged behind the document's own text, whatever was guessed before it: what the target would say behind
    another guess no trace knows.

    Parameters
    ----------
    trace : RankTrace
        With `topk_probs` and `entropies`.
    epsilon, delta : float
        See `typical_threshold`.

    Returns
    -------
    ndarray of bool, shape (positions, heads, ranks)

    Raises
    ------
    TraceError
        If the trace does not hold the target's probabilities, or no position has all heads observed.
    """
    if trace.topk_probs is None or trace.entropies is None:
        raise TraceError(
            "the trace does not hold the target's probabilities of the guesses, which typical acceptance needs; "
            "calibrate with --candidates 10"
        )
    rows = np.flatnonzero((trace.ranks >= 0).all(axis=1))
    if not rows.size:
        raise TraceError("no position has a token observed by every head; calibrate on longer continuations")
    # Head h's guess is judged h tokens after the root, by the target's distribution there.
    thresholds = typical_threshold(trace.entropies[rows[:, None] + np.arange(trace.num_heads)], epsilon, delta)
    passes: NDArray[np.bool_] = trace.topk_probs[rows] > thresholds[:, :, None]
    return passes
