"""Hypothesis strategies: trees, accuracies, traces."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from treeopt import DraftTree


@st.composite
def trees(draw, max_nodes=24, max_rank=5, max_depth=5):
    """Grow a tree node by node below nodes that exist."""
    paths = [()]
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        parent = draw(st.sampled_from([path for path in paths if len(path) < max_depth]))
        path = (*parent, draw(st.integers(0, max_rank)))
        if path not in paths:
            paths.append(path)
    return DraftTree.from_paths(paths[1:])


@st.composite
def rates(draw, max_heads=3, max_ranks=3):
    """Rows with ties, zeros, ones and rising ranks: multiples of 1/8 that sum to at most 1."""
    num_ranks = draw(st.integers(1, max_ranks))
    rows = []
    for _ in range(draw(st.integers(1, max_heads))):
        eighths, row = 8, []
        for _ in range(num_ranks):
            row.append(draw(st.integers(0, eighths)))
            eighths -= row[-1]
        rows.append([value / 8 for value in draw(st.permutations(row))])
    # Rows that all rise from the first rank on are taken for cumulative accuracies and refused.
    assume(num_ranks < 3 or not all(row[0] > 0 and all(a < b for a, b in pairwise(row)) for row in rows))
    return rows


@st.composite
def rank_arrays(draw, max_documents=4, max_length=8, num_heads=3, max_rank=4):
    """Ranks and offsets in which head h sees nothing in a document's last h + 1 rows."""
    lengths = draw(st.lists(st.integers(0, max_length), min_size=1, max_size=max_documents))
    rows = []
    for length in lengths:
        block = np.array(
            draw(st.lists(st.integers(0, max_rank), min_size=length * num_heads, max_size=length * num_heads)),
            dtype=int,
        ).reshape(length, num_heads)
        for head in range(num_heads):
            block[max(0, length - 1 - head) :, head] = -1
        rows.append(block)
    return np.concatenate(rows), np.concatenate([[0], np.cumsum(lengths)])
