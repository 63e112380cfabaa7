"""Exact replay: the steps that greedy decoding takes with a tree, read off a trace without running the model.

Heads that read the target's hidden state alone give the same guesses whatever tree is verified, and the target's greedy
output is the same for every tree. So a trace decides every step of every tree: from a position the decode jumps by the
accepted length and one more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.intervals import ratio_interval
from treeopt.paths import Path, order_key
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree
from treeopt.walk import accepted_nodes

__all__ = ["Replay", "replay", "replay_many", "visited_positions"]

# Trees that are replayed at a time: so many that a step moves this many decodes, which hides what the step itself costs,
# but no more accepted lengths than 64 MiB.
CHUNK_DECODES = 1 << 14
CHUNK_CELLS = 1 << 25

Lengths = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Replay:
    """What greedy decoding of a trace's documents takes with one tree.

    A document's first token comes from the prompt's own pass; steps give the others, as `treeopt verify` counts them.

    Attributes
    ----------
    steps : ndarray of int64, shape (documents,)
        Verification passes.
    tokens : ndarray of int64, shape (documents,)
        Tokens that the steps give.
    histogram : ndarray of int64, shape (depth + 1,)
        Steps that accepted 0, 1, … nodes, up to the end of their document.
    domains : tuple of str or None
        Domain of each document.
    """

    steps: Lengths
    tokens: Lengths
    histogram: Lengths
    domains: tuple[str, ...] | None = None

    @property
    def num_steps(self) -> int:
        """Steps in all."""
        return int(self.steps.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return int(self.tokens.sum())

    @property
    def tokens_per_step(self) -> float:
        """Tokens over steps; 1 where no document has a step."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0

    def interval(self, *, seed: int = 0) -> tuple[float, float]:
        """Return the 95 % bootstrap interval of `tokens_per_step` over documents."""
        if not self.num_steps:
            return 1.0, 1.0
        low, high = ratio_interval(self.tokens, self.steps, seed=seed)
        return float(low), float(high)

    def by_domain(self) -> dict[str, Replay]:
        """Return the replay of each domain's documents; the histogram is of all, and left out."""
        if self.domains is None:
            return {}
        names = np.array(self.domains)
        return {
            name: Replay(self.steps[names == name], self.tokens[names == name], self.histogram[:0])
            for name in sorted(set(self.domains))
        }


def replay(tree: DraftTree, trace: RankTrace) -> Replay:
    """Return the exact steps, tokens and accepted lengths of greedy decoding with a tree.

    Parameters
    ----------
    tree : DraftTree
        No deeper than the trace has heads.
    trace : RankTrace
        Ranks of documents from their first generated token on.

    Returns
    -------
    Replay

    Raises
    ------
    TreeError
        If the tree is deeper than the trace has heads.

    Examples
    --------
    >>> trace = RankTrace(ranks=[[0, 0], [3, 0], [0, -1], [-1, -1]], documents=[0, 4])
    >>> replay(DraftTree.from_paths([(0,), (0, 0)]), trace).steps.tolist()
    [1]
    >>> replay(DraftTree.from_paths([(0,)]), trace).steps.tolist()
    [2]
    """
    return replay_many([tree], trace)[0]


def replay_many(trees: Sequence[DraftTree], trace: RankTrace) -> list[Replay]:
    """Replay many trees; see `replay`.

    One walk serves them all: along the union of their paths, each position is matched once, and a tree's accepted length
    there is the depth of its deepest node above the match.
    """
    for tree in trees:
        tree.require_heads(trace.num_heads)
    wanted, most = CHUNK_DECODES // max(1, trace.num_documents), CHUNK_CELLS // max(1, trace.num_positions)
    per_chunk = max(1, min(wanted, most))
    chunks = [trees[start : start + per_chunk] for start in range(0, len(trees), per_chunk)]
    return [one for chunk in chunks for one in _replayed(chunk, trace)]


def visited_positions(tree: DraftTree, trace: RankTrace) -> NDArray[np.bool_]:
    """Return the positions at which greedy decoding with a tree takes a step, shape (positions,)."""
    tree.require_heads(trace.num_heads)
    visited = np.zeros(trace.num_positions, dtype=bool)
    for step in _steps(_accepted_lengths([tree], trace), trace):
        visited[step.positions] = True
    return visited


class _Union:
    """The tree of all paths of some trees, and each tree's deepest own node above every node of it."""

    def __init__(self, trees: Sequence[DraftTree]) -> None:
        paths = sorted({path for tree in trees for path in tree.paths[1:]}, key=order_key)
        place: dict[Path, int] = {(): 0, **{path: node for node, path in enumerate(paths, 1)}}
        self.tree = DraftTree.from_paths(paths)
        self.lengths = np.zeros((len(trees), len(place)), dtype=np.int16)
        for row, tree in zip(self.lengths, trees):
            row[[place[path] for path in tree.paths]] = tree.depths
        for depth in range(1, self.tree.max_depth + 1):
            level = np.flatnonzero(self.tree.depths == depth)
            above = self.lengths[:, self.tree.parents[level]]
            self.lengths[:, level] = np.maximum(self.lengths[:, level], above)


def _accepted_lengths(trees: Sequence[DraftTree], trace: RankTrace) -> NDArray[np.int16]:
    """Return how many nodes each tree has accepted at each position, (trees, positions)."""
    union = _Union(trees)
    # Nodes are sorted by depth, so the deepest accepted is the largest; the root is accepted everywhere.
    deepest = accepted_nodes(union.tree, trace).max(axis=1, initial=0)
    return np.ascontiguousarray(union.lengths[:, deepest])


def _replayed(trees: Sequence[DraftTree], trace: RankTrace) -> list[Replay]:
    accepted = _accepted_lengths(trees, trace)
    num_documents, width = trace.num_documents, max(tree.max_depth for tree in trees) + 1
    steps = np.zeros((len(trees), num_documents), dtype=np.int64)
    histogram = np.zeros((len(trees), width), dtype=np.int64)
    for step in _steps(accepted, trace):
        steps.reshape(-1)[step.decodes] += 1
        cells = step.decodes // num_documents * width + step.accepted
        histogram += np.bincount(cells, minlength=histogram.size).reshape(histogram.shape)
    tokens = np.maximum(np.diff(trace.documents) - 1, 0)
    return [
        Replay(row, tokens, lengths[: tree.max_depth + 1], trace.domains)
        for tree, row, lengths in zip(trees, steps, histogram)
    ]


class _Step(NamedTuple):
    """One step of every decode that still runs; decode t · documents + d is tree t's of document d."""

    decodes: Lengths
    positions: Lengths
    accepted: Lengths  # up to the end of the document


def _steps(accepted: NDArray[np.int16], trace: RankTrace) -> Iterator[_Step]:
    """Give step after step of all trees' decodes of all documents at once, until the longest has ended."""
    num_trees, num_positions = accepted.shape
    flat = accepted.reshape(-1)
    last = np.tile(trace.documents[1:] - 1, num_trees)  # a document's last token ends its decode
    position = np.tile(trace.documents[:-1], num_trees)
    row = np.repeat(np.arange(num_trees) * num_positions, trace.num_documents)
    decodes = np.flatnonzero(position < last)
    position, last, row = position[decodes], last[decodes], row[decodes]
    while decodes.size:
        lengths = flat[row + position].astype(np.int64)
        yield _Step(decodes, position, np.minimum(lengths, last - position - 1))
        position = position + lengths + 1
        running = position < last
        if not running.all():
            decodes, position, last, row = decodes[running], position[running], last[running], row[running]
