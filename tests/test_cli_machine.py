"""The commands that know a machine or several trees: build --nodes auto, explain, profile, compare."""

import csv
import json
import re
from pathlib import Path

import pytest

from treeopt import RankTrace, read_tree
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.latency import LatencyTable

DATA = Path(__file__).parent / "data"
A800 = DATA / "caddtree_verify_cost_A800.json"
DEMO = str(calibration_path(DEMO_TRACE))


@pytest.fixture
def flat(tmp_path):
    path = tmp_path / "flat.csv"
    path.write_text("nodes,seconds\n1,0.010\n2,0.011\n32,0.0110001\n64,0.5\n")
    return path


def test_the_budget_is_chosen_on_a_curve_and_said_in_words(run, flat):
    result = run("build", DEMO, "--nodes", "auto", "--latency", flat)
    assert result.exit_code == 0, result.output
    chosen = read_tree("tree.json").tree.num_nodes
    assert 24 < chosen <= 32
    assert re.search(rf"{chosen}  < +1\.\d+ +11\.00", result.stdout)
    assert f"{chosen} nodes: predicted 1." in result.stdout


def test_do_not_speculate_and_a_chain_are_legal_answers(run, tmp_path):
    (tmp_path / "steep.csv").write_text("nodes,seconds\n1,0.01\n64,0.64\n")
    result = run("build", DEMO, "--nodes", "auto", "--latency", "steep.csv")
    assert "do not speculate: on this machine plain decoding gives more tokens a second than any tree" in result.stdout
    assert read_tree("tree.json").tree.num_nodes == 1
    (tmp_path / "table.json").write_text("[[0.9], [0.9], [0.9]]")
    (tmp_path / "cheap.csv").write_text("nodes,seconds\n1,0.01\n64,0.011\n")
    result = run("build", "table.json", "--nodes", "auto", "--latency", "cheap.csv")
    assert "a chain of 3 guesses: predicted" in result.stdout


