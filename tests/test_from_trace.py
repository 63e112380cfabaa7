import numpy as np
import pytest

from treeopt import RankTrace
from treeopt.errors import AcceptanceError, ConstraintError, TraceError
from treeopt.optimize import HeadModel, Limits, MixtureModel, PassingModel
from treeopt.optimize.from_trace import Aim, tree_from_trace
from treeopt.optimize.models import path_probabilities
from treeopt.typical import passing_guesses

NAMES = ("code", "prose", "sums")


@pytest.fixture(scope="module")
def trace():
    """Three domains whose heads prefer different ranks, with probabilities of the guesses."""
    rng = np.random.default_rng(0)
    shares = {"code": [0.7, 0.1, 0.1, 0.1], "prose": [0.2, 0.5, 0.2, 0.1], "sums": [0.3, 0.1, 0.1, 0.5]}
    domains = [NAMES[i % 3] for i in range(30)]
    ranks = np.concatenate([rng.choice(4, size=(20, 3), p=shares[name]) for name in domains])
    documents = np.arange(31) * 20
    for end in documents[1:]:
        for head in range(3):
            ranks[end - 1 - head : end, head] = -1
    probs = rng.dirichlet(np.full(8, 0.3), size=(600, 3))[:, :, :4]
    return RankTrace(ranks, documents, domains, topk_probs=probs, entropies=rng.random(600) * 2)


def test_the_mixture_is_the_weighted_mean_of_the_domains(trace):
    built = tree_from_trace(trace, Limits(12), Aim(objective="mixture", weights={"code": 3, "sums": 1}))
    parts = {name: path_probabilities(HeadModel(trace.domain(name).table()), built.tree) for name in ("code", "sums")}
    mean = 0.75 * parts["code"] + 0.25 * parts["sums"]
    assert built.path_probabilities == pytest.approx(mean)
    assert built.certificate.objective == "mixture"
    assert built.certificate.value == built.expected_accepted == pytest.approx(mean[1:].sum())
    assert built.certificate.parts == {name: pytest.approx(part[1:].sum()) for name, part in parts.items()}
    assert built.certificate.noise.low < built.expected_accepted < built.certificate.noise.high
    assert built.provenance["weights"] == "code 3, sums 1"


def test_a_mixture_of_one_domain_is_that_domains_tree(trace):
    built = tree_from_trace(trace, Limits(12), Aim(objective="mixture", weights={"prose": 2}))
    alone = tree_from_trace(trace.domain("prose"), Limits(12))
    assert built.tree == alone.tree
    assert built.path_probabilities == pytest.approx(alone.path_probabilities)
    assert built.certificate.noise == alone.certificate.noise


def test_the_worst_domain_of_the_robust_tree_has_more_than_that_of_the_plain_one(trace):
    robust = tree_from_trace(trace, Limits(8), Aim(objective="robust"))
    plain = tree_from_trace(trace, Limits(8))
    models = [HeadModel(trace.domain(name).table()) for name in NAMES]
    worst = [min(path_probabilities(model, built.tree)[1:].sum() for model in models) for built in (robust, plain)]
    assert robust.certificate.value == pytest.approx(worst[0])
    assert worst[0] > worst[1] + 0.01
    assert robust.expected_accepted < plain.expected_accepted  # what it costs on average
    assert min(robust.certificate.parts.values()) == pytest.approx(robust.certificate.value)
    assert robust.certificate.optimal


def test_the_typical_tree_covers_more_than_the_plain_one(trace):
    typical = tree_from_trace(trace, Limits(8), Aim(objective="typical", epsilon=0.2, delta=0.4))
    plain = tree_from_trace(trace, Limits(8))
    model = PassingModel(passing_guesses(trace, 0.2, 0.4))
    assert typical.certificate.value == pytest.approx(model.covered(typical.tree.paths[1:]))
    assert typical.certificate.value > model.covered(plain.tree.paths[1:]) + 0.01
    assert typical.certificate.bound == typical.certificate.value
    assert typical.expected_accepted < plain.expected_accepted  # under greedy acceptance
    assert (typical.provenance["epsilon"], typical.provenance["delta"]) == ("0.2", "0.4")


def test_adding_up_what_passes_would_overcount(trace):
    limits = Limits(8)
    typical = tree_from_trace(trace, limits, Aim(objective="typical", epsilon=0.05, delta=0.1))
    total = path_probabilities(PassingModel(passing_guesses(trace, 0.05, 0.1)), typical.tree)[1:].sum()
    assert total > 1.3 * typical.certificate.value


def test_the_joint_model_is_certified_with_its_strengths(trace):
    built = tree_from_trace(trace, Limits(12), Aim("joint"))
    assert built.provenance["model"] == "joint"
    assert built.provenance["strengths"].split(", ")[0] == "inf"
    assert built.certificate.noise.low < built.expected_accepted < built.certificate.noise.high


@pytest.mark.parametrize(
    ("aim", "limits", "error", "message"),
    [
        (
            {"objective": "mixture", "weights": {"math": 1}},
            {},
            TraceError,
            r"domain `math`: `math` is no domain .* code, prose, sums",
        ),
        ({"objective": "mixture", "weights": {"code": -1}}, {}, AcceptanceError, r"`code` has weight -1"),
        ({"objective": "mixture", "weights": {"code": 0}}, {}, AcceptanceError, r"all weights are 0"),
        ({"objective": "mixture"}, {}, AcceptanceError, r"`weights` belong to `objective` mixture"),
        (
            {"weights": {"code": 1}},
            {},
            AcceptanceError,
            r"`weights` belong to `objective` mixture, which is expected-accepted",
        ),
        ({"objective": "speed"}, {}, AcceptanceError, r"`objective` is 'speed'; give one of expected-accepted"),
        ({"model": "psychic"}, {}, AcceptanceError, r"`model` is 'psychic'"),
        ({"objective": "robust"}, {"level_regular": True}, ConstraintError, r"`level_regular` .* another `objective`"),
        ({"objective": "typical", "epsilon": 2.0}, {}, AcceptanceError, r"`epsilon` is 2.0"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(trace, aim, limits, error, message):
    with pytest.raises(error, match=message):
        tree_from_trace(trace, Limits(8, **limits), Aim(**aim))


@pytest.mark.parametrize("objective", ["robust", "mixture"])
def test_domains_are_needed_where_they_are_asked_for(objective):
    trace = RankTrace([[0], [-1], [0], [-1]], [0, 2, 4])
    weights = {"code": 1.0} if objective == "mixture" else None
    with pytest.raises(TraceError, match=rf"the trace has no domains, and `objective` {objective} needs two"):
        tree_from_trace(trace, Limits(4), Aim(objective=objective, weights=weights))


def test_weights_of_a_mixture_are_those_of_its_models():
    models = {"a": HeadModel, "b": HeadModel}
    with pytest.raises(AcceptanceError, match=r"`b` has a weight or a trace, but not both"):
        MixtureModel(models, {"a": 1.0})


def test_nodes_within_noise_are_counted_only_where_nodes_are_chosen_by_their_probability(trace):
    assert tree_from_trace(trace, Limits(8)).certificate.noise.nodes_within_noise >= 0
    for objective in ("robust", "typical"):
        assert tree_from_trace(trace, Limits(8), Aim(objective=objective)).certificate.noise.nodes_within_noise is None
