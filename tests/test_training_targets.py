"""Targets of several kinds, trained: what is given back is what is loaded again, and padding is nobody's guess."""

import warnings

import pytest
import torch
from transformers import (
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedModel,
)
from transformers.models.auto import AutoModelForCausalLM

from treeopt.calibrate.documents import Continuation
from treeopt.heads import MedusaHeads
from treeopt.targets.loading import LoadedTarget
from treeopt.training import JointSettings, TrainingSettings, train, whole
from treeopt.training.backbone import backbone_of
from treeopt.training.joint_stage import DocumentBatches, Together
from treeopt.training.measuring import measure, speech

pytestmark = pytest.mark.filterwarnings("ignore:mtime may not be reliable")

COMMON = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GPT2 = {
    "vocab_size": 48,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 128,
    "eos_token_id": None,
    "bos_token_id": None,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**COMMON),
    "tied": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True),
    "capped": lambda: Gemma2Config(**COMMON, head_dim=8, sliding_window=8),
    "scaled": lambda: CohereConfig(**COMMON),
    "divided": lambda: GraniteConfig(**COMMON, logits_scaling=8.0),
    "transposed": lambda: GPT2Config(**GPT2),
    "transposed and untied": lambda: GPT2Config(**GPT2, tie_word_embeddings=False),
    "shifted positions": lambda: OPTConfig(
        vocab_size=48, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=128,
        word_embed_proj_dim=32, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    ),
}  # fmt: skip

DOCUMENTS = [whole(Continuation(str(i), None, (1, 2), tuple((i + j) % 40 for j in range(30)))) for i in range(12)]
SETTINGS = TrainingSettings(num_heads=2, epochs=1, warmup_steps=2, batch_size=64)
JOINT = JointSettings(learning_rate=1e-2, batch_tokens=100, warmup_steps=2, lora_rank=4)


def made(kind) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()


def is_tied(model):
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("distill", [False, True])
def test_the_first_loss_of_the_target_is_that_of_its_own_forward(kind, distill):
    # Unchanged adapters: the divergence from the original is 0, the text's loss transformers' own.
    model = made(kind)
    documents = DOCUMENTS[:3]
    ids = [torch.tensor([[*sample.document.prompt, *sample.document.tokens]]) for sample in documents]
    with torch.no_grad():
        logits = [model(given).logits[0, 1:-1].log_softmax(-1) for given in ids]
    plain = -sum(log.gather(1, given[0, 2:, None]).sum() for log, given in zip(logits, ids)) / 90
    joint = JointSettings(batch_tokens=10_000, heads_weight=1e-9, distill=distill)
    together = Together(backbone_of(model, joint), MedusaHeads.for_target(model, 2), joint)
    batch = DocumentBatches(model, documents, joint, 2, 0)[0]
    loss = together(**batch, counts=(batch["labels"] >= 0).sum(0))["loss"]
    assert float(loss.detach()) == pytest.approx(0 if distill else float(plain), abs=1e-5)


@pytest.mark.parametrize("backbone", ["lora", "full"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_measured_of_a_target_is_true_of_the_one_that_is_loaded_again(tmp_path, kind, backbone):
    target = LoadedTarget(kind, made(kind).to(torch.bfloat16), None)
    target.model.save_pretrained(tmp_path / "given")  # in bfloat16, as large targets come
    target = LoadedTarget(kind, AutoModelForCausalLM.from_pretrained(tmp_path / "given", dtype="auto").eval(), None)
    joint = JointSettings(learning_rate=1e-2, batch_tokens=100, warmup_steps=2, lora_rank=4, backbone=backbone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = train(target, DOCUMENTS, SETTINGS, tmp_path / "work", joint=joint)
    trained.target.save_pretrained(tmp_path / "target")
    trained.heads.save(tmp_path / "heads")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="auto").eval()
    assert {p.dtype for p in loaded.parameters()} == {p.dtype for p in trained.target.parameters()} == {torch.bfloat16}
    assert speech(loaded, DOCUMENTS[:1]) == trained.speech["after"]
    assert measure(loaded, MedusaHeads.load(tmp_path / "heads", loaded), DOCUMENTS[:1]) == trained.measures["joint"]
    assert is_tied(loaded) == is_tied(made(kind))


@pytest.mark.parametrize("own_lm_heads", [False, True])
def test_heads_that_know_fewer_tokens_than_the_target_are_trained_further(tmp_path, own_lm_heads):
    # A padded output embedding: the tokenizer knows 40 tokens of 48, and the target says 45 all the same.
    documents = [
        whole(Continuation(str(i), None, (1, 2), tuple(45 if j % 5 == 4 else (i + j) % 40 for j in range(20))))
        for i in range(12)
    ]
    target = LoadedTarget("padded", made("llama"), None)
    MedusaHeads.for_target(target.model, 2, own_lm_heads=own_lm_heads).save(tmp_path / "fresh")
    heads = MedusaHeads.load(tmp_path / "fresh", target.model, num_tokens=40)
    assert heads.vocabulary == 40
    trained = train(target, documents, SETTINGS, tmp_path / "work", heads=heads, joint=JOINT)
    assert trained.heads.vocabulary == 40
    labels = DocumentBatches(trained.target, documents, JOINT, 2, 0, 40)[0]["labels"]
    assert int(labels[:, 0].max()) == 45  # the target learns it
    assert int(labels[:, 1:].max()) < 40


def test_documents_beyond_the_context_are_measured_as_far_as_it_goes(tmp_path):
    # GPT-2 has no position behind its last.
    long = whole(Continuation("long", None, (1, 2), tuple(i % 40 for i in range(200))))
    target = LoadedTarget("short", made("transposed"), None)
    cut = whole(Continuation("long", None, (1, 2), long.document.tokens[:127]))
    assert speech(target.model, [long]) == speech(target.model, [cut])
    trained = train(target, [long, *DOCUMENTS], SETTINGS, tmp_path / "work", joint=JOINT)
    assert trained.speech["after"] == speech(trained.target, [cut])
