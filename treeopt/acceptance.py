"""Per-head accuracies: how often head h's rank-r guess is the token the target produces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt import strictjson
from treeopt.errors import AcceptanceError

__all__ = ["AcceptanceTable"]

SCHEMA = "treeopt.acceptance/1"
OVERSHOOT = 0.05  # rates fitted or rounded rank by rank may sum to a little over 1; cumulative rows go far beyond
MAX_COUNT = 1 << 48  # sums of counts stay far from the end of 64 bits
MIN_CUMULATIVE_RANKS = 3  # two rising rates prove nothing: a head's second guess may be the better one


@dataclass(frozen=True, eq=False)
class AcceptanceTable:
    """Accuracy of each head at each rank.

    Attributes
    ----------
    rates : ndarray of float64, shape (heads, ranks)
        In [0, 1]; a row sums to at most 1 (rates fitted rank by rank, 1.05). Ranks need not be monotone.
    positions : ndarray of int64, shape (heads,), or None
        At how many positions each head had an observed token; None for bare rates.

    Examples
    --------
    >>> table = AcceptanceTable.from_rates([[0.6, 0.2], [0.5, 0.1]])
    >>> table.num_heads, table.num_ranks
    (2, 2)
    """

    rates: NDArray[np.float64]
    positions: NDArray[np.int64] | None = None

    @classmethod
    def from_rates(cls, rates: ArrayLike | Sequence[Sequence[float]]) -> AcceptanceTable:
        """Build from rates, one row a head; shorter rows are filled with zeros.

        Raises
        ------
        AcceptanceError
            For a rate that is not a number in [0, 1], a row that sums to more than 1, or rows that look like
            cumulative top-k accuracies.
        """
        array = _rectangle(rates)
        _check_rates(array)
        array.setflags(write=False)
        return cls(array)

    @classmethod
    def from_counts(cls, hits: ArrayLike, positions: ArrayLike) -> AcceptanceTable:
        """Build from hits per head and rank, and the positions each head was observed at.

        Parameters
        ----------
        hits : array_like of int, shape (heads, ranks)
        positions : array_like of int, shape (heads,)
            Every head has its own: head h sees no token behind the end of a document.

        Raises
        ------
        AcceptanceError
            For negative counts or more hits than positions.
        """
        hit, seen = np.asarray(hits), np.asarray(positions)
        if hit.ndim != 2 or seen.shape != hit.shape[:1]:
            raise AcceptanceError(
                f"`hits` has shape {hit.shape} and `positions` {seen.shape}; give (heads, ranks) and (heads,)"
            )
        if not (np.issubdtype(hit.dtype, np.integer) and np.issubdtype(seen.dtype, np.integer)):
            raise AcceptanceError(f"`hits` and `positions` are {hit.dtype} and {seen.dtype}; give whole numbers")
        if hit.size and (hit.min() < 0 or seen.min() < 0):
            raise AcceptanceError("`hits` and `positions` hold a negative count; counts start at 0")
        if not seen.size or seen.min() == 0 or seen.max() > MAX_COUNT or hit.max(initial=0) > MAX_COUNT:
            raise AcceptanceError(f"`positions` must lie in 1 … {MAX_COUNT} for every head, and no hits above; recount")
        over = np.flatnonzero(hit.sum(axis=1) > seen)
        if over.size:
            head = int(over[0])
            raise AcceptanceError(f"head `{head}` has {hit[head].sum()} hits at {seen[head]} positions; recount")
        rates = hit / np.maximum(seen, 1)[:, None]
        rates.setflags(write=False)
        return cls(rates, seen.astype(np.int64))

    @classmethod
    def read(cls, path: str | Path) -> AcceptanceTable:
        """Read a JSON file of schema ``treeopt.acceptance/1``, or a bare list of rows of rates.

        Raises
        ------
        AcceptanceError
            If the file is not JSON, has unknown keys, or holds no accuracies.
        """
        try:
            data = strictjson.parse(Path(path).read_bytes())
        except OSError as error:
            raise AcceptanceError(
                f"`{path}` cannot be read: {error.strerror}; give a trace or an acceptance table"
            ) from error
        except ValueError as error:
            raise AcceptanceError(f"`{path}` cannot be read as an acceptance table: {error}; mend it") from error
        try:
            return cls.from_json(data)
        except (AcceptanceError, OverflowError) as error:
            raise AcceptanceError(f"`{path}`: {error}") from error

    @classmethod
    def from_json(cls, data: Any) -> AcceptanceTable:
        """Build from parsed JSON; see `read`."""
        if isinstance(data, list):
            return cls.from_rates(data)
        if isinstance(data, dict) and str(data.get("schema")).startswith("treeopt.tree/"):
            raise AcceptanceError("this is a tree, not a table of accuracies; print it with treeopt show")
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise AcceptanceError(
                f"`schema` is {found!r}; an acceptance table has schema {SCHEMA!r} or is a list of rows"
            )
        unknown = sorted(set(data) - {"schema", "rates", "hits", "positions", "source"})
        if unknown:
            raise AcceptanceError(f"`{unknown[0]}` is not a key of {SCHEMA}; delete it")
        if ("rates" in data) == ("hits" in data):
            raise AcceptanceError("exactly one of `rates` and `hits` is needed; give bare rates, or hits and positions")
        if "rates" in data:
            return cls.from_rates(data["rates"])
        return cls.from_counts(data["hits"], data.get("positions", []))

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return int(self.rates.shape[0])

    @property
    def num_ranks(self) -> int:
        """Number of ranks known for each head."""
        return int(self.rates.shape[1])

    def top(self, num_ranks: int) -> NDArray[np.float64]:
        """Return each head's top-`num_ranks` accuracy, shape (heads,)."""
        total: NDArray[np.float64] = self.rates[:, :num_ranks].sum(axis=1)
        return total


