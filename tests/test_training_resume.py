"""What chance and the clock must not change in a training, and what is left of an interrupted one."""

import json
import shutil

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.interruption import save_every_step, stopped_after
from treeopt.calibrate.documents import Continuation
from treeopt.errors import HeadsError
from treeopt.targets.loading import LoadedTarget
from treeopt.training import JointSettings, TrainingSettings, checkpoints, train, trainer, whole

pytestmark = pytest.mark.filterwarnings("ignore:mtime may not be reliable")

DOCUMENTS = [whole(Continuation(str(i), None, (1, 2), tuple((i + j) % 13 for j in range(12)))) for i in range(40)]
SETTINGS = TrainingSettings(num_heads=2, epochs=1, warmup_steps=2, batch_size=64)
JOINT = JointSettings(learning_rate=1e-2, batch_tokens=100, warmup_steps=2, lora_rank=4, lora_dropout=0.2)


@pytest.fixture
def dropping():
    """Return a function that gives the same target with dropout again and again."""

    def make():
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=13, n_embd=16, n_layer=2, n_head=2, n_positions=64, eos_token_id=None, bos_token_id=None,
            resid_pdrop=0.2,
        )  # fmt: skip
        return LoadedTarget("dropping", GPT2LMHeadModel(config).eval(), None)

    return make


def equal(one, two):
    return all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_dropout_is_that_of_the_seed_however_often_is_measured(dropping, tmp_path, monkeypatch, backbone):
    joint = JointSettings(
        learning_rate=1e-2, batch_tokens=100, warmup_steps=2, lora_rank=4, lora_dropout=0.2, backbone=backbone
    )
    trained = []
    for spacing, seed in ((0, 0), (1e9, 0), (0, 1)):
        monkeypatch.setattr(trainer, "MEASURE_SPACING", spacing)
        settings = TrainingSettings(num_heads=2, epochs=1, warmup_steps=2, batch_size=64, seed=seed)
        trained.append(train(dropping(), DOCUMENTS, settings, tmp_path / f"{spacing}{seed}", joint=joint))
    often, rarely, another = trained
    assert len(often.log) > len(rarely.log)
    assert equal(often.heads, rarely.heads)
    assert equal(often.target, rarely.target)
    assert not equal(often.target, another.target)


@pytest.mark.parametrize("count", [2, 9, 11])
def test_interrupted_training_goes_on_with_the_same_dropout(dropping, tmp_path, monkeypatch, count):
    whole_run = train(dropping(), DOCUMENTS, SETTINGS, tmp_path / "whole", joint=JOINT)
    save_every_step(monkeypatch)
    stopped_after(monkeypatch, count, lambda: train(dropping(), DOCUMENTS, SETTINGS, tmp_path / "work", joint=JOINT))
    again = train(dropping(), DOCUMENTS, SETTINGS, tmp_path / "work", joint=JOINT)
    assert equal(again.heads, whole_run.heads)
    assert equal(again.target, whole_run.target)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_checkpoint_with_a_bad_or_missing_file_is_named(dropping, tmp_path, monkeypatch, name, how):
    # Trainer goes on without a missing file: with fresh moments, another rate, another dropout.
    save_every_step(monkeypatch)
    stopped_after(monkeypatch, 3, lambda: train(dropping(), DOCUMENTS, SETTINGS, tmp_path, joint=JOINT))
    file = tmp_path / "heads" / "checkpoint-3" / name
    file.unlink()
    if how == "damaged":
        file.write_bytes(b"garbage")
    with pytest.raises(HeadsError, match=r"checkpoint-3` is damaged \(.*delete it to go on from the one before"):
        train(dropping(), DOCUMENTS, SETTINGS, tmp_path, joint=JOINT)
    shutil.rmtree(tmp_path / "heads" / "checkpoint-3")
    assert (tmp_path / "heads" / "checkpoint-2").is_dir()
    train(dropping(), DOCUMENTS, SETTINGS, tmp_path, joint=JOINT)


@pytest.mark.parametrize("name", ["heads.safetensors", "heads.json"])
def test_damaged_heads_of_the_first_stage_are_named(dropping, tmp_path, name):
    first = train(dropping(), DOCUMENTS, SETTINGS, tmp_path)
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(HeadsError, match=r"heads.safetensors` or the log beside it is damaged \(.*delete it"):
        train(dropping(), DOCUMENTS, SETTINGS, tmp_path)
    (tmp_path / "heads.safetensors").unlink()
    assert equal(train(dropping(), DOCUMENTS, SETTINGS, tmp_path).heads, first.heads)


def test_forgotten_checkpoints_are_gone_and_what_is_beside_them_stays(tmp_path, monkeypatch):
    for name in ("checkpoint-1", "checkpoint-2", "runs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoints.COMPLETE).touch()
    with monkeypatch.context() as patched:  # the end comes in the middle
        patched.setattr(shutil, "rmtree", lambda *arguments, **keywords: None)
        checkpoints.forget(tmp_path)
    assert not (tmp_path / "checkpoint-1" / checkpoints.COMPLETE).exists()
    assert not (tmp_path / "checkpoint-2" / checkpoints.COMPLETE).exists()
    checkpoints.forget(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_training_that_diverges_says_so(dropping, tmp_path):
    target = dropping()
    with torch.no_grad():
        target.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(HeadsError, match=r"training heads diverged.*give a smaller rate"):
        train(target, DOCUMENTS, SETTINGS, tmp_path)


def test_documents_of_one_id_are_refused(dropping, tmp_path):
    with pytest.raises(HeadsError, match=r"two documents have the id '3'; give each its own"):
        train(dropping(), [*DOCUMENTS, DOCUMENTS[3]], SETTINGS, tmp_path)


def test_documents_without_two_tokens_in_a_row_are_refused(dropping, tmp_path):
    short = [whole(Continuation(str(i), None, (1, 2), (i,)[: i % 2])) for i in range(9)]
    with pytest.raises(HeadsError, match=r"heads have nothing to guess; give longer replies"):
        train(dropping(), short, SETTINGS, tmp_path)
    # One that is long enough suffices.
    log = train(dropping(), [*short, DOCUMENTS[20]], SETTINGS, tmp_path / "more").log
    assert json.dumps(log)
