"""Every check and timing that needs a GPU, in one call of under eight minutes: python tests/benchmarks/gpu.py [OUTPUT.json]

Random weights, no network. Correctness first: each attention backend against float64 by hand, decoding through each
backend and through a captured step against the target's own `generate`. Then times, each beside its baseline in turn:
attention backends against dense masks, a step against a bare forward of its shape with the CUDA graph on and off,
decoding against `generate`, and the pass of calibration, at the shapes of 1B and 7B models. `--rehearse` runs all of it on a CPU at tiny shapes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import treeopt
from tests.benchmarks.calibration import calibration_checks
from tests.benchmarks.machine import machine
from treeopt.attention import Pass
from treeopt.attention.backends import BACKENDS, Needs
from treeopt.heads import MedusaHeads
from treeopt.targets.cache import RowCache
from treeopt.verify import TreeVerifier
from treeopt.verify.acceptance import TreeIndex
from treeopt.verify.fixed import FixedStep
from treeopt.verify.step import State

LIMIT = 430.0  # seconds; what has not begun by then is left out and named
ACCURACY = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
TABLE = treeopt.AcceptanceTable.from_rates([[0.45 * 0.5**r * 0.8**h for r in range(10)] for h in range(5)])
SHAPES = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    "7B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
    "tiny": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500},
}  # fmt: skip


class Plan:
    """What runs where: a GPU at full size, or a rehearsal on a CPU."""

    def __init__(self, rehearse):
        self.device = torch.device("cpu" if rehearse else "cuda")
        self.shapes = ["tiny"] if rehearse else ["1B", "7B"]
        self.dtype = torch.float32 if rehearse else torch.bfloat16
        self.dtypes = [torch.float32] if rehearse else list(ACCURACY)
        self.prefixes = [64] if rehearse else [512, 2048, 8192, 32768]
        self.nodes = [16] if rehearse else [16, 64, 256]
        self.head_dims = [16] if rehearse else [64, 80, 128, 256]
        self.repeats = 3 if rehearse else 20
        self.new_tokens = 12 if rehearse else 96
        self.begun = time.monotonic()

    @property
    def late(self):
        return time.monotonic() - self.begun > LIMIT

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, calls):
        """Time named calls in turn; return milliseconds of each, median and quartiles."""
        taken = {name: [] for name in calls}
        for turn in range(self.repeats + 2):
            for name, call in calls.items():
                self.synchronize()
                start = time.perf_counter()
                call()
                self.synchronize()
                if turn > 1:
                    taken[name].append(1e3 * (time.perf_counter() - start))
        return {name: statistics.quantiles(values, n=4) for name, values in taken.items()}


def model(shape, plan, context=40960):
    """Return a target of random weights that are lively enough to disagree with one another."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=context, eos_token_id=None, bos_token_id=None)
    default = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(plan.dtype)
    try:
        with plan.device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def serving(plan, head_dim, dtype):
    """Name the backends that serve here, and why the others do not."""
    needs = Needs(plan.device, dtype, head_dim)
    refused = {name: backend.refusal(needs) for name, backend in BACKENDS.items()}
    return [name for name in BACKENDS if refused[name] is None], {n: r for n, r in refused.items() if r}


def tree_pass(tree, starts, device):
    index = TreeIndex.of(tree, device)
    starts = torch.tensor(starts, device=device)
    return Pass(starts, index.depths, index.mask, int(starts.max()) + tree.num_nodes, words=index.words)


def inputs(at, heads, kv_heads, head_dim, dtype):
    generator = torch.Generator(at.starts.device).manual_seed(0)
    rows, device = len(at.starts), at.starts.device
    query = torch.randn(rows, heads, at.num_tokens, head_dim, generator=generator, device=device)
    key = torch.randn(rows, kv_heads, at.span, head_dim, generator=generator, device=device)
    value = torch.randn(rows, kv_heads, at.span, head_dim, generator=generator, device=device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def accuracy(plan):
    """Each backend against eager attention in float64."""
    found = []
    for dtype in plan.dtypes:
        for head_dim in plan.head_dims:
            names, refused = serving(plan, head_dim, dtype)
            for nodes, starts in ((1, [70]), (64, [0, 513, 1100]), (256, [2050])):
                tree = treeopt.best_tree(TABLE, nodes).tree
                at = tree_pass(tree, starts, plan.device)
                query, key, value = inputs(at, 8, 2, head_dim, dtype)
                scaling = head_dim**-0.5
                expected = BACKENDS["eager"].attend(
                    query.double(), key.double(), value.double(), at, scaling=scaling, window=None
                )
                for name in names:
                    output = BACKENDS[name].attend(query, key, value, at, scaling=scaling, window=None)
                    error = float((output.double() - expected).abs().max())
                    found.append(
                        {"backend": name, "dtype": str(dtype), "head_dim": head_dim, "nodes": nodes, "error": error,
                         "right": error <= ACCURACY[dtype]}
                    )  # fmt: skip
            found += [
                {"backend": n, "dtype": str(dtype), "head_dim": head_dim, "refused": r} for n, r in refused.items()
            ]
    return found


def greedy_equality(plan):
    """Float32 decodes through every backend, captured and not, against `generate`."""
    exact = Plan(plan.device.type == "cpu")
    exact.dtype = torch.float32
    target = model("tiny", exact, context=512)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    heads = MedusaHeads.for_target(target, 5)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]]
    plain = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=plan.device)
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False, pad_token_id=0
        )
        plain.append(output[0, len(prompt) :].tolist())
    found = []
    for name in [*serving(plan, 16, torch.float32)[0], "native"]:
        for nodes in (1, 16, 64):
            for captured in (False, True) if plan.device.type == "cuda" and name != "native" else (False,):
                tree = treeopt.best_tree(TABLE, nodes).tree
                verifier = TreeVerifier(target, heads, tree, attention=name, cuda_graph=captured)
                decoded = [row.tokens for row in verifier.decode(prompts, 60)]
                found.append(
                    {"backend": verifier.attention, "nodes": nodes, "captured": captured, "right": decoded == plain}
                )
    return found


