"""A step on the device: fixed shapes, no word with the host inside, no memory of nodes × vocabulary beside the logits."""

import contextlib
import copy
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from treeopt import chain, dense_tree
from treeopt.heads import MedusaHeads
from treeopt.targets.cache import RowCache
from treeopt.verify import TreeVerifier
from treeopt.verify.acceptance import Greedy, NodeScores, TreeIndex
from treeopt.verify.fixed import FixedStep
from treeopt.verify.sampling import Sample
from treeopt.verify.step import State
from treeopt.verify.typical import Typical

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4], [9, 2, 6, 5, 3, 5, 8], [7]]
# What waits for the device where there is one.
WAITS = {
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
}


class Watched(TorchDispatchMode):
    """Records the operations and the largest new memory of each."""

    def __init__(self):
        super().__init__()
        self.names, self.sizes = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        self.names.append(function.name().split(".")[0])
        for tensor in _tensors(output):
            if tensor.untyped_storage().data_ptr() not in given:
                self.sizes.append((tensor.numel(), self.names[-1]))
        return output


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@pytest.fixture(scope="module")
def sharp_heads(tiny_target):
    """Heads that sometimes guess right: random blocks behind the target's own embedding."""
    torch.manual_seed(3)
    heads = MedusaHeads.for_target(tiny_target, num_heads=4)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0, 0.3)
    return heads


def begun(verifier, prompts, capacity):
    cache = RowCache(verifier.target, len(prompts), capacity)
    hidden = torch.stack([verifier.prefill(cache, row, prompt) for row, prompt in enumerate(prompts)])
    roots = torch.tensor([verifier.first_token(hidden[row], prompt) for row, prompt in enumerate(prompts)])
    return cache, State(torch.tensor([len(prompt) for prompt in prompts]), roots, hidden)


@torch.inference_mode()
@pytest.mark.parametrize("tree", [chain(0), chain(3), dense_tree([4, 3, 2])], ids=repr)
def test_fixed_steps_give_what_decoding_gives(tiny_target, sharp_heads, tree):
    verifier = TreeVerifier(tiny_target, sharp_heads, tree)
    expected = [row.tokens for row in verifier.decode(PROMPTS, 30)]
    cache, state = begun(verifier, PROMPTS, 128)
    fixed = FixedStep(verifier.step, cache, state, capture=False)
    fixed.begin(state)
    tokens = [[int(root)] for root in state.roots]
    while any(len(row) < 30 for row in tokens):
        for row, (length, bonus, *path) in enumerate(fixed().tolist()):
            if len(tokens[row]) < 30:
                tokens[row] += [*path[:length], bonus]
                if len(tokens[row]) >= 30:
                    fixed.end(row)
    assert [row[:30] for row in tokens] == expected


@torch.inference_mode()
def test_a_row_that_has_ended_stands_still(tiny_target, sharp_heads):
    verifier = TreeVerifier(tiny_target, sharp_heads, dense_tree([3, 2]))
    cache, state = begun(verifier, PROMPTS, 64)
    fixed = FixedStep(verifier.step, cache, state, capture=False)
    fixed.begin(state)
    fixed.end(1)
    for _ in range(3):
        fixed()
    assert fixed.state.lengths[1] == 0
    assert (fixed.state.lengths[[0, 2]] >= torch.tensor([3 + 3, 1 + 3])).all()
    fixed.begin(state)
    fixed()
    assert fixed.state.lengths[1] > len(PROMPTS[1])


@torch.inference_mode()
def test_a_captured_decode_reuses_its_memory(tiny_target, sharp_heads, monkeypatch):
    """What a GPU does, with the capture left out."""
    made = []

    class Uncaptured(FixedStep):
        def __init__(self, step, cache, state, *, capture):
            made.append(cache.capacity)
            super().__init__(step, cache, state, capture=False)
            self.warm_up()

    monkeypatch.setattr("treeopt.verify.verifier.FixedStep", Uncaptured)
    verifier = TreeVerifier(tiny_target, sharp_heads, dense_tree([4, 3]))
    expected = [
        [row.tokens for row in verifier.decode(prompts, 25)] for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[:1])
    ]
    verifier.captures = True
    found = [[row.tokens for row in verifier.decode(prompts, 25)] for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[:1])]
    assert found == expected
    assert made == [1024, 1024]  # one for batches of three, one for a batch of one


@torch.inference_mode()
def test_rows_that_have_ended_never_reach_beyond_the_cache(tiny_target, sharp_heads, monkeypatch):
    monkeypatch.setattr("treeopt.verify.verifier.CAPACITY_UNIT", 1)
    monkeypatch.setattr(FixedStep, "_capture", lambda self: None)
    monkeypatch.setattr(FixedStep, "_device", lambda self: contextlib.nullcontext())
    for first, second in itertools.product(range(1, 9), [[9, 2, 6], [5, 8, 9, 7, 9, 3]]):
        prompts = [[first] * 4, second]
        verifier = TreeVerifier(tiny_target, sharp_heads, dense_tree([4, 3, 2]))
        expected = [row.tokens for row in verifier.decode(prompts, 14)]
        verifier.captures = True
        assert [row.tokens for row in verifier.decode(prompts, 14)] == expected


