"""Rules of acceptance: sampling by enumeration, typical acceptance against a walk by hand, processors at the true text."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from tests.strategies import trees
from treeopt import DraftTree, chain, dense_tree
from treeopt.errors import AcceptanceError
from treeopt.typical import entropy, typical_threshold
from treeopt.verify import sampling
from treeopt.verify.acceptance import Greedy, NodeScores, TreeIndex
from treeopt.verify.sampling import Sample
from treeopt.verify.typical import Typical

CPU = torch.device("cpu")


def scores_of(tree, tokens, probabilities, processors=None, texts=()):
    logits = torch.tensor(probabilities, dtype=torch.float64).log()
    return NodeScores(
        logits, torch.tensor(tokens), TreeIndex.of(tree, CPU), lambda x: x, lambda x: x, processors, texts
    )


# Sampling, by enumeration of every draw


def law_of_step(monkeypatch, rule, tree, tokens, probabilities):
    """Return the probability of each (accepted tokens, bonus) that a step can give, trying every sequence of draws."""
    size = len(probabilities[0])
    law = {}
    for draws in itertools.product(range(size), repeat=tree.max_depth + 1):
        weights, used = [], iter(draws)

        def draw(row, generator=None):
            token = next(used)  # noqa: B023
            weights.append(float(row.softmax(dim=-1)[0, token]))  # noqa: B023
            return torch.tensor([token])

        monkeypatch.setattr(sampling, "draw", draw)
        accepted = rule.accept(scores_of(tree, [tokens], [probabilities]))
        node, path = int(accepted.nodes), []
        while node:
            path.insert(0, tokens[node])
            node = int(tree.parents[node])
        assert len(path) == int(accepted.lengths)
        # Draws behind the end of the walk are not used: every way to continue them is counted once.
        share = math.prod(weights) / size ** (len(draws) - len(weights))
        outcome = (*path, int(accepted.bonus))
        law[outcome] = law.get(outcome, 0.0) + share
    return law


def warped(probabilities, rule):
    """Temperature, top-k and top-p by hand, on one distribution."""
    powered = np.asarray(probabilities) ** (1 / rule.temperature)
    powered /= powered.sum()
    order = np.argsort(-powered, kind="stable")
    kept = np.ones(len(powered), dtype=bool)
    if rule.top_k:
        kept[order[rule.top_k :]] = False
    renormalised = np.where(kept, powered, 0) / powered[kept].sum()
    before = np.cumsum(renormalised[order]) - renormalised[order]
    kept[order[before >= rule.top_p]] = False
    return np.where(kept, powered, 0) / powered[kept].sum()


def distance_from_target(law, distribution):
    """Largest total variation of the next token, behind every text that a step can emit."""
    worst, prefixes = 0.0, {outcome[:i] for outcome in law for i in range(len(outcome))}
    for prefix in prefixes:
        longer = {o: p for o, p in law.items() if len(o) > len(prefix) and o[: len(prefix)] == prefix}
        total = sum(longer.values())
        if total > 0:
            emitted = np.zeros(len(distribution(prefix)))
            for outcome, probability in longer.items():
                emitted[outcome[len(prefix)]] += probability / total
            worst = max(worst, 0.5 * np.abs(emitted - distribution(prefix)).sum())
    return worst


RULES = [Sample(), Sample(temperature=0.6), Sample(top_k=2), Sample(top_p=0.75), Sample(1.3, top_k=3, top_p=0.9)]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("first", [[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.0, 1.0, 0.0, 0.0]])
@pytest.mark.parametrize(
    ("paths", "tokens"),
    [
        ([(0,)], [9, 0]),
        ([(0,), (1,)], [9, 0, 1]),
        ([(0,), (1,), (2,)], [9, 3, 0, 2]),
        ([(0,), (1,)], [9, 1, 1]),  # twice the same token
        ([(0,), (0, 0)], [9, 1, 2]),
        ([(0,), (1,), (0, 0), (0, 1), (1, 0)], [9, 0, 2, 1, 3, 0]),
        ([(0,), (1,), (2,), (0, 0), (0, 1), (0, 2)], [9, 2, 1, 0, 3, 3, 1]),
    ],
    ids=str,
)
def test_the_emitted_text_has_exactly_the_targets_distribution(monkeypatch, rule, first, paths, tokens):
    tree = DraftTree.from_paths(paths)
    generator = np.random.default_rng(0)
    rows = [first, *generator.dirichlet(np.ones(4), size=tree.num_nodes - 1).tolist()]
    law = law_of_step(monkeypatch, rule, tree, tokens, rows)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)

    def distribution(prefix):
        node = 0
        for token in prefix:
            node = next(i for i in range(1, tree.num_nodes) if tree.parents[i] == node and tokens[i] == token)
        return warped(rows[node], rule)

    assert distance_from_target(law, distribution) < 1e-12


def recursive_rejection(p, siblings):
    """Try siblings in turn, zeroing and renormalising behind each rejection; return the law of what is emitted."""
    rest, emitted, reached = np.array(p), np.zeros(len(p)), 1.0
    for token in siblings:
        accepted = rest[token] / rest.sum() if rest.sum() > 0 else 0.0
        emitted[token] += reached * accepted
        reached *= 1 - accepted
        rest[token] = 0.0
    return emitted + (reached * rest / rest.sum() if rest.sum() > 0 else 0.0)


def test_one_draw_has_the_law_of_recursive_rejection(monkeypatch):
    p, tree = [0.5, 0.3, 0.2], DraftTree.from_paths([(0,), (1,)])
    law = law_of_step(monkeypatch, Sample(), tree, [9, 0, 1], [p, p, p])
    first = np.zeros(3)
    for outcome, probability in law.items():
        first[outcome[0]] += probability
    assert np.abs(first - recursive_rejection(p, [0, 1])).max() < 1e-12
    assert np.abs(first - p).max() < 1e-12


def test_a_token_without_probability_is_never_drawn():
    torch.manual_seed(0)
    scores = torch.tensor([[float("-inf"), 0.0, float("-inf")]]).expand(5000, -1)
    assert sampling.draw(scores).unique().tolist() == [1]


def test_uniform_logits_give_more_than_one_token_over_50_seeds():
    tree, uniform = chain(1), [[[0.25] * 4] * 2]
    drawn = {int(Sample(seed=seed).accept(scores_of(tree, [[9, 0]], uniform)).bonus) for seed in range(50)}
    assert len(drawn) > 1


def test_a_seed_gives_the_same_draws_again():
    tree, uniform = chain(3), [[[0.25] * 4] * 4] * 6
    first, again = (Sample(seed=3).accept(scores_of(tree, [[9, 0, 1, 2]] * 6, uniform)) for _ in range(2))
    assert torch.equal(first.bonus, again.bonus)
    assert torch.equal(first.lengths, again.lengths)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": 0.0}, r"`temperature` is 0.0; give a number above 0"),
        ({"top_k": -1}, r"`top_k` is -1"),
        ({"top_p": 0.0}, r"`top_p` is 0.0"),
        ({"top_p": 1.5}, r"`top_p` is 1.5"),
    ],
)
def test_parameters_out_of_range_are_refused(parameters, message):
    with pytest.raises(AcceptanceError, match=message):
        Sample(**parameters)


# Typical acceptance


def typical_by_hand(tree, tokens, rows, epsilon, delta):
    """Return accepted length and node, walking every path."""
    threshold = typical_threshold(entropy(rows), epsilon, delta)
    best = (-1, 0.0, 0)
    for node, path in enumerate(tree.paths):
        nodes = [tree.paths.index(path[:i]) for i in range(len(path) + 1)]
        pairs = list(itertools.pairwise(nodes))
        if all(rows[a][tokens[b]] > threshold[a] for a, b in pairs):
            likelihood = math.prod(rows[a][tokens[b]] for a, b in pairs)
            best = max(best, (len(path), likelihood, -node))
    return best[0], -best[2]


@given(trees(max_rank=2), st.randoms(use_true_random=False), st.sampled_from([(0.09, 0.3), (0.3, 0.09), (0.6, 0.9)]))
@settings(max_examples=60, deadline=None)
def test_typical_acceptance_takes_the_likeliest_of_the_longest_passing_paths(tree, random, thresholds):
    rows = [[random.random() ** 3 + 1e-3 for _ in range(5)] for _ in range(tree.num_nodes)]
    rows = [[value / sum(row) for value in row] for row in rows]
    offset = [random.randrange(5) for _ in range(tree.num_nodes)]
    tokens = [0] + [(int(tree.ranks[i]) + offset[tree.parents[i]]) % 5 for i in range(1, tree.num_nodes)]
    length, node = typical_by_hand(tree, tokens, rows, *thresholds)
    accepted = Typical(*thresholds).accept(scores_of(tree, [tokens], [rows]))
    assert int(accepted.lengths) == length
    # Logarithms are added in float32: of nearly equal paths either may be taken.
    found = int(accepted.nodes)
    likelihoods = [
        math.prod(rows[tree.paths.index(path[:i])][tokens[tree.paths.index(path[: i + 1])]] for i in range(len(path)))
        for path in (tree.paths[found], tree.paths[node])
    ]
    assert len(tree.paths[found]) == length
    assert likelihoods[0] >= likelihoods[1] * (1 - 1e-6)
    threshold = typical_threshold(entropy(rows), *thresholds)
    assert rows[found][int(accepted.bonus)] > threshold[found]


def test_several_siblings_may_pass_and_the_longer_path_wins():
    tree = DraftTree.from_paths([(0,), (1,), (1, 0)])
    rows = [[0.5, 0.45, 0.05], [0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [1.0, 0.0, 0.0]]
    accepted = Typical().accept(scores_of(tree, [[9, 0, 1, 1]], [rows]))
    assert (int(accepted.nodes), int(accepted.lengths), int(accepted.bonus)) == (3, 2, 0)


@pytest.mark.parametrize(
    ("p", "epsilon", "delta", "threshold"),
    [
        ([0.7, 0.2, 0.05, 0.05], 0.09, 0.3, 0.09),
        ([0.7, 0.2, 0.05, 0.05], 0.3, 0.09, 0.0377),
        ([0.25] * 4, 0.09, 0.3, 0.075),
        ([0.25] * 4, 0.3, 0.09, 0.0225),
        ([1.0, 0.0, 0.0, 0.0], 0.3, 0.09, 0.09),
    ],
)
def test_the_threshold_of_the_verifier_is_that_of_the_search(p, epsilon, delta, threshold):
    logarithms = torch.tensor([p], dtype=torch.float64).log()
    found = Typical(epsilon, delta)._threshold(logarithms)
    assert float(found) == pytest.approx(threshold, abs=5e-5)
    assert float(found) == pytest.approx(float(typical_threshold(entropy(p), epsilon, delta)), abs=1e-12)


def test_the_temperature_of_typical_acceptance_sharpens():
    tree, rows = chain(1), [[0.7, 0.25, 0.05], [1.0, 0.0, 0.0]]
    lengths = [int(Typical(0.2, 0.9, t).accept(scores_of(tree, [[9, 1]], [rows])).lengths) for t in (1.0, 0.5)]
    assert lengths == [1, 0]


def test_thresholds_out_of_range_are_refused():
    with pytest.raises(AcceptanceError, match=r"`delta` is 1.0; give a number between 0 and 1"):
        Typical(delta=1.0)


# Processors


class Recorded(LogitsProcessorList):
    """Remembers every text it is shown; forbids a token that the text holds already."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def __call__(self, input_ids, scores):
        self.texts.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[0, [token for token in input_ids[0].tolist() if token < scores.shape[1]]] = float("-inf")
        return scores


