"""Held-out comparison: what each way to choose a tree predicts, and what documents it never saw give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import TraceError
from treeopt.intervals import bootstrap_weights, percentiles
from treeopt.optimize.built import BuiltTree
from treeopt.optimize.from_trace import MODELS, Aim, tree_from_trace
from treeopt.optimize.limits import Limits
from treeopt.optimize.passing import PassingModel
from treeopt.replays import replay
from treeopt.trace import RankTrace
from treeopt.typical import passing_guesses
from treeopt.visited import tree_for_steps
from treeopt.walk import observed_acceptance

__all__ = [
    "Choice",
    "Comparison",
    "Estimate",
    "SplitErrors",
    "compare_ways",
    "rebuilding_gain",
    "split_errors",
    "steps_gain",
]

FOLDS = 5
MIN_DOCUMENTS = 4  # two to build from in every fold
SPLITS = 8
STEPS = "tokens-per-step"  # the way whose trees are chosen by replay

Values = NDArray[np.float64]


class Estimate(NamedTuple):
    """A value over left-out documents and its 95 % interval over samples of them."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Choice:
    """One way to choose a tree, over all folds. Gains are over the first way, on the same documents.

    Attributes
    ----------
    name : str
    predicted : float
        1 + E[L] that the way states of its own trees, mean over folds.
    measured, gain : Estimate
        1 + E[L] at the positions of the left-out documents: for each depth, the share of the positions observed at which
        a node is accepted.
    replayed, replayed_gain : Estimate
        Tokens a step of greedy decoding of the left-out documents: exact, no average over positions.
    shared_nodes : float
        Nodes in common with the first way's tree, root included, mean over folds.
    own_value : float or None
        What the left-out documents give the trees under the objective of the comparison, if it is another.
    """

    name: str
    predicted: float
    measured: Estimate
    gain: Estimate
    replayed: Estimate
    replayed_gain: Estimate
    shared_nodes: float
    own_value: float | None = None

    @property
    def error(self) -> float:
        """Predicted minus measured."""
        return self.predicted - self.measured.value


@dataclass(frozen=True)
class SplitErrors:
    """How far predictions from one half of the documents are from what the other half takes, over random halves.

    Attributes
    ----------
    replayed, averaged : tuple of float
        Relative errors of the replay, and of 1 + E[L] averaged over positions; one a split.
    """

    replayed: tuple[float, ...]
    averaged: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """Ways to choose a tree beside each other.

    Attributes
    ----------
    choices : tuple of Choice
        The independent model first.
    splits : SplitErrors
        Of the first way.
    num_folds, num_documents, num_positions : int
    num_nodes : int
        Root included.
    objective : str or None
        Whose values `own_value` are.
    """

    choices: tuple[Choice, ...]
    splits: SplitErrors
    num_folds: int
    num_documents: int
    num_positions: int
    num_nodes: int
    objective: str | None


Way = Callable[[RankTrace], BuiltTree]


def compare_ways(trace: RankTrace, limits: Limits, aim: Aim | None = None, *, seed: int = 0) -> Comparison:
    """Build in every way on four fifths of the documents and measure on the rest, five times.

    Parameters
    ----------
    trace : RankTrace
    limits : Limits
    aim : Aim, optional
        A further way, with another objective.
    seed : int
        Of the splits and of the bootstrap.

    Raises
    ------
    TraceError
        If there are fewer than four documents: two to build from, in every fold.
    """
    ways = _ways(limits, aim or Aim())
    parts = _parts(trace, seed)
    results = {name: _Result([(way(known), left_out) for known, left_out in parts]) for name, way in ways.items()}
    first = next(iter(results.values()))
    other = aim if aim is not None and aim.objective not in ("expected-accepted", STEPS) else None
    weights = bootstrap_weights(trace.num_documents, seed=seed).astype(np.float64)
    return Comparison(
        tuple(result.choice(name, first, weights, other) for name, result in results.items()),
        split_errors(trace, limits, seed=seed),
        len(parts),
        trace.num_documents,
        int((trace.ranks[:, 0] >= 0).sum()),
        limits.num_nodes,
        other.objective if other is not None else None,
    )


def steps_gain(trace: RankTrace, limits: Limits, model: str = "independent", *, seed: int = 0) -> Estimate:
    """Return how many more tokens a step left-out documents take with trees chosen by replay than with the usual ones.

    Parameters
    ----------
    trace : RankTrace
    limits : Limits
    model : {'independent', 'joint'}
    seed : int

    Raises
    ------
    TraceError
        If there are fewer than four documents.
    """
    usual = _Result(
        [(tree_from_trace(known, limits, Aim(model), certify=False), rest) for known, rest in _parts(trace, seed)]
    )
    by_steps = _Result([(tree_for_steps(known, limits, model)[0], rest) for known, rest in _parts(trace, seed)])
    weights = bootstrap_weights(trace.num_documents, seed=seed).astype(np.float64)
    return by_steps.choice(STEPS, usual, weights, None).replayed_gain


def rebuilding_gain(reference: RankTrace, trace: RankTrace, limits: Limits, *, seed: int = 0) -> Estimate:
    """Return how many more tokens a step a trace's left-out documents take with trees built from it than with another's.

    Parameters
    ----------
    reference : RankTrace
        That the other tree is built from.
    trace : RankTrace
    limits : Limits
    seed : int
    """
    old = tree_from_trace(reference, limits, certify=False)
    parts = _parts(trace, seed)
    anew = _Result([(tree_from_trace(known, limits, certify=False), rest) for known, rest in parts])
    weights = bootstrap_weights(trace.num_documents, seed=seed).astype(np.float64)
    return anew.choice("anew", _Result([(old, rest) for _, rest in parts]), weights, None).replayed_gain


