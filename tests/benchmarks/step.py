"""Where the time of a step goes: python tests/benchmarks/step.py [OUTPUT.json] [REPEATS]

On the demo target, 64 nodes over a prefix of 128 tokens, parts timed in turn in one process; and decoding with the root alone
beside transformers' own greedy `generate`. Shares and ratios are of medians, with quartiles.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch

import treeopt
from tests.benchmarks.machine import machine
from treeopt.attention import Pass
from treeopt.bundled import DEMO_HEADS, DEMO_PROMPTS, calibration_path
from treeopt.heads import MedusaHeads
from treeopt.prompts import evenly, read_prompts
from treeopt.targets.cache import RowCache
from treeopt.targets.forward import Forward
from treeopt.targets.loading import load_target
from treeopt.verify import TreeVerifier
from treeopt.verify.acceptance import NodeScores
from treeopt.verify.compare import plain_greedy
from treeopt.verify.step import State

ROOT = Path(__file__).parents[2]
CONTEXT = 128


def timed(calls, repeats):
    """Time named calls in turn; return seconds of each."""
    taken = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn > 1:
                taken[name].append(time.perf_counter() - start)
    return taken


def spread(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartiles": [low, high]}


def ratio(above, below):
    """Median of the ratios of neighbours in time, with quartiles."""
    return spread([a / b for a, b in zip(above, below)])


def split(target, heads, repeats, nodes=64):
    """Time a step and its parts beside the target's own forward of the same shape."""
    tree = treeopt.read_tree(ROOT / f"trees/demo-{nodes}.json").tree
    verifier = TreeVerifier(target.model, heads, tree)
    cache = RowCache(target.model, 1, CONTEXT + tree.num_nodes)
    text = torch.randint(1000, (CONTEXT + 1,), generator=torch.Generator().manual_seed(0)).tolist()
    hidden = verifier.prefill(cache, 0, text[:-1])[None]
    state = State(torch.tensor([CONTEXT]), torch.tensor(text[-1:]), hidden)
    index, forward, span = verifier._index, verifier._forward, CONTEXT + tree.num_nodes
    own = Forward(target.model, "native")
    outcome = verifier.step(cache, state, span, CONTEXT)
    tokens = outcome.tokens

    def tree_pass():
        return Pass(state.lengths, index.depths, index.mask, span, CONTEXT, words=index.words)

    def of(through):
        at = tree_pass()
        return through.logits(through.hidden(tokens, at, cache.at(at)))

    logits = of(forward)
    scores = NodeScores(logits, tokens, index, forward.scaled, forward.exact)
    kept = state.lengths[:, None] + index.paths[outcome.accepted.nodes][:, 1:]
    calls = {
        "step": lambda: verifier.step(cache, state, span, CONTEXT).table.tolist(),
        "own forward": lambda: of(own),
        "our forward": lambda: of(forward),
        "heads": lambda: verifier._draft(state.roots, state.hidden),
        "acceptance": lambda: verifier.acceptance.accept(scores),
        "compaction": lambda: cache.keep(kept, state.lengths + 1),
    }
    taken = timed(calls, repeats)
    beyond = ratio(taken["step"], taken["own forward"])
    return {
        "nodes": tree.num_nodes,
        "context": CONTEXT,
        "share_beyond_own_forward": {
            "median": 1 - statistics.median(taken["own forward"]) / statistics.median(taken["step"]),
            "of_neighbours": 1 - 1 / beyond["median"],
        },
        "share_of_step": {
            name: statistics.median(values) / statistics.median(taken["step"]) for name, values in taken.items()
        },
        "seconds": {name: spread(values) for name, values in taken.items()},
    }


def plain(target, heads, repeats, new_tokens=48):
    """Decode with the root alone and with `generate`, in turn; ratio of times, ours over theirs."""
    verifier = TreeVerifier(target.model, heads, treeopt.chain(0))
    prompts = evenly(read_prompts(calibration_path(DEMO_PROMPTS), split="evaluation"), repeats)
    ours, theirs = [], []
    for turn, prompt in enumerate([prompts[0], *prompts]):
        ids = target.prompt_ids(prompt.messages)
        start = time.perf_counter()
        expected = plain_greedy(target, ids, new_tokens, verifier.eos_ids)
        middle = time.perf_counter()
        (row,) = verifier.decode([ids], new_tokens)
        end = time.perf_counter()
        if turn and len(expected) > 1:
            theirs.append((middle - start) / len(expected))
            ours.append((end - middle) / len(row.tokens))
    return {"new_tokens": new_tokens, "prompts": len(ours), "ours_over_generate": ratio(ours, theirs)}


@torch.inference_mode()
def main(output=None, repeats=20):
    """Print the split of a step and the ratio to `generate`, in float32 and bfloat16."""
    found = {"machine": machine()}
    for dtype in ("float32", "bfloat16"):
        target = load_target("demo", dtype=dtype)
        heads = MedusaHeads.load(calibration_path(DEMO_HEADS), target.model)
        found[dtype] = {"step": split(target, heads, int(repeats)), "plain": plain(target, heads, int(repeats))}
        step = found[dtype]["step"]
        print(f"{dtype}: beyond the target's own forward {step['share_beyond_own_forward']['median']:.1%} of a step")
        for name, share in step["share_of_step"].items():
            print(f"  {name:>12}: {share:.1%}")
        over = found[dtype]["plain"]["ours_over_generate"]
        print(f"  plain decoding, ours over generate: {over['median']:.3f} {over['quartiles']}", flush=True)
    if output:
        Path(output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
