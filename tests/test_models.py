import itertools
import math

import numpy as np
import pytest
from hypothesis import given

from tests.strategies import rank_arrays
from treeopt import AcceptanceTable, RankTrace, best_tree, chain
from treeopt.errors import AcceptanceError
from treeopt.optimize import HeadModel, JointModel, SiblingModel
from treeopt.optimize.models import STRENGTHS, path_probabilities


def joint(trace, strengths):
    """Return a joint model of a trace with strengths of our own."""
    fitted = JointModel.fit(trace)
    return JointModel(fitted.table, fitted.codes, tuple(strengths))


def independent_trace(num_documents, seed, length=40):
    rng = np.random.default_rng(seed)
    ranks = rng.choice(5, size=(num_documents * length, 2), p=[0.5, 0.2, 0.1, 0.1, 0.1])
    return RankTrace(ranks, np.arange(num_documents + 1) * length)


def dependent_trace(num_documents, seed, length=40):
    """Head 1 is right at rank 0 with probability .8 where head 0 was, and .2 where head 0's second guess was."""
    rng = np.random.default_rng(seed)
    first = rng.choice(2, size=num_documents * length)
    right = rng.random(len(first)) < np.where(first == 0, 0.8, 0.2)
    return RankTrace(np.stack([first, np.where(right, 0, 7)], axis=1), np.arange(num_documents + 1) * length)


@given(rank_arrays())
def test_joint_conditionals_are_counts_pulled_toward_the_heads_own_rates(arrays):
    ranks, documents = arrays
    if len(documents) < 3 or not (ranks >= 0).any(axis=0).all():
        return
    model = joint(RankTrace(ranks, documents), [2.0] * 3)
    for path in itertools.chain([()], itertools.product(range(2)), itertools.product(range(2), range(2))):
        level = len(path)
        seen = [row for row in ranks if row[level] >= 0 and tuple(row[:level]) == path]
        expected = {}
        for rank in range(model.table.num_ranks):
            hits = sum(row[level] == rank for row in seen)
            rate = (hits + 2.0 * model.table.rates[level, rank]) / (len(seen) + 2.0)
            if rate > 0:
                expected[rank] = rate
        found = {rank: rate for rate, rank in model.children(path)}
        assert found == pytest.approx(expected)
        order = [(-rate, rank) for rate, rank in model.children(path)]
        assert order == sorted(order)


def test_an_infinite_strength_is_the_independent_model():
    trace = independent_trace(10, 0)
    model = joint(trace, [math.inf, math.inf])
    heads = HeadModel(trace.table(32))
    for path in [(), (0,), (3,)]:
        assert list(model.children(path)) == list(heads.children(path))
    assert model.children((0, 0)) == ()


def test_the_strength_ends_at_the_product_where_heads_are_independent():
    strengths = [JointModel.fit(independent_trace(8, seed)).strengths[1] for seed in range(8)]
    assert sum(strength >= 256 for strength in strengths) >= 6


def test_the_strength_is_small_where_paths_matter_and_counts_abound():
    assert JointModel.fit(dependent_trace(100, 0)).strengths[1] <= 16
    assert 0 not in STRENGTHS  # raw counts are never taken


def test_the_joint_tree_follows_the_likelier_path():
    trace = dependent_trace(100, 1)
    model = JointModel.fit(trace)
    # The heads alone cannot tell (0, 0) from (1, 0); the joint model knows that the first is four times as likely.
    after = [{rank: rate for rate, rank in model.children((first,))}[0] for first in (0, 1)]
    assert after == pytest.approx([0.8, 0.2], abs=0.05)
    built = best_tree(model, 6)
    taken = [built.tree.paths[node] for node in built.added]
    assert taken.index((0, 0)) < taken.index((1, 0))


def test_probabilities_of_a_given_tree_are_products_along_its_paths():
    model = HeadModel(AcceptanceTable.from_rates([[0.5, 0.25], [0.5, 0.0]]))
    assert path_probabilities(model, chain(2)).tolist() == [1.0, 0.5, 0.25]
    built = best_tree(model, 5)
    assert path_probabilities(model, built.tree).tolist() == built.path_probabilities.tolist()


def test_a_sibling_model_repeats_one_row():
    model = SiblingModel([0.6, 0.3], max_depth=3)
    assert model.num_levels == 3
    assert list(model.children((1, 1))) == [(0.6, 0), (0.3, 1)]
    assert model.children((0, 0, 0)) == ()


def test_traces_that_cannot_be_split_or_coded_are_refused():
    with pytest.raises(AcceptanceError, match=r"`1` documents cannot be split"):
        JointModel.fit(RankTrace([[0]], [0, 1]))
    with pytest.raises(AcceptanceError, match=r"too much for 13 heads"):
        JointModel.fit(RankTrace(np.zeros((4, 13), dtype=int), [0, 2, 4]))
