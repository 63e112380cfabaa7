import itertools
import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.interruption import save_every_step, stopped_after
from treeopt.calibrate.documents import Continuation
from treeopt.errors import HeadsError, TargetError
from treeopt.heads import MedusaHeads
from treeopt.targets.loading import LoadedTarget
from treeopt.training import (
    JointSettings,
    TrainingSettings,
    checkpoints,
    heads_stage,
    joint_stage,
    losses,
    measuring,
    train,
    whole,
)
from treeopt.training.backbone import adapted_modules, backbone_of
from treeopt.training.heads_stage import PositionBatches
from treeopt.training.joint_stage import DocumentBatches, Together
from treeopt.training.measuring import measure, speech
from treeopt.training.samples import Sample

# Checkpoints of a tiny run come faster than file times tell apart; older versions of transformers say so.
pytestmark = pytest.mark.filterwarnings("ignore:mtime may not be reliable")

DOCUMENTS = [whole(Continuation(str(i), None, (1, 2), tuple((i + j) % 13 for j in range(12)))) for i in range(40)]
SETTINGS = TrainingSettings(num_heads=3, epochs=2, warmup_steps=2, batch_size=64)
JOINT = JointSettings(epochs=2, learning_rate=1e-2, batch_tokens=100, warmup_steps=2, lora_rank=4, lora_alpha=8)


@pytest.fixture
def counting_target():
    """Return a target whose hidden state after token x is the one-hot vector of x: heads can count on from it."""
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


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_one_step_moves_every_head_and_not_the_target(fresh, tmp_path):
    target = fresh()
    before = state_of(target.model)
    settings = TrainingSettings(num_heads=3, num_layers=2, epochs=1, warmup_steps=1, batch_size=10_000)
    heads = train(target, DOCUMENTS, settings, tmp_path).heads
    for block in heads.blocks:
        for layer in block:
            assert layer.linear.weight.abs().max() > 0
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_layers_of_a_head_are_not_shared(fresh, tmp_path):
    # Starting at zero they take the same first step; from the second on each goes its own way.
    settings = TrainingSettings(num_heads=1, num_layers=2, epochs=3, warmup_steps=1, batch_size=10_000)
    heads = train(fresh(), DOCUMENTS, settings, tmp_path).heads
    assert not torch.equal(heads.blocks[0][0].linear.weight, heads.blocks[0][1].linear.weight)


def test_output_embeddings_of_their_own_are_trained_and_the_targets_is_not(fresh, tmp_path):
    target = fresh()
    before = target.model.lm_head.weight.clone()
    settings = TrainingSettings(num_heads=2, own_lm_heads=True, epochs=1, warmup_steps=1, batch_size=64)
    heads = train(target, DOCUMENTS, settings, tmp_path).heads
    assert torch.equal(target.model.lm_head.weight, before)
    for own in heads.lm_heads:
        assert not torch.equal(own.weight, before)
    heads.save(tmp_path / "heads")
    loaded = MedusaHeads.load(tmp_path / "heads", target.model)
    assert torch.equal(loaded.lm_heads[1].weight, heads.lm_heads[1].weight)


def test_a_sequence_is_learnt_by_heart(counting_target, tmp_path):
    documents = [whole(Continuation(str(i), None, (i % 8,), tuple(range(i % 8 + 1, 16)))) for i in range(33)]
    settings = TrainingSettings(num_heads=3, epochs=60, learning_rate=3e-2, warmup_steps=2, batch_size=64)
    trained = train(counting_target, documents, settings, tmp_path)
    with torch.no_grad():
        for x in range(10):
            hidden = counting_target.model.model(torch.tensor([[x]])).last_hidden_state[0, -1]
            assert trained.heads(hidden[None])[:, 0].argmax(-1).tolist() == [x + 2, x + 3, x + 4]
    assert trained.measures["heads"].accuracies == (1.0, 1.0, 1.0)
    assert trained.measures["heads"].expected_accepted == pytest.approx(3.0)


