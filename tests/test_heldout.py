import numpy as np
import pytest

from treeopt import RankTrace
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.errors import TraceError
from treeopt.heldout import _parts, _Result, compare_ways, split_errors, steps_gain
from treeopt.optimize import Limits
from treeopt.optimize.from_trace import Aim, tree_from_trace
from treeopt.replays import replay
from treeopt.show import describe_comparison


@pytest.fixture(scope="module")
def demo():
    return RankTrace.read(calibration_path(DEMO_TRACE))


@pytest.fixture(scope="module")
def comparison(demo):
    return compare_ways(demo, Limits(64))


def dependent_trace(num_documents=100, length=40, seed=1):
    """Equal accuracies of head 1 after either guess of head 0 on average, but .8 after rank 0 and .2 after rank 1."""
    rng = np.random.default_rng(seed)
    first = rng.choice(2, size=num_documents * length)
    right = rng.random(len(first)) < np.where(first == 0, 0.8, 0.2)
    return RankTrace(np.stack([first, np.where(right, 0, 7)], axis=1), np.arange(num_documents + 1) * length)


def test_on_the_demo_trace_the_joint_model_predicts_and_builds_no_worse(comparison):
    independent, joint = comparison.choices[:2]
    half_width = (independent.measured.high - independent.measured.low) / 2
    assert abs(joint.error) <= abs(independent.error) + half_width
    assert joint.gain.high >= 0.0
    assert joint.replayed_gain.high >= 0.0
    assert independent.measured.low < independent.measured.value < independent.measured.high


def test_every_document_is_measured_once_and_built_without_itself(demo, comparison):
    assert comparison.num_documents == demo.num_documents
    assert comparison.num_positions == (demo.ranks[:, 0] >= 0).sum()
    result = _Result([(tree_from_trace(known, Limits(16), certify=False), rest) for known, rest in _parts(demo, 0)])
    # The documents' own tokens, each once, in whatever order.
    assert sorted(result.tokens) == sorted(np.diff(demo.documents) - 1)
    assert result.observed[:, 0].sum() == comparison.num_positions


def test_the_replay_of_one_half_predicts_the_other_within_one_percent_in_the_mean(demo):
    """Averages over positions say too much: decoding jumps over what it accepts, and so stands at hard positions."""
    for num_nodes in (16, 64):
        errors = split_errors(demo, Limits(num_nodes))
        assert len(errors.replayed) == len(errors.averaged) == 8
        assert abs(np.mean(errors.replayed)) < 0.01
        assert np.mean(errors.averaged) > 0.02


def test_replayed_and_averaged_values_are_those_of_the_left_out_documents(demo):
    parts = _parts(demo, 3)
    built = [tree_from_trace(known, Limits(8), certify=False) for known, _ in parts]
    choice = compare_ways(demo, Limits(8), seed=3).choices[0]
    replays = [replay(one.tree, rest) for one, (_, rest) in zip(built, parts)]
    tokens, steps = sum(one.num_tokens for one in replays), sum(one.num_steps for one in replays)
    assert choice.replayed.value == pytest.approx(tokens / steps)
    assert choice.replayed.low < choice.replayed.value < choice.replayed.high
    assert choice.predicted == pytest.approx(np.mean([one.tokens_per_step for one in built]))
    assert choice.gain == choice.replayed_gain == (0.0, 0.0, 0.0)


def test_dependence_shows_as_an_error_of_the_independent_model_alone():
    independent, joint, _ = compare_ways(dependent_trace(), Limits(4)).choices
    assert abs(joint.error) < abs(independent.error) / 2
    assert independent.error < -0.05  # (0,0) has .4 where independent heads say .25
    assert joint.gain.value >= independent.gain.value == 0.0


def test_trees_chosen_by_steps_gain_where_averages_mislead():
    gain = steps_gain(dependent_trace(), Limits(3))
    assert gain.low <= gain.value <= gain.high
    assert gain.value == pytest.approx(compare_ways(dependent_trace(), Limits(3)).choices[2].replayed_gain.value)


def test_another_objective_is_measured_by_its_own_value(demo):
    rows = compare_ways(demo, Limits(16), Aim(objective="robust")).choices
    assert [row.name for row in rows] == ["independent", "joint", "tokens-per-step", "robust"]
    assert all(row.own_value is not None and row.own_value < row.measured.value for row in rows)
    typical = compare_ways(demo, Limits(16), Aim(objective="typical")).choices
    assert typical[3].own_value > typical[0].own_value
    weighted = compare_ways(demo, Limits(16), Aim(objective="mixture", weights={"math": 1.0})).choices
    assert weighted[3].own_value > weighted[3].measured.value  # math is the easiest domain


def test_the_text_has_a_line_for_every_choice(comparison):
    lines = describe_comparison(comparison).splitlines()
    assert [line.split()[0] for line in lines] == [
        "held-out",
        "chosen",
        "independent",
        "joint",
        "tokens-per-step",
        "built",
    ]
    assert f"{comparison.choices[1].measured.value:.4f}" in lines[3]
    assert f"{np.mean(comparison.splits.replayed):+.1%} off" in lines[5]


def test_too_few_documents_are_refused():
    with pytest.raises(TraceError, match=r"`3` documents cannot be split"):
        compare_ways(RankTrace([[0], [0], [0]], [0, 1, 2, 3]), Limits(2))
