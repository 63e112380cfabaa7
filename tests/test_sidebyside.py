import numpy as np
import pytest

from treeopt import RankTrace, best_tree, chain, dense_tree
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.errors import TreeError
from treeopt.latency import LatencyCurve
from treeopt.replays import replay
from treeopt.sidebyside import compare_trees


@pytest.fixture(scope="module")
def demo():
    return RankTrace.read(calibration_path(DEMO_TRACE))


@pytest.fixture(scope="module")
def trees(demo):
    return {"ours": best_tree(demo.table(), 32).tree, "chain": chain(4), "dense": dense_tree([5, 5]), "plain": chain(0)}


def test_each_row_is_the_trees_exact_replay(demo, trees):
    rows = compare_trees(trees, demo)
    assert [row.name for row in rows] == list(trees)
    for row, tree in zip(rows, trees.values()):
        found = replay(tree, demo)
        assert row.tokens_per_step == found.tokens_per_step
        assert row.low <= row.tokens_per_step <= row.high
        assert row.domains == {name: part.tokens_per_step for name, part in found.by_domain().items()}
        assert row.gain == pytest.approx(row.tokens_per_step - rows[0].tokens_per_step)
        assert row.gain_low <= row.gain <= row.gain_high
        assert row.shared_nodes == len(set(tree.paths) & set(trees["ours"].paths))
        assert row.speedup is None
    assert (rows[0].gain, rows[0].gain_low, rows[0].gain_high) == (0.0, 0.0, 0.0)
    assert (rows[3].tokens_per_step, rows[3].low, rows[3].high) == (1.0, 1.0, 1.0)


def test_differences_are_of_the_same_documents_and_so_tighter_than_two_intervals(demo):
    table = demo.table()
    near = {"a": best_tree(table, 64).tree, "b": best_tree(table, 60).tree}
    second = compare_trees(near, demo)[1]
    assert second.gain_high - second.gain_low < 0.3 * (second.high - second.low)


def test_predicted_speed_prices_verification_drafting_and_plain_steps(demo, trees):
    curve = LatencyCurve.of([1, 32], [2.0, 3.0], plain_seconds=1.5, draft_seconds=[0.1, 0.2, 0.3])
    rows = {row.name: row for row in compare_trees(trees, demo, curve=curve)}
    depth = trees["ours"].max_depth
    assert rows["ours"].speedup == pytest.approx(rows["ours"].tokens_per_step * 1.5 / (3.0 + 0.1 * depth))
    assert rows["plain"].speedup == 1.0
    assert compare_trees({"large": best_tree(demo.table(), 33).tree}, demo, curve=curve)[0].speedup is None


def test_a_tree_too_deep_is_named_and_none_at_all_refused():
    trace = RankTrace(np.array([[0], [-1]]), [0, 2])
    with pytest.raises(TreeError, match=r"`deep`: the tree has depth 2 but there are 1 heads"):
        compare_trees({"deep": chain(2)}, trace)
    with pytest.raises(TreeError, match=r"no tree is given"):
        compare_trees({}, trace)