def test_only_the_assistants_turns_are_learnt(counting_target, tmp_path):
    # Behind 5 the user says 9, the assistant never does.
    documents = [
        Sample(Continuation(str(i), None, (3,), (4, 5, 9, 10, 4, 5, 6)), (True, True, False, False, True, True, True))
        for i in range(33)
    ]
    settings = TrainingSettings(num_heads=1, epochs=60, learning_rate=3e-2, warmup_steps=2, batch_size=64)
    heads = train(counting_target, documents, settings, tmp_path).heads
    with torch.no_grad():
        hidden = counting_target.model.model(torch.tensor([[3, 4, 5]])).last_hidden_state[0]
        assert heads(hidden[None])[0, 0].argmax(-1).tolist() == [5, 6, 5]  # behind 5, untaught, it repeats the target


@pytest.mark.parametrize(("count", "backbone"), [(1, "lora"), (9, "lora"), (20, "lora"), (18, "full")])
def test_interrupted_training_goes_on_to_the_same_heads_and_target(fresh, tmp_path, monkeypatch, count, backbone):
    monkeypatch.setattr(heads_stage, "GROUP_TOKENS", 100)
    save_every_step(monkeypatch)
    joint = JointSettings(epochs=2, learning_rate=1e-2, batch_tokens=100, backbone=backbone, lora_rank=4, distill=True)
    whole_run = train(fresh(), DOCUMENTS, SETTINGS, tmp_path / "whole", joint=joint)
    stopped_after(monkeypatch, count, lambda: train(fresh(), DOCUMENTS, SETTINGS, tmp_path / "work", joint=joint))
    steps, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *args, **keywords: steps.append(1) or step(*args, **keywords))
    again = train(fresh(), DOCUMENTS, SETTINGS, tmp_path / "work", joint=joint)
    assert all(map(torch.equal, again.heads.state_dict().values(), whole_run.heads.state_dict().values()))
    assert all(map(torch.equal, again.target.state_dict().values(), whole_run.target.state_dict().values()))
    assert again.measures == whole_run.measures
    losses = [entry["loss"] for entry in again.log if "loss" in entry]
    assert losses == [entry["loss"] for entry in whole_run.log if "loss" in entry]
    assert len(steps) == len(losses) - count  # every step is logged here, and each had its checkpoint


def test_a_checkpoint_that_was_not_finished_is_passed_over(fresh, tmp_path, monkeypatch):
    save_every_step(monkeypatch)
    whole_run = train(fresh(), DOCUMENTS, SETTINGS, tmp_path / "whole")
    stopped_after(monkeypatch, 4, lambda: train(fresh(), DOCUMENTS, SETTINGS, tmp_path / "work"))
    newest = tmp_path / "work" / "heads" / "checkpoint-4"
    (newest / checkpoints.COMPLETE).unlink()
    (newest / "model.safetensors").write_bytes(b"half")
    again = train(fresh(), DOCUMENTS, SETTINGS, tmp_path / "work")
    assert all(map(torch.equal, again.heads.state_dict().values(), whole_run.heads.state_dict().values()))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_damaged_checkpoint_is_named(fresh, tmp_path, monkeypatch, name):
    stopped_after(monkeypatch, 1, lambda: train(fresh(), DOCUMENTS, SETTINGS, tmp_path))
    (checkpoint,) = (tmp_path / "heads").glob("checkpoint-*")
    (checkpoint / name).write_bytes(b"garbage")
    with pytest.raises(HeadsError, match=r"checkpoint-\d+` is damaged \(.*delete it"):
        train(fresh(), DOCUMENTS, SETTINGS, tmp_path)


def test_the_work_of_other_settings_is_refused(fresh, tmp_path):
    train(fresh(), DOCUMENTS, SETTINGS, tmp_path)
    with pytest.raises(HeadsError, match=r"another epochs; delete it"):
        train(fresh(), DOCUMENTS, TrainingSettings(num_heads=3, batch_size=64, warmup_steps=2), tmp_path)
    with pytest.raises(HeadsError, match=r"another documents; delete it"):
        train(fresh(), DOCUMENTS[:39], SETTINGS, tmp_path)
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(HeadsError, match=r"training.json` is damaged; delete"):
        train(fresh(), DOCUMENTS, SETTINGS, tmp_path)


def test_too_few_documents_are_refused(fresh, tmp_path):
    with pytest.raises(HeadsError, match=r"too few to train on"):
        train(fresh(), DOCUMENTS[:1], SETTINGS, tmp_path)