def attention_times(plan):
    """Backends beside each other: milliseconds of one layer's attention."""
    found = []
    for prefix in plan.prefixes:
        for nodes in plan.nodes:
            if plan.late:
                return found
            at = tree_pass(treeopt.best_tree(TABLE, nodes).tree, [prefix], plan.device)
            query, key, value = inputs(at, 32, 8, 128 if plan.device.type == "cuda" else 16, plan.dtype)
            names, _ = serving(plan, query.shape[-1], plan.dtype)
            calls = {
                name: (lambda name=name: BACKENDS[name].attend(query, key, value, at, scaling=0.1, window=None))
                for name in names
                if name != "eager"
            }
            found.append({"prefix": prefix, "nodes": nodes, "milliseconds": plan.timed(calls)})
    return found


def step_times(plan, shape, target):
    """A step, captured and not, beside a bare forward of its shape."""
    heads = MedusaHeads.for_target(target, 5)
    found = []
    for prefix in (plan.prefixes[0], plan.prefixes[min(2, len(plan.prefixes) - 1)]):
        for nodes in (1, *plan.nodes):
            if plan.late:
                return found
            tree = treeopt.best_tree(TABLE, nodes).tree
            verifier = TreeVerifier(target, heads, tree)
            span = prefix + tree.num_nodes
            cache = RowCache(target, 1, span)
            text = torch.randint(400, (prefix,), generator=torch.Generator().manual_seed(0)).tolist()
            hidden = verifier.prefill(cache, 0, text)[None]
            state = State(torch.tensor([prefix], device=plan.device), torch.tensor([7], device=plan.device), hidden)
            tokens, forward = verifier._draft(state.roots, state.hidden), verifier._forward
            at = Pass(
                state.lengths, verifier._index.depths, verifier._index.mask, span, prefix, words=verifier._index.words
            )
            calls = {
                "bare forward": lambda: forward.logits(forward.hidden(tokens, at, cache.at(at))),
                "step": lambda: verifier.step(cache, state, span, prefix).table.tolist(),
            }
            if plan.device.type == "cuda":
                fixed = FixedStep(verifier.step, cache, state, capture=True)

                def captured(fixed=fixed, state=state):
                    fixed.begin(state)
                    fixed().tolist()

                calls["captured step"] = captured
            found.append(
                {"shape": shape, "prefix": prefix, "nodes": nodes, "attention": verifier.attention,
                 "milliseconds": plan.timed(calls)}
            )  # fmt: skip
    return found


def decode_times(plan, shape, target):
    """Tokens a second, the tree's beside those of `generate`; random heads accept next to nothing, so steps are what counts."""
    heads = MedusaHeads.for_target(target, 5)
    ids = torch.randint(400, (1, 128), generator=torch.Generator().manual_seed(1)).to(plan.device)
    prompt, mask = ids[0].tolist(), torch.ones_like(ids)
    found = {}
    for nodes in (1, 64):
        verifier = TreeVerifier(target, heads, treeopt.best_tree(TABLE, nodes).tree)
        verifier.decode([prompt], plan.new_tokens)  # captures
        taken = plan.timed(
            {
                "generate": lambda: target.generate(
                    ids, attention_mask=mask, max_new_tokens=plan.new_tokens, do_sample=False, pad_token_id=0
                ),
                "tree": lambda: verifier.decode([prompt], plan.new_tokens),
            }
        )
        (row,) = verifier.decode([prompt], plan.new_tokens)
        found[nodes] = {"milliseconds": taken, "tokens": len(row.tokens), "steps": row.num_steps}
    return {"shape": shape, "budgets": found}


@torch.inference_mode()
def main(output=None, rehearse=False):
    """Run everything, print a line a section, write the JSON."""
    plan = Plan(rehearse)
    found = {"machine": machine(), "rehearsal": rehearse, "limit_seconds": LIMIT}
    found["accuracy"] = accuracy(plan)
    found["greedy equality"] = greedy_equality(plan)
    wrong = [row for part in ("accuracy", "greedy equality") for row in found[part] if not row.get("right", True)]
    print(
        f"{len(wrong)} of {len(found['accuracy']) + len(found['greedy equality'])} checks are wrong", wrong, flush=True
    )
    found["attention"] = attention_times(plan)
    for shape in plan.shapes:
        if plan.late:
            found.setdefault("left out", []).append(shape)
            continue
        target = model(shape, plan)
        found[f"steps {shape}"] = step_times(plan, shape, target)
        repeats, plan.repeats = plan.repeats, 3
        found[f"decoding {shape}"] = decode_times(plan, shape, target)
        plan.repeats = repeats
        del target
        if not plan.late:
            sizes = {"num_documents": 2, "prompt": 5, "tokens": 12} if rehearse else {"num_documents": 16}
            found[f"calibration {shape}"] = calibration_checks(
                plan.device, plan.dtype, SHAPES[shape], repeats=1 if rehearse else 3, **sizes
            )
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()
    found["seconds"] = time.monotonic() - plan.begun
    print(f"{found['seconds']:.0f} s", flush=True)
    if output:
        Path(output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")
    return found


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--rehearse"]
    result = main(*arguments, rehearse="--rehearse" in sys.argv)
    checks = [*result["accuracy"], *result["greedy equality"]]
    raise SystemExit(any(not row.get("right", True) for row in checks))
