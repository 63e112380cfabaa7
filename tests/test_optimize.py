import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import all_paths, best_sum
from tests.strategies import rates
from treeopt import AcceptanceTable, DraftTree, best_tree
from treeopt.errors import ConstraintError
from treeopt.optimize import HeadModel
from treeopt.optimize.large import likeliest_paths
from treeopt.optimize.limits import Limits
from treeopt.optimize.search import search


@given(rates(), st.integers(1, 8), st.none() | st.integers(0, 3), st.none() | st.integers(0, 2))
def test_no_tree_of_the_same_size_has_a_larger_sum(rows, num_nodes, max_depth, max_rank):
    built = best_tree(rows, num_nodes, max_depth=max_depth, max_rank=max_rank)
    assert built.tree.num_nodes <= num_nodes
    assert math.isclose(built.expected_accepted, best_sum(rows, num_nodes, max_depth, max_rank), abs_tol=1e-12)
    assert math.isclose(built.certificate.unconstrained, best_sum(rows, num_nodes), abs_tol=1e-12)


@given(rates(), st.integers(1, 30))
def test_nodes_are_taken_by_probability_then_depth_then_path(rows, num_nodes):
    built = best_tree(rows, num_nodes)
    paths = all_paths(rows)
    expected = sorted(paths, key=lambda path: (-paths[path], len(path), path))[: num_nodes - 1]
    assert [built.tree.paths[node] for node in built.added[1:]] == expected
    assert built.path_probabilities[built.added[1:]].tolist() == [paths[path] for path in expected]
    left_out = sorted(paths.values(), reverse=True)[num_nodes - 1 :]
    assert built.certificate.first_excluded == (left_out[0] if left_out else 0.0)


@given(rates(), st.integers(2, 20))
def test_trees_of_smaller_budgets_nest_and_the_curve_is_theirs(rows, num_nodes):
    large = best_tree(rows, num_nodes)
    for smaller in range(1, large.tree.num_nodes + 1):
        small = best_tree(rows, smaller)
        assert set(small.tree.paths) == {large.tree.paths[node] for node in large.added[:smaller]}
        assert large.curve[smaller - 1] == small.expected_accepted


def test_a_better_later_rank_is_reached():
    built = best_tree([[0.4, 0.1, 0.35], [0.5, 0.2, 0.1]], num_nodes=4)
    assert built.tree.paths == ((), (0,), (2,), (0, 0))
    assert built.expected_accepted == pytest.approx(0.95)
    assert best_tree([[0.2, 0.6, 0.1]], num_nodes=2).tree.paths == ((), (1,))


def test_a_budget_beyond_all_paths_is_met_with_what_exists():
    built = best_tree([[0.5, 0.25], [0.5, 0.0]], num_nodes=1000)
    assert built.tree.num_nodes == 1 + 2 + 2
    assert built.constraints.num_nodes == 1000
    assert built.certificate.first_excluded == 0.0


def test_one_node_is_plain_decoding():
    built = best_tree([[0.5]], num_nodes=1)
    assert built.tree.num_nodes == 1
    assert built.tokens_per_step == 1.0
    assert built.certificate.first_excluded == 0.5


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_nodes": 0}, "`num_nodes` is 0"),
        ({"max_depth": -1}, "`max_depth` is -1"),
        ({"max_rank": -2}, "`max_rank` is -2"),
    ],
)
def test_impossible_limits_are_refused(keywords, message):
    with pytest.raises(ConstraintError, match=message):
        best_tree([[0.5]], **keywords)


def test_a_cap_that_binds_states_its_cost_and_one_that_does_not_costs_nothing():
    rows = [[0.5, 0.3], [0.5, 0.3], [0.5, 0.3]]
    binding = best_tree(rows, 8, max_depth=1).certificate
    assert binding.constraint_costs["max_depth"] == binding.unconstrained - binding.value > 0.5
    assert best_tree(rows, 3, max_depth=3, max_rank=1).certificate.constraint_costs == {
        "max_depth": 0.0,
        "max_rank": 0.0,
    }


def test_probabilities_are_products_along_the_path():
    rows = np.random.default_rng(0).dirichlet(np.ones(12), size=4)
    built = best_tree(rows, 200)
    for path, probability in zip(built.tree.paths, built.path_probabilities):
        product = 1.0
        for head, rank in enumerate(path):
            product *= rows[head, rank]
        assert probability == product


def assert_same(fast, slow, num_nodes):
    """Compare arrays with the answer of the heap."""
    tree = DraftTree.from_parents(fast.parents, fast.ranks)
    assert list(tree.paths[1:]) == slow.paths
    assert fast.probabilities[1:].tolist() == slow.probabilities
    order = sorted(range(len(slow.paths)), key=lambda i: -slow.probabilities[i])
    assert fast.added.tolist() == [0, *(i + 1 for i in order)]
    assert fast.following == slow.left_out


@given(rates(max_heads=4, max_ranks=4), st.integers(1, 80))
def test_array_operations_take_the_same_nodes_as_the_heap(rows, num_nodes):
    model = HeadModel(AcceptanceTable.from_rates(rows))
    assert_same(likeliest_paths(model.table.rates, num_nodes), search(model, Limits(num_nodes)), num_nodes)


@pytest.mark.parametrize("num_nodes", [1025, 3000, 20_000])
def test_large_budgets_take_the_same_nodes_as_the_heap(num_nodes):
    rows = np.random.default_rng(1).dirichlet(np.full(40, 0.2), size=6)  # neither sorted nor without tiny rates
    keywords = {"max_depth": 5, "max_rank": 30, "rank_caps": (35, 12)}
    slow = search(HeadModel(AcceptanceTable.from_rates(rows)), Limits(num_nodes, **keywords))
    built = best_tree(rows, num_nodes, **keywords)
    assert list(built.tree.paths[1:]) == slow.paths
    assert built.path_probabilities[1:].tolist() == slow.probabilities
    assert built.certificate.first_excluded == slow.left_out
    assert built.certificate.nested
    assert built.tree == DraftTree.from_paths(built.tree.paths[1:])