def test_every_position_is_learnt_once_an_epoch_by_any_number_of_processes(fresh, monkeypatch):
    monkeypatch.setattr(heads_stage, "GROUP_TOKENS", 100)
    target = fresh()
    for size in (1, 2, 3):
        items = PositionBatches(target, DOCUMENTS, SETTINGS, 3, size)
        labels = torch.cat([items[i]["labels"] for i in range(len(items))])
        rows = sorted(map(tuple, labels.tolist()))
        once = sorted(
            tuple(s.document.tokens[i + j] if i + j < 12 else -1 for j in range(1, 4))
            for s in DOCUMENTS
            for i in range(11)
        )
        if size == 1:
            assert rows == sorted(once * 2)
        else:
            assert set(rows) == set(once)
        # A process that takes each size-th pass stays within a group until it is done.
        for rank in range(size):
            numbers = [items._places[i][0] for i in range(rank, len(items), size)]
            assert len([1 for a, b in itertools.pairwise(numbers) if a != b]) < len(items._groups)


def test_padding_and_company_change_nothing_that_is_learnt(fresh):
    target = fresh()
    documents = [
        whole(Continuation(str(i), None, (1,) * (1 + i), tuple((i + j) % 13 for j in range(4 + i)))) for i in range(5)
    ]
    joint = JointSettings(batch_tokens=10_000)
    heads = MedusaHeads.for_target(target.model, 3)
    together = Together(backbone_of(target.model, joint), heads, joint)
    (batch,) = (DocumentBatches(target.model, documents, joint, 3, 0)[0],)
    counts = (batch["labels"] >= 0).sum(0)
    one_by_one = sum(
        together(**DocumentBatches(target.model, [document], joint, 3, 0)[0], counts=counts)["loss"]
        for document in documents
    )
    assert torch.allclose(together(**batch, counts=counts)["loss"], one_by_one, atol=1e-5)


@pytest.mark.parametrize("distill", [False, True])
def test_the_joint_loss_is_the_sum_that_it_is_called(fresh, distill):
    target = fresh()
    joint = JointSettings(batch_tokens=10_000, heads_weight=0.3, distill=distill, lora_rank=4)
    heads = MedusaHeads.for_target(target.model, 3)
    backbone = backbone_of(target.model, joint)
    together = Together(backbone, heads, joint)
    with torch.no_grad():  # an adapter that changes something
        for name, parameter in target.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    (batch,) = (DocumentBatches(target.model, DOCUMENTS[:6], joint, 3, 0)[0],)
    found = float(together(**batch, counts=(batch["labels"] >= 0).sum(0))["loss"].detach())
    untouched = fresh().model
    sums, counts = torch.zeros(4), torch.zeros(4)
    for sample in DOCUMENTS[:6]:
        ids = torch.tensor([[*sample.document.prompt, *sample.document.tokens]])
        with torch.no_grad():
            hidden = target.model.model(ids).last_hidden_state[0]
            now, then = target.model.lm_head(hidden).log_softmax(-1), untouched(ids).logits[0].log_softmax(-1)
            for i in range(12):
                place = 2 + i - 1
                sums[0] += (
                    (then[place].exp() * (then[place] - now[place])).sum()
                    if distill
                    else -now[place, ids[0, place + 1]]
                )
                counts[0] += 1
                for head in range(3):
                    if i + 1 + head < 12:
                        guess = heads(hidden[place][None])[head, 0].log_softmax(-1)
                        sums[1 + head] -= guess[ids[0, place + 2 + head]]
                        counts[1 + head] += 1
    means = sums / counts
    assert found == pytest.approx(float(means[0] + 0.3 * sum(0.8**h * means[1 + h] for h in range(3))), rel=1e-4)


