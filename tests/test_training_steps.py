"""What a step of a training is made of: rates, decay, clipping, order, adapters; seen from where Trainer's optimiser stands."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from treeopt.calibrate.documents import Continuation
from treeopt.heads import MedusaHeads
from treeopt.targets.loading import LoadedTarget
from treeopt.training import JointSettings, TrainingSettings, joint_stage, measuring, train, trainer, whole
from treeopt.training.backbone import backbone_of
from treeopt.training.heads_stage import PositionBatches
from treeopt.training.joint_stage import DocumentBatches, Together
from treeopt.training.measuring import measure, speech
from treeopt.training.samples import Sample

pytestmark = pytest.mark.filterwarnings("ignore:mtime may not be reliable")

DOCUMENTS = [whole(Continuation(str(i), None, (1, 2), tuple((i + j) % 13 for j in range(12)))) for i in range(40)]
HEADS = TrainingSettings(num_heads=2, epochs=2, learning_rate=3e-3, warmup_steps=3, batch_size=40, weight_decay=0.02)
JOINT = JointSettings(
    epochs=2, learning_rate=1e-3, heads_rate=7.0, batch_tokens=60, warmup_steps=3, weight_decay=0.03, lora_rank=4,
    accumulate=2, ramp="sine",
)  # fmt: skip


@pytest.fixture
def steps(monkeypatch):
    """Note rate, decay, and the norm of the gradients of each group at every step of the optimiser."""
    noted, step = [], torch.optim.AdamW.step

    def noting(self, *arguments, **keywords):
        norm = math.sqrt(sum(float(p.grad.norm()) ** 2 for g in self.param_groups for p in g["params"]))
        noted.append(([g["lr"] for g in self.param_groups], {g["weight_decay"] for g in self.param_groups}, norm))
        return step(self, *arguments, **keywords)

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    return noted


def cosine(count, warmup):
    rising = [(i + 1) / warmup for i in range(warmup)]
    return rising + [0.5 * (1 + math.cos(math.pi * i / (count - warmup))) for i in range(count - warmup)]


def test_rates_rise_and_fall_by_stage_and_group_and_gradients_are_clipped(fresh, tmp_path, steps):
    train(fresh(), DOCUMENTS, HEADS, tmp_path, joint=JOINT)
    alone = [found for found in steps if len(found[0]) == 1]
    together = [found for found in steps if len(found[0]) == 2]
    assert len(alone) == math.ceil(38 * 11 / 40) * 2
    assert {tuple(decays) for _, decays, _ in alone} == {(0.02,)}
    assert [rates[0] for rates, _, _ in alone] == pytest.approx([3e-3 * f for f in cosine(len(alone), 3)])
    passes = len(DocumentBatches(fresh().model, [d for i, d in enumerate(DOCUMENTS) if i % 32], JOINT, 2, 0))
    assert len(together) == math.ceil(passes / 2)
    assert {tuple(decays) for _, decays, _ in together} == {(0.03,)}
    assert len(together) == 10
    factors = cosine(10, 2)  # a quarter of the steps at most
    assert [rates[0] for rates, _, _ in together] == pytest.approx([1e-3 * f for f in factors])
    assert [rates[1] for rates, _, _ in together] == pytest.approx([7e-3 * f for f in factors])
    norms = [norm for _, _, norm in steps]
    assert max(norms) < trainer.CLIPPED_NORM + 1e-4
    assert max(norms) > trainer.CLIPPED_NORM - 1e-2  # some were longer


def test_the_heads_weight_rises_with_the_steps_of_the_training(fresh, tmp_path, monkeypatch):
    seen, forward = [], Together.forward
    monkeypatch.setattr(
        Together, "forward", lambda self, **given: seen.append(self.heads_weight) or forward(self, **given)
    )
    train(fresh(), DOCUMENTS, HEADS, tmp_path, joint=JOINT)
    steps = math.ceil(len(seen) / 2)
    assert seen == pytest.approx([0.2 * math.sin(math.pi / 2 * (i // 2) / steps) for i in range(len(seen))])


def test_the_seed_orders_documents_positions_and_passes_and_draws_adapters(fresh):
    def firsts(seed):
        target = fresh()
        settings = TrainingSettings(num_heads=2, epochs=2, batch_size=40, seed=seed)
        alone, together = (
            PositionBatches(target, DOCUMENTS, settings, 2),
            DocumentBatches(target.model, DOCUMENTS, JOINT, 2, seed),
        )
        adapted = backbone_of(target.model, JOINT, seed).target
        drawn = next(p for name, p in adapted.named_parameters() if "lora_A" in name)
        return alone._groups[0], alone[0]["labels"], together._order, drawn

    (group, labels, order, drawn), again, other = firsts(0), firsts(0), firsts(1)
    assert (group, order) == (again[0], again[2])
    assert torch.equal(labels, again[1])
    assert torch.equal(drawn, again[3])
    assert group != other[0]
    assert order != other[2]
    assert not torch.equal(drawn, other[3])
    half = len(order) // 2
    assert sorted(order[:half]) == sorted(order[half:])  # each epoch the same passes
    assert order[:half] != order[half:]  # in another order


def test_positions_of_one_group_are_shuffled_anew_by_seed_and_epoch(fresh):
    def labels(seed):
        settings = TrainingSettings(num_heads=2, epochs=2, batch_size=10_000, seed=seed)
        items = PositionBatches(fresh(), DOCUMENTS[:1], settings, 2)
        return [items[i]["labels"].tolist() for i in range(2)]

    (first, second), (other, _) = labels(0), labels(1)
    assert sorted(first) == sorted(second) == sorted(other)
    assert first != second
    assert first != other


@pytest.mark.parametrize("fits", [True, False])
def test_states_are_computed_once_while_they_fit(fresh, monkeypatch, fits):
    from treeopt.training import heads_stage

    monkeypatch.setattr(heads_stage, "STATE_BYTES", 1 << 30 if fits else 0)
    computed, states = [], heads_stage.document_states
    monkeypatch.setattr(
        heads_stage, "document_states", lambda forward, batch: computed.extend(batch) or states(forward, batch)
    )
    items = PositionBatches(fresh(), DOCUMENTS, HEADS, 2)
    found = [items[i] for i in range(len(items))]
    assert len(found) == len(items)
    assert len(computed) == len(DOCUMENTS) * (1 if fits else HEADS.epochs)


def test_what_measures_is_never_learnt(fresh, tmp_path, monkeypatch):
    learnt, init = [], joint_stage.DocumentBatches.__init__

    def noting(self, target, samples, *rest):
        learnt.extend(sample.document.prompt_id for sample in samples)
        init(self, target, samples, *rest)

    monkeypatch.setattr(joint_stage.DocumentBatches, "__init__", noting)
    train(fresh(), DOCUMENTS, HEADS, tmp_path, joint=JOINT)
    assert set(learnt) == {str(i) for i in range(40)} - {"0", "32"}


def test_adapters_are_those_of_the_settings(fresh):
    joint = JointSettings(lora_rank=3, lora_alpha=12, lora_dropout=0.25, lora_modules=("q_proj", "up_proj"))
    target = backbone_of(fresh().model, joint).target
    adapted = {name: module for name, module in target.named_modules() if hasattr(module, "lora_A")}
    assert {name.rsplit(".", 1)[-1] for name in adapted} == {"q_proj", "up_proj"}
    assert len(adapted) == 4
    for module in adapted.values():
        assert module.r["default"] == 3
        assert module.scaling["default"] == 4.0
        assert module.lora_dropout["default"].p == 0.25
        assert module.lora_A["default"].weight.dtype == torch.float32


def test_the_target_is_measured_without_dropout_and_trained_with_it(tiny_target, tmp_path, monkeypatch):
    config = LlamaConfig(**{**tiny_target.config.to_dict(), "attention_dropout": 0.5})
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(tiny_target.state_dict())
    monkeypatch.setattr(trainer, "MEASURE_SPACING", 0)
    seen, forward, measuring_now = [], Together.forward, measuring.observe

    def noted(self, **given):
        seen.append(("trained", self.target.training))
        return forward(self, **given)

    def observed(forward, *rest):
        seen.append(("measured", forward.target.training))
        return measuring_now(forward, *rest)

    monkeypatch.setattr(Together, "forward", noted)
    monkeypatch.setattr(measuring, "observe", observed)
    train(LoadedTarget("tiny", model, None), DOCUMENTS, HEADS, tmp_path, joint=JOINT)
    assert set(seen) == {("trained", True), ("measured", False)}


def test_what_the_target_says_is_measured_before_and_after(fresh, tmp_path):
    trained = train(fresh(), DOCUMENTS, HEADS, tmp_path, joint=JOINT)
    assert trained.speech["before"] == speech(fresh().model, DOCUMENTS[::32])
    assert trained.speech["after"] == speech(trained.target, DOCUMENTS[::32])
    assert trained.speech["before"] != trained.speech["after"]


def test_e_of_l_is_that_of_the_best_tree_of_64_nodes(tiny_target, tiny_heads):
    from treeopt import AcceptanceTable, best_tree
    from treeopt.calibrate.observe import RANKS_ONLY, observe
    from treeopt.targets.forward import Forward

    learnt = (True,) * 5 + (False,) * 3 + (True,) * 4
    samples = [Sample(sample.document, learnt) for sample in DOCUMENTS[:6]]
    hits, positions = torch.zeros(4, 13), torch.zeros(4)
    for sample in samples:
        (seen,) = observe(Forward(tiny_target), tiny_heads, [sample.document], RANKS_ONLY)
        for i in range(12):
            for head in range(4):
                if i + 1 + head < 12 and all(learnt[i : i + 2 + head]):
                    hits[head, seen.ranks[i, head]] += 1
                    positions[head] += 1
    rates = (hits / positions[:, None]).tolist()
    found = measure(tiny_target, tiny_heads, samples)
    assert found.accuracies == pytest.approx([row[0] for row in rates])
    assert found.expected_accepted == pytest.approx(
        best_tree(AcceptanceTable.from_rates(rates), num_nodes=64).expected_accepted
    )


def test_a_checkpoint_is_written_at_the_end_alone_where_time_allows_no_other(fresh, tmp_path, monkeypatch):
    saved, on_save = [], trainer._Talk.on_save

    def noting(self, args, state, control, **rest):
        saved.append(state.global_step)
        on_save(self, args, state, control, **rest)

    monkeypatch.setattr(trainer._Talk, "on_save", noting)
    monkeypatch.setattr(trainer, "SAVE_SECONDS", 1e9)
    log = train(fresh(), DOCUMENTS, HEADS, tmp_path).log
    assert saved == [max(entry["step"] for entry in log)]


def test_adapters_and_heads_learn_in_float32_beside_a_target_in_bfloat16(fresh):
    target = fresh()
    target.model.to(torch.bfloat16)
    joint = JointSettings(lora_rank=2)
    heads = MedusaHeads.for_target(target.model, 1).float()
    together = Together(backbone_of(target.model, joint), heads, joint)
    batch = DocumentBatches(target.model, DOCUMENTS[:3], joint, 1, 0)[0]
    together(**batch, counts=(batch["labels"] >= 0).sum(0))["loss"].backward()
    for parameter in (p for p in together.parameters() if p.requires_grad):
        assert parameter.grad.dtype == torch.float32


def test_layers_are_computed_again_only_when_asked(fresh):
    counts = []
    for asked in (False, True):
        target, calls = fresh().model, []
        joint = JointSettings(gradient_checkpointing=asked, lora_rank=2)
        together = Together(backbone_of(target, joint), MedusaHeads.for_target(target, 1), joint).train()
        target.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        batch = DocumentBatches(target, DOCUMENTS[:3], joint, 1, 0)[0]
        together(**batch, counts=(batch["labels"] >= 0).sum(0))["loss"].backward()
        counts.append(len(calls))
    assert counts == [1, 2]


def test_adapters_are_drawn_by_the_seed_of_the_training(fresh, tmp_path, monkeypatch):
    from treeopt.training import run

    drawn = []

    def noting(target, joint, seed):
        backbone = backbone_of(target, joint, seed)
        drawn.append(next(p.detach().clone() for name, p in target.named_parameters() if "lora_A" in name))
        return backbone

    monkeypatch.setattr(run, "backbone_of", noting)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        settings = TrainingSettings(num_heads=2, epochs=1, batch_size=400, seed=seed)
        train(fresh(), DOCUMENTS, settings, tmp_path / name, joint=JOINT)
    first, again, other = drawn
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
