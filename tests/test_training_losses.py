import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.memory import Live
from treeopt.heads import MedusaHeads
from treeopt.training import losses
from treeopt.training.losses import Logits, divergence, heads_loss, text_loss


@pytest.fixture
def chunk_of(monkeypatch):
    def set_rows(rows):
        monkeypatch.setattr(losses, "chunk_rows", lambda vocabulary, device: rows)

    return set_rows


def random_heads(own_lm_heads=False, trained_lm_head=False):
    lm_head = nn.Linear(16, 50, bias=False).requires_grad_(trained_lm_head)
    heads = MedusaHeads(lm_head, 16, num_heads=3, num_layers=2, own_lm_heads=own_lm_heads)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0, 0.3)
    return lm_head, heads


def plain_loss(heads, hidden, labels):
    return sum(
        0.8**head
        * functional.cross_entropy(
            heads.output(head)(heads.blocks[head](hidden)), labels[:, head], ignore_index=-1, reduction="mean"
        )
        for head in range(heads.num_heads)
        if (labels[:, head] >= 0).any()
    )


def gradients(loss, parameters):
    return torch.autograd.grad(loss, parameters, allow_unused=True)


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("kind", ["shared", "own_lm_heads", "trained_lm_head"])
def test_the_chunked_loss_and_its_gradients_equal_plain_cross_entropy(chunk_of, rows, kind):
    torch.manual_seed(0)
    lm_head, heads = random_heads(own_lm_heads=kind == "own_lm_heads", trained_lm_head=kind == "trained_lm_head")
    hidden, labels = torch.randn(40, 16, requires_grad=True), torch.randint(-1, 50, (40, 3))
    labels[:, 2] = -1  # a head without labels adds nothing
    wanted = [hidden, *heads.parameters(), *(lm_head.parameters() if lm_head.weight.requires_grad else ())]
    plain = plain_loss(heads, hidden, labels)
    expected = gradients(plain, wanted)
    chunk_of(rows)
    loss = heads_loss(heads, hidden, labels, (labels >= 0).sum(0))
    assert abs(float(loss.detach()) - float(plain.detach())) < 1e-5
    for found, right in zip(gradients(loss, wanted), expected):
        assert (found - (0 if right is None else right)).abs().max() < 1e-6


def test_the_gradient_is_scaled_by_what_stands_behind_the_loss(chunk_of):
    torch.manual_seed(0)
    chunk_of(4)
    lm_head = nn.Linear(8, 20, bias=False)
    states, true = torch.randn(9, 8, requires_grad=True), torch.randint(0, 20, (9,))
    plain = functional.cross_entropy(lm_head(states), true, reduction="sum") * 0.3
    loss = text_loss(Logits(lm_head, 20, tuple(lm_head.parameters())), states, true) * 0.3
    for found, right in zip(gradients(loss, [states, lm_head.weight]), gradients(plain, [states, lm_head.weight])):
        assert (found - right).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [2, 100])
def test_the_divergence_is_that_of_whole_distributions(chunk_of, rows):
    torch.manual_seed(0)
    chunk_of(rows)
    now, before = nn.Linear(8, 20, bias=False), nn.Linear(8, 20, bias=False)
    states, old = torch.randn(9, 8, requires_grad=True), torch.randn(9, 8)
    goal = before(old).softmax(-1).detach()
    plain = (goal * (goal.log() - now(states).log_softmax(-1))).sum()
    loss = divergence(Logits(now, 20, tuple(now.parameters())), states, Logits(before, 20), old)
    assert abs(float(loss.detach()) - float(plain.detach())) < 1e-5
    for found, right in zip(gradients(loss, [states, now.weight]), gradients(plain, [states, now.weight])):
        assert (found - right).abs().max() < 1e-5
    same = divergence(Logits(before, 20), old, Logits(before, 20), old)
    assert abs(float(same)) < 1e-5


def test_a_soft_cap_behind_the_product_is_part_of_the_gradient(chunk_of):
    torch.manual_seed(0)
    chunk_of(3)
    lm_head = nn.Linear(8, 20, bias=False).requires_grad_(False)
    capped = lambda states: 2 * torch.tanh(lm_head(states) / 2)  # noqa: E731
    states, true = torch.randn(9, 8, requires_grad=True), torch.randint(0, 20, (9,))
    (right,) = gradients(functional.cross_entropy(capped(states), true, reduction="sum"), [states])
    (found,) = gradients(text_loss(Logits(capped, 20), states, true), [states])
    assert (found - right).abs().max() < 1e-5


def test_nothing_is_differentiated_where_nothing_is_learnt(chunk_of):
    chunk_of(3)
    lm_head = nn.Linear(8, 20, bias=False)
    states, true = torch.randn(9, 8), torch.randint(0, 20, (9,))
    with torch.no_grad():
        loss = text_loss(Logits(lm_head, 20, tuple(lm_head.parameters())), states, true)
    assert not loss.requires_grad
    assert (
        abs(float(loss.detach()) - float(functional.cross_entropy(lm_head(states), true, reduction="sum").detach()))
        < 1e-5
    )


def test_heads_in_float32_learn_from_states_in_bfloat16():
    torch.manual_seed(0)
    lm_head = nn.Linear(16, 50, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    heads = MedusaHeads(lm_head, 16, num_heads=2)
    hidden, labels = torch.randn(40, 16, dtype=torch.bfloat16), torch.randint(0, 50, (40, 2))
    heads_loss(heads, hidden, labels, torch.tensor([40, 40])).backward()
    for parameter in heads.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize("own_lm_heads", [False, True])
def test_learning_over_a_vocabulary_of_128k_takes_a_part_of_one_heads_logits(own_lm_heads):
    vocabulary, positions = 128 * 1024, 256
    torch.manual_seed(0)
    lm_head = nn.Linear(8, vocabulary, bias=False).requires_grad_(False)
    heads = MedusaHeads(lm_head, 8, num_heads=5, own_lm_heads=own_lm_heads)
    hidden, labels = torch.randn(positions, 8), torch.randint(0, vocabulary, (positions, 5))
    labels[-60:, 3] = -1
    with Live() as live:
        loss = heads_loss(heads, hidden, labels, (labels >= 0).sum(0))
        loss.backward()
    # Bytes. One head's logits are 128 MiB in float32, and two such tensors would be needed; seen were 48 and 72 MiB. The
    # gradients of five output embeddings are 20 of them.
    assert live.most < 96 << 20
    with torch.no_grad():
        assert float(loss.detach()) == pytest.approx(float(plain_loss(heads, hidden, labels)), rel=1e-6)
