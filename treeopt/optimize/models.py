"""Path models: how likely the next rank is accepted, given that the path before it was.

A search asks for nothing else. Because a conditional never exceeds 1, a path is never likelier than its parent under any
of them, and the best nodes always form a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt.acceptance import AcceptanceTable
from treeopt.errors import AcceptanceError
from treeopt.paths import Path
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree

__all__ = ["HeadModel", "JointModel", "PathModel", "SiblingModel", "path_probabilities"]

Child = tuple[float, int]  # conditional rate, rank
MIN_DOCUMENTS = 2
STRENGTHS = (*(4.0**power for power in range(-1, 8)), float("inf"))  # positions of the heads' own accuracy


class PathModel(Protocol):
    """What every search needs of an acceptance model."""

    @property
    def num_levels(self) -> int:
        """Deepest level a path can reach."""

    def children(self, path: Path) -> Sequence[Child]:
        """Return (conditional rate, rank) of the children of a path that have a positive rate.

        Best first: by falling rate, equal rates by rising rank. Ranks need not be monotone.
        """


@dataclass(frozen=True, eq=False)
class HeadModel:
    """Independent heads: the rate of rank r at depth d is head d - 1's accuracy at r, whatever the path.

    Attributes
    ----------
    table : AcceptanceTable
    """

    table: AcceptanceTable

    @property
    def num_levels(self) -> int:
        """Number of heads."""
        return self.table.num_heads

    @cached_property
    def levels(self) -> tuple[tuple[Child, ...], ...]:
        """Children of any path of each length, best first."""
        return tuple(_sorted_children(row) for row in self.table.rates)

    def children(self, path: Path) -> Sequence[Child]:
        """See `PathModel.children`."""
        return self.levels[len(path)] if len(path) < len(self.levels) else ()


def SiblingModel(rates: ArrayLike, max_depth: int) -> HeadModel:  # noqa: N802  (reads as a model)
    """Return the model of one fixed row of rates for every level: the i-th child of any node is accepted with rates[i].

    Parameters
    ----------
    rates : array_like of float, shape (ranks,)
    max_depth : int

    Notes
    -----
    Sequoia's positional acceptance (Chen et al. 2024, arXiv 2402.12374, section 4.1).
    """
    return HeadModel(AcceptanceTable.from_rates([list(np.asarray(rates, dtype=float))] * max_depth))


@dataclass(frozen=True, eq=False)
class JointModel:
    """Joint counts of whole paths, shrunk level by level toward independent heads.

    The conditional of rank r after a path is (hits + strength · a) / (seen + strength), where `seen` positions followed
    the path, `hits` of them went on with r, and a is the head's own accuracy at r. Raw counts (strength 0) overfit at a
    few hundred positions; an infinite strength is the independent model.

    Attributes
    ----------
    table : AcceptanceTable
        Accuracies of the heads alone.
    codes : tuple of ndarray of int64, each sorted
        For each level, one code per observed position: the path before it and its rank, in base `num_ranks` + 1.
    strengths : tuple of float
        One per level, in positions; infinity takes the head's own accuracy.
    """

    table: AcceptanceTable
    codes: tuple[NDArray[np.int64], ...]
    strengths: tuple[float, ...]

    @classmethod
    def fit(cls, trace: RankTrace, *, num_ranks: int = 32, folds: int = 5) -> JointModel:
        """Count the paths of a trace and choose each level's strength by held-out documents.

        A strength is the one under which documents left out of the counting have the largest likelihood, in
        `folds`-fold cross-validation. Where counts teach nothing it ends at infinity: the independent model.

        Parameters
        ----------
        trace : RankTrace
        num_ranks : int
            Ranks counted; deeper ones are one class, never drafted.
        folds : int

        Raises
        ------
        AcceptanceError
            If the trace has fewer than two documents, or more levels and ranks than a 64-bit code holds.
        """
        if trace.num_documents < MIN_DOCUMENTS:
            raise AcceptanceError(f"`{trace.num_documents}` documents cannot be split to hold some out; calibrate more")
        if (num_ranks + 1) ** trace.num_heads >= 1 << 63:
            raise AcceptanceError(f"`num_ranks` {num_ranks} is too much for {trace.num_heads} heads; give fewer")
        table = trace.table(num_ranks)
        num_ranks = table.num_ranks
        ranks = np.minimum(trace.ranks.astype(np.int64), num_ranks)
        document = np.repeat(np.arange(trace.num_documents), np.diff(trace.documents))
        fold = document % min(folds, trace.num_documents)
        codes = [_codes(ranks, level, num_ranks) for level in range(trace.num_heads)]
        # Before the first head there is no path: its counts are its own accuracy.
        strengths = [float("inf")] + [
            _best_strength(codes[level], fold[ranks[:, level] >= 0], num_ranks) for level in range(1, trace.num_heads)
        ]
        return cls(table, tuple(np.sort(code) for code in codes), tuple(strengths))

    def simplest(self) -> PathModel:
        """Return the independent model if counts taught nothing: searches are exact for more of its constraints."""
        return HeadModel(self.table) if all(map(np.isinf, self.strengths)) else self

    @property
    def num_levels(self) -> int:
        """Number of heads."""
        return self.table.num_heads

    def children(self, path: Path) -> Sequence[Child]:
        """See `PathModel.children`."""
        level = len(path)
        if level >= self.num_levels:
            return ()
        own, strength = self.table.rates[level], self.strengths[level]
        if np.isinf(strength):
            return _sorted_children(own)
        base = self.table.num_ranks + 1
        code = 0
        for rank in path:
            code = code * base + rank
        codes = self.codes[level]
        start, end = np.searchsorted(codes, [code * base, (code + 1) * base])
        hits = np.bincount(codes[start:end] - code * base, minlength=base)[:-1]
        return _sorted_children((hits + strength * own) / (end - start + strength))


def path_probabilities(model: PathModel, tree: DraftTree) -> NDArray[np.float64]:
    """Return the probability of each node's whole path under a model, shape (num_nodes,).

    Parameters
    ----------
    model : PathModel
    tree : DraftTree
    """
    probabilities = np.ones(tree.num_nodes)
    rates: dict[Path, dict[int, float]] = {}
    for node, path in enumerate(tree.paths[1:], 1):
        parent = path[:-1]
        if parent not in rates:
            rates[parent] = {rank: rate for rate, rank in model.children(parent)}
        probabilities[node] = probabilities[tree.parents[node]] * rates[parent].get(path[-1], 0.0)
    return probabilities


def _sorted_children(rates: NDArray[np.float64]) -> tuple[Child, ...]:
    order = np.argsort(-rates, kind="stable")
    order = order[rates[order] > 0]
    return tuple(zip(rates[order].tolist(), order.tolist()))


def _codes(ranks: NDArray[np.int64], level: int, num_ranks: int) -> NDArray[np.int64]:
    """Return for every position observed at `level` its path and rank as one number; the last digit is the rank."""
    observed = ranks[ranks[:, level] >= 0, : level + 1]
    codes = np.zeros(len(observed), dtype=np.int64)
    for column in observed.T:
        codes = codes * (num_ranks + 1) + column
    return codes


def _best_strength(codes: NDArray[np.int64], fold: NDArray[np.int64], num_ranks: int) -> float:
    """Return the strength under which held-out positions have the largest likelihood; ties go to the stronger."""
    likelihood = np.zeros(len(STRENGTHS))
    for held_out in range(int(fold.max(initial=0)) + 1):
        likelihood += _held_out_likelihood(codes[fold != held_out], codes[fold == held_out], num_ranks)
    best = len(STRENGTHS) - 1 - int(likelihood[::-1].argmax())
    return STRENGTHS[best]


def _held_out_likelihood(
    counted: NDArray[np.int64], held_out: NDArray[np.int64], num_ranks: int
) -> NDArray[np.float64]:
    """Return the log-likelihood of held-out codes under every strength, in nats; shape (strengths,)."""
    base = num_ranks + 1
    counted = np.sort(counted)
    own = np.bincount(counted % base, minlength=base) + 0.5  # half a hit: a rank unseen here may be seen there
    own /= own.sum()
    path, rank = held_out // base, held_out % base
    seen = np.searchsorted(counted, (path + 1) * base) - np.searchsorted(counted, path * base)
    hits = np.searchsorted(counted, held_out + 1) - np.searchsorted(counted, held_out)
    total = np.empty(len(STRENGTHS))
    for i, strength in enumerate(STRENGTHS):
        if np.isinf(strength):
            total[i] = np.log(own[rank]).sum()
        else:
            total[i] = np.log((hits + strength * own[rank]) / (seen + strength)).sum()
    return total
