"""What is drawn of a trace: accuracies by rank, and tokens a step against nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.auto import nested_tree
from treeopt.errors import TraceError
from treeopt.intervals import ratio_interval
from treeopt.optimize import BuiltTree, best_tree
from treeopt.replays import replay_many
from treeopt.trace import RankTrace
from treeopt.walk import document_counts

__all__ = ["NodeCurve", "RankCurves", "describe_source", "node_curve", "printable", "rank_curves"]

MAX_NAME = 30  # signs of a target's name; of a longer path the end is told

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RankCurves:
    """Accuracy of each head by rank, with 95 % intervals over documents.

    Attributes
    ----------
    rates, low, high : ndarray of float64, shape (heads, ranks)
    """

    rates: Values
    low: Values
    high: Values


@dataclass(frozen=True, eq=False)
class NodeCurve:
    """Tokens a step of the best trees of 1, 2, … nodes.

    Attributes
    ----------
    built : BuiltTree
        The largest; the others are nested in it.
    predicted : ndarray of float64, shape (built.tree.num_nodes,)
        1 + E[L] under independent heads.
    replayed, low, high : ndarray of float64, shape (built.tree.num_nodes,)
        Exact replay on the trace, and its 95 % interval over documents.
    """

    built: BuiltTree
    predicted: Values
    replayed: Values
    low: Values
    high: Values

    @property
    def nodes(self) -> NDArray[np.int64]:
        """Budgets, root included: 1, 2, …."""
        return np.arange(1, self.built.tree.num_nodes + 1)


def rank_curves(trace: RankTrace, num_ranks: int, *, together: bool = False, seed: int = 0) -> RankCurves:
    """Return the accuracy of each head at ranks 0 … `num_ranks` - 1, or of its first 1 … `num_ranks` guesses together.

    Parameters
    ----------
    trace : RankTrace
    num_ranks : int
    together : bool
        Whether ranks are summed up: what papers call top-k.
    seed : int
        Of the bootstrap over documents.

    Raises
    ------
    TraceError
        If the trace has fewer than two documents with observed tokens, or a head without any.
    """
    _require_spread(trace)
    hits, observed = document_counts(trace, num_ranks)
    if together:
        hits = hits.cumsum(axis=2)
    seen = np.broadcast_to(observed[:, :, None], hits.shape)
    low, high = ratio_interval(hits, seen, seed=seed)
    return RankCurves(hits.sum(axis=0) / seen.sum(axis=0), low, high)


def node_curve(trace: RankTrace, max_nodes: int, *, seed: int = 0) -> NodeCurve:
    """Build the best tree of every size and replay it.

    Parameters
    ----------
    trace : RankTrace
    max_nodes : int
        Largest budget, root included; fewer are returned where fewer paths exist.
    seed : int
        Of the bootstrap over documents.

    Raises
    ------
    TraceError
        If the trace has fewer than two documents with observed tokens, or a head without any.
    """
    _require_spread(trace)
    built = best_tree(trace.table(), max_nodes)
    replays = replay_many([nested_tree(built, n) for n in range(1, built.tree.num_nodes + 1)], trace)
    steps = np.stack([one.steps for one in replays], axis=1)
    low, high = ratio_interval(np.broadcast_to(replays[0].tokens[:, None], steps.shape), steps, seed=seed)
    return NodeCurve(built, 1.0 + built.curve, np.array([one.tokens_per_step for one in replays]), low, high)


def describe_source(trace: RankTrace) -> str:
    """Return in a line whose trace it is and how much it holds."""
    name = printable(trace.metadata.get("target", ""))
    short = name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}"
    target = f"Target {short}, " if name else ""
    return f"{target}{trace.num_documents:,} documents, {trace.num_positions:,} positions"


def printable(text: str) -> str:
    """Return a text in one line, with a space for whatever is no sign to be seen."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def _require_spread(trace: RankTrace) -> None:
    unseen = np.flatnonzero((trace.ranks < 0).all(axis=0))
    if unseen.size:
        raise TraceError(f"head `{unseen[0]}` was observed at no position; calibrate on longer continuations")
    filled = int((np.diff(trace.documents) > 1).sum())
    if filled < 2:
        raise TraceError(
            f"`documents` holds {filled} with tokens to guess, which shows no spread; calibrate on 2 or more"
        )
