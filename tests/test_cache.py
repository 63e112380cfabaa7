import pytest
import torch

from treeopt.attention import Pass
from treeopt.targets.cache import RowCache
from treeopt.targets.forward import Forward

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def causal(forward, cache, row_tokens, start):
    """Run tokens from slot `start` on over the cache and return their logits."""
    count = len(row_tokens)
    visible = torch.ones(count, count).tril().bool()
    at = Pass(torch.tensor([start]), torch.arange(count), visible, start + count, start)
    return forward.logits(forward.hidden(torch.tensor([row_tokens]), at, cache.at(at)))[0]


@pytest.fixture
def forward(tiny_target):
    return Forward(tiny_target)


@torch.no_grad()
@pytest.mark.parametrize("kept", [0, 1, 5, 6, 9])
def test_keeping_the_first_rows_equals_a_prefix_that_never_had_more(forward, tiny_target, kept):
    cache = RowCache(tiny_target, 1, 16)
    causal(forward, cache, TOKENS[:6], 0)
    cache.lengths[0] = 6
    cache.truncate(0, kept)
    length = cache.lengths[0]
    assert length == min(kept, 6)
    again = causal(forward, cache, [7, 8], length)
    expected = tiny_target(torch.tensor([[*TOKENS[:length], 7, 8]])).logits[0, -2:]
    assert (again - expected).abs().max() < 1e-5


@torch.no_grad()
def test_kept_slots_are_gathered_and_the_prefix_is_not_touched(forward, tiny_target):
    cache = RowCache(tiny_target, 1, 16)
    causal(forward, cache, TOKENS[:7], 0)
    before = [(keys.clone(), values.clone()) for keys, values in cache.buffers]
    # Prefix of 3, tree (0), (1), (0, 0) with its root in slot 3: accepting (0) and (0, 0) keeps rows 0, 1, 2, 3, 4, 6.
    cache.keep(torch.tensor([[4, 6]]), torch.tensor([4]))
    for (keys, values), (old_keys, old_values) in zip(cache.buffers, before):
        assert torch.equal(keys[:, :, :6], old_keys[:, :, [0, 1, 2, 3, 4, 6]])
        assert torch.equal(values[:, :, :6], old_values[:, :, [0, 1, 2, 3, 4, 6]])


@torch.no_grad()
def test_rows_of_different_lengths_share_one_forward(forward, tiny_target):
    cache = RowCache(tiny_target, 2, 16)
    lengths = [5, 2]
    for row, length in enumerate(lengths):
        at = Pass.text(1, length, torch.device("cpu"))
        forward.hidden(torch.tensor([TOKENS[:length]]), at, cache.at(at, torch.tensor([row])))
    at = Pass.next_token(torch.tensor(lengths), 6)
    logits = forward.logits(forward.hidden(torch.tensor([[7], [8]]), at, cache.at(at)))
    for row, length in enumerate(lengths):
        expected = tiny_target(torch.tensor([[*TOKENS[:length], 7 + row]])).logits[0, -1]
        assert (logits[row, 0] - expected).abs().max() < 1e-5


@torch.no_grad()
def test_a_row_moves_to_the_place_of_another(forward, tiny_target):
    cache = RowCache(tiny_target, 3, 16)
    for row, length in enumerate([2, 3, 5]):
        at = Pass.text(1, length, torch.device("cpu"))
        forward.hidden(torch.tensor([TOKENS[row : row + length]]), at, cache.at(at, slice(row, row + 1)))
        cache.lengths[row] = length
    cache.move(2, 0)
    assert cache.lengths[0] == 5
    at = Pass.next_token(torch.tensor([5]), 6, 5)
    logits = forward.logits(forward.hidden(torch.tensor([[7]]), at, cache.at(at, slice(0, 1))))
    assert (logits[0, 0] - tiny_target(torch.tensor([[*TOKENS[2:7], 7]])).logits[0, -1]).abs().max() < 1e-5
