"""How sure a tree's E[L] is: the bootstrap over documents of the trace it was built from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.intervals import CONFIDENCE, bootstrap_weights
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree, Path

__all__ = ["Noise", "sampling_noise"]

RESAMPLES = 1000
MAX_NODES = 4096  # a table of resamples × nodes stays under 40 MB


@dataclass(frozen=True, slots=True)
class Noise:
    """What another sample of documents would change.

    Attributes
    ----------
    low, high : float
        95 % interval of E[L] under independent heads.
    nodes_within_noise : int
        Nodes of the tree that the sample cannot tell from the best node left out: the interval of the difference of
        their probabilities holds 0.
    """

    low: float
    high: float
    nodes_within_noise: int


def sampling_noise(trace: RankTrace, tree: DraftTree, left_out: Path | None, *, seed: int = 0) -> Noise | None:
    """Resample the documents of a trace and return the spread of E[L] of a fixed tree.

    Parameters
    ----------
    trace : RankTrace
    tree : DraftTree
    left_out : Path or None
        The likeliest path that is not in the tree.
    seed : int

    Returns
    -------
    Noise or None
        None for trees too large for the table of resamples, and for traces of a single document.
    """
    if tree.num_nodes > MAX_NODES or trace.num_documents < 2:
        return None
    paths = [*tree.paths[1:], *([left_out] if left_out else [])]
    probabilities = _resampled(trace, paths, seed)
    num_drafts = tree.num_nodes - 1
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(probabilities[:, :num_drafts].sum(axis=1), [tail, 1 - tail])
    within = 0
    if left_out:
        lowest = np.quantile(probabilities[:, :num_drafts] - probabilities[:, num_drafts:], tail, axis=0)
        within = int((lowest <= 0).sum())
    return Noise(float(low), float(high), within)


def _resampled(trace: RankTrace, paths: list[Path], seed: int) -> NDArray[np.float64]:
    """Return each path's probability under the heads' accuracies in each resample, (resamples, paths)."""
    num_ranks = 1 + max((max(path) for path in paths), default=0)
    hits, observed = _document_counts(trace, num_ranks)
    weights = bootstrap_weights(trace.num_documents, seed=seed, resamples=RESAMPLES).astype(np.float64)
    seen = np.maximum(weights @ observed, 1.0)
    result = np.ones((RESAMPLES, len(paths)))
    for head in range(max(map(len, paths), default=0)):
        rates = (weights @ hits[:, head]) / seen[:, head, None]  # [resamples, ranks]
        deep = [i for i, path in enumerate(paths) if len(path) > head]
        result[:, deep] *= rates[:, [paths[i][head] for i in deep]]
    return result


def _document_counts(trace: RankTrace, num_ranks: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return per document hits (documents, heads, ranks) and observed positions (documents, heads)."""
    document = np.repeat(np.arange(trace.num_documents), np.diff(trace.documents))
    hits = np.zeros((trace.num_documents, trace.num_heads, num_ranks))
    observed = np.zeros((trace.num_documents, trace.num_heads))
    for head, column in enumerate(trace.ranks.T):
        np.add.at(observed[:, head], document[column >= 0], 1.0)
        shallow = (column >= 0) & (column < num_ranks)
        np.add.at(hits[:, head], (document[shallow], column[shallow]), 1.0)
    return hits, observed
