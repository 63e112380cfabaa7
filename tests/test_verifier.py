import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.reference import greedy_walk
from tests.strategies import trees
from treeopt import DraftTree, chain, dense_tree
from treeopt.errors import TargetError, TreeError
from treeopt.heads import MedusaHeads
from treeopt.prompts import Prompt
from treeopt.targets.cache import RowCache
from treeopt.verify import TreeVerifier, verifier
from treeopt.verify.acceptance import TreeIndex, accept_greedily
from treeopt.verify.compare import _difference as difference
from treeopt.verify.compare import compare
from treeopt.verify.step import State

DATA = Path(__file__).parent / "data"
CPU = torch.device("cpu")
SMALL = DraftTree.from_paths([(0,), (1,), (0, 0)])
PROMPTS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]])


@pytest.fixture(scope="module")
def published():
    choices = json.loads((DATA / "published_static_trees.json").read_text())["medusa"]["trees"]["mc_sim_7b_63"]
    return DraftTree.from_paths(choices)


def plain(target, prompt, max_new_tokens, **keywords):
    given_ids = torch.tensor([prompt])
    mask = torch.ones_like(given_ids)
    return target.generate(given_ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, **keywords)


class Guesses:
    """Heads that guess given tokens, for steps whose outcome is written down beforehand."""

    num_heads, vocabulary = 5, 13

    def __init__(self, *guesses):
        self.guesses = guesses

    def draft(self, hidden, ranks):
        return [torch.tensor([row[:count]] * len(hidden)) for row, count in zip(self.guesses, ranks)]


# Shapes


@pytest.mark.parametrize(
    "tree", [chain(0), chain(4), dense_tree([4]), dense_tree([3, 2]), dense_tree([3, 3, 2, 2])], ids=repr
)
def test_every_tree_gives_the_targets_own_greedy_output(tiny_target, tiny_heads, tree):
    expected = torch.cat([plain(tiny_target, prompt, 40) for prompt in PROMPTS.tolist()])
    assert torch.equal(TreeVerifier(tiny_target, tiny_heads, tree).generate(PROMPTS, 40), expected)


def test_the_root_alone_takes_a_step_a_token_and_a_wide_tree_fewer(tiny_target, tiny_heads):
    steps = [
        TreeVerifier(tiny_target, tiny_heads, tree).decode(PROMPTS.tolist(), 40)[0].num_steps
        for tree in (chain(0), dense_tree([13]))
    ]
    assert steps[0] == 39
    assert steps[1] == 20  # all 13 tokens are tried, so each step gives two


def test_a_batch_equals_its_rows_decoded_alone(tiny_target, tiny_heads):
    prompts = [[3, 1, 4], [9, 2, 6, 5, 3, 5, 8], [7]]
    tree_verifier = TreeVerifier(tiny_target, tiny_heads, dense_tree([3, 2]))
    together = tree_verifier.decode(prompts, 25)
    alone = [tree_verifier.decode([prompt], 25)[0] for prompt in prompts]
    assert together == alone


