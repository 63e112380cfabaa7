"""Greedy equality on the demo target: python tests/benchmarks/equality.py [OUTPUT.json] [PROMPTS] [TOKENS] [NODES]

Every evaluation prompt is decoded with `generate`, and with a tree through every attention backend that serves on this
machine, one prompt at a time and four together. In float32 all texts are equal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import treeopt
from tests.benchmarks.machine import machine
from treeopt.attention.backends import BACKENDS, NATIVE
from treeopt.bundled import DEMO_HEADS, DEMO_PROMPTS, calibration_path
from treeopt.heads import MedusaHeads
from treeopt.prompts import evenly, read_prompts
from treeopt.targets.loading import load_target
from treeopt.verify import TreeVerifier
from treeopt.verify.compare import plain_greedy

ROOT = Path(__file__).parents[2]


def main(output=None, num_prompts=48, max_new_tokens=32, nodes=16):
    """Decode and print a line for each backend and batch size."""
    target = load_target("demo", dtype="float32")
    heads = MedusaHeads.load(calibration_path(DEMO_HEADS), target.model)
    tree = treeopt.read_tree(ROOT / f"trees/demo-{nodes}.json").tree
    prompts = evenly(read_prompts(calibration_path(DEMO_PROMPTS), split="evaluation"), int(num_prompts))
    ids = [target.prompt_ids(prompt.messages) for prompt in prompts]
    rows, plain = [], None
    for name in [*BACKENDS, NATIVE]:
        verifier = TreeVerifier(target.model, heads, tree, attention=name)
        if verifier.attention != name:
            rows.append({"backend": name, "refused": verifier.refused[name]})
            continue
        if plain is None:
            plain = [plain_greedy(target, row, int(max_new_tokens), verifier.eos_ids) for row in ids]
        for batch in (1, 4):
            decoded = []
            for start in range(0, len(ids), batch):
                decoded += verifier.decode(ids[start : start + batch], int(max_new_tokens))
            differing = [p.id for p, row, text in zip(prompts, decoded, plain) if row.tokens != text]
            rows.append({"backend": name, "batch": batch, "prompts": len(ids), "differing": differing})
            print(f"{name}, batch {batch}: {len(differing)} of {len(ids)} texts differ", flush=True)
    result = {
        "machine": machine(), "dtype": "float32", "nodes": tree.num_nodes, "max_new_tokens": int(max_new_tokens),
        "new_tokens": sum(map(len, plain)), "backends": rows,
    }  # fmt: skip
    if output:
        Path(output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