def split_errors(trace: RankTrace, limits: Limits, *, splits: int = SPLITS, seed: int = 0) -> SplitErrors:
    """Build on a random half of the documents, predict from it, and replay the other half; again and again.

    Parameters
    ----------
    trace : RankTrace
    limits : Limits
    splits : int
    seed : int
    """
    rng = np.random.default_rng(seed)
    replayed, averaged = [], []
    for _ in range(splits):
        order = rng.permutation(trace.num_documents)
        half = trace.num_documents // 2
        known, left_out = trace.select(order[:half]), trace.select(order[half:])
        built = tree_from_trace(known, limits, certify=False)
        truth = replay(built.tree, left_out).tokens_per_step
        replayed.append(replay(built.tree, known).tokens_per_step / truth - 1.0)
        averaged.append(built.tokens_per_step / truth - 1.0)
    return SplitErrors(tuple(replayed), tuple(averaged))


class _Result:
    """The trees of one way, one a fold, and what the documents left out of each give: rows in the order of the folds."""

    def __init__(self, built: Sequence[tuple[BuiltTree, RankTrace]]) -> None:
        self.built = built
        counts = [observed_acceptance(one.tree, left_out) for one, left_out in built]
        self.accepted, self.observed = (np.concatenate(part) for part in zip(*counts))
        replays = [replay(one.tree, left_out) for one, left_out in built]
        self.steps = np.concatenate([one.steps for one in replays]).astype(np.float64)
        self.tokens = np.concatenate([one.tokens for one in replays]).astype(np.float64)

    def choice(self, name: str, first: _Result, weights: Values, other: Aim | None) -> Choice:
        """Describe the way beside the first one."""
        shared = [
            len({*mine.tree.paths} & {*theirs.tree.paths}) for (mine, _), (theirs, _) in zip(self.built, first.built)
        ]
        return Choice(
            name=name,
            predicted=float(np.mean([one.tokens_per_step for one, _ in self.built])),
            measured=_estimate(self._averaged, weights),
            gain=_estimate(lambda rows: self._averaged(rows) - first._averaged(rows), weights),
            replayed=_estimate(self._replayed, weights),
            replayed_gain=_estimate(lambda rows: self._replayed(rows) - first._replayed(rows), weights),
            shared_nodes=float(np.mean(shared)),
            own_value=None if other is None else self._own_value(other),
        )

    def _averaged(self, weights: Values) -> Values:
        """Return 1 + E[L] over positions for rows of weights of the documents."""
        total: Values = 1.0 + ((weights @ self.accepted) / np.maximum(weights @ self.observed, 1.0)).sum(axis=1)
        return total

    def _replayed(self, weights: Values) -> Values:
        """Return tokens a step for rows of weights of the documents."""
        steps: Values = weights @ self.steps
        return np.where(steps > 0, (weights @ self.tokens) / np.maximum(steps, 1.0), 1.0)

    def _own_value(self, aim: Aim) -> float:
        """Return 1 + what the left-out documents give the trees under another objective."""
        if aim.objective == "typical":
            passing = [PassingModel(passing_guesses(part, aim.epsilon, aim.delta)) for _, part in self.built]
            covered = [model.covered(one.tree.paths[1:]) for model, (one, _) in zip(passing, self.built)]
            return 1.0 + float(np.average(covered, weights=[model.num_positions for model in passing]))
        domains = np.concatenate([np.array(part.domains, dtype=object) for _, part in self.built])
        values = {name: float(self._averaged((domains == name)[None].astype(np.float64))[0]) for name in set(domains)}
        if aim.objective == "robust":
            return min(values.values())
        weights = aim.weights or {}
        return float(np.average([values[name] for name in weights], weights=list(weights.values())))


def _ways(limits: Limits, aim: Aim) -> Mapping[str, Way]:
    def of(one: Aim) -> Way:
        return lambda trace: tree_from_trace(trace, limits, one, certify=False)

    ways = {model: of(Aim(model=model)) for model in MODELS}
    ways[STEPS] = lambda trace: tree_for_steps(trace, limits, aim.model)[0]
    if aim.objective not in ("expected-accepted", STEPS):
        ways[aim.objective] = of(aim)
    return ways


def _parts(trace: RankTrace, seed: int) -> list[tuple[RankTrace, RankTrace]]:
    """Return, for every fold, the documents to build from and those left out; a domain's are spread over all folds."""
    if trace.num_documents < MIN_DOCUMENTS:
        raise TraceError(f"`{trace.num_documents}` documents cannot be split to compare ways; calibrate more")
    order = np.random.default_rng(seed).permutation(trace.num_documents)
    if trace.domains is not None:
        order = order[np.argsort(np.array(trace.domains)[order], kind="stable")]
    num_folds = min(FOLDS, trace.num_documents // 2)
    fold = np.empty(trace.num_documents, dtype=np.int64)
    fold[order] = np.arange(trace.num_documents) % num_folds
    return [
        (trace.select(np.flatnonzero(fold != i)), trace.select(np.flatnonzero(fold == i))) for i in range(num_folds)
    ]


def _estimate(value: Callable[[Values], Values], weights: Values) -> Estimate:
    low, high = percentiles(value(weights))
    return Estimate(float(value(np.ones((1, weights.shape[1])))[0]), float(low), float(high))