def test_a_padded_batch_is_read_through_its_attention_mask(tiny_target, tiny_heads):
    ids = torch.tensor([[0, 0, 3, 1], [9, 2, 6, 5]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    new = TreeVerifier(tiny_target, tiny_heads, chain(2)).generate(ids, 12, attention_mask=mask)
    assert torch.equal(new[0, 4:], plain(tiny_target, [3, 1], 12)[0, 2:])
    assert torch.equal(new[1], plain(tiny_target, [9, 2, 6, 5], 12)[0])


# Refusals


def test_a_tree_deeper_than_the_heads_is_refused_before_any_tensor_is_touched(published):
    class Untouchable:
        def __init__(self, num_heads):
            self.num_heads = num_heads

    with pytest.raises(TreeError, match=r"2 nodes are out of reach \(`\(0,0,0,0\), \(0,0,0,1\)`\).*max_depth=3"):
        TreeVerifier(None, Untouchable(3), published)
    with pytest.raises(TreeError, match=r"25 nodes are out of reach"):
        TreeVerifier(None, Untouchable(2), published)
    assert len(published.prune(max_depth=3).paths[1:]) == 61


def test_a_tree_that_ranks_beyond_the_vocabulary_is_refused(tiny_target, tiny_heads):
    with pytest.raises(TargetError, match=r"rank 13 but the vocabulary has 13"):
        TreeVerifier(tiny_target, tiny_heads, DraftTree.from_paths([(13,)]))


def test_a_target_with_implicit_positions_is_refused_by_name():
    from transformers import BloomConfig, BloomForCausalLM

    target = BloomForCausalLM(BloomConfig(vocab_size=13, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(TargetError, match=r"`bloom` takes positions from the order of its cache"):
        TreeVerifier(target, MedusaHeads.for_target(target), chain(1))


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [([], 4, r"no tokens"), ([1], 0, r"`max_new_tokens` is 0"), ([1] * 256, 4, r"fills the context of 256")],
)
def test_prompts_that_cannot_be_decoded_are_refused(tiny_target, tiny_heads, prompt, new, message):
    with pytest.raises(TargetError, match=message):
        TreeVerifier(tiny_target, tiny_heads, SMALL).decode([prompt], new)


def test_decoding_stops_where_the_context_ends(tiny_target, tiny_heads):
    prompt = [1 + i % 12 for i in range(250)]
    decoded = TreeVerifier(tiny_target, tiny_heads, dense_tree([3, 2])).decode([prompt], 40)[0]
    assert decoded.tokens == plain(tiny_target, prompt, 6)[0, 250:].tolist()


# Acceptance


def test_a_missing_child_is_no_candidate_whatever_stands_in_its_place():
    index = TreeIndex.of(SMALL, CPU)
    # Root 5, (0) 2, (1) 3, (0, 0) 4; the target says 3 after the root and 0 after (1).
    for filler in (0, 3, 4, 7):
        chosen = torch.tensor([[3, filler, 0, filler]])
        accepted = accept_greedily(torch.tensor([[5, 2, 3, 4]]), chosen, index)
        assert (accepted.nodes.tolist(), accepted.lengths.tolist(), accepted.bonus.tolist()) == ([2], [1], [0])


def test_a_match_below_a_mismatch_is_not_accepted():
    index = TreeIndex.of(chain(4), CPU)
    accepted = accept_greedily(torch.tensor([[9, 1, 2, 3, 4]]), torch.tensor([[1, 7, 3, 4, 5]]), index)
    assert accepted.lengths.tolist() == [1]
    assert accepted.bonus.tolist() == [7]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(trees(max_rank=3), st.randoms(use_true_random=False))
def test_acceptance_equals_a_walk_from_the_root(tree, random):
    offsets = [random.randrange(4) for _ in range(tree.num_nodes)]  # siblings carry distinct tokens
    tokens = [9] + [(int(tree.ranks[i]) + offsets[tree.parents[i]]) % 4 for i in range(1, tree.num_nodes)]
    argmax = [random.randrange(4) for _ in range(tree.num_nodes)]
    node, path, bonus = greedy_walk(tree, tokens, argmax)
    accepted = accept_greedily(torch.tensor([tokens]), torch.tensor([argmax]), TreeIndex.of(tree, CPU))
    assert accepted.nodes.tolist() == [node]
    assert accepted.lengths.tolist() == [len(path)]
    assert accepted.bonus.tolist() == [bonus]


def one_step(tree_verifier, cache, prompt, root):
    """Run a prompt and one step behind it, with a root of the test's choice."""
    with torch.inference_mode():
        hidden = tree_verifier.prefill(cache, 0, prompt)
        state = State(torch.tensor([len(prompt)]), torch.tensor([root]), hidden[None])
        return tree_verifier.step(cache, state, len(prompt) + tree_verifier.tree.num_nodes, len(prompt))


def test_the_next_step_reads_the_accepted_nodes_row(tiny_target, tiny_heads):
    prompt = [3, 1, 4]
    tokens = plain(tiny_target, prompt, 4)[0, 3:].tolist()
    wrong = next(token for token in range(13) if token not in tokens)
    guesses = Guesses([wrong, tokens[1]], [wrong])
    outcome = one_step(TreeVerifier(tiny_target, guesses, SMALL), RowCache(tiny_target, 1, 32), prompt, tokens[0])
    assert outcome.accepted.nodes.tolist() == [2]  # node (1)
    with torch.inference_mode():
        whole = tiny_target.model(torch.tensor([[*prompt, *tokens[:2]]])).last_hidden_state[0, -1]
    assert (outcome.state.hidden[0] - whole).abs().max() < 1e-5
    assert outcome.state.lengths.tolist() == [3 + 2]  # prompt, root, (1)
    assert outcome.state.roots.tolist() == [tokens[2]]


def test_the_heads_read_each_rows_own_accepted_node(tiny_target):
    """Two rows of four drafts, 2 and 0 of them accepted: rows 2 and 5 of all the nodes laid in one line."""
    prompts = [[3, 1, 4], [9, 2, 6]]
    texts = [plain(tiny_target, prompt, 6)[0, 3:].tolist() for prompt in prompts]
    wrong = [next(token for token in range(13) if token != text[i]) for i, text in zip((3, 1), texts)]
    drafts = [[*texts[0][1:3], wrong[0], 0], [wrong[1], *texts[1][2:5]]]

    class Rows:
        num_heads, vocabulary = 4, 13

        def draft(self, hidden, ranks):
            return [torch.tensor([[row[depth]] for row in drafts]) for depth in range(4)]

    tree_verifier, cache = TreeVerifier(tiny_target, Rows(), chain(4)), RowCache(tiny_target, 2, 16)
    with torch.inference_mode():
        hidden = torch.stack([tree_verifier.prefill(cache, row, prompt) for row, prompt in enumerate(prompts)])
        state = State(torch.tensor([3, 3]), torch.tensor([text[0] for text in texts]), hidden)
        outcome = tree_verifier.step(cache, state, 3 + 5, 3)
        assert outcome.accepted.lengths.tolist() == [2, 0]
        assert (outcome.accepted.nodes + torch.tensor([0, 5])).tolist() == [2, 5]
        for row, count in enumerate((3, 1)):
            whole = tiny_target.model(torch.tensor([[*prompts[row], *texts[row][:count]]])).last_hidden_state[0, -1]
            assert (outcome.state.hidden[row] - whole).abs().max() < 1e-5


def test_the_cache_keeps_prefix_root_and_the_accepted_node(tiny_target):
    prompt = [3, 1, 4]
    tokens = plain(tiny_target, prompt, 4)[0, 3:].tolist()
    wrong = next(token for token in range(13) if token not in tokens)
    tree_verifier = TreeVerifier(tiny_target, Guesses([tokens[1], wrong], [tokens[2]]), SMALL)
    cache, clean = RowCache(tiny_target, 1, 32), RowCache(tiny_target, 1, 32)
    outcome = one_step(tree_verifier, cache, prompt, tokens[0])
    before = [(keys[:, :, :3].clone(), values[:, :, :3].clone()) for keys, values in cache.buffers]
    with torch.inference_mode():
        tree_verifier.prefill(clean, 0, [*prompt, *tokens[:3]])
    assert outcome.accepted.lengths.tolist() == [2]
    for (keys, values), (clean_keys, clean_values) in zip(cache.buffers, clean.buffers):
        assert (keys[:, :, :6] - clean_keys[:, :, :6]).abs().max() < 1e-5
        assert (values[:, :, :6] - clean_values[:, :, :6]).abs().max() < 1e-5
    one_step(tree_verifier, cache, prompt, tokens[0])
    for (keys, values), (old_keys, old_values) in zip(cache.buffers, before):
        assert torch.equal(keys[:, :, :3], old_keys)
        assert torch.equal(values[:, :, :3], old_values)


# Positions and mask


def test_tree_logits_equal_one_sequential_forward_per_path(tiny_target, tiny_heads):
    prompt, tree = [3, 1, 4], dense_tree([3, 2, 2])
    tree_verifier = TreeVerifier(tiny_target, tiny_heads, tree)
    cache = RowCache(tiny_target, 1, 3 + tree.num_nodes)
    seen = {}
    forward = tree_verifier._forward
    hidden_of = forward.hidden

    def spy(ids, at, view):
        seen["ids"], seen["positions"] = ids, at.positions(256)
        seen["hidden"] = hidden_of(ids, at, view)
        return seen["hidden"]

    forward.hidden = spy
    one_step(tree_verifier, cache, prompt, 7)
    with torch.inference_mode():
        logits = forward.logits(seen["hidden"])[0]
        assert seen["positions"][0].tolist() == [3 + len(path) for path in tree.paths]
        for node, path in enumerate(tree.paths):
            nodes = [tree.paths.index(path[:i]) for i in range(len(path) + 1)]
            text = torch.tensor([prompt + [int(seen["ids"][0, i]) for i in nodes]])
            assert (logits[node] - tiny_target(text).logits[0, -1]).abs().max() < 1e-5


def test_positions_of_a_small_tree_after_three_tokens(tiny_target, tiny_heads):
    tree_verifier = TreeVerifier(tiny_target, tiny_heads, SMALL)
    assert (3 + tree_verifier._index.depths).tolist() == [3, 4, 4, 5]


# The end of the text


def test_tokens_behind_the_end_of_sequence_are_cut_from_output_and_cache(tiny_target, monkeypatch):
    prompt = [3, 1, 4]
    tokens = plain(tiny_target, prompt, 8)[0, 3:].tolist()
    eos = next(token for token in tokens[2:5] if tokens.index(token) >= 2)
    end = tokens.index(eos)
    caches = []
    monkeypatch.setattr(verifier, "RowCache", lambda *args: caches.append(RowCache(*args)) or caches[-1])
    tree_verifier = TreeVerifier(tiny_target, Guesses(*([token] for token in tokens[1:6])), chain(5))
    tree_verifier.eos_ids = frozenset([eos])
    decoded = tree_verifier.decode([prompt], 20)[0]
    assert decoded.tokens == tokens[: end + 1]
    assert decoded.accepted == [end - 1]
    assert caches[0].lengths == [len(prompt) + end + 1]
    expected = plain(tiny_target, prompt, 20, eos_token_id=eos, pad_token_id=0)[0, 3:].tolist()
    assert decoded.tokens == expected


def test_no_more_than_the_asked_tokens_are_made(tiny_target, tiny_heads):
    for count in range(1, 9):
        decoded = TreeVerifier(tiny_target, tiny_heads, dense_tree([13, 1])).decode([[3, 1, 4]], count)[0]
        assert decoded.tokens == plain(tiny_target, [3, 1, 4], count)[0, 3:].tolist()


def test_rows_that_end_early_are_padded(tiny_target, tiny_heads):
    outputs = [plain(tiny_target, prompt, 10)[0, 5:].tolist() for prompt in PROMPTS.tolist()]
    tree_verifier = TreeVerifier(tiny_target, tiny_heads, chain(2))
    tree_verifier.eos_ids = frozenset([outputs[0][1]])
    new = tree_verifier.generate(PROMPTS, 10)[:, 5:]
    assert new[0, :2].tolist() == outputs[0][:2]
    assert (new[0, 2:] == 0).all()


# Below float32


def test_a_difference_between_equal_logits_is_a_near_tie_below_float32_alone(tiny_loaded, monkeypatch):
    prompt = [3, 1, 4]
    for dtype, near in ((torch.bfloat16, True), (torch.float32, False)):
        target = copy.deepcopy(tiny_loaded.model).to(dtype)
        best = int(target(torch.tensor([prompt])).logits[0, -1].argmax())
        other = (best + 1) % 13
        with torch.no_grad():
            target.lm_head.weight[other] = target.lm_head.weight[best]
        loaded = replace(tiny_loaded, model=target)
        found = difference(loaded, prompt, [best, 5], [other, 5])
        assert (found.position, found.plain, found.tree) == (0, best, other)
        assert found.near_tie == near
        assert found.top2_gap == 0


def test_texts_in_bfloat16_part_at_near_ties_only(tiny_loaded, tiny_heads):
    target = copy.deepcopy(tiny_loaded.model).to(torch.bfloat16)
    loaded = replace(tiny_loaded, model=target)
    heads = copy.deepcopy(tiny_heads).to(torch.bfloat16)
    heads._shared = (target.lm_head,)
    tree_verifier = TreeVerifier(target, heads, dense_tree([4, 3]))
    prompts = [Prompt(str(i), ({"role": "user", "content": f"{i % 13} {i * 5 % 13} {i * 7 % 13}"},)) for i in range(40)]
    differences = [found.difference for found in compare(loaded, tree_verifier, prompts, max_new_tokens=24)]
    assert all(found is None or found.near_tie for found in differences)