@torch.inference_mode()
def test_a_row_that_ends_with_its_first_token_stands_still_in_a_captured_decode(tiny_target, sharp_heads, monkeypatch):
    monkeypatch.setattr("treeopt.verify.verifier.CAPACITY_UNIT", 1)
    monkeypatch.setattr(FixedStep, "_capture", lambda self: None)
    monkeypatch.setattr(FixedStep, "_device", lambda self: contextlib.nullcontext())
    verifier = TreeVerifier(tiny_target, sharp_heads, dense_tree([4, 3, 2]))
    first = verifier.decode(PROMPTS[:1], 1)[0].tokens[0]
    verifier.eos_ids = frozenset([first])
    expected = [row.tokens for row in verifier.decode(PROMPTS, 40)]
    assert expected[0] == [first]
    verifier.captures = True
    assert [row.tokens for row in verifier.decode(PROMPTS, 40)] == expected


@torch.inference_mode()
def test_a_step_is_captured_anew_when_the_target_has_changed(tiny_target, sharp_heads, monkeypatch):
    monkeypatch.setattr(FixedStep, "_capture", lambda self: None)
    monkeypatch.setattr(FixedStep, "_device", lambda self: contextlib.nullcontext())
    target, heads = copy.deepcopy(tiny_target), copy.deepcopy(sharp_heads)
    heads._shared = (target.lm_head,)
    verifier = TreeVerifier(target, heads, dense_tree([4, 3]))
    verifier.captures = True
    verifier.decode(PROMPTS, 10)
    first = verifier._fixed
    verifier.decode(PROMPTS[::-1], 10)
    assert verifier._fixed is first
    target.double()
    heads.double()
    decoded = [row.tokens for row in verifier.decode(PROMPTS, 10)]
    assert verifier._fixed is not first
    assert decoded == [row.tokens for row in TreeVerifier(target, heads, dense_tree([4, 3])).decode(PROMPTS, 10)]


@torch.inference_mode()
@pytest.mark.parametrize("start", [None, 3])
def test_a_greedy_step_never_waits_for_the_device(tiny_target, sharp_heads, start, monkeypatch):
    tree = dense_tree([4, 3, 2])
    verifier = TreeVerifier(tiny_target, sharp_heads, tree)
    prompts = PROMPTS[:1] if start else PROMPTS
    cache, state = begun(verifier, prompts, 64)
    # Ties of heads are told by bits on a device; on the CPU a flag is read instead.
    monkeypatch.setattr("treeopt.heads.ranking.READS_FLAGS", ())
    with Watched() as watched:
        outcome = verifier.step(cache, state, 64 if start is None else start + tree.num_nodes, start)
    assert WAITS & set(watched.names) == set()
    with Watched() as watched:
        outcome.table[0, 0].item()
    assert WAITS & set(watched.names)  # the watch sees what waits


def scores_of(nodes, vocabulary, rows=2):
    tree = dense_tree([nodes - 1]) if nodes > 1 else chain(0)
    torch.manual_seed(0)
    return NodeScores(
        torch.randn(rows, nodes, vocabulary),
        torch.randint(vocabulary, (rows, nodes)),
        TreeIndex.of(tree, CPU),
        lambda logits: logits,
        lambda logits: logits,
    )


@pytest.mark.parametrize("rule", [Greedy(), Typical(), Sample(0.7, 50, 0.9)], ids=lambda rule: rule.name)
def test_acceptance_takes_no_memory_of_nodes_times_vocabulary(rule):
    largest = {}
    for nodes in (8, 64):
        scores = scores_of(nodes, 5000)
        with Watched() as watched:
            rule.accept(scores)
        largest[nodes] = max(watched.sizes)
    # A few rows of the vocabulary, however many nodes there are; all logits would be 64 rows of each of two texts.
    assert largest[64][0] <= max(largest[8][0], 4 * 64 * 64), largest
    assert largest[64][0] <= 2 * 2 * 5000, largest


def test_the_watch_sees_memory_of_nodes_times_vocabulary():
    scores = scores_of(64, 5000)
    with Watched() as watched:
        scores.logits.softmax(dim=-1)
    assert max(watched.sizes)[0] == 2 * 64 * 5000


@torch.inference_mode()
def test_a_whole_step_has_one_tensor_of_nodes_times_vocabulary():
    config = LlamaConfig(
        vocab_size=4000, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval()
    verifier = TreeVerifier(target, MedusaHeads.for_target(target, 2), dense_tree([8, 7]))
    cache, state = begun(verifier, [[1, 2, 3]], 128)
    with Watched() as watched:
        verifier.step(cache, state, 3 + 65, 3)
    large = [name for size, name in watched.sizes if size >= 65 * 4000]
    assert large in (["aten::mm"], ["aten::addmm"], ["aten::linear"], ["aten::bmm"]), large
