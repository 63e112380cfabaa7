from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt import AcceptanceTable, RankTrace, best_tree
from treeopt.auto import auto_budget, nested_tree
from treeopt.budget import choose_budget
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.errors import ConstraintError
from treeopt.latency import LatencyCurve, LatencyTable
from treeopt.replays import replay

A800 = Path(__file__).parent / "data" / "caddtree_verify_cost_A800.json"
VICUNA = AcceptanceTable.read(calibration_path("tables/vicuna-7b-v0.json"))


@pytest.mark.parametrize(
    "curve", LatencyTable.read(A800, model="Qwen3-8B").curves, ids=lambda curve: str(curve.context)
)
def test_on_a_published_curve_the_budget_is_that_of_a_plain_scan(curve):
    choice = auto_budget(lambda n: best_tree(VICUNA, n), curve)
    best, best_rate = 1, 1.0 / curve.plain_seconds
    for n in range(2, curve.max_nodes + 1):
        built = best_tree(VICUNA, n)
        seconds = np.interp(n, curve.nodes, curve.seconds) + 0.0065
        if built.tokens_per_step / seconds > best_rate:
            best, best_rate = n, built.tokens_per_step / seconds
    assert choice.num_nodes == best
    assert choice.tokens_per_second[choice.best] == pytest.approx(best_rate)


def test_budgets_fall_as_the_context_grows():
    curves = LatencyTable.read(A800, model="Qwen3-8B").curves
    chosen = [auto_budget(lambda n: best_tree(VICUNA, n), curve).num_nodes for curve in curves]
    assert chosen[0] == 200
    assert max(chosen[4:]) < 40


def test_a_flat_curve_takes_the_largest_budget_and_a_proportional_one_none():
    flat = LatencyCurve.of([1, 100], [1.0, 1.0])
    assert auto_budget(lambda n: best_tree(VICUNA, n), flat).num_nodes == 100
    proportional = LatencyCurve.of([1, 100], [1.0, 100.0])
    choice = auto_budget(lambda n: best_tree(VICUNA, n), proportional)
    assert (choice.num_nodes, choice.speedup) == (1, 1.0)


def test_stairs_are_climbed_to_their_edge():
    stairs = LatencyCurve.of([1, 16, 32, 64], [1.0, 1.1, 1.3, 9.0], between="step")
    assert auto_budget(lambda n: best_tree(VICUNA, n), stairs).num_nodes in (16, 32)


def test_drafting_that_costs_more_than_it_gives_is_not_done():
    curve = LatencyCurve.of([1, 64], [1.0, 1.0], draft_seconds=[0.1, 5.0])
    choice = choose_budget(curve, [2, 3, 64], [1.5, 1.8, 2.4], [1, 2, 3])
    assert choice.num_nodes == 2


@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=12),
    st.lists(st.floats(1, 6), min_size=12, max_size=12),
    st.sampled_from(["linear", "step"]),
)
def test_whatever_the_curve_no_budget_gives_more_tokens_a_second(seconds, gains, between):
    curve = LatencyCurve.of(range(1, len(seconds) + 1), seconds, between=between)
    choice = choose_budget(curve, range(2, 14), gains, [1] * 12)
    rates = [1 / seconds[0]] + [gain / time for gain, time in zip(gains, seconds[1:])]
    assert choice.tokens_per_second.tolist() == pytest.approx(rates)
    assert choice.num_nodes == 1 + int(np.argmax(rates))


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ConstraintError, match=r"have lengths 2, 1 and 2"):
        choose_budget(LatencyCurve.of([1], [1.0]), [2, 3], [1.5], [1, 1])


def test_a_nested_tree_is_the_best_of_its_size():
    large = best_tree(VICUNA, 200)
    for n in (1, 2, 17, 64, 200):
        assert nested_tree(large, n) == best_tree(VICUNA, n).tree


def test_with_a_trace_tokens_a_step_are_replayed():
    trace = RankTrace.read(calibration_path(DEMO_TRACE))
    curve = LatencyCurve.of([1, 32], [1.0, 1.2])
    choice = auto_budget(lambda n: best_tree(trace.table(), n), curve, trace)
    for i in (1, 7, 31):
        expected = replay(best_tree(trace.table(), int(choice.nodes[i])).tree, trace).tokens_per_step
        assert choice.tokens_per_step[i] == pytest.approx(expected)


def test_trees_that_do_not_nest_are_built_at_the_measured_budgets():
    curve = LatencyCurve.of([1, 8, 16], [1.0, 1.0, 1.0])
    choice = auto_budget(lambda n: best_tree(VICUNA, n, max_leaves=3), curve)
    assert set(choice.nodes.tolist()) <= {1, 8, 16}
    assert choice.tokens_per_step[1] == pytest.approx(best_tree(VICUNA, 8, max_leaves=3).tokens_per_step)


def test_a_curve_beyond_all_paths_ends_where_the_paths_do():
    table = AcceptanceTable.from_rates([[0.5, 0.3]])
    choice = auto_budget(lambda n: best_tree(table, n), LatencyCurve.of([1, 50], [1.0, 1.0]))
    assert choice.num_nodes == 3
