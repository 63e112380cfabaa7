import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from tests.reference import ancestors
from tests.strategies import trees
from treeopt import chain, dense_tree
from treeopt.attention import Pass, dense, flex
from treeopt.attention.backends import BACKENDS, Needs, choose
from treeopt.attention.passes import words_of
from treeopt.verify.acceptance import TreeIndex

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def tree_pass(tree, starts, spare=0, start=None):
    index = TreeIndex.of(tree, CPU)
    starts = torch.tensor(starts)
    return Pass(starts, index.depths, index.mask, int(starts.max()) + tree.num_nodes + spare, start, words=index.words)


def seen_by_hand(tree, starts, span, window=None):
    """For every row and node the slots it sees: the prefix and its ancestors, no farther than the window by position."""
    lines = ancestors(tree.paths)
    rows = []
    for start in starts:
        position = [*range(start), *(start + len(path) for path in tree.paths)]
        rows.append([])
        for node, path in enumerate(tree.paths):
            slots = {*range(start), *(start + other for other in lines[node])}
            near = {slot for slot in slots if window is None or start + len(path) - position[slot] < window}
            rows[-1].append([slot in near for slot in range(span)])
    return rows


@given(trees(max_rank=3), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.sampled_from([None, 1, 2, 5]))
def test_a_node_sees_its_prefix_and_its_ancestors_within_the_window(tree, starts, window):
    at = tree_pass(tree, starts, spare=2)
    expected = seen_by_hand(tree, starts, at.span, window)
    assert at.seen(window).tolist() == expected
    bias = at.bias(torch.float32, CPU, window, groups=2)
    assert bias.shape == (len(starts), 1, 2 * tree.num_nodes, at.span)
    for half in bias[:, 0].chunk(2, dim=1):
        assert (half == 0).tolist() == expected


@given(trees(max_rank=3), st.lists(st.integers(0, 9), min_size=1, max_size=3))
@settings(max_examples=20, deadline=None)
def test_the_mask_function_of_flex_attention_says_the_same(tree, starts):
    at = tree_pass(tree, starts, spare=2)
    mask = create_mask(flex.mask_function(at, CPU), len(starts), 1, tree.num_nodes, at.span, device="cpu")
    assert mask[:, 0].tolist() == seen_by_hand(tree, starts, at.span)


@given(st.integers(1, 200), st.randoms(use_true_random=False))
def test_words_hold_every_bit(size, random):
    visible = torch.tensor([[random.random() < 0.5 for _ in range(size)] for _ in range(3)])
    words = words_of(visible)
    assert words.shape == (3, -(-size // 64))
    unpacked = [[bool(words[i, j // 64] >> (j % 64) & 1) for j in range(size)] for i in range(3)]
    assert unpacked == visible.tolist()


def by_hand(query, key, value, seen, scaling, softcap=None, sinks=None):
    """Attention of one query after the other."""
    num_rows, num_heads, num_tokens, head_dim = query.shape
    groups = num_heads // key.shape[1]
    output = torch.zeros(num_rows, num_tokens, num_heads, head_dim, dtype=torch.float64)
    for row, head, token in itertools.product(range(num_rows), range(num_heads), range(num_tokens)):
        slots = [slot for slot, visible in enumerate(seen[row][token]) if visible]
        scores = key[row, head // groups, slots].double() @ query[row, head, token].double() * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double().reshape(1)])
        weights = scores.softmax(dim=0)[: len(slots)]
        output[row, token, head] = weights @ value[row, head // groups, slots].double()
    return output


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("starts", [[0], [7], [3, 0, 6]])
@pytest.mark.parametrize("tree", [chain(0), chain(3), dense_tree([3, 2])], ids=repr)
def test_dense_backends_equal_attention_by_hand(tree, starts, groups, window):
    torch.manual_seed(0)
    at = tree_pass(tree, starts, start=starts[0] if len(starts) == 1 else None)
    query = torch.randn(len(starts), 2 * groups, tree.num_nodes, 8)
    key, value = torch.randn(2, len(starts), 2, at.span, 8)
    expected = by_hand(query, key, value, seen_by_hand(tree, starts, at.span, window), 0.3)
    for attend in (dense.attend, dense.attend_eagerly):
        assert (attend(query, key, value, at, scaling=0.3, window=window) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 3, 6])
def test_a_text_is_attended_to_causally(window):
    torch.manual_seed(0)
    at = Pass.text(2, 6, CPU)
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    seen = [[[0 <= i - j < (window or 6) for j in range(6)] for i in range(6)]] * 2
    expected = by_hand(query, key, value, seen, 0.5)
    for attend in (dense.attend, dense.attend_eagerly):
        assert (attend(query, key, value, at, scaling=0.5, window=window) - expected).abs().max() < 1e-5


def test_soft_caps_and_sinks_are_followed_by_eager_attention():
    torch.manual_seed(0)
    tree = dense_tree([2, 2])
    at = tree_pass(tree, [3])
    query, key, value = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
    sinks = torch.randn(4)
    expected = by_hand(query, key, value, seen_by_hand(tree, [3], 10), 1.0, softcap=2.0, sinks=sinks)
    found = dense.attend_eagerly(query, key, value, at, scaling=1.0, window=None, softcap=2.0, sinks=sinks)
    assert (found - expected).abs().max() < 1e-5


def test_masks_are_made_once_for_all_layers(monkeypatch):
    at, calls = tree_pass(dense_tree([2]), [4]), []
    monkeypatch.setattr(Pass, "seen", lambda self, window=None: calls.append(window) or torch.ones(1, 3, 7).bool())
    for _ in range(3):
        at.bias(torch.float32, CPU)
        at.bias(torch.float32, CPU, window=2)
    assert calls == [None, 2]


NEEDS = Needs(device=CUDA, dtype=torch.bfloat16, head_dim=128)


@pytest.mark.parametrize(
    ("needs", "name", "taken"),
    [
        (NEEDS, "auto", "triton"),
        (NEEDS, "flex", "flex"),
        (NEEDS, "sdpa", "sdpa"),
        (Needs(CUDA, torch.bfloat16, 512), "auto", "flex"),
        (Needs(CUDA, torch.float32, 256), "auto", "flex"),
        (Needs(CUDA, torch.bfloat16, 128, window=64), "auto", "sdpa"),
        (Needs(CUDA, torch.bfloat16, 128, softcap=True), "triton", "eager"),
        (Needs(CUDA, torch.bfloat16, 128, sinks=True), "auto", "eager"),
        (Needs(CUDA, torch.bfloat16, 8), "auto", "sdpa"),
        (Needs(CPU, torch.float32, 64), "auto", "sdpa"),
        (Needs(CPU, torch.float32, 64), "triton", "sdpa"),
    ],
)
def test_the_first_backend_that_serves_is_taken_and_the_others_say_why(needs, name, taken, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module)  # Triton is not on every machine
    chosen, refused = choose(needs, name)
    assert chosen == taken
    names = list(BACKENDS)
    begun = 0 if name == "auto" else names.index(name)
    assert list(refused) == names[begun : names.index(taken)]
    assert all(refused.values())


def test_without_triton_the_next_backend_is_taken(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    assert choose(NEEDS) == ("flex", {"triton": "triton is not installed"})
