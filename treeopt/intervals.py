"""Bootstrap intervals over documents: tokens of one document go together, so documents are what is resampled."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["bootstrap_weights", "percentiles", "ratio_interval"]

RESAMPLES = 2000
CONFIDENCE = 0.95


def bootstrap_weights(num_documents: int, *, seed: int = 0, resamples: int = RESAMPLES) -> NDArray[np.int64]:
    """Return how often each document is drawn in each resample, shape (resamples, num_documents)."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_documents, np.full(num_documents, 1 / num_documents), size=resamples)


def percentiles(values: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the ends of the 95 % interval of resampled values, over their first axis."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.asarray(values), [tail, 1 - tail], axis=0)
    return low, high


def ratio_interval(
    numerators: ArrayLike, denominators: ArrayLike, *, seed: int = 0, confidence: float = CONFIDENCE
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the percentile bootstrap interval of a ratio of sums over documents.

    Parameters
    ----------
    numerators, denominators : array_like, shape (documents, ...)
        One row a document; the ratio is of their column sums.
    seed : int
    confidence : float
        In (0, 1).

    Returns
    -------
    low, high : ndarray of float64, shape (...)
        NaN where every resample has a denominator of 0.

    Examples
    --------
    >>> low, high = ratio_interval([3, 4, 5, 4], [4, 5, 6, 5])
    >>> bool(low < 16 / 20 < high)
    True
    """
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    weights = bootstrap_weights(len(above), seed=seed).astype(np.float64)
    totals = np.tensordot(weights, below, axes=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.where(totals > 0, np.tensordot(weights, above, axes=1) / totals, np.nan)
    tail = (1 - confidence) / 2
    undefined = np.isnan(ratios).all(axis=0)
    low, high = np.nanquantile(np.where(undefined, 0.0, ratios), [tail, 1 - tail], axis=0)
    return np.where(undefined, np.nan, low), np.where(undefined, np.nan, high)
