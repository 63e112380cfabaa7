import json
import re
import subprocess
import sys
from importlib import util

import pytest

from treeopt import RankTrace, __version__, read_tree
from treeopt.cli import main


@pytest.fixture
def models(tiny_directory, tiny_heads_directory, tiny_prompts):
    return ["--target", tiny_directory, "--heads", tiny_heads_directory, "--prompts", tiny_prompts]


def test_a_model_is_calibrated_built_and_verified(run, models, tmp_path):
    calibrated = run("calibrate", *models, "--max-new-tokens", 20)
    assert calibrated.exit_code == 0, calibrated.output
    assert re.search(r"head +positions +top-1", calibrated.stdout)
    assert "written to trace.safetensors" in calibrated.stderr
    built = run("build", "--nodes", 12)
    assert built.exit_code == 0, built.output
    assert "newest calibration" in built.stderr
    assert "12 nodes (root included)" in built.stdout
    provenance = read_tree("tree.json").provenance
    assert provenance["target_hash"] == RankTrace.read("trace.safetensors").metadata["target_hash"]
    verified = run("verify", "tree.json", *models, "--max-new-tokens", 20)
    assert verified.exit_code == 0, verified.output
    assert "4 of 4 prompts give exactly the target's own greedy output" in verified.stdout
    assert re.search(r"predicted tokens_per_step \d\.\d+, measured \d\.\d+, 12 nodes, \d+ steps", verified.stdout)


def test_verify_prints_json_by_domain(run, models, table):
    run("build", table, "-o", "tree.json", "--nodes", 6)
    result = run("verify", "tree.json", *models, "--max-new-tokens", 8, "--limit", 2, "--json")
    data = json.loads(result.stdout)
    assert data["all"]["prompts"] == 2
    assert data["differences"] == {}
    assert set(data["domains"]) <= {"even", "odd"}
    low, high = data["all"]["tokens_per_step_interval"]
    assert low <= data["all"]["tokens_per_step"] <= high


def test_verify_exits_with_1_and_explains_when_outputs_differ(run, models, table, monkeypatch):
    from treeopt.verify import compare

    run("build", table, "-o", "tree.json")
    honest = compare.plain_greedy
    monkeypatch.setattr(compare, "plain_greedy", lambda *arguments: [*honest(*arguments)[:-1], 12])
    result = run("verify", "tree.json", *models, "--max-new-tokens", 8, "--limit", 1)
    assert result.exit_code == 1
    assert re.search(r"differs from new token 7 on: plain 12, tree \d+; .* apart \(not a near tie\)", result.stdout)
    assert "0 of 1 prompts" in result.stdout


def test_train_writes_heads_that_calibrate(run, models, tmp_path, tiny_directory, tiny_prompts):
    # Prompts of every split are too few here for a held-out part of their own, but enough to train.
    result = run(
        "train", "--target", tiny_directory, "--prompts", tiny_prompts, "--max-new-tokens", 12, "--num-heads", 2,
        "--epochs", 1, "-o", "heads",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert re.search(r"head 0 0\.\d+  head 1 0\.\d+", result.stdout)
    calibrated = run("calibrate", "--target", tiny_directory, "--heads", "heads", "--prompts", tiny_prompts)
    assert calibrated.exit_code == 0, calibrated.output
    assert RankTrace.read("trace.safetensors").num_heads == 2


def test_without_a_calibration_the_bundled_one_is_built(run, monkeypatch, tmp_path):
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path / "empty"))
    result = run("build")
    assert result.exit_code == 0, result.output
    assert "bundled calibration" in result.stderr
    assert read_tree("tree.json").tree.num_nodes == 64


def test_show_tells_files_by_content_whatever_their_name(run, table, tmp_path):
    run("build", table, "--nodes", 5, "-o", "tree.safetensors")
    assert "5 nodes" in run("show", "tree.safetensors").stdout
    RankTrace([[0]], [0, 1]).write(tmp_path / "trace.json")
    assert "1 documents" in run("show", "trace.json").stdout
    RankTrace([[-1]], [0, 1]).write(tmp_path / "empty")
    assert "no head was observed" in run("show", "empty").stdout


