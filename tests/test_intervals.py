import numpy as np
import pytest

from treeopt.intervals import bootstrap_weights, ratio_interval


def test_each_resample_draws_as_many_documents_as_there_are():
    weights = bootstrap_weights(7, seed=3, resamples=50)
    assert weights.shape == (50, 7)
    assert (weights.sum(axis=1) == 7).all()


def test_equal_documents_have_no_spread_and_unequal_ones_do():
    low, high = ratio_interval([2, 2, 2], [4, 4, 4])
    assert low == high == 0.5
    low, high = ratio_interval([0, 4, 0, 4], [4, 4, 4, 4])
    assert low < 0.5 < high


def test_columns_are_ratios_of_their_own():
    low, high = ratio_interval([[1, 4], [1, 4]], [[2, 4], [2, 4]])
    assert low.tolist() == [0.5, 1.0]
    assert high.tolist() == [0.5, 1.0]


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        rates = rng.beta(4, 6, size=40)  # documents differ: positions within one go together
        hits = rng.binomial(50, rates)
        low, high = ratio_interval(hits, np.full(40, 50), seed=trial)
        covered += bool(low <= 0.4 <= high)
    assert covered / 200 == pytest.approx(0.95, abs=0.05)


def test_the_same_seed_gives_the_same_interval():
    numbers = np.arange(20)
    assert ratio_interval(numbers, numbers + 5, seed=1) == ratio_interval(numbers, numbers + 5, seed=1)
    assert ratio_interval(numbers, numbers + 5, seed=1) != ratio_interval(numbers, numbers + 5, seed=2)