def test_the_weight_of_the_heads_rises_along_a_sine(fresh):
    joint = JointSettings(heads_weight=0.01, ramp="sine")
    together = Together(backbone_of(fresh().model, joint), MedusaHeads.for_target(fresh().model, 1), joint)
    weights = []
    for together.progress in (0.0, 1 / 3, 1.0):
        weights.append(together.heads_weight)
    assert weights == pytest.approx([0.0, 0.005, 0.01])


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_medusa_2_gives_a_target_without_adapters_and_heads_that_fit_it(fresh, tmp_path, backbone):
    given = fresh()
    before = state_of(given.model)
    joint = JointSettings(
        epochs=4, learning_rate=1e-2, batch_tokens=100, warmup_steps=2, backbone=backbone, lora_rank=4
    )
    trained = train(given, DOCUMENTS, SETTINGS, tmp_path, joint=joint)
    assert set(trained.target.state_dict()) == set(before)
    assert not torch.equal(
        trained.target.model.layers[0].mlp.up_proj.weight, before["model.layers.0.mlp.up_proj.weight"]
    )
    assert trained.heads.output(0) is trained.target.get_output_embeddings()
    assert trained.measures["joint"].expected_accepted > trained.measures["heads"].expected_accepted + 0.1
    assert trained.speech["after"].text_perplexity < trained.speech["before"].text_perplexity
    # What was measured in training is what the merged pair gives.
    assert measure(trained.target, trained.heads, DOCUMENTS[::32]) == trained.measures["joint"]
    assert speech(trained.target, DOCUMENTS[::32]) == trained.speech["after"]
    trained.target.save_pretrained(tmp_path / "target")
    trained.heads.save(tmp_path / "heads")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "target")
    again = measure(loaded, MedusaHeads.load(tmp_path / "heads", loaded), DOCUMENTS[::32])
    assert again == trained.measures["joint"]


def test_self_distillation_keeps_the_target_nearer_than_learning_its_text(fresh, tmp_path):
    documents = [
        whole(Continuation(str(i), None, (1 + i % 3,), tuple((i * 5 + j * j) % 13 for j in range(12))))
        for i in range(40)
    ]
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        before = fresh().model(ids).logits.log_softmax(-1)

    def moved(distill, name):
        joint = JointSettings(epochs=4, learning_rate=1e-2, batch_tokens=100, warmup_steps=2, distill=distill)
        target = train(fresh(), documents, SETTINGS, tmp_path / name, joint=joint).target
        with torch.no_grad():
            return float((before.exp() * (before - target(ids).logits.log_softmax(-1))).sum(-1).mean())

    assert moved(True, "kept") < 0.3 * moved(False, "learnt")


def test_passes_of_one_step_weigh_as_one_pass(fresh, tmp_path):
    # Documents of unlike length: a mean of means would differ.
    documents = [
        whole(Continuation(str(i), None, (1, 2), tuple((i + j) % 13 for j in range(2 + i)))) for i in range(12)
    ]
    states = []
    for name, batch, accumulate in (("one", 1000, 1), ("many", 7, 100)):
        settings = TrainingSettings(num_heads=3, epochs=1, warmup_steps=1, batch_size=batch, accumulate=accumulate)
        states.append(train(fresh(), documents, settings, tmp_path / name).heads.state_dict())
    for one, many in zip(*map(dict.values, states)):
        assert torch.allclose(one, many, atol=1e-5)


def test_heads_are_trained_further(fresh, tmp_path):
    target = fresh()
    first = train(target, DOCUMENTS, SETTINGS, tmp_path / "first").heads
    further = train(target, DOCUMENTS, SETTINGS, tmp_path / "further", heads=first)
    assert further.log[0]["expected_accepted"] == measure(target.model, first, DOCUMENTS[::32]).expected_accepted
    assert not torch.equal(further.heads.blocks[0][0].linear.weight, first.blocks[0][0].linear.weight)
    joint = train(fresh(), DOCUMENTS, TrainingSettings(epochs=0), tmp_path / "joint", heads=first, joint=JOINT)
    assert {entry["stage"] for entry in joint.log} == {"joint"}


def test_heads_with_a_draft_vocabulary_are_refused(fresh, tmp_path):
    from treeopt.heads.vocabulary import Columns

    target = fresh()
    heads = MedusaHeads(target.model.lm_head, 32, 1, own_lm_heads=True, columns=Columns(3, torch.tensor([0, 2, 5])))
    with pytest.raises(HeadsError, match=r"draft vocabulary of their own cannot be trained"):
        train(target, DOCUMENTS, SETTINGS, tmp_path, heads=heads)


def test_the_log_holds_losses_rates_and_measures(fresh, tmp_path):
    log = train(fresh(), DOCUMENTS, SETTINGS, tmp_path, joint=JOINT).log
    assert {entry["stage"] for entry in log} == {"heads", "joint"}
    measured = [entry for entry in log if "expected_accepted" in entry]
    assert {(entry["stage"], entry["step"]) for entry in measured} >= {("heads", 0), ("joint", 0)}
    assert all(len(entry["accuracies"]) == 3 for entry in measured)
    json.dumps(log)


