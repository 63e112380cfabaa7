"""The README's commands, code and claims about files, as far as a test can run them."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest

import treeopt
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.cli import main
from treeopt.document import CERTIFICATE_KEYS, KEYS
from treeopt.heldout import compare_ways
from treeopt.optimize import Limits
from treeopt.optimize.from_trace import Aim
from treeopt.show import head_rows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands():
    text = "\n".join(blocks("bash") + blocks(""))
    return [shlex.split(part) for part in re.findall(r"(?:^|&& )(treeopt [^&\n]+)", text, re.M)]


def test_the_first_command_installs_calibrates_builds_and_verifies_and_the_second_tests():
    first, second = blocks("bash")
    assert re.search(r"pip install .*\.\[torch\]", first)
    assert [words[1] for words in commands()[:3]] == ["calibrate", "build", "verify"]
    assert re.search(r"pip install .*\.\[dev\]", second)
    assert second.rstrip().endswith("pytest -n auto")


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_line_is_understood(words):
    command, name, *rest = main.commands[words[1]], *words[1:]
    while isinstance(command, click.Group):
        command, name, *rest = command.commands[rest[0]], *rest
    command.make_context(name, rest, resilient_parsing=False)
    with pytest.raises(click.UsageError):
        command.make_context(name, [*rest, "--no-such-option"])


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, _ = blocks("python")
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("import")]) <= 6
    names = {}
    exec(code, names)
    assert names["buffers"].attention_mask.shape == (names["built"].tree.num_nodes,) * 2
    assert "DraftTree(num_nodes=7" in capsys.readouterr().out


def test_the_example_with_torch_runs(tmp_path, monkeypatch, tiny_target, tiny_heads):
    import torch

    from treeopt.heads import MedusaHeads
    from treeopt.verify import Sample, TreeVerifier

    monkeypatch.chdir(tmp_path)
    tiny_heads.save("heads")
    treeopt.write_tree(treeopt.best_tree([[0.6, 0.2], [0.5, 0.1]], num_nodes=5), "tree.json")
    ids = torch.tensor([[3, 1, 4]])
    names = {
        "treeopt": treeopt, "MedusaHeads": MedusaHeads, "TreeVerifier": TreeVerifier, "Sample": Sample,
        "model": tiny_target, "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "input_ids": ids,
        "tree": treeopt.read_tree("tree.json").tree,
    }  # fmt: skip
    _, code, _ = blocks("python")
    lines = code.splitlines()
    exec(lines[0], names)
    outputs = [eval(line, names) for line in lines[1:]]
    assert [tuple(output.shape) for output in outputs] == [(1, 3 + 64)] * 3
    assert torch.equal(outputs[0], outputs[1])


def test_the_table_of_the_format_names_every_key():
    table = README.split("## The tree file")[1].split("| in `certificate` |")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(KEYS)


def test_a_consumer_written_from_the_table_rebuilds_mask_and_paths(tmp_path):
    treeopt.write_tree(treeopt.best_tree(np.full((3, 4), 0.25), num_nodes=70), tmp_path / "tree.json")
    document = json.loads((tmp_path / "tree.json").read_text())
    parents, ranks = document["parents"], document["ranks"]
    num_nodes = document["num_nodes"]
    for row in range(1, num_nodes):
        assert document["paths"][row] == [*document["paths"][parents[row]], ranks[row]]
        seen, node = {row}, row
        while node > 0:
            node = parents[node]
            seen.add(node)
        words = [int(word, 16) for word in document["packed_mask"][row]]
        assert {j for j in range(num_nodes) if words[j // 64] >> (j % 64) & 1} == seen
        assert {j for j, bit in enumerate(document["attention_mask"][row]) if bit} == seen


def test_the_readme_and_the_package_agree_on_the_lowest_versions():
    project = (ROOT / "pyproject.toml").read_text()
    torch, python = (re.search(text, README)[1] for text in (r"any torch from (\S+) on", r"Python (\S+) or newer"))
    assert f'"torch>={torch}"' in project
    assert f'requires-python = ">={python}"' in project


def test_the_printed_steps_are_those_of_the_committed_run():
    result = json.loads((ROOT / "tests/benchmarks/results/verify-demo-64.json").read_text())
    assert result["differences"] == {}
    for name, row in [*result["domains"].items(), ("all", result["all"])]:
        low, high = row["tokens_per_step_interval"]
        assert (
            f"| {name} | {row['new_tokens']} | {row['num_steps']} | {row['tokens_per_step']:.3f} | {low:.3f} … {high:.3f} |"
        ) in README
    tree = treeopt.read_tree(ROOT / "trees/demo-64.json")
    assert f"predicts {tree.tokens_per_step:.3f} tokens/step" in README
    assert f"took {result['all']['time_ratio']:.2f} of the tree's time" in README


def test_the_committed_runs_show_equal_steps_and_equal_texts():
    replayed = json.loads((ROOT / "tests/benchmarks/results/replay.json").read_text())["trees"]
    assert len(replayed) == 7
    for row in replayed:
        assert row["documents"] == 48
        assert row["steps_replayed"] == row["steps_counted"]
        assert row["documents_with_other_steps"] == row["documents_with_other_tokens"] == []
    equality = json.loads((ROOT / "tests/benchmarks/results/equality.json").read_text())["backends"]
    compared = {(row["backend"], row["batch"]): row["differing"] for row in equality if "batch" in row}
    assert compared == {(name, batch): [] for name in ("sdpa", "eager", "native") for batch in (1, 4)}
    assert all(row["prompts"] == 48 for row in equality if "batch" in row)


def test_the_printed_times_are_those_of_the_committed_runs_and_what_was_aimed_at():
    result = json.loads((ROOT / "tests/benchmarks/results/decoding.json").read_text())
    for row in result["trees"]:
        low, high = row["time_ratio_interval"]
        predicted = "" if row["predicted_ratio"] is None else f"{row['predicted_ratio']:.2f}"
        cells = f"{row['tokens_per_step']:.3f} | {row['time_ratio']:.2f} ({low:.2f} … {high:.2f}) | {predicted}"
        assert f"| {row['num_nodes']} | {cells} |" in README
    assert result["chosen_over_best_measured"] >= 0.95
    ranking = result["ranking"]
    assert ranking["ordered_as_predicted"] == ranking["pairs_apart"] > 5
    assert f"at {result['chosen_over_best_measured']:.3f} of the best measured speed" in README
    text = " ".join(README.split())
    step = json.loads((ROOT / "tests/benchmarks/results/step.json").read_text())
    single, half = (step[dtype]["step"]["share_beyond_own_forward"]["median"] for dtype in ("float32", "bfloat16"))
    assert max(single, half) <= 0.08
    assert f"is {single:.1%} of it in float32 and {half:.1%} in bfloat16" in text
    ratios = [step[dtype]["plain"]["ours_over_generate"]["median"] for dtype in ("float32", "bfloat16")]
    assert f"takes {ratios[0]:.2f} and {ratios[1]:.2f} of the time of `generate`" in text


def test_the_printed_accuracies_are_those_of_the_bundled_trace():
    for row in head_rows(treeopt.RankTrace.read(calibration_path(DEMO_TRACE))):
        cells = ["{:.3f} ({:.3f} … {:.3f})".format(*row[f"top_{top}"]) for top in (1, 3, 10)]
        assert f"| {row['head']} | {' | '.join(cells)} |" in README


def test_the_printed_results_of_medusa_2_are_those_of_the_committed_runs():
    recipe = json.loads((ROOT / "calibration/recipes/demo_medusa2.json").read_text())
    logs = {}
    for name, weight in (("demo_medusa2", 0.2), ("demo_medusa2_near", 0.02)):
        log = json.loads((ROOT / f"calibration/recipes/{name}.jsonl").read_text().splitlines()[0])
        assert {key: log["recipe"][key] for key in recipe} == {**recipe, "heads_weight": weight}
        logs[f"Medusa-2, λ0 {weight}"] = log["speech"]["after"]
        logs["Medusa-1"] = log["speech"]["before"]
    bundled, *trained = json.loads((ROOT / "tests/benchmarks/results/pairs.json").read_text())["pairs"]
    for row in (bundled, *trained):
        along = [
            f"{found['tokens_per_step']:.3f} ({found['interval'][0]:.3f} … {found['interval'][1]:.3f})" if found else ""
            for found in (row["own_text"], row.get("text_before"))
        ]
        said = logs[row["name"]]
        cells = [
            row["name"],
            *along,
            f"{row['distinct_4_grams']:.3f}",
            f"{said['text_perplexity']:.3f}",
            f"{said['prompts_perplexity']:.1f}",
            f"{said['agreement']:.1%}",
        ]
        assert "| " + " | ".join(cells).replace("|  |", "| |") + " |" in README
    for row in trained:
        assert (
            row["own_text"]["tokens_per_step"]
            > row["text_before"]["tokens_per_step"]
            > bundled["own_text"]["tokens_per_step"]
        )
    assert trained[0]["own_text"]["interval"][0] > bundled["own_text"]["interval"][1]


def test_the_certificates_table_names_every_key():
    table = README.split("| in `certificate` | content |")[1].split("A reader refuses")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(CERTIFICATE_KEYS)


def test_the_printed_comparison_is_that_of_the_bundled_trace():
    trace = treeopt.RankTrace.read(calibration_path(DEMO_TRACE))
    comparison = compare_ways(trace, Limits(64), Aim(objective="typical"))
    independent, *_, typical = comparison.choices
    for row in comparison.choices[:3]:
        cells = ["{:.3f} ({:.3f} … {:.3f})".format(*part) for part in (row.measured, row.replayed)]
        gain = "" if row is independent else "{:+.3f} ({:+.3f} … {:+.3f})".format(*row.replayed_gain)
        assert f"| {row.name} | {row.predicted:.3f} | {cells[0]} | {cells[1]} | {gain} |" in README
    replayed, averaged = (float(np.mean(part)) for part in (comparison.splits.replayed, comparison.splits.averaged))
    assert f"{replayed:+.1%} off what the other half takes" in README
    assert f"E[L] over positions {averaged:+.1%}" in README
    typical_value, plain_value = (f"{row.own_value:.3f}" for row in (typical, independent))
    assert f"gives {typical_value} held-out, the\ndefault tree {plain_value}." in README


def test_the_printed_search_times_are_those_of_the_committed_run_and_what_was_aimed_at():
    result = json.loads((ROOT / "tests/benchmarks/results/optimizer.json").read_text())
    ratios = {(row["other"], row["num_nodes"]): row["ratio"] for row in result["comparisons"]}
    rescan, heap = ratios["all-neighbours rescan", 512], ratios["plain heap", 10**6]
    assert rescan >= 1000
    assert heap >= 10
    assert result["nodes_64"]["median_s"] <= 0.3e-3
    assert all(row["over_n_log_n"] <= 1 for row in result["growth"])
    assert f"{result['nodes_64']['median_s'] * 1e3:.2f} ms for 64 nodes; {rescan:.0f} times" in README
    assert f"{heap:.0f} times faster than\na plain heap" in README


@pytest.mark.heavy
def test_the_package_installs_without_the_repository(tmp_path):
    """A wheel carries prompts, heads, traces and trees."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(wheel)], capture_output=True, text=True, check=True
    ).stdout
    for name in (
        "calibration/prompts/chat.jsonl",
        "calibration/heads/demo/medusa_lm_head.safetensors",
        "trees/demo-64.json",
    ):
        assert f"treeopt/bundled/{name}" in names
    assert "py.typed" in names
