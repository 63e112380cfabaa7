"""Any number of trees on one trace: exact tokens a step, their differences, their predicted speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import TreeError
from treeopt.intervals import bootstrap_weights, percentiles
from treeopt.latency import LatencyCurve
from treeopt.replays import Replay, replay_many
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree

__all__ = ["TreeRow", "compare_trees"]


@dataclass(frozen=True)
class TreeRow:
    """One tree beside the first.

    Attributes
    ----------
    name : str
    num_nodes, max_depth : int
    tokens_per_step, low, high : float
        Exact replay on the trace, and its 95 % interval over documents.
    gain, gain_low, gain_high : float
        Tokens a step more than the first tree's, and the 95 % interval of the difference on the same documents.
    domains : mapping of str to float
        Tokens a step by domain.
    shared_nodes : int
        Nodes in common with the first tree, root included.
    speedup : float or None
        Predicted tokens a second over those of plain decoding; None without a curve, or beyond its largest budget.
    """

    name: str
    num_nodes: int
    max_depth: int
    tokens_per_step: float
    low: float
    high: float
    gain: float
    gain_low: float
    gain_high: float
    domains: Mapping[str, float]
    shared_nodes: int
    speedup: float | None


def compare_trees(
    trees: Mapping[str, DraftTree], trace: RankTrace, *, curve: LatencyCurve | None = None, seed: int = 0
) -> list[TreeRow]:
    """Replay trees on a trace and compare each with the first.

    Parameters
    ----------
    trees : mapping of str to DraftTree
    trace : RankTrace
    curve : LatencyCurve, optional
    seed : int
        Of the paired bootstrap over documents.

    Raises
    ------
    TreeError
        If there is no tree, or one is deeper than the trace has heads.
    """
    if not trees:
        raise TreeError("no tree is given; name at least one")
    for name, tree in trees.items():
        try:
            tree.require_heads(trace.num_heads)
        except TreeError as error:
            raise TreeError(f"`{name}`: {error}") from error
    replays = replay_many(list(trees.values()), trace)
    weights = bootstrap_weights(trace.num_documents, seed=seed).astype(np.float64)
    resampled = [_rates(one, weights) for one in replays]
    first = next(iter(trees.values()))
    held = set(first.paths)
    rows = []
    for (name, tree), found, rates in zip(trees.items(), replays, resampled):
        low, high = map(float, percentiles(rates))
        gain_low, gain_high = map(float, percentiles(rates - resampled[0]))
        rows.append(
            TreeRow(
                name=name,
                num_nodes=tree.num_nodes,
                max_depth=tree.max_depth,
                tokens_per_step=found.tokens_per_step,
                low=low,
                high=high,
                gain=found.tokens_per_step - replays[0].tokens_per_step,
                gain_low=gain_low,
                gain_high=gain_high,
                domains={domain: part.tokens_per_step for domain, part in found.by_domain().items()},
                shared_nodes=len(held.intersection(tree.paths)),
                speedup=None if curve is None else _speedup(tree, found.tokens_per_step, curve),
            )
        )
    return rows


def _rates(found: Replay, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return tokens a step for rows of weights of the documents."""
    steps = weights @ found.steps
    return np.where(steps > 0, (weights @ found.tokens) / np.maximum(steps, 1.0), 1.0)


def _speedup(tree: DraftTree, tokens_per_step: float, curve: LatencyCurve) -> float | None:
    if tree.num_nodes == 1:
        return 1.0
    if tree.num_nodes > curve.max_nodes:
        return None
    step = float(curve.at(tree.num_nodes) + curve.drafting(tree.max_depth))
    return tokens_per_step * curve.plain_seconds / step
