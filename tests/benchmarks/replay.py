"""Replay against the verifier on the demo target: python tests/benchmarks/replay.py [OUTPUT.json] [PROMPTS] [TOKENS]

The evaluation prompts are continued once, plainly; the heads' ranks along the continuations are one trace. Then every tree
decodes the same prompts, and each document's steps are compared with the replay's, as integers. No tree sees the others.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import treeopt
from treeopt.agreement import replay_disagreements, trace_of
from treeopt.bundled import DEMO_HEADS, DEMO_PROMPTS, calibration_path
from treeopt.calibrate.continuations import continue_prompts
from treeopt.heads import MedusaHeads
from treeopt.prompts import evenly, read_prompts
from treeopt.replays import replay
from treeopt.targets.loading import load_target
from treeopt.verify import TreeVerifier

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "tests/data/published_static_trees.json"


def trees():
    """Name the trees to be compared."""
    published = json.loads(PUBLISHED.read_text())["medusa"]["trees"]["mc_sim_7b_63"]
    ours = {f"demo-{n}": treeopt.read_tree(ROOT / f"trees/demo-{n}.json").tree for n in (16, 32, 64, 128)}
    return {
        "chain": treeopt.chain(5),
        "dense 7 × 6": treeopt.dense_tree([7, 6]),
        "mc_sim_7b_63": treeopt.DraftTree.from_paths(published),
        **ours,
    }


def main(output=None, num_prompts=48, max_new_tokens=128):
    """Decode with every tree and print a line for each."""
    target = load_target("demo", dtype="float32")
    heads = MedusaHeads.load(calibration_path(DEMO_HEADS), target.model)
    prompts = evenly(read_prompts(calibration_path(DEMO_PROMPTS), split="evaluation"), int(num_prompts))
    with tempfile.TemporaryDirectory() as work:
        store = Path(work) / "continuations.jsonl"
        documents = continue_prompts(target, prompts, store, max_new_tokens=int(max_new_tokens), batch_size=24)
    trace = trace_of(target, heads, documents)
    rows = []
    for name, tree in trees().items():
        verifier = TreeVerifier(target.model, heads, tree)
        decoded = []
        for start in range(0, len(documents), 8):
            batch = documents[start : start + 8]
            decoded += verifier.decode([document.prompt for document in batch], int(max_new_tokens))
        wrong = replay_disagreements(tree, trace, documents, decoded)
        differing = [d.prompt_id for d, row in zip(documents, decoded) if list(d.tokens) != row.tokens]
        found = replay(tree, trace)
        rows.append(
            {
                "tree": name,
                "num_nodes": tree.num_nodes,
                "documents": len(documents),
                "steps_replayed": found.num_steps,
                "steps_counted": sum(row.num_steps for row in decoded),
                "documents_with_other_steps": [one.document for one in wrong],
                "documents_with_other_tokens": differing,
                "tokens_per_step": found.tokens_per_step,
            }
        )
        print(
            f"{name}: {rows[-1]['steps_replayed']} steps replayed, {rows[-1]['steps_counted']} counted, "
            f"{len(wrong)} documents with other steps, {len(differing)} with other tokens",
            flush=True,
        )
    if output:
        with open(output, "w", encoding="utf8") as file:
            json.dump({"max_new_tokens": int(max_new_tokens), "dtype": "float32", "trees": rows}, file, indent=1)
            file.write("\n")
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