def test_a_cache_that_cannot_be_written_does_not_cost_the_calibration(run, models, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path / "file" / "cache"))
    result = run("calibrate", *models, "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    assert "top-1" in result.stdout
    assert "treeopt build will not find it by itself" in result.stderr


def test_verify_of_a_single_new_token_has_no_steps_and_valid_json(run, models, table):
    run("build", table, "-o", "tree.json")
    result = run("verify", "tree.json", *models, "--max-new-tokens", 1, "--json")
    data = json.loads(result.stdout, parse_constant=pytest.fail)
    assert data["all"]["num_steps"] == 0
    assert data["all"]["tokens_per_step"] == 1.0


def test_verify_at_the_end_of_the_context_agrees(run, models, table):
    run("build", table, "-o", "tree.json")
    result = run("verify", "tree.json", *models, "--max-new-tokens", 300, "--limit", 1)
    assert result.exit_code == 0, result.output


def test_a_dash_writes_the_tree_to_stdout_and_the_talk_to_stderr(run, table):
    result = run("build", table, "--nodes", 5, "-o", "-")
    assert json.loads(result.stdout)["num_nodes"] == 5
    assert "expected_accepted" in result.stderr


def test_show_tells_trees_traces_and_tables_apart(run, table):
    run("build", table, "--nodes", 5)
    tree = run("show", "tree.json").stdout
    assert "├─ 0  0.5000" in tree
    assert "E[L] by nodes: 1: 0.000, 2: 0.500, 4: 0.900, 5: 1.000" in tree
    assert "2 heads, 3 ranks" in run("show", table).stdout
    RankTrace([[0, 1], [2, -1], [-1, -1]], [0, 3], ["math"]).write("trace.safetensors")
    trace = run("show", "trace.safetensors").stdout
    assert "1 documents, 3 positions, 2 heads" in trace
    assert "domains: math 1" in trace


def test_a_budget_beyond_all_paths_and_caps_are_said(run, table):
    assert "1000 nodes were asked for, 13 exist" in run("build", table, "--nodes", 1000).stdout
    assert "--max-depth 1 costs" in run("build", table, "--nodes", 4, "--max-depth", 1).stdout
    assert "--max-depth 2 does not bind" in run("build", table, "--nodes", 4, "--max-depth", 2).stdout


def test_one_node_builds_plain_decoding(run, table):
    assert "tokens_per_step 1.0000" in run("build", table, "--nodes", 1).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "none.safetensors"], "Error: `none.safetensors` cannot be read"),
        (["build", "cumulative.json"], "cumulative top-k"),
        (["build", "table.json", "--nodes", "0"], "`num_nodes` is 0"),
        (["show", "none.json"], "Error: `none.json` cannot be read"),
        (["build", "tree.json"], "this is a tree, not a table"),
        (["verify", "trace.txt"], "`trace.txt` is no tree file"),
        (["show", "deep.json"], "nested too deeply"),
        (["verify", "none.json"], "Error: `none.json` cannot be read"),
        (["calibrate", "--target", "somewhere"], "`--target somewhere` needs --heads"),
        (["calibrate", "--prompts", "none.jsonl"], "Error: `none.jsonl` cannot be read"),
    ],
)
def test_errors_are_one_line_and_exit_with_1(run, table, tmp_path, arguments, message):
    (tmp_path / "cumulative.json").write_text("[[0.6, 0.7, 0.75]]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "tree.json").write_text('{"schema": "treeopt.tree/1"}')
    RankTrace([[0]], [0, 1]).write(tmp_path / "trace.txt")
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith(("building", "searching"))]
    assert line.startswith("Error: ")
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", "--nodes", "many"],
        ["nothing"],
        ["calibrate", "--batch-size", "some"],
        ["verify"],
        ["build", "--seed", "-1"],
        ["calibrate", "--batch-size", "²"],
        ["train", "-o", "x", "--learning-rate", "nan"],
    ],
)
def test_usage_errors_exit_with_2(run, arguments):
    assert run(*arguments).exit_code == 2


def test_a_target_that_cannot_be_loaded_is_one_line(run, tmp_path, tiny_heads_directory):
    (tmp_path / "empty").mkdir()
    result = run("calibrate", "--target", tmp_path / "empty", "--heads", tiny_heads_directory)
    assert result.exit_code == 1
    assert "cannot be loaded as a target" in result.stderr


@pytest.mark.parametrize("command", ["calibrate", "verify tree.json", "train -o heads"])
def test_a_missing_extra_is_named_with_the_pip_command(run, monkeypatch, command):
    find_spec = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "torch" else find_spec(name, *rest))
    result = run(*command.split())
    assert result.exit_code == 1
    assert "needs `torch`, which is not installed: pip install 'treeopt[torch]'" in result.stderr


def test_an_interruption_is_said(run, table, monkeypatch):
    from treeopt import document

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(document, "write_tree", interrupted)
    result = run("build", table)
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted\n")


def test_an_interrupted_calibration_says_how_to_go_on(run, models, monkeypatch):
    from treeopt.calibrate import run as calibration

    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "calibrate_together", interrupted)
    result = run("calibrate", *models)
    assert result.exit_code == 130
    assert "run the same command again" in result.stderr


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_has_help_with_an_example(run, name):
    text = run(name, "--help").output
    assert f"    treeopt {name}" in re.split("Examples?:", text)[1]


def test_the_module_and_the_version_run():
    result = subprocess.run([sys.executable, "-m", "treeopt", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"treeopt, version {__version__}"