def test_a_published_curve_is_read_with_its_context(run):
    result = run("build", DEMO, "--nodes", "auto", "--latency", A800, "--latency-model", "Qwen3-8B", "--context", 7900)
    assert result.exit_code == 0
    assert "step times at batch 1, context 8000, up to 513 nodes" in result.stderr
    assert 64 < read_tree("tree.json").tree.num_nodes < 96  # at context 1 it is 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", DEMO, "--nodes", "auto"], "--nodes auto and --latency belong together"),
        (["build", DEMO, "--latency", "x.json"], "--nodes auto and --latency belong together"),
        (["build", DEMO, "--nodes", "some"], "'some' is neither auto nor a whole number"),
        (["explain", "tree.json"], "--latency is needed: measure one with treeopt profile"),
        (["compare", DEMO], "nothing to compare"),
    ],
)
def test_options_that_are_missing_are_usage_errors(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_explain_says_whether_and_why(run, flat):
    run("build", DEMO, "--nodes", 32)
    result = run("explain", "tree.json", "--latency", flat)
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", result.stdout)]
    tokens, plain, gained, draft, verify, step, ratio, even = numbers
    assert "speculation pays" in result.stdout
    assert gained == pytest.approx(tokens * plain, abs=1e-3)
    assert step == pytest.approx(draft + verify, abs=1e-3)
    assert ratio == pytest.approx(gained / step, abs=1e-3)
    assert even == pytest.approx(step / plain, abs=1e-3)
    replayed = run("explain", "tree.json", "--latency", flat, "--trace", DEMO).stdout
    assert "(replayed)" in replayed
    run("build", DEMO, "--nodes", 64)
    assert "speculation does not pay" in run("explain", "tree.json", "--latency", flat).stdout
    run("build", DEMO, "--nodes", 65)
    assert "the tree has 65 nodes and the curve ends at 64" in run("explain", "tree.json", "--latency", flat).stderr


def test_trees_of_every_form_are_compared(run, tmp_path, flat):
    published = json.loads((DATA / "published_static_trees.json").read_text())["medusa"]["trees"]["mc_sim_7b_63"]
    (tmp_path / "published.json").write_text(json.dumps(published))
    run("build", DEMO)
    names = ["tree.json", "published.json", "chain:4", "dense:7,6"]
    result = run("compare", DEMO, *names, "--latency", flat, "--csv", "rows.csv")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["tree", *names]
    assert "times plain" in lines[0]
    with Path("rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == names
    assert float(rows[0]["tokens_per_step"]) > float(rows[1]["tokens_per_step"]) > float(rows[2]["tokens_per_step"])
    data = json.loads(run("compare", DEMO, *names, "--json").stdout)
    assert data["trees"][1]["num_nodes"] == 64
    assert data["trees"][1]["gain_high"] < 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("chain:x", None, "`chain:x` is no shape; write chain:4 or dense:7,6"),
        ("dense:7,0", None, "width 0"),
        ("none.json", None, "`none.json` cannot be read"),
        ("bad.json", "[[0], [0]]", "`bad.json`: node `(0)` is given twice"),
        (
            "table.json",
            '{"schema": "treeopt.acceptance/1", "rates": [[0.5]]}',
            "is neither a tree file nor a list of paths",
        ),
        ("chain:9", None, "`chain:9`: the tree has depth 9 but there are 5 heads"),
    ],
)
def test_what_is_no_tree_is_refused_in_one_line(run, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    result = run("compare", DEMO, name)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_new_trace_is_tested_against_the_calibrations(run, tmp_path):
    demo = RankTrace.read(DEMO)
    demo.domain("math").write("math.safetensors")
    result = run("compare", "math.safetensors", "--reference", DEMO, "--nodes", 16)
    assert result.exit_code == 0, result.output
    assert re.search(r"(no head differs|heads [\d, ]+ differ) beyond chance", result.stdout)
    assert "building 16 nodes anew changes tokens_per_step on left-out documents by" in result.stdout
    data = json.loads(run("compare", "math.safetensors", "--reference", DEMO, "--nodes", 16, "--json").stdout)
    assert len(data["drift"]["heads"]) == 5


def test_a_profile_is_written_and_read_by_build(run, tiny_directory, tiny_heads_directory):
    arguments = ["--target", tiny_directory, "--heads", tiny_heads_directory, "--nodes", "1,2,4,8", "--context", "8,30"]
    result = run("profile", *arguments, "--batch", "1,2", "--repeats", 3)
    assert result.exit_code == 0, result.output
    assert "batch 2, context 30: ms a step" in result.stdout
    assert len(LatencyTable.read("latency.json").curves) == 4
    assert [path.name for path in Path().iterdir()] == ["latency.json"]
    built = run("build", DEMO, "--max-depth", 4, "--nodes", "auto", "--latency", "latency.json", "--batch", 2)
    assert built.exit_code == 0, built.output
    assert "step times at batch 2, context 8, up to 8 nodes" in built.stderr


def test_verify_checks_the_replay(run, tiny_directory, tiny_heads_directory, tiny_prompts, monkeypatch):
    models = ["--target", tiny_directory, "--heads", tiny_heads_directory, "--prompts", tiny_prompts]
    Path("t.json").write_text("[[0.5, 0.2, 0.1], [0.4, 0.1, 0.05]]")
    run("build", "t.json", "--nodes", 6)
    result = run("verify", "tree.json", *models, "--max-new-tokens", 20, "--check-replay")
    assert result.exit_code == 0, result.output
    assert "replay takes exactly the counted steps in 4 of 4 documents" in result.stdout
    from treeopt import agreement

    found = agreement.Disagreement("p", 3, 4)
    monkeypatch.setattr(agreement, "replay_disagreements", lambda *_: [found])
    result = run("verify", "tree.json", *models, "--max-new-tokens", 20, "--check-replay")
    assert result.exit_code == 1
    assert "`p`: replayed 3 steps, counted 4" in result.stdout
