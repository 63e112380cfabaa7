import numpy as np
import pytest

from treeopt import RankTrace, best_tree
from treeopt.optimize import certified
from treeopt.optimize.certificate import sampling_noise
from treeopt.tree import chain


def trace_of(num_documents, seed, length=60):
    ranks = np.random.default_rng(seed).choice(6, size=(num_documents * length, 3), p=[0.5, 0.2, 0.1, 0.1, 0.05, 0.05])
    return RankTrace(ranks, np.arange(num_documents + 1) * length)


def test_the_interval_holds_the_value_and_narrows_with_more_documents():
    widths = []
    for num_documents in (10, 160):
        trace = trace_of(num_documents, 0)
        built = certified(best_tree(trace.table(), 16), trace)
        assert built.noise.low < built.expected_accepted < built.noise.high
        widths.append(built.noise.high - built.noise.low)
    assert widths[1] < widths[0] / 2


def test_the_interval_covers_the_true_value_about_as_often_as_it_says():
    tree = best_tree([[0.5, 0.2, 0.1]] * 3, 10).tree
    truth = 0.0
    for path in tree.paths[1:]:
        truth += np.prod([(0.5, 0.2, 0.1)[rank] for rank in path])
    covered = 0
    for seed in range(100):
        noise = sampling_noise(trace_of(30, seed), tree, None)
        covered += noise.low <= truth <= noise.high
    assert covered == pytest.approx(95, abs=6)


def test_a_node_as_likely_as_the_one_left_out_is_within_noise_and_a_likelier_one_is_not():
    trace = trace_of(100, 1)
    # Ranks 2 and 3 are equally likely; rank 0 is five times as likely as either.
    built = certified(best_tree(trace.table(), 4, max_depth=1), trace)
    assert built.tree.paths[1:] in [((0,), (1,), (2,)), ((0,), (1,), (3,))]
    assert built.noise.nodes_within_noise == 1


def test_nothing_is_left_out_of_a_tree_of_all_paths():
    trace = trace_of(20, 2)
    built = certified(best_tree(trace.table(), 1000), trace)
    assert built.first_excluded == 0.0
    assert built.noise.nodes_within_noise == 0


def test_a_single_document_has_no_interval():
    assert sampling_noise(trace_of(1, 0), chain(2), None) is None


def test_plain_decoding_has_no_spread():
    noise = sampling_noise(trace_of(5, 0), chain(0), (0,))
    assert (noise.low, noise.high, noise.nodes_within_noise) == (0.0, 0.0, 0)
