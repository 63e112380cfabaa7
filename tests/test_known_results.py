"""Published trees and values, to every printed digit."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.optimizer import plain_heap
from treeopt import best_tree, dense_tree
from treeopt.optimize import Limits, SiblingModel
from treeopt.optimize.search import search

DATA = Path(__file__).parent / "data"
SEQUOIA_LEVELS = 9  # the published depth of 10 counts the root; ten levels of guesses give 4.1988 at 128


def read(name):
    return json.loads((DATA / name).read_text())


def sequoia_rates():
    """The published vector without its unused first entry and its residual."""
    return read("sequoia_acceptance_vector.json")["vector"][1:33]


def isotonic(rates):
    """The falling rates nearest to these: neighbours that rise are replaced by their mean, again and again."""
    blocks = []
    for rate in rates:
        blocks.append([rate, 1])
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (first, n), (second, m) = blocks[-2:]
            blocks[-2:] = [[(first * n + second * m) / (n + m), n + m]]
    return [mean for mean, count in blocks for _ in range(count)]


@pytest.mark.parametrize("name", ["mc_sim_7b_63", "vicuna_7b_stage2", "vicuna_7b_stage1", "zephyr_stage2"])
def test_witness_accuracies_print_the_published_list_in_its_order(name):
    witness = read("medusa_tree_witness_tables.json")["trees"][name]
    published = read("published_static_trees.json")["medusa"]["trees"][name]
    built = best_tree(witness["rank_accuracy_witness"], len(published) + 1)
    assert [list(built.tree.paths[node]) for node in built.added[1:]] == published


@pytest.mark.parametrize(("size", "tokens_per_step"), [("7b", 2.3845), ("13b", 2.4812), ("33b", 2.5224)])
def test_the_published_v0_accuracies_give_the_known_optimum(size, tokens_per_step):
    accuracies = read("medusa_v0_head_accuracy.json")["rank_accuracy"][size]
    assert round(best_tree(accuracies, 64).tokens_per_step, 4) == tokens_per_step


@pytest.mark.parametrize(
    ("num_nodes", "tokens_per_step"),
    [(4, 2.2914), (8, 2.7322), (16, 3.1303), (32, 3.5007), (64, 3.8523), (128, 4.1921)],
)
def test_sequoias_optima_with_left_siblings_are_met(num_nodes, tokens_per_step):
    solution = search(SiblingModel(sequoia_rates(), SEQUOIA_LEVELS), Limits(num_nodes, dense_siblings=True))
    assert solution.optimal
    assert len(solution.paths) == num_nodes - 1
    assert round(1 + solution.value, 4) == tokens_per_step


def test_a_plain_heap_misses_sequoias_optimum_where_a_later_sibling_is_better():
    rates = sequoia_rates()
    assert rates[8] > rates[7]
    assert round(1 + plain_heap([rates] * SEQUOIA_LEVELS, 128), 4) == 4.1682
    # Without left siblings the better sibling is simply taken.
    assert best_tree(SiblingModel(rates, SEQUOIA_LEVELS), 128).tokens_per_step > 4.1921


@pytest.mark.parametrize(
    ("num_nodes", "tokens_per_step"),
    [(4, 2.291432), (8, 2.732173), (16, 3.130289), (32, 3.500739), (64, 3.852309), (128, 4.186284)],
)
def test_after_isotonic_regression_left_siblings_cost_nothing(num_nodes, tokens_per_step):
    model = SiblingModel(isotonic(sequoia_rates()), SEQUOIA_LEVELS)
    built = best_tree(model, num_nodes, dense_siblings=True)
    assert round(built.tokens_per_step, 6) == tokens_per_step
    assert built.certificate.constraint_costs["dense_siblings"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("shape", read("umbrella_defaults.json")["DERIVED_E_tokens"])
def test_equal_growth_and_the_optimum_of_as_many_nodes(shape):
    data = read("umbrella_defaults.json")
    width, depth = map(int, shape.split("x"))
    model = SiblingModel(data["default_acc"], max_depth=width * depth)
    equal = best_tree(model, 1 + width * depth, max_depth=depth, level_caps=[width] * depth)
    free = best_tree(model, 1 + width * depth)
    assert equal.tree.level_widths == (min(width, len(data["default_acc"])), *[width] * (depth - 1))
    found = [round(built.tokens_per_step, 4) for built in (equal, free)]
    assert found == data["DERIVED_E_tokens"][shape]


def test_the_dense_tree_of_four_heads_and_eight_guesses():
    tree = dense_tree([8, 8, 8, 8])
    assert tree.num_nodes - 1 == 4680
    assert len(tree.leaves) == 4096
    built = best_tree([[1 / 8] * 8] * 4, 10_000)
    assert built.tree == tree
    assert built.tokens_per_step == 5.0
