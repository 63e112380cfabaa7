import numpy as np
import pytest

from treeopt import RankTrace, best_tree
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.errors import TraceError
from treeopt.optimize import Limits
from treeopt.replays import replay
from treeopt.visited import tree_for_steps


def phased_trace(pattern=(0, 2, 0, 3), num_documents=10, length=70):
    """Text whose right ranks repeat, so that where decoding stands depends on the tree alone."""
    rows = np.array([[pattern[(i + head) % len(pattern)] for head in range(4)] for i in range(length)])
    for head in range(4):
        rows[length - 1 - head :, head] = -1
    return RankTrace(np.tile(rows, (num_documents, 1)), np.arange(num_documents + 1) * length)


def test_where_decoding_stands_elsewhere_than_on_average_the_tree_follows_it():
    trace = phased_trace()
    usual = replay(best_tree(trace.table(), 5).tree, trace)
    built, found = tree_for_steps(trace, Limits(5))
    assert found.tokens_per_step > usual.tokens_per_step + 1.5
    assert built.certificate.value == found.tokens_per_step - 1.0
    assert replay(built.tree, trace).num_steps == found.num_steps


@pytest.mark.parametrize("model", ["independent", "joint"])
def test_the_result_is_never_worse_than_the_usual_tree_and_its_averages_are_over_all_positions(model):
    trace = RankTrace.read(calibration_path(DEMO_TRACE))
    built, found = tree_for_steps(trace, Limits(16), model)
    assert found.tokens_per_step >= replay(best_tree(trace.table(), 16).tree, trace).tokens_per_step - 1e-12
    assert built.certificate.objective == "tokens_per_step"
    assert not built.certificate.optimal
    assert built.certificate.bound == 5.0
    assert built.expected_accepted > built.certificate.value  # decoding stands at hard positions
    assert built.certificate.noise.low < built.expected_accepted < built.certificate.noise.high


def test_limits_hold():
    trace = RankTrace.read(calibration_path(DEMO_TRACE))
    limits = Limits(16, max_children=3, max_depth=2)
    built, _ = tree_for_steps(trace, limits)
    limits.check(built.tree)
    assert built.certificate.bound == 2.0


def test_positions_are_chosen_by_a_flag_each():
    trace = RankTrace([[0], [1], [2], [-1], [4], [-1]], [0, 4, 6], ["a", "b"])
    chosen = trace.at([True, False, True, False, False, True])
    assert chosen.ranks[:, 0].tolist() == [0, 2, -1]
    assert chosen.documents.tolist() == [0, 2, 3]
    assert chosen.domains == ("a", "b")
    with pytest.raises(TraceError, match=r"`positions` has shape \(2,\); give one flag for each of 6 rows"):
        trace.at([True, False])
