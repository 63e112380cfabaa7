"""Held-out comparison: what each acceptance model predicts, and what documents it never saw give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import TraceError
from treeopt.intervals import CONFIDENCE, bootstrap_weights
from treeopt.optimize.from_trace import MODELS, Aim, tree_from_trace
from treeopt.optimize.limits import Limits
from treeopt.optimize.passing import PassingModel
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree
from treeopt.typical import passing_guesses
from treeopt.walk import accepted_nodes, document_of_position

__all__ = ["Choice", "Comparison", "compare_models", "observed_acceptance"]

FOLDS = 5

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """One way to choose a tree, over all folds. Values are E[L], root excluded.

    Attributes
    ----------
    aim : Aim
    predicted : float
        What the way says of its own trees, mean over folds.
    measured : float
        What the left-out documents give them under greedy acceptance.
    low, high : float
        95 % interval of `measured` over documents.
    gain, gain_low, gain_high : float
        `measured` minus that of the first choice, on the same documents, and its 95 % interval.
    shared_nodes : float
        Nodes in common with the first choice's tree, root included, mean over folds.
    own_value : float or None
        What the left-out documents give the trees under the objective of the comparison, if it is another; for the first
        choice too.
    """

    aim: Aim
    predicted: float
    measured: float
    low: float
    high: float
    gain: float
    gain_low: float
    gain_high: float
    shared_nodes: float
    own_value: float | None = None

    @property
    def error(self) -> float:
        """Predicted minus measured."""
        return self.predicted - self.measured


@dataclass(frozen=True)
class Comparison:
    """Choices beside each other.

    Attributes
    ----------
    choices : tuple of Choice
        The independent model first.
    num_folds, num_documents, num_positions : int
    num_nodes : int
        Root included.
    objective : str
        Whose values `own_value` are.
    """

    choices: tuple[Choice, ...]
    num_folds: int
    num_documents: int
    num_positions: int
    num_nodes: int
    objective: str


def compare_models(trace: RankTrace, limits: Limits, aim: Aim | None = None, *, seed: int = 0) -> Comparison:
    """Build under every model on four fifths of the documents and measure on the rest, five times.

    Parameters
    ----------
    trace : RankTrace
    limits : Limits
    aim : Aim, optional
        A further choice with another objective.
    seed : int
        Of the split and of the bootstrap.

    Raises
    ------
    TraceError
        If there are fewer than four documents: two to build from, in every fold.
    """
    if trace.num_documents < 4:
        raise TraceError(f"`{trace.num_documents}` documents cannot be split to compare models; calibrate more")
    aims = [Aim(model=model) for model in MODELS]
    if aim is not None and aim.objective != "expected-accepted":
        aims.append(aim)
    num_folds = min(FOLDS, trace.num_documents // 2)
    fold = _folds(trace, num_folds, seed)
    trees = [
        [tree_from_trace(trace.select(np.flatnonzero(fold != i)), limits, one, certify=False) for one in aims]
        for i in range(num_folds)
    ]
    held_out = [trace.select(np.flatnonzero(fold == i)) for i in range(num_folds)]
    matched = [
        _joined([observed_acceptance(built[place].tree, part) for built, part in zip(trees, held_out)])
        for place in range(len(aims))
    ]
    weights = bootstrap_weights(trace.num_documents, seed=seed).astype(np.float64)
    everything = np.ones((1, trace.num_documents))
    measured = [float(_expected(counts, everything)[0]) for counts in matched]
    resampled = [_expected(counts, weights) for counts in matched]
    choices = []
    for place, one in enumerate(aims):
        built = [row[place] for row in trees]
        predicted = np.mean([each.expected_accepted for each in built])
        low, high = _interval(resampled[place])
        gain_low, gain_high = _interval(resampled[place] - resampled[0])
        shared = np.mean([len({*row[0].tree.paths} & {*each.tree.paths}) for row, each in zip(trees, built)])
        own = _own_value(aim, [each.tree for each in built], held_out) if len(aims) > len(MODELS) else None
        choices.append(
            Choice(
                one, float(predicted), measured[place], low, high, measured[place] - measured[0], gain_low, gain_high,
                float(shared), own,
            )
        )  # fmt: skip
    positions = int((trace.ranks[:, 0] >= 0).sum())
    objective = aims[-1].objective
    return Comparison(tuple(choices), num_folds, trace.num_documents, positions, limits.num_nodes, objective)


def observed_acceptance(tree: DraftTree, trace: RankTrace) -> tuple[Values, Values]:
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


def _folds(trace: RankTrace, num_folds: int, seed: int) -> NDArray[np.int64]:
    """Return each document's fold; those of one domain are spread over all folds."""
    order = np.random.default_rng(seed).permutation(trace.num_documents)
    if trace.domains is not None:
        order = order[np.argsort(np.array(trace.domains)[order], kind="stable")]
    fold = np.empty(trace.num_documents, dtype=np.int64)
    fold[order] = np.arange(trace.num_documents) % num_folds
    return fold


def _joined(parts: Sequence[tuple[Values, Values]]) -> tuple[Values, Values]:
    return np.concatenate([accepted for accepted, _ in parts]), np.concatenate([observed for _, observed in parts])


def _expected(counts: tuple[Values, Values], weights: Values) -> Values:
    """Return E[L] for rows of weights of the documents: at each depth the share of positions with an accepted node."""
    accepted, observed = (weights @ part for part in counts)
    total: Values = (accepted / np.maximum(observed, 1.0)).sum(axis=1)
    return total


def _interval(values: Values) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def _own_value(aim: Aim | None, trees: Sequence[DraftTree], held_out: Sequence[RankTrace]) -> float | None:
    """Return what left-out documents give trees under the aim's objective: a mean over folds."""
    assert aim is not None
    if aim.objective == "typical":
        passing = [PassingModel(passing_guesses(part, aim.epsilon, aim.delta)) for part in held_out]
        covered = [model.covered(tree.paths[1:]) for model, tree in zip(passing, trees)]
        return float(np.average(covered, weights=[model.num_positions for model in passing]))
    everything = sorted({name for part in held_out for name in part.domains or ()})
    domains = {
        name: _joined(
            [
                observed_acceptance(tree, part.domain(name))
                for tree, part in zip(trees, held_out)
                if name in (part.domains or ())
            ]
        )
        for name in everything
    }
    values = {name: float(_expected(counts, np.ones((1, len(counts[0]))))[0]) for name, counts in domains.items()}
    if aim.objective == "robust":
        return min(values.values())
    weights = aim.weights or {}
    return float(np.average([values[name] for name in weights], weights=list(weights.values())))
