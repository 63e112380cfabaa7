import numpy as np
import pytest

from treeopt import RankTrace
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.errors import TraceError
from treeopt.heldout import compare_models, observed_acceptance
from treeopt.optimize import Limits
from treeopt.optimize.from_trace import Aim
from treeopt.show import describe_comparison
from treeopt.tree import DraftTree


@pytest.fixture(scope="module")
def demo():
    return RankTrace.read(calibration_path(DEMO_TRACE))


@pytest.fixture(scope="module")
def comparison(demo):
    return compare_models(demo, Limits(64))


def dependent_trace(num_documents=100, length=40, seed=1):
    """Equal accuracies of head 1 after either guess of head 0 on average, but .8 after rank 0 and .2 after rank 1."""
    rng = np.random.default_rng(seed)
    first = rng.choice(2, size=num_documents * length)
    right = rng.random(len(first)) < np.where(first == 0, 0.8, 0.2)
    return RankTrace(np.stack([first, np.where(right, 0, 7)], axis=1), np.arange(num_documents + 1) * length)


def test_acceptance_is_counted_by_document_and_depth_over_what_was_observed():
    trace = RankTrace([[0, 1], [1, 0], [0, -1], [-1, -1], [0, 0], [0, -1], [-1, -1]], [0, 4, 7])
    accepted, observed = observed_acceptance(DraftTree.from_paths([(0,), (0, 0), (0, 1)]), trace)
    assert accepted.tolist() == [[2, 1], [2, 1]]
    assert observed.tolist() == [[3, 2], [2, 1]]


def test_on_the_demo_trace_the_joint_model_predicts_and_builds_no_worse(comparison):
    independent, joint = comparison.choices
    half_width = (independent.high - independent.low) / 2
    assert abs(joint.error) <= abs(independent.error) + half_width
    assert joint.gain_high >= 0.0
    assert independent.low < independent.measured < independent.high


def test_every_document_is_measured_once_and_built_without_itself(demo, comparison):
    assert comparison.num_documents == demo.num_documents
    assert comparison.num_positions == (demo.ranks[:, 0] >= 0).sum()
    # What is built on all documents predicts more than four fifths did, and measured lies near the in-sample value.
    accepted, observed = observed_acceptance(DraftTree.from_paths([(0,)]), demo)
    assert comparison.choices[0].measured > accepted.sum() / observed[:, 0].sum()


def test_dependence_shows_as_an_error_of_the_independent_model_alone():
    trace = dependent_trace()
    independent, joint = compare_models(trace, Limits(5)).choices
    # Four drafts: (0), (1), (0,0) and either (1,0) or (0,7): .5 + .5 + .4 + .1.
    assert independent.measured == pytest.approx(1.5, abs=0.03)
    assert abs(joint.error) < 0.02
    assert joint.gain_low > -0.01
    tight = compare_models(trace, Limits(4)).choices
    assert tight[1].gain >= tight[0].gain == 0.0


def test_another_objective_is_measured_by_its_own_value(demo):
    rows = compare_models(demo, Limits(16), Aim(objective="robust")).choices
    assert [row.aim.objective for row in rows] == ["expected-accepted", "expected-accepted", "robust"]
    assert all(row.own_value is not None and row.own_value < row.measured for row in rows)
    typical = compare_models(demo, Limits(16), Aim(objective="typical")).choices
    assert typical[2].own_value > typical[0].own_value
    weighted = compare_models(demo, Limits(16), Aim(objective="mixture", weights={"math": 1.0})).choices
    assert weighted[2].own_value > weighted[2].measured  # math is the easiest domain


def test_the_text_has_a_line_for_every_choice(comparison):
    text = describe_comparison(comparison)
    assert [line.split()[0] for line in text.splitlines()] == ["held-out", "chosen", "independent", "joint"]
    assert f"{1 + comparison.choices[1].measured:.4f}" in text


def test_too_few_documents_are_refused():
    with pytest.raises(TraceError, match=r"`3` documents cannot be split"):
        compare_models(RankTrace([[0], [0], [0]], [0, 1, 2, 3]), Limits(2))