@pytest.mark.parametrize(("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_mixed_precision_computes_in_half_and_learns(fresh, tmp_path, monkeypatch, precision, dtype):
    seen, forward = set(), torch.nn.Linear.forward

    def noted(linear, given):
        product = forward(linear, given)
        if linear.weight.requires_grad and torch.is_grad_enabled():
            seen.add((linear.weight.dtype, product.dtype))
        return product

    monkeypatch.setattr(torch.nn.Linear, "forward", noted)
    settings = TrainingSettings(num_heads=2, epochs=2, warmup_steps=1, batch_size=64, mixed_precision=precision)
    trained = train(fresh(), DOCUMENTS, settings, tmp_path, joint=JOINT)
    assert seen == {(torch.float32, dtype)}
    assert trained.measures["joint"].expected_accepted > trained.measures["heads"].expected_accepted


def test_a_run_that_ended_before_its_result_was_written_gives_it_at_once(fresh, tmp_path, monkeypatch):
    first = train(fresh(), DOCUMENTS, SETTINGS, tmp_path, joint=JOINT)
    steps, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *args, **keywords: steps.append(1) or step(*args, **keywords))
    again = train(fresh(), DOCUMENTS, SETTINGS, tmp_path, joint=JOINT)
    assert not steps
    assert again.measures == first.measures
    assert all(map(torch.equal, again.target.state_dict().values(), first.target.state_dict().values()))


def test_what_is_kept_to_is_free_of_dropout(tiny_target):
    config = LlamaConfig(**{**tiny_target.config.to_dict(), "attention_dropout": 0.5})
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(tiny_target.state_dict())
    joint = JointSettings(distill=True, lora_rank=4)
    together = Together(backbone_of(model, joint), MedusaHeads.for_target(model, 1), joint).train()
    ids, rows = torch.tensor([[1, 2, 3, 4]]), torch.arange(4)
    before = together._states_before(ids, rows)
    assert torch.equal(before, tiny_target.model(ids).last_hidden_state[0])
    assert model.training
    assert not torch.equal(before, model.model(ids).last_hidden_state[0])  # dropout is at work otherwise


def test_gradient_checkpointing_changes_no_step(fresh, tmp_path):
    states = []
    for checkpointing in (False, True):
        joint = JointSettings(
            epochs=1, batch_tokens=100, warmup_steps=2, gradient_checkpointing=checkpointing, lora_rank=4
        )
        trained = train(fresh(), DOCUMENTS, SETTINGS, tmp_path / str(checkpointing), joint=joint)
        states.append(trained.target.state_dict())
    for plain, again in zip(*map(dict.values, states)):
        assert torch.allclose(plain, again, atol=1e-6)


def test_a_full_target_of_half_precision_is_trained_in_float32_and_given_back_as_it_was(fresh, tmp_path):
    target = fresh()
    target.model.to(torch.bfloat16)
    seen = []
    forward = joint_stage.Together.forward
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            joint_stage.Together,
            "forward",
            lambda self, **given: seen.append(self.target.dtype) or forward(self, **given),
        )
        joint = JointSettings(epochs=1, batch_tokens=100, warmup_steps=2, backbone="full")
        trained = train(target, DOCUMENTS, SETTINGS, tmp_path, joint=joint)
    assert set(seen) == {torch.float32}
    assert trained.target.dtype == trained.heads.blocks[0][0].linear.weight.dtype == torch.bfloat16


def test_adapters_are_in_every_linear_module_but_a_tied_output_embedding(tiny_target):
    names = adapted_modules(tiny_target, ())
    assert len(names) == 2 * 7 + 1
    assert "lm_head" in names
    tied = LlamaForCausalLM(LlamaConfig(**{**tiny_target.config.to_dict(), "tie_word_embeddings": True}))
    assert adapted_modules(tied, ()) == [name for name in names if name != "lm_head"]
    assert adapted_modules(tied, ("q_proj", "v_proj")) == [n for n in names if n.endswith(("q_proj", "v_proj"))]
    with pytest.raises(
        TargetError, match=r"`--lora-modules lm_head` is no linear module that can be adapted; use down_proj"
    ):
        adapted_modules(tied, ("lm_head",))


