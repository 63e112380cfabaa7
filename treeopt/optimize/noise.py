"""How sure a tree's E[L] is: the bootstrap over documents of the trace it was built from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.intervals import bootstrap_weights, percentiles
from treeopt.paths import Path
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree
from treeopt.walk import accepted_nodes, document_counts, document_of_position

__all__ = ["Noise", "Sample", "sampling_noise"]

RESAMPLES = 1000
MAX_NODES = 4096  # a table of resamples × nodes stays under 40 MB

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Noise:
    """What another sample of documents would change.

    Attributes
    ----------
    low, high : float
        95 % interval of E[L] under the tree's acceptance model.
    nodes_within_noise : int or None
        Nodes of the tree that the sample cannot tell from the likeliest path left out: the interval of the difference of
        their probabilities holds 0. None where nodes were not chosen by their probability.
    """

    low: float
    high: float
    nodes_within_noise: int | None


@dataclass(frozen=True)
class Sample:
    """Documents that a path model was counted on.

    Attributes
    ----------
    trace : RankTrace
    strengths : sequence of float, optional
        Of a `JointModel`, held fixed; without them heads are independent.
    weight : float
        Share of these documents in a mixture; documents of different samples are resampled apart.
    """

    trace: RankTrace
    strengths: Sequence[float] | None = None
    weight: float = 1.0


def sampling_noise(samples: Sequence[Sample], tree: DraftTree, left_out: Path | None, *, seed: int = 0) -> Noise | None:
    """Resample documents and return the spread of E[L] of a fixed tree.

    Parameters
    ----------
    samples : sequence of Sample
        One, or the domains of a mixture.
    tree : DraftTree
    left_out : Path or None
        The likeliest path that is not in the tree; its parent is.
    seed : int

    Returns
    -------
    Noise or None
        None for trees too large for the table of resamples, and for samples of a single document.
    """
    samples = [sample for sample in samples if sample.weight > 0]
    if tree.num_nodes > MAX_NODES or min(sample.trace.num_documents for sample in samples) < 2:
        return None
    wider = tree if left_out is None else DraftTree.from_paths([*tree.paths[1:], left_out])
    probabilities = np.zeros((RESAMPLES, wider.num_nodes))
    for i, sample in enumerate(samples):
        probabilities += sample.weight * _resampled(sample, wider, seed + i)
    extra = np.array([path == left_out for path in wider.paths])
    drafted = ~extra
    drafted[0] = False
    low, high = percentiles(probabilities[:, drafted].sum(axis=1))
    within = 0
    if left_out is not None:
        lowest, _ = percentiles(probabilities[:, drafted] - probabilities[:, extra])
        within = int((lowest <= 0).sum())
    return Noise(float(low), float(high), within)


def _resampled(sample: Sample, tree: DraftTree, seed: int) -> Values:
    """Return the probability of each node's path in each resample, (resamples, nodes)."""
    trace, strengths = sample.trace, sample.strengths
    weights = bootstrap_weights(trace.num_documents, seed=seed, resamples=RESAMPLES).astype(np.float64)
    hits, observed = document_counts(trace, tree.max_rank + 1)
    seen = np.maximum(weights @ observed, 1.0)
    result = np.ones((RESAMPLES, tree.num_nodes))
    reached = _Reached(trace, tree) if strengths is not None else None
    for head in range(tree.max_depth):
        level = np.flatnonzero(tree.depths == head + 1)
        own = (weights @ hits[:, head]) / seen[:, head, None]  # [resamples, ranks]
        rates = own[:, tree.ranks[level]]
        strength = math.inf if strengths is None else strengths[head]
        if reached is not None and math.isfinite(strength):
            taken, passed = reached.counts(level)
            rates = (weights @ taken + strength * rates) / (weights @ passed + strength)
        result[:, level] = result[:, tree.parents[level]] * rates
    return result


class _Reached:
    """In each document, how often a node is accepted and how often its parent is with the next token observed."""

    def __init__(self, trace: RankTrace, tree: DraftTree) -> None:
        self.trace, self.tree = trace, tree
        self.nodes = accepted_nodes(tree, trace)
        self.document = document_of_position(trace)

    def counts(self, level: NDArray[np.int64]) -> tuple[Values, Values]:
        """Return hits and observations of the nodes of one level, (documents, nodes of the level) each."""
        column = int(self.tree.depths[level[0]]) - 1
        above = self.nodes[:, column - 1] if column else np.zeros(self.trace.num_positions, dtype=np.int64)
        observed = (self.trace.ranks[:, column] >= 0) & (above >= 0)
        taken = self._per_document(self.nodes[:, column], self.nodes[:, column] >= 0)
        return taken[:, level], self._per_document(above, observed)[:, self.tree.parents[level]]

    def _per_document(self, nodes: NDArray[np.int64], kept: NDArray[np.bool_]) -> Values:
        width = self.tree.num_nodes
        cells = self.document[kept] * width + nodes[kept]
        counts = np.bincount(cells, minlength=self.trace.num_documents * width)
        return counts.reshape(-1, width).astype(np.float64)
