import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import replayed
from tests.strategies import rank_arrays, trees
from treeopt import RankTrace, best_tree, chain, dense_tree
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.errors import TreeError
from treeopt.replays import replay, replay_many, visited_positions

SHALLOW = {"max_nodes": 12, "max_rank": 4, "max_depth": 3}


@given(trees(**SHALLOW), rank_arrays())
def test_replay_equals_a_walk_step_by_step(tree, arrays):
    ranks, documents = arrays
    trace = RankTrace(ranks, documents)
    steps, tokens, lengths, visited = replayed(tree, ranks.tolist(), documents.tolist())
    found = replay(tree, trace)
    assert found.steps.tolist() == steps
    assert found.tokens.tolist() == tokens
    assert found.histogram.tolist() == np.bincount(lengths, minlength=tree.max_depth + 1).tolist()
    assert np.flatnonzero(visited_positions(tree, trace)).tolist() == visited
    assert found.num_tokens == found.num_steps + sum(lengths)


@given(st.lists(trees(**SHALLOW), min_size=1, max_size=5), rank_arrays())
def test_many_trees_at_once_give_what_each_gives_alone(many, arrays):
    trace = RankTrace(*arrays)
    for together, tree in zip(replay_many(many, trace), many):
        alone = replay(tree, trace)
        assert together.steps.tolist() == alone.steps.tolist()
        assert together.histogram.tolist() == alone.histogram.tolist()


def test_chunks_of_trees_change_nothing(monkeypatch):
    trace = RankTrace.read(calibration_path(DEMO_TRACE))
    many = [best_tree(trace.table(), n).tree for n in range(1, 12)]
    whole = [one.steps.tolist() for one in replay_many(many, trace)]
    monkeypatch.setattr("treeopt.replays.CHUNK_DECODES", 200)
    assert [one.steps.tolist() for one in replay_many(many, trace)] == whole


def test_plain_decoding_takes_a_step_a_token():
    trace = RankTrace.read(calibration_path(DEMO_TRACE))
    found = replay(chain(0), trace)
    assert found.tokens_per_step == 1.0
    assert found.num_steps == trace.num_positions - trace.num_documents
    assert found.histogram.tolist() == [found.num_steps]


def test_larger_budgets_give_more_tokens_a_step():
    trace = RankTrace.read(calibration_path(DEMO_TRACE))
    built = [replay(best_tree(trace.table(), n).tree, trace) for n in (2, 4, 16, 64, 256)]
    rates = [one.tokens_per_step for one in built]
    assert rates == sorted(rates)
    low, high = built[3].interval()
    assert low < built[3].tokens_per_step < high


def test_domains_add_up():
    trace = RankTrace.read(calibration_path(DEMO_TRACE))
    found = replay(dense_tree([3, 2]), trace)
    parts = found.by_domain()
    assert set(parts) == set(trace.domains)
    assert sum(part.num_steps for part in parts.values()) == found.num_steps
    assert parts["math"].steps.tolist() == replay(dense_tree([3, 2]), trace.domain("math")).steps.tolist()
    assert replay(chain(1), RankTrace([[0], [-1]], [0, 2])).by_domain() == {}


def test_a_tree_deeper_than_the_trace_is_refused():
    with pytest.raises(TreeError, match=r"depth 2 but there are 1 heads"):
        replay(chain(2), RankTrace([[0], [-1]], [0, 2]))


def test_a_trace_without_steps_has_the_rate_of_plain_decoding():
    found = replay(chain(1), RankTrace([[-1], [-1]], [0, 1, 2]))
    assert (found.num_steps, found.tokens_per_step, found.interval()) == (0, 1.0, (1.0, 1.0))


@pytest.mark.heavy
def test_a_thousand_trees_on_a_hundred_thousand_positions_take_less_than_ten_seconds():
    demo = RankTrace.read(calibration_path(DEMO_TRACE))
    trace = demo.select(np.tile(np.arange(96), 11))
    assert trace.num_positions > 100_000
    rng, table = np.random.default_rng(0), demo.table()
    many = [best_tree(table.rates * rng.uniform(0.5, 1.0, table.rates.shape), 64).tree for _ in range(1000)]
    for whole in (trace, RankTrace(trace.ranks, [0, trace.num_positions])):  # many documents, and a single one
        start = time.perf_counter()
        found = replay_many(many, whole)
        assert time.perf_counter() - start < 10.0
        assert len(found) == 1000
