"""Things in a row, as near as possible to where they want to be, without touching."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["spaced"]

Places = NDArray[np.float64]


def spaced(wanted: ArrayLike, sizes: ArrayLike, low: float, high: float) -> Places:
    """Return centres that keep the order and do not overlap, with the least sum of squared moves.

    Parameters
    ----------
    wanted : array_like of float, shape (things,)
        Where each centre would like to be; neighbours keep their order whatever it says.
    sizes : array_like of float, shape (things,)
        Extent of each, gap included.
    low, high : float
        Ends of the row. What does not fit sticks out at the high end.

    Examples
    --------
    >>> spaced([5.0, 5.0, 9.0], [2.0, 2.0, 2.0], 0.0, 10.0).tolist()
    [4.0, 6.0, 9.0]
    """
    goals, extents = np.asarray(wanted, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    if not goals.size:
        return goals
    # Without the room that the things before each take, "no overlap" reads "never falls": isotonic regression.
    before = np.cumsum(extents) - extents / 2
    free = np.clip(_rising(goals - before), low, max(low, high - float(extents.sum())))
    return free + before


def _rising(values: Places) -> Places:
    """Return the nearest sequence that never falls: neighbours that fall are pooled at their mean."""
    means: list[float] = []
    counts: list[int] = []
    for value in values.tolist():
        mean, count = value, 1
        while means and means[-1] > mean:
            other = counts.pop()
            mean = (means.pop() * other + mean * count) / (other + count)
            count += other
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)
