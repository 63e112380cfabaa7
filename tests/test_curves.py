import numpy as np
import pytest

from treeopt import RankTrace, best_tree, replay
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.curves import describe_source, node_curve, rank_curves
from treeopt.errors import TraceError
from treeopt.show import head_rows


@pytest.fixture(scope="module")
def demo():
    return RankTrace.read(calibration_path(DEMO_TRACE))


def test_rates_by_rank_are_counts_over_each_heads_own_positions(demo):
    alone, together = rank_curves(demo, 6), rank_curves(demo, 6, together=True)
    for head in range(demo.num_heads):
        seen = [rank for rank in demo.ranks[:, head].tolist() if rank >= 0]
        assert alone.rates[head].tolist() == pytest.approx([seen.count(rank) / len(seen) for rank in range(6)])
        assert together.rates[head].tolist() == pytest.approx(np.cumsum(alone.rates[head]).tolist())
    for curves in (alone, together):
        assert (curves.low <= curves.rates).all()
        assert (curves.rates <= curves.high).all()
        assert (curves.low < curves.high).all()


def test_the_intervals_are_those_of_the_printed_table(demo):
    together = rank_curves(demo, 10, together=True)
    for row in head_rows(demo):
        for top in (1, 3, 5, 10):
            cell = [array[row["head"], top - 1] for array in (together.rates, together.low, together.high)]
            assert cell == pytest.approx(row[f"top_{top}"])


def test_each_point_of_the_node_curve_is_the_best_tree_of_that_size(demo):
    curve = node_curve(demo, 20)
    assert curve.nodes.tolist() == list(range(1, 21))
    for n in curve.nodes.tolist():
        built = best_tree(demo.table(), n)
        assert curve.predicted[n - 1] == pytest.approx(built.tokens_per_step)
        found = replay(built.tree, demo)
        assert curve.replayed[n - 1] == found.tokens_per_step
        assert (curve.low[n - 1], curve.high[n - 1]) == pytest.approx(found.interval())


def test_a_curve_ends_where_paths_do():
    trace = RankTrace([[0], [1], [-1], [0], [0], [-1]], [0, 3, 6])
    assert node_curve(trace, 512).built.tree.num_nodes == 3


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (RankTrace([[0], [-1]], [0, 2]), r"`documents` holds 1 with tokens to guess, .* calibrate on 2 or more"),
        (RankTrace([[0, -1], [-1, -1]] * 2, [0, 2, 4]), r"head `1` was observed at no position"),
        (RankTrace(np.zeros((0, 2), dtype=int), [0]), r"head `0` was observed at no position"),
    ],
)
def test_a_trace_too_small_for_a_curve_is_refused(trace, message):
    with pytest.raises(TraceError, match=message):
        rank_curves(trace, 5)
    with pytest.raises(TraceError, match=message):
        node_curve(trace, 8)


def test_the_source_is_named_by_the_end_of_a_long_path():
    trace = RankTrace([[0], [-1]], [0, 2], metadata={"target": "models/" + "x" * 60 + "/end"})
    text = describe_source(trace)
    assert text.startswith("Target …x")
    assert text.endswith("x/end, 1 documents, 2 positions")
    assert describe_source(RankTrace([[0]], [0, 1])) == "1 documents, 1 positions"
