"""Walking a tree along a trace: which nodes the target's own tokens accept at every position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treeopt.trace import RankTrace
from treeopt.tree import DraftTree

__all__ = ["accepted_nodes", "document_counts", "document_of_position", "observed_acceptance"]


def accepted_nodes(tree: DraftTree, trace: RankTrace) -> NDArray[np.int64]:
    """Return the node that is accepted at each depth, at every position of a trace.

    Parameters
    ----------
    tree : DraftTree
    trace : RankTrace

    Returns
    -------
    ndarray of int64, shape (positions, depth)
        Column d - 1 holds the node of depth d, or -1 where none is accepted: the tree has no such path, or the document
        ends before it. `depth` is the tree's, or the number of heads if that is smaller.

    Examples
    --------
    >>> trace = RankTrace(ranks=[[1, 0], [0, -1], [-1, -1]], documents=[0, 3])
    >>> accepted_nodes(DraftTree.from_paths([(0,), (1,), (1, 0)]), trace).tolist()
    [[2, 3], [1, -1], [-1, -1]]
    """
    depth = min(tree.max_depth, trace.num_heads)
    found = np.full((trace.num_positions, depth), -1, dtype=np.int64)
    # Nodes are sorted by (depth, path), hence by (parent, rank): a child is found by bisection.
    base = tree.max_rank + 2
    keys = tree.parents[1:] * base + tree.ranks[1:]
    positions, nodes = np.arange(trace.num_positions), np.zeros(trace.num_positions, dtype=np.int64)
    for column in range(depth):
        ranks = trace.ranks[positions, column]
        inside = (ranks >= 0) & (ranks < base)
        positions, wanted = positions[inside], nodes[inside] * base + ranks[inside]
        place = np.searchsorted(keys, wanted)
        hit = place < len(keys)
        hit[hit] = keys[place[hit]] == wanted[hit]
        positions, nodes = positions[hit], place[hit] + 1
        found[positions, column] = nodes
    return found


def document_of_position(trace: RankTrace) -> NDArray[np.int64]:
    """Return the document that each position belongs to, shape (positions,)."""
    return np.repeat(np.arange(trace.num_documents), np.diff(trace.documents))


def observed_acceptance(tree: DraftTree, trace: RankTrace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how often a node of each depth is accepted in each document, and at how many positions it could be.

    Parameters
    ----------
    tree : DraftTree
    trace : RankTrace

    Returns
    -------
    accepted, observed : ndarray of float64, shape (documents, heads)
        Observed are positions at which the head of that depth has a token to be compared with.
    """
    nodes, document = accepted_nodes(tree, trace), document_of_position(trace)
    accepted, observed = np.zeros((2, trace.num_documents, trace.num_heads))
    for head in range(trace.num_heads):
        seen = document[trace.ranks[:, head] >= 0]
        observed[:, head] = np.bincount(seen, minlength=trace.num_documents)
        if head < nodes.shape[1]:
            accepted[:, head] = np.bincount(document[nodes[:, head] >= 0], minlength=trace.num_documents)
    return accepted, observed


def document_counts(trace: RankTrace, num_ranks: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return per document hits (documents, heads, ranks) and observed positions (documents, heads)."""
    document = document_of_position(trace)
    hits = np.zeros((trace.num_documents, trace.num_heads, max(num_ranks, 1)))
    observed = np.zeros((trace.num_documents, trace.num_heads))
    for head, column in enumerate(trace.ranks.T):
        np.add.at(observed[:, head], document[column >= 0], 1.0)
        shallow = (column >= 0) & (column < num_ranks)
        np.add.at(hits[:, head], (document[shallow], column[shallow]), 1.0)
    return hits, observed
