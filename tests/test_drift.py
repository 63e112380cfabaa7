import numpy as np
import pytest

from treeopt import RankTrace
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.drift import measure_drift
from treeopt.errors import TraceError
from treeopt.optimize import Limits


def trace_of(shares, num_documents=40, seed=0, length=50):
    """Heads of given shares of ranks; documents differ in how easy they are, as real ones do."""
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(num_documents):
        ease = rng.uniform(0.8, 1.2)
        columns = []
        for share in shares:
            p = np.array(share, dtype=float)
            p[0] = min(0.95, p[0] * ease)
            columns.append(rng.choice(len(p), size=length, p=p / p.sum()))
        blocks.append(np.stack(columns, axis=1))
    return RankTrace(np.concatenate(blocks), np.arange(num_documents + 1) * length)


SAME = ([0.6, 0.2, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1])


def test_a_head_that_got_worse_is_found_and_the_other_is_not():
    drift = measure_drift(trace_of(SAME), trace_of(([0.35, 0.35, 0.2, 0.1], SAME[1]), seed=1), Limits(8))
    assert drift.significant == (0,)
    worse, same = drift.heads
    assert worse.differences[0][2] < 0 < same.differences[0][2]
    assert worse.effect_size == pytest.approx(2 * (np.arcsin(0.35**0.5) - np.arcsin(0.6**0.5)), abs=0.1)
    assert abs(same.effect_size) < 0.1


def test_without_drift_a_difference_is_claimed_no_more_often_than_stated():
    claims = [
        bool(measure_drift(trace_of(SAME, seed=2 * i), trace_of(SAME, seed=2 * i + 1), Limits(2)).significant)
        for i in range(30)
    ]
    assert sum(claims) <= 4  # 5 % of 30 are 1.5


def test_other_ranks_are_worth_building_anew_for():
    swapped = ([0.1, 0.1, 0.2, 0.6], [0.1, 0.2, 0.3, 0.4])
    drift = measure_drift(trace_of(SAME), trace_of(swapped, seed=1), Limits(4))
    assert drift.gain.low > 0.1
    assert drift.significant == (0, 1)


def test_halves_of_the_bundled_trace_do_not_differ():
    demo = RankTrace.read(calibration_path(DEMO_TRACE))
    drift = measure_drift(demo.select(range(0, 96, 2)), demo.select(range(1, 96, 2)), Limits(16))
    assert drift.significant == ()
    assert drift.gain.low < 0.02


def test_traces_of_other_heads_and_single_documents_are_refused():
    with pytest.raises(TraceError, match=r"the reference has 2 heads and the trace 1"):
        measure_drift(trace_of(SAME), trace_of(SAME[:1]), Limits(4))
    with pytest.raises(TraceError, match=r"a single document shows no spread"):
        measure_drift(trace_of(SAME), trace_of(SAME, num_documents=1), Limits(4))
