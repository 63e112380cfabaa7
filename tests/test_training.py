import pytest
import torch
from torch.nn import functional

from treeopt import training
from treeopt.calibrate.continuations import Continuation
from treeopt.errors import HeadsError
from treeopt.heads import MedusaHeads
from treeopt.targets.loading import LoadedTarget
from treeopt.training import TrainingSettings, chunked_loss, train_heads

DOCUMENTS = [Continuation(str(i), None, (1, 2), tuple((i + j) % 13 for j in range(12))) for i in range(40)]
SETTINGS = TrainingSettings(num_heads=3, epochs=2, warmup_steps=2, batch_size=64)


@pytest.fixture
def counting_target():
    """Return a target whose hidden state after token x is the one-hot vector of x: heads can count on from it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(16))
        model.lm_head.weight.copy_(torch.eye(16))
    return LoadedTarget("counting", model, None)


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_the_chunked_loss_and_its_gradient_equal_plain_cross_entropy(monkeypatch, rows):
    torch.manual_seed(0)
    lm_head = torch.nn.Linear(16, 50, bias=False).requires_grad_(False)
    heads = MedusaHeads(lm_head, 16, num_heads=3, num_layers=2)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0, 0.3)
    hidden, labels = torch.randn(40, 16), torch.randint(-1, 50, (40, 3))
    labels[:, 2] = -1  # a head without labels adds nothing
    plain = sum(
        0.8**head
        * functional.cross_entropy(heads.project(heads.blocks[head](hidden), head), labels[:, head], ignore_index=-1)
        for head in range(2)
    )
    plain.backward()
    expected = [None if p.grad is None else p.grad.clone() for p in heads.parameters()]
    heads.zero_grad(set_to_none=True)
    monkeypatch.setattr(training, "CHUNK_LOGITS", rows * 50)
    loss = chunked_loss(heads, hidden, labels)
    assert abs(float(loss) - float(plain.detach())) < 1e-5
    for parameter, gradient in zip(heads.parameters(), expected):
        if gradient is None:
            assert parameter.grad is None
        else:
            assert (parameter.grad - gradient).abs().max() < 1e-6


def test_head_h_is_taught_the_token_h_plus_two_after_its_hidden_state():
    labels = training._labels([5, 6, 7, 8], 3)
    # Row 0 reads the state that token 5 was decided from.
    assert labels.tolist() == [[6, 7, 8], [7, 8, -1], [8, -1, -1], [-1, -1, -1]]


def test_one_step_moves_every_head_and_not_the_target(tiny_loaded, tmp_path):
    before = {name: value.clone() for name, value in tiny_loaded.model.state_dict().items()}
    settings = TrainingSettings(num_heads=3, num_layers=2, epochs=1, warmup_steps=1, batch_size=10_000)
    heads, _ = train_heads(tiny_loaded, DOCUMENTS, settings, tmp_path / "state.pt")
    for block in heads.blocks:
        for layer in block:
            assert layer.linear.weight.abs().max() > 0
    for name, value in tiny_loaded.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_layers_of_a_head_are_not_shared(tiny_loaded, tmp_path):
    # Starting at zero they take the same first step; from the second on each goes its own way.
    settings = TrainingSettings(num_heads=1, num_layers=2, epochs=3, warmup_steps=1, batch_size=10_000)
    heads, _ = train_heads(tiny_loaded, DOCUMENTS, settings, tmp_path / "state.pt")
    assert not torch.equal(heads.blocks[0][0].linear.weight, heads.blocks[0][1].linear.weight)


def test_a_sequence_is_learnt_by_heart(counting_target, tmp_path):
    documents = [Continuation(str(i), None, (i % 8,), tuple(range(i % 8 + 1, 16))) for i in range(33)]
    settings = TrainingSettings(num_heads=3, epochs=60, learning_rate=3e-2, warmup_steps=2, batch_size=64)
    heads, _ = train_heads(counting_target, documents, settings, tmp_path / "state.pt")
    with torch.no_grad():
        for x in range(10):
            hidden = counting_target.model.model(torch.tensor([[x]])).last_hidden_state[0, -1]
            assert heads(hidden[None])[:, 0].argmax(-1).tolist() == [x + 2, x + 3, x + 4]


@pytest.mark.parametrize("place", [(1, 0), (2, 1), (3, 0)])
def test_interrupted_training_goes_on_to_the_same_heads(tiny_loaded, tmp_path, monkeypatch, place):
    monkeypatch.setattr(training, "GROUP_TOKENS", 100)
    monkeypatch.setattr(training, "SAVE_SPACING", 0)
    whole, accuracies = train_heads(tiny_loaded, DOCUMENTS, SETTINGS, tmp_path / "whole.pt")
    save = training._Run.save

    def stopping(run):
        save(run)
        if (run.groups, run.batches) == place:
            raise KeyboardInterrupt

    monkeypatch.setattr(training._Run, "save", stopping)
    with pytest.raises(KeyboardInterrupt):
        train_heads(tiny_loaded, DOCUMENTS, SETTINGS, tmp_path / "state.pt")
    monkeypatch.setattr(training._Run, "save", save)
    steps = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *args, **keywords: steps.append(1) or step(*args, **keywords))
    again, again_accuracies = train_heads(tiny_loaded, DOCUMENTS, SETTINGS, tmp_path / "state.pt")
    assert all(map(torch.equal, again.state_dict().values(), whole.state_dict().values()))
    assert again_accuracies == accuracies
    groups, batches = place
    total = torch.load(tmp_path / "state.pt", weights_only=True)["schedule"]["last_epoch"]
    assert len(steps) == total - 2 * groups - batches  # each group of about 100 positions is two batches of 64


def test_a_state_of_other_settings_is_refused(tiny_loaded, tmp_path):
    train_heads(tiny_loaded, DOCUMENTS, SETTINGS, tmp_path / "state.pt")
    with pytest.raises(HeadsError, match=r"another epochs; delete it"):
        train_heads(
            tiny_loaded, DOCUMENTS, TrainingSettings(num_heads=3, batch_size=64, warmup_steps=2), tmp_path / "state.pt"
        )


def test_too_few_documents_are_refused(tiny_loaded, tmp_path):
    with pytest.raises(HeadsError, match=r"too few to train on"):
        train_heads(tiny_loaded, DOCUMENTS[:1], SETTINGS, tmp_path / "state.pt")


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 half"])
def test_a_damaged_state_is_named(tiny_loaded, tmp_path, content):
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(HeadsError, match=r"state.pt` is damaged; delete it"):
        train_heads(tiny_loaded, DOCUMENTS, SETTINGS, tmp_path / "state.pt")
