"""treeopt build: limits, models, objectives and the held-out comparison on the command line."""

import re

import numpy as np
import pytest

from treeopt import RankTrace, read_tree
from treeopt.bundled import DEMO_TRACE, calibration_path

DEMO = str(calibration_path(DEMO_TRACE))


@pytest.fixture
def dependent(tmp_path):
    """Two guesses of head 0 equally often right; head 1 is right .8 after the first of them and .2 after the other."""
    rng = np.random.default_rng(1)
    first = rng.choice(2, size=4000)
    right = rng.random(len(first)) < np.where(first == 0, 0.8, 0.2)
    path = tmp_path / "dependent.safetensors"
    RankTrace(np.stack([first, np.where(right, 0, 7)], axis=1), np.arange(101) * 40).write(path)
    return path


def test_every_limit_is_obeyed_and_its_cost_printed(run, table):
    limits = {
        "--max-depth": ("2", {}),
        "--max-rank": ("1", {}),
        "--rank-caps": ("2,0", {"rank_caps": (2, 0)}),
        "--max-children": ("1", {}),
        "--level-caps": ("2,1", {"level_caps": (2, 1)}),
        "--max-leaves": ("2", {}),
        "--must-include": ("2,2", {"must_include": ((2, 2),)}),
    }
    for option, (value, stated) in limits.items():
        result = run("build", table, "--nodes", 8, option, value)
        assert result.exit_code == 0, result.output
        assert re.search(rf"{option} {value} (costs 0\.\d{{4}} of E\[L\]|does not bind)", result.stdout), result.stdout
        built = read_tree("tree.json")
        built.constraints.check(built.tree)
        for name, expected in stated.items():
            assert getattr(built.constraints, name) == expected
    for flag in ("--dense-siblings", "--level-regular"):
        assert flag in run("build", table, "--nodes", 8, flag).stdout


def test_limits_combine_and_their_common_cost_is_printed(run, table):
    text = run("build", table, "--nodes", 6, "--max-children", 2, "--must-include", "2,2", "--must-include", "1").stdout
    assert re.search(r"--must-include 2,2 --must-include 1 costs 0\.\d+ of E\[L\]", text)
    assert re.search(r"all limits together cost 0\.\d+ of E\[L\]", text)
    assert "proven optimal" in text
    assert "E[L] by nodes" not in text  # the best trees of smaller budgets do not nest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--max-depth 1 --must-include 0,0", r"`must_include` holds \(0,0\), deeper than `max_depth` 1"),
        (
            "--max-children 1 --must-include 0 --must-include 1",
            "`must_include` needs 2 children .* `max_children` is 1",
        ),
        ("--max-leaves 1 --must-include 0 --must-include 1", "`must_include` needs 2 leaves, but `max_leaves` is 1"),
        ("--nodes 2 --must-include 0,0", "`must_include` needs 3 nodes, root included, but `num_nodes` is 2"),
        ("--nodes 3 --dense-siblings --must-include 2", "`must_include` with `dense_siblings` needs 4 nodes"),
        ("--must-include 0,0,0", "of depth 3, but the model has 2 levels"),
        ("--max-leaves 0", "`max_leaves` is 0; give a whole number from 1 on"),
        ("--model joint", "`--model` needs a trace, and `.*` is a table"),
        ("--objective robust", "`--objective` needs a trace"),
        ("--compare", "`--compare` needs a trace"),
    ],
)
def test_what_contradicts_is_refused_in_one_line_naming_both(run, table, arguments, message):
    result = run("build", table, *arguments.split())
    assert result.exit_code == 1
    assert re.search(message, result.stderr), result.stderr
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("searching")]
    assert line.startswith("Error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--objective mixture", "--weight and --objective mixture belong together"),
        ("--weight math=1", "--weight and --objective mixture belong together"),
        ("--epsilon 0.1", "are those of --objective typical"),
        ("--objective mixture --weight math", "not of the form DOMAIN=W"),
        ("--rank-caps 1,x", "'1,x' is no list of whole numbers; write them as 9,4,2"),
        ("--must-include (0,0)", "is no list of whole numbers"),
        ("--objective speed", "is not one of"),
    ],
)
def test_options_that_do_not_go_together_are_usage_errors(run, arguments, message):
    result = run("build", DEMO, *arguments.split())
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_trace_without_what_an_objective_needs_says_what_to_do(run, dependent):
    result = run("build", dependent, "--objective", "typical")
    assert (result.exit_code, "calibrate with --candidates 10" in result.stderr) == (1, True)
    result = run("build", dependent, "--objective", "robust")
    assert (result.exit_code, "`domain` each" in result.stderr) == (1, True)


