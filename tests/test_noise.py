import numpy as np
import pytest

from treeopt import RankTrace, best_tree
from treeopt.optimize import HeadModel, JointModel, Sample, certified
from treeopt.optimize.noise import sampling_noise
from treeopt.tree import DraftTree, chain


def trace_of(num_documents, seed, length=60):
    ranks = np.random.default_rng(seed).choice(6, size=(num_documents * length, 3), p=[0.5, 0.2, 0.1, 0.1, 0.05, 0.05])
    return RankTrace(ranks, np.arange(num_documents + 1) * length)


def test_the_interval_holds_the_value_and_narrows_with_more_documents():
    widths = []
    for num_documents in (10, 160):
        trace = trace_of(num_documents, 0)
        built = certified(best_tree(trace.table(), 16), HeadModel(trace.table()), [Sample(trace)])
        assert built.certificate.noise.low < built.expected_accepted < built.certificate.noise.high
        widths.append(built.certificate.noise.high - built.certificate.noise.low)
    assert widths[1] < widths[0] / 2


def test_the_interval_covers_the_true_value_about_as_often_as_it_says():
    tree = best_tree([[0.5, 0.2, 0.1]] * 3, 10).tree
    truth = 0.0
    for path in tree.paths[1:]:
        truth += np.prod([(0.5, 0.2, 0.1)[rank] for rank in path])
    covered = 0
    for seed in range(100):
        noise = sampling_noise([Sample(trace_of(30, seed))], tree, None)
        covered += noise.low <= truth <= noise.high
    assert covered == pytest.approx(95, abs=6)


def test_a_node_as_likely_as_the_one_left_out_is_within_noise_and_a_likelier_one_is_not():
    trace = trace_of(100, 1)
    # Ranks 2 and 3 are equally likely; rank 0 is five times as likely as either.
    built = certified(best_tree(trace.table(), 4, max_depth=1), HeadModel(trace.table()), [Sample(trace)])
    assert built.tree.paths[1:] in [((0,), (1,), (2,)), ((0,), (1,), (3,))]
    assert built.certificate.noise.nodes_within_noise == 1


def test_nothing_is_left_out_of_a_tree_of_all_paths():
    trace = trace_of(20, 2)
    built = certified(best_tree(trace.table(), 1000), HeadModel(trace.table()), [Sample(trace)])
    assert built.certificate.first_excluded == 0.0
    assert built.certificate.noise.nodes_within_noise == 0


def test_a_single_document_has_no_interval():
    assert sampling_noise([Sample(trace_of(1, 0))], chain(2), None) is None


def test_plain_decoding_has_no_spread():
    noise = sampling_noise([Sample(trace_of(5, 0))], chain(0), (0,))
    assert (noise.low, noise.high, noise.nodes_within_noise) == (0.0, 0.0, 0)


def dependent_trace(num_documents, seed, length=40):
    rng = np.random.default_rng(seed)
    first = rng.choice(2, size=num_documents * length)
    right = rng.random(len(first)) < np.where(first == 0, 0.8, 0.2)
    return RankTrace(np.stack([first, np.where(right, 0, 7)], axis=1), np.arange(num_documents + 1) * length)


def test_the_interval_of_a_joint_model_is_of_its_own_value():
    """Under independent heads (0,0) and (1,0) have .25 each; in truth .4 and .1."""
    trace = dependent_trace(100, 0)
    tree = DraftTree.from_paths([(0,), (0, 0)])
    strengths = JointModel.fit(trace).strengths
    joint = sampling_noise([Sample(trace, strengths)], tree, None)
    independent = sampling_noise([Sample(trace)], tree, None)
    assert joint.low < 0.9 < joint.high
    assert independent.low < 0.75 < independent.high < joint.low


def test_the_interval_of_a_joint_model_covers_the_true_value_about_as_often_as_it_says():
    tree = DraftTree.from_paths([(0,), (0, 0)])
    covered = 0
    for seed in range(100):
        trace = dependent_trace(60, seed)
        noise = sampling_noise([Sample(trace, JointModel.fit(trace).strengths)], tree, None)
        covered += noise.low <= 0.9 <= noise.high
    assert covered == pytest.approx(95, abs=6)


def test_infinite_strengths_and_one_domain_give_the_independent_interval():
    trace = trace_of(20, 3)
    tree = best_tree(trace.table(), 8).tree
    plain = sampling_noise([Sample(trace)], tree, (5,))
    assert sampling_noise([Sample(trace, [float("inf")] * 3)], tree, (5,)) == plain
    assert sampling_noise([Sample(trace, weight=1.0), Sample(trace_of(1, 0), weight=0.0)], tree, (5,)) == plain


def test_domains_of_a_mixture_are_resampled_apart():
    """Two domains of constant accuracy: drawing documents within each changes nothing, drawing over both would."""
    ranks = np.concatenate([np.zeros((200, 1), dtype=int), np.ones((200, 1), dtype=int)])
    trace = RankTrace(ranks, np.arange(11) * 40, ["a"] * 5 + ["b"] * 5)
    samples = [Sample(trace.domain(name), weight=0.5) for name in "ab"]
    apart = sampling_noise(samples, chain(1), None)
    assert (apart.low, apart.high) == (0.5, 0.5)
    together = sampling_noise([Sample(trace)], chain(1), None)
    assert together.low < 0.4
    assert together.high > 0.6
