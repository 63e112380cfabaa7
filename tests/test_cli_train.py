import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from treeopt.document import read_tree
from treeopt.heads.checkpoint import read_checkpoint
from treeopt.trace import RankTrace


@pytest.fixture
def models(tiny_directory, tiny_prompts):
    return ["--target", tiny_directory, "--prompts", tiny_prompts]


@pytest.fixture
def recipe(tmp_path, tiny_directory, tiny_prompts):
    """Write a short recipe for Medusa-2 with some changes; return its path."""

    def write(**changes):
        values = {
            "schema": "treeopt.recipe/1", "target": str(tiny_directory), "prompts": [str(tiny_prompts)], "split": "train",
            "method": "medusa-2", "max_new_tokens": 12, "num_heads": 3, "epochs": 2, "warmup_steps": 1, "joint_epochs": 2,
            "joint_learning_rate": 1e-3, "joint_warmup_steps": 1, "lora_rank": 4, "lora_modules": ["q_proj", "up_proj"],
        }  # fmt: skip
        path = tmp_path / "recipe.json"
        path.write_text(json.dumps({**values, **changes}))
        return path

    return write


def test_medusa_2_from_a_recipe_calibrates_builds_and_verifies_like_any_other(run, recipe, tiny_prompts):
    result = run("train", "--recipe", recipe(), "-o", "out")
    assert result.exit_code == 0, result.output
    assert re.search(
        r"heads alone: head 0 0\.\d+  head 1 0\.\d+  head 2 0\.\d+  E\[L\] at 64 nodes \d\.\d+", result.stdout
    )
    assert re.search(r"with the target: head 0", result.stdout)
    for what in ("text", "prompts"):
        assert re.search(rf"perplexity of the {what}: \d+\.\d+ before, \d+\.\d+ after \([+-]\d", result.stdout)
    pair = ["--target", "out/target", "--heads", "out", "--prompts", tiny_prompts]
    assert run("calibrate", *pair, "--max-new-tokens", 12, "-o", "trace.safetensors").exit_code == 0
    assert RankTrace.read("trace.safetensors").num_heads == 3
    assert run("build", "trace.safetensors", "--nodes", 9, "-o", "tree.json").exit_code == 0
    assert read_tree("tree.json").tree.num_nodes == 9
    verified = run("verify", "tree.json", *pair, "--max-new-tokens", 8)
    assert verified.exit_code == 0, verified.output
    # Another target's heads would be noticed: the trace is of this pair.
    assert run("calibrate", "--target", "out/target", "--heads", "out", "--prompts", tiny_prompts).exit_code == 0


def test_the_log_says_recipe_data_and_result(run, recipe):
    run("train", "--recipe", recipe(), "--seed", 5, "-o", "out")
    first, *entries = map(json.loads, Path("out/training.jsonl").read_text().splitlines())
    assert first["recipe"]["seed"] == 5
    assert first["recipe"]["lora_modules"] == ["q_proj", "up_proj"]
    assert first["recipe"]["method"] == "medusa-2"
    assert first["documents"] == 4
    assert set(first["measures"]) == {"heads", "joint"}
    assert set(first["speech"]) == {"before", "after"}
    assert {entry["stage"] for entry in entries} == {"heads", "joint"}
    # The recipe of the log gives the same again.
    Path("again.json").write_text(json.dumps(first["recipe"]))
    assert run("train", "--recipe", "again.json", "-o", "again").exit_code == 0
    for name in ("medusa_lm_head.safetensors", "target/model.safetensors"):
        assert Path("out", name).read_bytes() == Path("again", name).read_bytes()


def test_the_command_line_comes_before_the_recipe(run, recipe):
    path = recipe(method="medusa-1", joint_epochs=None, joint_learning_rate=None)
    given = {
        k: v for k, v in json.loads(path.read_text()).items() if v is not None and not k.startswith(("joint", "lora"))
    }
    path.write_text(json.dumps(given))
    assert run("train", "--recipe", path, "--num-heads", 1, "-o", "out").exit_code == 0
    assert read_checkpoint("out").num_heads == 1
    assert not Path("out/target").exists()


def test_a_flag_of_the_recipe_is_taken_back(run, recipe):
    path = recipe(distill=True, own_lm_heads=True)
    assert run("train", "--recipe", path, "--no-distill", "--no-own-lm-heads", "-o", "out").exit_code == 0
    first = json.loads(Path("out/training.jsonl").read_text().splitlines()[0])
    assert first["recipe"]["distill"] is first["recipe"]["own_lm_heads"] is False
    assert not read_checkpoint("out").own_lm_heads


@pytest.mark.parametrize(("flags", "own"), [([], False), (["--own-lm-heads"], True)])
def test_formats_a_and_c_come_out(run, models, flags, own):
    assert (
        run("train", *models, "--max-new-tokens", 12, "--epochs", 1, "--num-layers", 2, *flags, "-o", "out").exit_code
        == 0
    )
    found = read_checkpoint("out")
    assert (found.num_heads, found.num_layers, found.own_lm_heads) == (5, 2, own)
    inspected = run("heads", "inspect", "out")
    assert "A" in inspected.stdout if own else "C" in inspected.stdout


def test_replies_of_the_data_set_are_learnt_on_request(run, models):
    result = run("train", *models, "--continuations", "dataset", "--epochs", 1, "--num-heads", 2, "-o", "out")
    assert result.exit_code == 0, result.output
    assert "4 documents, 20 tokens" in result.stdout  # five words each; the tiny target has no end-of-sequence token


