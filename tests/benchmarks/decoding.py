"""Decoding side by side on the demo target: python tests/benchmarks/decoding.py OUTPUT.json [PROMPTS] [TOKENS] [DTYPE]

First the machine is profiled and `--nodes auto` picks its budget. Then every prompt is decoded with every tree, one after
the other, so that a busy moment falls on all of them. Every tree gives the same text, so a prompt's time ratio is the time
of plain decoding over the tree's; medians over prompts, with bootstrap intervals, stand beside what was predicted.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import treeopt
from tests.benchmarks.machine import machine
from tests.benchmarks.replay import trees as compared_trees
from treeopt.auto import auto_budget
from treeopt.bundled import DEMO_HEADS, DEMO_PROMPTS, DEMO_TRACE, calibration_path
from treeopt.heads import MedusaHeads
from treeopt.profiling import ProfileSettings, profile
from treeopt.prompts import evenly, read_prompts
from treeopt.targets.loading import load_target
from treeopt.verify import TreeVerifier
from treeopt.verify.compare import plain_greedy

BUDGETS = (1, 4, 8, 16, 32, 64, 128)
CONTEXT = 128  # prompts of some dozen tokens and up to 128 new ones
PLAIN = "root alone"


def chosen(target, heads, trace, table):
    """Profile this machine and choose; return the choice."""
    settings = ProfileSettings(nodes=BUDGETS, contexts=(CONTEXT,), repeats=25)
    with tempfile.TemporaryDirectory() as work:
        latency = profile(target, heads, treeopt.best_tree(table, max(BUDGETS)), settings, Path(work) / "profile")
    return auto_budget(lambda n: treeopt.best_tree(table, n), latency.curve(), trace)


def median_interval(values, seed=0, resamples=2000):
    """95 % bootstrap interval of the median."""
    generator = np.random.default_rng(seed)
    medians = np.median(generator.choice(values, (resamples, len(values))), axis=1)
    return np.quantile(medians, [0.025, 0.975]).tolist()


def decoded_by_all(target, verifiers, prompts, max_new_tokens):
    """Return seconds, new tokens and steps of each prompt with each tree, and with transformers' `generate`."""
    names = [*verifiers, "generate"]
    seconds, tokens, steps = ({name: [] for name in names} for _ in range(3))
    ids = [target.prompt_ids(prompt.messages) for prompt in prompts]
    for turn, prompt in enumerate([ids[0], *ids]):  # the first is decoded twice: once to warm up
        for name in names:
            start = time.perf_counter()
            if name == "generate":
                text = plain_greedy(target, prompt, max_new_tokens, verifiers[PLAIN].eos_ids)
                passes = len(text) - 1
            else:
                (row,) = verifiers[name].decode([prompt], max_new_tokens)
                text, passes = row.tokens, row.num_steps
            if turn:
                seconds[name].append(time.perf_counter() - start)
                tokens[name].append(len(text))
                steps[name].append(passes)
    return seconds, tokens, steps


def agreement(rows):
    """Of the pairs of budgets whose measured intervals are apart, how many are ordered as predicted."""
    pairs = [
        (one, other)
        for one, other in itertools.combinations(rows, 2)
        if one["time_ratio_interval"][0] > other["time_ratio_interval"][1]
        or other["time_ratio_interval"][0] > one["time_ratio_interval"][1]
    ]
    right = [
        (one["time_ratio"] > other["time_ratio"]) == (one["predicted_ratio"] > other["predicted_ratio"])
        for one, other in pairs
    ]
    return {"pairs_apart": len(pairs), "ordered_as_predicted": sum(right)}


def main(output=None, num_prompts=12, max_new_tokens=48, dtype="float32"):
    """Profile, choose, decode, print a line for each tree."""
    target = load_target("demo", dtype=dtype)
    heads = MedusaHeads.load(calibration_path(DEMO_HEADS), target.model)
    trace = treeopt.RankTrace.read(calibration_path(DEMO_TRACE))
    table = trace.table()
    choice = chosen(target, heads, trace, table)
    predicted = dict(zip(choice.nodes.tolist(), (choice.tokens_per_second / choice.tokens_per_second[0]).tolist()))
    budgets = {n: treeopt.best_tree(table, n).tree for n in {*BUDGETS, choice.num_nodes}}
    trees = {PLAIN: treeopt.chain(0)}
    trees |= {name: tree for name, tree in compared_trees().items() if not name.startswith("demo")}
    trees |= {f"ours at {n}": budgets[n] for n in sorted(budgets) if n > 1}
    verifiers = {name: TreeVerifier(target.model, heads, tree) for name, tree in trees.items()}
    prompts = evenly(read_prompts(calibration_path(DEMO_PROMPTS), split="evaluation"), int(num_prompts))
    seconds, tokens, steps = decoded_by_all(target, verifiers, prompts, int(max_new_tokens))
    rows = []
    for name in ["generate", *trees]:
        ratios = np.array(seconds[PLAIN]) / np.array(seconds[name])
        nodes = trees[name].num_nodes if name in trees else 1
        ours = name == PLAIN or name.startswith("ours")
        rows.append(
            {
                "tree": name,
                "num_nodes": nodes,
                "tokens_per_step": (sum(tokens[name]) - len(prompts)) / sum(steps[name]),
                "time_ratio": float(np.median(ratios)),
                "time_ratio_interval": median_interval(ratios),
                "predicted_ratio": predicted.get(nodes) if ours else None,
            }
        )
        low, high = rows[-1]["time_ratio_interval"]
        print(
            f"{name:>14}: {rows[-1]['tokens_per_step']:.3f} tokens/step, time ratio {rows[-1]['time_ratio']:.3f} "
            f"[{low:.3f}, {high:.3f}], predicted {rows[-1]['predicted_ratio']}",
            flush=True,
        )
    compared = [row for row in rows if row["predicted_ratio"] is not None]
    picked = next(row for row in compared if row["num_nodes"] == choice.num_nodes)
    result = {
        "machine": machine(), "dtype": dtype, "prompts": len(prompts), "max_new_tokens": int(max_new_tokens),
        "nodes": choice.nodes.tolist(), "predicted_seconds": choice.seconds.tolist(), "chosen_nodes": choice.num_nodes,
        "chosen_over_best_measured": picked["time_ratio"] / max(row["time_ratio"] for row in compared),
        "ranking": agreement(compared), "trees": rows,
    }  # fmt: skip
    print(
        f"auto chooses {choice.num_nodes}; {result['ranking']}; chosen over best {result['chosen_over_best_measured']:.3f}"
    )
    if output:
        Path(output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