def _rectangle(rates: Any) -> NDArray[np.float64]:
    if isinstance(rates, np.ndarray):
        rows: list[Any] = list(rates) if rates.ndim == 2 else [rates]
    else:
        rows = list(rates) if isinstance(rates, (list, tuple)) else [rates]
    for head, row in enumerate(rows):
        if not isinstance(row, (list, tuple, np.ndarray)) or len(row) == 0:
            raise AcceptanceError(f"head `{head}` is {row!r}; give a list of rates, one a rank")
        if any(isinstance(rate, (bool, str)) for rate in row):
            raise AcceptanceError(f"head `{head}` holds something that is not a number: {row!r}")
    if not rows:
        raise AcceptanceError("`rates` is empty; give one row of rates for each head")
    array = np.zeros((len(rows), max(map(len, rows))))
    for head, row in enumerate(rows):
        try:
            array[head, : len(row)] = row
        except (TypeError, ValueError, OverflowError):
            raise AcceptanceError(f"head `{head}` holds something that is not a number: {row!r}") from None
    return array


def _check_rates(rates: NDArray[np.float64]) -> None:
    bad = np.argwhere(~((rates >= 0) & (rates <= 1)))
    if bad.size:
        head, rank = map(int, bad[0])
        raise AcceptanceError(f"head `{head}` has rate {rates[head, rank]} at rank {rank}; accuracies lie in [0, 1]")
    cumulative = rates.shape[1] >= MIN_CUMULATIVE_RANKS and bool(
        ((np.diff(rates, axis=1) > 0).all(axis=1) & (rates[:, 0] > 0)).all()
    )
    over = np.flatnonzero(rates.sum(axis=1) > 1 + OVERSHOOT)
    if cumulative:
        raise AcceptanceError(
            "every head's rates rise from rank to rank: these are cumulative top-k accuracies; "
            "give the accuracy of each rank alone (the differences of neighbours)"
        )
    if over.size:
        head = int(over[0])
        raise AcceptanceError(
            f"head `{head}` has rates that sum to {rates[head].sum():.6g}; the ranks of one head exclude each other, so "
            "give the accuracy of each rank alone, not cumulative top-k"
        )