def test_a_limit_takes_prompts_of_every_file_evenly(run, models, tmp_path, tiny_directory):
    (tmp_path / "more.jsonl").write_text(
        "".join(json.dumps({"id": f"m{i}", "prompt": f"{i} 2"}) + "\n" for i in range(9))
    )
    result = run(
        "train", *models, "--prompts", "more.jsonl", "--limit", 3, "--max-new-tokens", 4, "--epochs", 1, "--num-heads", 1, "-o", "out"
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "6 documents, 24 tokens" in result.stdout
    kept = Path("out.partial/continuations.jsonl").read_text()
    assert set(re.findall(r"m\d", kept)) == {"m0", "m3", "m6"}


def test_heads_are_trained_further_in_their_own_shape(run, models, tiny_heads_directory):
    more = ["--max-new-tokens", 12, "--epochs", 1, "-o", "out"]
    assert run("train", *models, "--heads", tiny_heads_directory, *more).exit_code == 0
    assert read_checkpoint("out").num_heads == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-rank", 4], "--lora-rank belongs to --method medusa-2"),
        (["--distill"], "--distill belongs to --method medusa-2"),
        (["--epochs", 0, "--method", "medusa-2"], "--epochs 0 leaves fresh heads as they are"),
        (["--epochs", 0, "--heads", "x"], "--epochs 0 trains nothing"),
        (["--heads", "x", "--num-heads", 3], "--num-heads is that of fresh heads"),
        (["--device", "cpu", "--device-map", "auto"], "--device and --device-map"),
        (["--heads-rate", "nan"], "nan is no rate"),
    ],
)
def test_options_that_contradict_each_other_are_usage_errors(run, models, flags, message):
    result = run("train", *models, *flags, "-o", "out")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema": "treeopt.recipe/1", "epoch": 3}', r"`epoch` is no option of treeopt train"),
        ('{"schema": "treeopt.recipe/1", "recipe": "x"}', r"`recipe` is no option of treeopt train"),
        ('{"epochs": 3}', r'is no recipe; give a JSON object with "schema": "treeopt.recipe/1"'),
        ("[]", r"is no recipe"),
        ('{"epochs": 3, "epochs": 4}', r"`epochs` is given twice"),
        ("{", r"is not JSON"),
    ],
)
def test_a_recipe_that_is_none_is_refused(run, tmp_path, content, message):
    (tmp_path / "recipe.json").write_text(content)
    result = run("train", "--recipe", "recipe.json", "-o", "out")
    assert result.exit_code == 1
    assert re.search(message, result.stderr)
    assert run("train", "--recipe", "missing.json", "-o", "out").exit_code == 1


@pytest.mark.parametrize(
    "changes", [{"epochs": "many"}, {"method": "medusa-3"}, {"joint_epochs": 0}, {"heads_rate": -1}]
)
def test_values_of_a_recipe_are_checked_like_those_of_the_command_line(run, recipe, changes):
    result = run("train", "--recipe", recipe(**changes), "-o", "out")
    assert result.exit_code == 2
    assert next(iter(changes)).replace("_", "-") in result.stderr


def test_what_training_needs_is_named_with_the_pip_command(run, models, monkeypatch):
    from importlib import util

    find_spec = util.find_spec
    for missing, flags in (("accelerate", []), ("peft", ["--method", "medusa-2", "--max-new-tokens", 4])):
        monkeypatch.setattr(
            util, "find_spec", lambda name, *rest, m=missing: None if name == m else find_spec(name, *rest)
        )
        result = run("train", *models, *flags, "-o", "out")
        assert result.exit_code == 1
        assert f"needs `{missing}`, which is not installed: pip install 'treeopt[train]'" in result.stderr


def test_a_finished_result_is_replaced_whole(run, recipe):
    assert run("train", "--recipe", recipe(), "-o", "out").exit_code == 0
    before = load_file("out/target/model.safetensors")
    assert run("train", "--recipe", recipe(), "--seed", 3, "-o", "out").exit_code == 0
    after = load_file("out/target/model.safetensors")
    assert any((before[name] != after[name]).any() for name in before)
    assert [path.name for path in Path("out.partial").iterdir()] == ["continuations.jsonl"]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_two_processes_step_as_one_does_in_two_passes(run, recipe, tmp_path):
    short = {"batch_tokens": 40, "positions": 6, "epochs": 1, "learning_rate": 1e-2, "joint_learning_rate": 1e-2}
    path = recipe(**short)
    command = [sys.executable, "-m", "treeopt", "train", "--recipe", path, "-o", tmp_path / "out", "--timeout", "60"]
    shared = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    running = []
    for rank in range(2):
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
        env = os.environ | {key: str(value) for key, value in own.items()}
        arguments = list(map(str, command))
        running.append(subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=180) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert "with the target" in outputs[0][0]
    assert outputs[1][0] == ""
    assert run("train", "--recipe", path, "--accumulate", 2, "--joint-accumulate", 2, "-o", "alone").exit_code == 0
    steps = [
        [entry["step"] for entry in map(json.loads, Path(name, "training.jsonl").read_text().splitlines()[1:])]
        for name in ("out", "alone")
    ]
    assert max(steps[0]) == max(steps[1]) == 3
    for name, tolerance in (("medusa_lm_head.safetensors", 1e-3), ("target/model.safetensors", 1e-5)):
        both, alone = load_file(Path("out", name)), load_file(Path("alone", name))
        for key, value in both.items():
            assert (value - alone[key]).abs().max() <= tolerance * value.abs().max(), key