def test_the_report_shows_measured_beside_predicted_and_the_joint_model_takes_the_likelier_path(run, dependent):
    """Marginals are equal, but head 1's first guess is four times as likely after rank 0 as after rank 1."""
    report = run("build", dependent, "--nodes", 5, "--model", "joint", "--compare").stdout
    rows = {line.split()[0]: line.split() for line in report.splitlines() if line.startswith(("independent", "joint"))}
    predicted, measured = (
        {name: float(row[1]) for name, row in rows.items()},
        {name: float(row[2]) for name, row in rows.items()},
    )
    assert predicted["joint"] == pytest.approx(measured["joint"], abs=0.02)
    built = read_tree("tree.json")
    taken = [built.tree.paths[node] for node in built.added]
    assert (0, 0) in taken
    assert (1, 0) not in taken or taken.index((0, 0)) < taken.index((1, 0))
    independent = run("build", dependent, "--nodes", 4, "-o", "i.json")
    assert independent.exit_code == 0
    joint = run("build", dependent, "--nodes", 4, "--model", "joint", "-o", "j.json")
    assert joint.exit_code == 0
    assert (0, 0) in read_tree("j.json").tree.paths
    assert read_tree("j.json").expected_accepted > read_tree("i.json").expected_accepted + 0.1


def test_a_better_later_rank_and_a_budget_beyond_all_paths(run, tmp_path):
    (tmp_path / "acc.json").write_text("[[0.4, 0.1, 0.35], [0.5, 0.2, 0.1]]")
    text = run("build", "acc.json", "--nodes", 4).stdout
    assert "expected_accepted E[L] 0.9500" in text
    assert read_tree("tree.json").tree.paths == ((), (0,), (2,), (0, 0))
    (tmp_path / "one.json").write_text("[[0.2, 0.6, 0.1]]")
    run("build", "one.json", "--nodes", 2)
    assert read_tree("tree.json").tree.paths == ((), (1,))
    assert "100 nodes were asked for, 4 exist" in run("build", "one.json", "--nodes", 100).stdout


def test_every_objective_runs_on_the_bundled_trace_and_is_read_back(run):
    for arguments, told in (
        (["--objective", "robust"], "in its worst domain, "),
        (["--objective", "typical"], "under typical acceptance E[L] "),
        (["--objective", "mixture", "--weight", "math=1", "--weight", "coding=2"], "E[L] by domain: coding "),
        (["--model", "joint"], "expected_accepted"),
        (["--objective", "tokens-per-step"], "chosen by replay: tokens_per_step 1."),
    ):
        result = run("build", DEMO, "--nodes", 16, *arguments)
        assert result.exit_code == 0, result.output
        assert told in result.stdout
        assert ("proven optimal" in result.stdout) == ("tokens-per-step" not in arguments)
        shown = run("show", "tree.json").stdout
        assert told in shown
        assert read_tree("tree.json").certificate.optimal == ("tokens-per-step" not in arguments)


def test_the_comparison_has_a_line_for_the_chosen_objective(run):
    text = run("build", DEMO, "--nodes", 16, "--objective", "typical", "--compare").stdout
    lines = text.split("\n\n")[1].splitlines()
    names = ["held-out", "chosen", "independent", "joint", "tokens-per-step", "typical", "built"]
    assert [line.split()[0] for line in lines] == names
    assert lines[1].endswith("typical value")


def test_help_says_what_every_limit_is_for(run):
    text = " ".join(run("build", "--help").output.split())
    for phrase in (
        "Tokens in one pass, root included",
        "what sampling without replacement and some decoders need",
        "what decoders that know only widths need",
        "A path that the tree must hold",
        "shrunk toward the former as far as held-out documents say",
        "in the worst domain, the replayed tokens a step, or E[L] under typical acceptance",
    ):
        assert phrase in text
