import math

import numpy as np
import pytest

from treeopt import RankTrace
from treeopt.errors import AcceptanceError, TraceError
from treeopt.typical import entropy, passing_guesses, typical_threshold


@pytest.mark.parametrize(
    ("probabilities", "epsilon", "delta", "threshold"),
    [
        ([0.7, 0.2, 0.05, 0.05], 0.09, 0.3, 0.09),
        ([0.7, 0.2, 0.05, 0.05], 0.3, 0.09, 0.0377),
        ([0.25] * 4, 0.09, 0.3, 0.075),
        ([0.25] * 4, 0.3, 0.09, 0.0225),
        ([1.0, 0.0], 0.09, 0.3, 0.09),  # a probability of 0 adds nothing
        ([0.5, 0.5, 0.0], 0.3, 0.09, 0.045),
    ],
)
def test_thresholds_of_known_distributions(probabilities, epsilon, delta, threshold):
    assert typical_threshold(entropy(probabilities), epsilon, delta) == pytest.approx(threshold, abs=5e-5)


def test_entropy_is_in_nats():
    assert entropy([[0.5, 0.5], [1.0, 0.0]]).tolist() == [math.log(2), 0.0]


def test_the_likeliest_token_always_passes():
    rng = np.random.default_rng(0)
    for concentration in (0.01, 0.1, 1.0, 100.0):
        p = rng.dirichlet(np.full(50, concentration), size=200)
        assert (p.max(axis=1) > typical_threshold(entropy(p), 0.999, 0.999)).all()


@pytest.mark.parametrize("keywords", [{"epsilon": 0.0}, {"delta": 1.0}, {"epsilon": float("nan")}])
def test_other_parameters_are_refused(keywords):
    with pytest.raises(AcceptanceError, match=rf"`{next(iter(keywords))}` is .*; give a number between 0 and 1"):
        typical_threshold(0.0, **keywords)


def trace_with_probabilities():
    # Two documents of 4 and 3 tokens; heads 0 and 1 look 1 and 2 tokens ahead.
    ranks = [[0, 1], [0, 0], [1, -1], [-1, -1], [0, 0], [2, -1], [-1, -1]]
    probs = np.zeros((7, 2, 2))
    probs[0] = [[0.8, 0.1], [0.05, 0.5]]
    probs[1] = [[0.3, 0.08], [0.2, 0.02]]
    probs[4] = [[0.5, 0.04], [0.1, 0.06]]
    entropies = [0.1, 2.0, 0.0, 0.0, 0.5, 3.0, 0.0]
    return RankTrace(ranks, [0, 4, 7], topk_probs=probs, entropies=entropies)


def test_head_h_is_judged_by_the_distribution_h_tokens_after_the_root():
    trace = trace_with_probabilities()
    passes = passing_guesses(trace, 0.09, 0.3)
    assert passes.shape == (3, 2, 2)  # positions 0, 1 and 4 have both heads observed
    # Thresholds: after token 0: .09, after 1: .3·e^-2 = .0406, after 2: .09, after 4: .09, after 5: .3·e^-3 = .0149.
    assert passes.tolist() == [
        [[True, True], [True, True]],
        [[True, True], [True, False]],
        [[True, False], [True, True]],
    ]


def test_a_trace_without_probabilities_is_refused_with_the_remedy():
    with pytest.raises(TraceError, match=r"calibrate with --candidates 10"):
        passing_guesses(RankTrace([[0]], [0, 1]))


def test_a_trace_without_a_whole_position_is_refused():
    trace = RankTrace([[0, -1]], [0, 1], topk_probs=np.zeros((1, 2, 1)), entropies=[0.0])
    with pytest.raises(TraceError, match=r"no position has a token observed by every head"):
        passing_guesses(trace)