def test_targets_that_cannot_be_trained_are_refused_before_the_heads_are(fresh, tmp_path, monkeypatch):
    target = fresh()
    monkeypatch.setattr(target.model, "is_quantized", True, raising=False)
    with pytest.raises(TargetError, match=r"quantised target cannot be trained.*medusa-1"):
        train(target, DOCUMENTS, SETTINGS, tmp_path, joint=JOINT)
    assert not (tmp_path / "heads").exists()


def test_documents_are_cut_to_the_longest_that_is_read(fresh):
    long = Sample(Continuation("x", None, (1, 2, 3), tuple(range(10))), (True,) * 10)
    (cut,) = (DocumentBatches(fresh().model, [long], JointSettings(max_length=6), 3, 0)[0],)
    assert cut["input_ids"].tolist() == [[1, 2, 3, 0, 1, 2]]
    assert cut["labels"][:, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(HeadsError, match=r"no document has anything to learn within 2 tokens"):
        DocumentBatches(fresh().model, [long], JointSettings(max_length=2), 3, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: JointSettings(backbone="all"), r"`backbone` is 'all'; use lora, full"),
        (lambda: JointSettings(ramp="cosine"), r"`ramp` is 'cosine'; use none, sine"),
        (lambda: TrainingSettings(mixed_precision="int8"), r"`mixed_precision` is 'int8'; use no, bf16, fp16"),
        (lambda: TrainingSettings(batch_size=0), r"`batch_size` is 0; give a whole number of at least 1"),
        (lambda: TrainingSettings(num_heads=2.5), r"`num_heads` is 2.5; give a whole number of at least 1"),
        (lambda: TrainingSettings(accumulate=True), r"`accumulate` is True; give a whole number"),
        (lambda: TrainingSettings(epochs=-1), r"`epochs` is -1; give a whole number of at least 0"),
        (lambda: TrainingSettings(learning_rate=0.0), r"`learning_rate` is 0.0; give a number above 0 and finite"),
        (lambda: TrainingSettings(weight_decay=float("nan")), r"`weight_decay` is nan; give a number at least 0"),
        (lambda: JointSettings(max_length=1), r"`max_length` is 1; give a whole number of at least 2"),
        (lambda: JointSettings(batch_tokens=0), r"`batch_tokens` is 0; give a whole number of at least 1"),
        (lambda: JointSettings(heads_rate=float("inf")), r"`heads_rate` is inf; give a number above 0 and finite"),
        (lambda: JointSettings(lora_dropout=1.0), r"`lora_dropout` is 1.0; give a number at least 0 and below 1"),
    ],
)
def test_settings_that_do_not_exist_are_named(settings, message):
    with pytest.raises(HeadsError, match=message):
        settings()


def test_perplexities_and_agreement_equal_a_plain_restatement(tiny_target, monkeypatch):
    monkeypatch.setattr(losses, "chunk_rows", lambda vocabulary, device: 3)
    monkeypatch.setattr(measuring, "chunk_rows", lambda vocabulary, device: 3)
    learnt = (True, True, False, False, True, True, True)
    samples = [Sample(Continuation(str(i), None, (1 + i, 2, 5), (3, i, 7, 8, 4, 6, i)), learnt) for i in range(3)]
    said, prompts, agreed = [], [], []
    for sample in samples:
        ids = [*sample.document.prompt, *sample.document.tokens]
        with torch.no_grad():
            logits = tiny_target(torch.tensor([ids])).logits[0]
        for place in range(1, len(ids)):
            nats = -float(logits[place - 1].log_softmax(-1)[ids[place]])
            if place >= 3 and learnt[place - 3]:
                said.append(nats)
                agreed.append(int(logits[place - 1].argmax()) == ids[place])
            else:
                prompts.append(nats)
    found = speech(tiny_target, samples)
    assert found.text_perplexity == pytest.approx(math.exp(sum(said) / len(said)), rel=1e-5)
    assert found.prompts_perplexity == pytest.approx(math.exp(sum(prompts) / len(prompts)), rel=1e-5)
    assert found.agreement == sum(agreed) / len(agreed)
