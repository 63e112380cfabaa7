"""Decoding side by side on the demo target: python tests/benchmarks/decoding.py OUTPUT.json [PROMPTS] [TOKENS] [DTYPE]

First the machine is profiled and `--nodes auto` picks its budget. Then every prompt is decoded with every tree, one after
the other, so that a busy moment falls on all of them; time ratios are of sums over prompts, with bootstrap intervals.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import treeopt
from tests.benchmarks.replay import trees as compared_trees
from treeopt.auto import auto_budget
from treeopt.bundled import DEMO_HEADS, DEMO_PROMPTS, DEMO_TRACE, calibration_path
from treeopt.heads import MedusaHeads
from treeopt.intervals import ratio_interval
from treeopt.profiling import ProfileSettings, profile
from treeopt.prompts import evenly, read_prompts
from treeopt.targets.loading import load_target
from treeopt.verify import TreeVerifier

BUDGETS = (1, 4, 8, 16, 32, 64, 128)
CONTEXT = 128  # prompts of some dozen tokens and up to 128 new ones


def main(output, num_prompts=8, max_new_tokens=64, dtype="float32"):
    """Profile, choose, decode, print a line for each tree."""
    target = load_target("demo", dtype=dtype)
    heads = MedusaHeads.load(calibration_path(DEMO_HEADS), target.model)
    trace = treeopt.RankTrace.read(calibration_path(DEMO_TRACE))
    table = trace.table()
    settings = ProfileSettings(nodes=BUDGETS, contexts=(CONTEXT,), repeats=15)
    with tempfile.TemporaryDirectory() as work:
        latency = profile(target, heads, treeopt.best_tree(table, max(BUDGETS)), settings, Path(work) / "profile")
    curve = latency.curve()
    choice = auto_budget(lambda n: treeopt.best_tree(table, n), curve, trace)
    predicted = dict(zip(choice.nodes.tolist(), choice.tokens_per_second.tolist()))
    trees = {name: tree for name, tree in compared_trees().items() if not name.startswith("demo")}
    trees = {"plain": treeopt.chain(0), **trees}
    trees |= {f"ours at {n}": treeopt.best_tree(table, n).tree for n in BUDGETS[1:]}
    trees[f"ours at auto ({choice.num_nodes})"] = treeopt.best_tree(table, choice.num_nodes).tree
    verifiers = {name: TreeVerifier(target.model, heads, tree) for name, tree in trees.items()}
    prompts = evenly(read_prompts(calibration_path(DEMO_PROMPTS), split="evaluation"), int(num_prompts))
    ids = [target.prompt_ids(prompt.messages) for prompt in prompts]
    verifiers["plain"].decode(ids[:1], 8)  # warm-up
    seconds = {name: np.zeros(len(ids)) for name in verifiers}
    tokens = {name: np.zeros(len(ids)) for name in verifiers}
    steps = {name: np.zeros(len(ids)) for name in verifiers}
    for i, prompt in enumerate(ids):
        for name, verifier in verifiers.items():
            start = time.perf_counter()
            (row,) = verifier.decode([prompt], int(max_new_tokens))
            seconds[name][i] = time.perf_counter() - start
            tokens[name][i], steps[name][i] = len(row.tokens) - 1, row.num_steps
    rows = []
    for name, tree in trees.items():
        low, high = ratio_interval(seconds["plain"], seconds[name])
        rate = tokens[name].sum() / seconds[name].sum()
        rows.append(
            {
                "tree": name,
                "num_nodes": tree.num_nodes,
                "tokens_per_step": tokens[name].sum() / steps[name].sum(),
                "time_ratio": seconds["plain"].sum() / seconds[name].sum(),
                "time_ratio_interval": [float(low), float(high)],
                "tokens_per_second": rate,
                "predicted_tokens_per_second": predicted.get(tree.num_nodes)
                if "ours" in name or name == "plain"
                else None,
            }
        )
        print(
            f"{name:>22}: {rows[-1]['tokens_per_step']:.3f} tokens/step, time ratio {rows[-1]['time_ratio']:.3f} "
            f"[{low:.3f}, {high:.3f}]",
            flush=True,
        )
    result = {
        "dtype": dtype, "prompts": len(ids), "max_new_tokens": int(max_new_tokens), "torch": torch.__version__,
        "nodes": curve.nodes.tolist(), "seconds": curve.seconds.tolist(), "draft_seconds": list(curve.draft_seconds),
        "chosen_nodes": choice.num_nodes, "trees": rows,
    }  # fmt: skip
    Path(output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main(*sys.argv[1:])
