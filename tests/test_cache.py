import pytest
import torch

from treeopt.targets.cache import RowCache
from treeopt.targets.forward import Forward

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def causal(forward, cache, row_tokens, start):
    """Run tokens from slot `start` on over the cache and return their logits."""
    ids = torch.tensor([row_tokens])
    positions = start + torch.arange(len(row_tokens))
    visible = (torch.arange(start + len(row_tokens))[None, :] <= positions[:, None])[None]
    return forward.logits(forward.hidden(ids, positions[None], visible, cache.at(start, len(row_tokens))))[0]


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
    cache.keep(torch.tensor([[4, 6]]), torch.tensor([0]), torch.tensor([4]))
    for (keys, values), (old_keys, old_values) in zip(cache.buffers, before):
        assert torch.equal(keys[:, :, :6], old_keys[:, :, [0, 1, 2, 3, 4, 6]])
        assert torch.equal(values[:, :, :6], old_values[:, :, [0, 1, 2, 3, 4, 6]])


@torch.no_grad()
def test_rows_of_different_lengths_share_one_forward(forward, tiny_target):
    cache = RowCache(tiny_target, 2, 16)
    lengths = [5, 2]
    for row, length in enumerate(lengths):
        ids = torch.tensor([TOKENS[:length]])
        positions = torch.arange(length)
        visible = (positions[None, :] <= positions[:, None])[None]
        forward.hidden(ids, positions[None], visible, cache.at(0, length, rows=torch.tensor([row])))
    slots = torch.tensor(lengths)[:, None]
    visible = (torch.arange(6)[None, :] <= slots)[:, None]
    logits = forward.logits(forward.hidden(torch.tensor([[7], [8]]), slots, visible, cache.at(slots, 1)))
    for row, length in enumerate(lengths):
        expected = tiny_target(torch.tensor([[*TOKENS[:length], 7 + row]])).logits[0, -1]
        assert (logits[row, 0] - expected).abs().max() < 1e-5