@pytest.mark.parametrize("rule", [Greedy(), Sample(), Typical()], ids=lambda rule: rule.name)
def test_processors_see_the_true_text_of_each_node(rule):
    tree = DraftTree.from_paths([(0,), (1,), (1, 0)])
    sharp = np.full((4, 6), 0.002).tolist()
    for row, token in enumerate([4, 5, 3, 0]):  # the root would repeat itself, were it not forbidden
        sharp[row][token] = 0.7
        sharp[row][(token + 1) % 6] = 0.2
    processors = Recorded()
    scores = scores_of(tree, [[4, 0, 5, 3]], [sharp], processors, [torch.tensor([1, 2])])
    accepted = rule.accept(scores)
    assert (int(accepted.nodes), int(accepted.lengths), int(accepted.bonus)) == (3, 2, 0)
    texts = {(): [1, 2, 4], (0,): [1, 2, 4, 0], (1,): [1, 2, 4, 5], (1, 0): [1, 2, 4, 5, 3]}
    assert processors.texts
    assert all(text in texts.values() for text in processors.texts)
    assert [texts[path] for path in ((), (1,), (1, 0))] == [
        t for t in processors.texts if t in (texts[()], texts[1,], texts[1, 0])
    ][:3]


def test_the_dense_tree_is_walked_as_the_parent_pointers_say():
    torch.manual_seed(0)
    tree = dense_tree([3, 2])
    for _ in range(50):
        tokens = torch.randint(4, (2, tree.num_nodes))
        probabilities = torch.rand(2, tree.num_nodes, 4).softmax(-1).tolist()
        # Siblings with one token would be told apart by rank in a walk and by depth otherwise.
        tokens[:, 1:4], tokens[:, 4:6] = torch.arange(3), torch.arange(2)
        tokens[:, 6:8], tokens[:, 8:10] = torch.arange(2), torch.arange(2)
        plain = Greedy().accept(scores_of(tree, tokens.tolist(), probabilities))
        walked = Greedy().accept(
            scores_of(tree, tokens.tolist(), probabilities, lambda ids, scores: scores, [torch.tensor([1])] * 2)
        )
        assert torch.equal(plain.nodes, walked.nodes)
        assert torch.equal(plain.bonus, walked.bonus)
