"""Trained pairs beside the bundled one: python tests/benchmarks/pairs.py OUTPUT.json [PAIR ...]

A pair is what `treeopt train --method medusa-2` writes: heads, and the target in its folder target. Of each pair the tree
of 64 nodes is built on the calibration prompts and replayed on the evaluation prompts: once along what the pair's own
target says there, and once along what the target said before it was trained. The first is what a user gets; the second
takes out of it how much easier to guess the target's text has become, of which the share of distinct 4-grams tells too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import treeopt
from tests.benchmarks.machine import machine
from treeopt.bundled import DEMO_HEADS, DEMO_PROMPTS, calibration_path
from treeopt.calibrate.continuations import continue_prompts
from treeopt.calibrate.observe import RANKS_ONLY, batches, observe
from treeopt.heads import MedusaHeads
from treeopt.prompts import read_prompts
from treeopt.targets.forward import Forward
from treeopt.targets.loading import load_target

NODES, NEW_TOKENS, BATCH = 64, 128, 32


def texts(target, prompts, work):
    return continue_prompts(target, prompts, work, max_new_tokens=NEW_TOKENS, batch_size=BATCH)


@torch.inference_mode()
def trace_along(target, heads, documents):
    forward, found = Forward(target.model), {}
    for batch in batches(documents, 4096):
        for document, seen in zip(batch, observe(forward, heads, batch, RANKS_ONLY)):
            found[document.prompt_id] = seen.ranks.numpy().astype(np.int32)
    ranks = [found[document.prompt_id] for document in documents]
    return treeopt.RankTrace(np.concatenate(ranks), np.cumsum([0, *map(len, ranks)]))


def distinct(documents, length=4):
    """Return the mean share of a document's n-grams that are not a repetition within it."""
    shares = []
    for document in documents:
        grams = [document.tokens[i : i + length] for i in range(len(document.tokens) - length + 1)]
        if grams:
            shares.append(len(set(grams)) / len(grams))
    return float(np.mean(shares))


def replayed(tree, trace):
    found = treeopt.replay(tree, trace)
    return {"tokens_per_step": found.tokens_per_step, "interval": list(found.interval())}


def measured(name, target, heads, before, splits, work):
    """Return what one pair gives, and its texts of both splits."""
    spoken = {split: texts(target, prompts, work / f"{name}-{split}") for split, prompts in splits.items()}
    traces = {split: trace_along(target, heads, documents) for split, documents in spoken.items()}
    table = traces["calibration"].table()
    built = treeopt.best_tree(table, NODES)
    row = {
        "name": name,
        "top_1": [float(rate) for rate in traces["evaluation"].table().rates[:, 0]],
        "predicted": built.tokens_per_step,
        "own_text": replayed(built.tree, traces["evaluation"]),
        "distinct_4_grams": distinct(spoken["evaluation"]),
    }
    if before is not None:
        row["text_before"] = replayed(built.tree, trace_along(target, heads, before))
    return row, spoken


def main(output, pairs=(), limit=None):
    prompts = read_prompts(calibration_path(DEMO_PROMPTS))
    splits = {
        split: [prompt for prompt in prompts if prompt.split == split][:limit]
        for split in ("calibration", "evaluation")
    }
    target = load_target("demo")
    heads = MedusaHeads.load(calibration_path(DEMO_HEADS), target.model)
    with tempfile.TemporaryDirectory() as work:
        row, spoken = measured("bundled", target, heads, None, splits, Path(work))
        rows = [row]
        for pair in map(Path, pairs):
            target = load_target(str(pair / "target"), dtype="float32")
            heads = MedusaHeads.load(pair, target.model)
            rows.append(measured(pair.name, target, heads, spoken["evaluation"], splits, Path(work))[0])
    result = {**machine(), "nodes": NODES, "new_tokens": NEW_TOKENS, "pairs": rows}
    Path(output).write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))
    return result


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
