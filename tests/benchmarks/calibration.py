"""The teacher-forced pass of calibration, beside what bounds it and beside decoding token by token.

    python -m tests.benchmarks.calibration [OUTPUT.json [PROMPTS [NEW_TOKENS [REPEATS]]]]

The bound is the target's forward over the same padded batches and one product with the output embedding for each head
and position, in chunks of the same size: nothing is ranked. The published way decodes each document token by token, and
at each step every head makes its logits and takes the ten best. All are called in turn in one process; medians,
quartiles, and ratios within a turn. With one thread on a CPU the times are the process's own (neighbours take none of
them), else wall times; the result says which. `calibration_checks` does the same at any shape with random weights.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.benchmarks.optimizer import spread
from treeopt.bundled import DEMO_HEADS, DEMO_PROMPTS, calibration_path
from treeopt.calibrate.continuations import Continuation, continue_prompts
from treeopt.calibrate.observe import OBSERVED_TOKENS, Candidates, batches, chunk_rows, document_states, observe
from treeopt.heads import MedusaHeads
from treeopt.heads.ranking import ranks_of
from treeopt.prompts import evenly, read_prompts
from treeopt.targets.cache import cache_keyword
from treeopt.targets.forward import Forward
from treeopt.targets.loading import load_target

TOP = 10  # guesses that the published way keeps
SHAPES = {
    "1B": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "7B": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False,
    },
}  # fmt: skip


def observed_pass(forward, heads, documents):
    """Ours: the ranks of every head along every document."""
    found = {}
    for batch in batches(documents, OBSERVED_TOKENS):
        for document, observation in zip(batch, observe(forward, heads, batch, Candidates())):
            found[document.prompt_id] = observation.ranks
    return [found[document.prompt_id] for document in documents]


def bound(forward, heads, documents):
    """The forward and one product a head and position."""
    rows = chunk_rows(heads.vocabulary, forward.device, Candidates())
    total = torch.zeros((), device=forward.device)
    for batch in batches(documents, OBSERVED_TOKENS):
        width = max(document.num_inputs for document in batch)
        texts = [[*document.prompt, *document.tokens[:-1]] for document in batch]
        ids = torch.tensor([row + row[-1:] * (width - len(row)) for row in texts], device=forward.device)
        hidden = forward.target.model(ids, use_cache=False).last_hidden_state
        for head in range(heads.num_heads):
            spans = [slice(len(document.prompt) - 1, document.num_inputs - head) for document in batch]
            states = torch.cat([row[span] for row, span in zip(hidden, spans)])
            for chunk in states.split(rows):
                total += heads.project(chunk, head)[0, 0]
    return total


def token_by_token(forward, heads, documents):
    """Count for each head how often the true token is its r-th best guess, one position after the other."""
    target, device, hits = forward.target, forward.device, torch.zeros(heads.num_heads, TOP, dtype=torch.int64)
    name = cache_keyword(target.model)
    for document in documents:
        ids, cache, guesses = torch.tensor([document.prompt], device=device), None, []
        for token in document.tokens:
            output = target.model(ids, **{name: cache}, use_cache=True)
            cache, hidden = getattr(output, name, None) or output.past_key_values, output.last_hidden_state[:, -1]
            ids = target.lm_head(hidden).argmax(-1, keepdim=True)
            logits = [heads.project(block(hidden), head) for head, block in enumerate(heads.blocks)]
            guesses.append(torch.stack([one[0].topk(TOP).indices for one in logits]))
            ids = torch.full_like(ids, token)  # rounding may decide a near tie otherwise than in a batch
        for i, best in enumerate(guesses):
            for head in range(heads.num_heads):
                if i + 1 + head < len(document.tokens):
                    hits[head] += (best[head] == document.tokens[i + 1 + head]).cpu()
    return hits


def clock(device):
    """Return the name of the clock that times are taken with, and the clock."""
    if torch.device(device).type == "cuda":
        return "wall", lambda: (torch.cuda.synchronize(), time.perf_counter())[1]
    return ("process", time.process_time) if torch.get_num_threads() == 1 else ("wall", time.perf_counter)


def in_turn(functions, repeats, device):
    """Call functions in turn; return their last results and the times of each in s."""
    times, results, now = [[] for _ in functions], [None] * len(functions), clock(device)[1]
    for _ in range(repeats):
        for i, function in enumerate(functions):
            start = now()
            results[i] = function()
            times[i].append(now() - start)
    return results, times


def ratios(above, below):
    """Return median and range of the ratios of two functions' times in the same turn."""
    found = sorted(a / b for a, b in zip(above, below))
    return {"median": statistics.median(found), "range": [found[0], found[-1]]}


@torch.inference_mode()
def measured(forward, heads, documents, repeats):
    """Time ours, the bound and the published way over the same documents; check that they count alike."""

    def ours():
        return observed_pass(forward, heads, documents)

    ours()  # warms up
    _, (passes, least) = in_turn([ours, lambda: bound(forward, heads, documents)], 2 * repeats, forward.device)
    (ranks, hits), (again, published) = in_turn(
        [ours, lambda: token_by_token(forward, heads, documents)], repeats, forward.device
    )
    every = torch.cat(ranks).cpu()
    counted = torch.stack([(every == rank).sum(0) for rank in range(TOP)], dim=1)
    return {
        "documents": len(documents),
        "continuation_tokens": sum(len(document.tokens) for document in documents),
        "prompt_tokens": sum(len(document.prompt) for document in documents),
        "clock": clock(forward.device)[0],
        "repeats": repeats,
        "ours": spread(passes),
        "bound": spread(least),
        "token_by_token": spread(published),
        "ours_over_bound": ratios(passes, least),
        "token_by_token_over_ours": ratios(published, again),
        # Rounding moves a token by a rank now and then; anything else would be an error.
        "hits_apart": int((counted - hits).abs().sum()),
        "hits": int(counted.sum()),
    }


@torch.inference_mode()
def calibration_checks(device, dtype, shape=None, *, num_documents=8, prompt=128, tokens=128, num_heads=5, repeats=5):
    """Measure the pass with random weights of a LlamaConfig's shape, and check its ranks against a sort.

    `shape` is the keywords of a LlamaConfig, the 1B one of SHAPES by default. Times are in s, memory in bytes beyond
    weights (CUDA only).
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**(shape or SHAPES["1B"]), max_position_embeddings=4096)
    with torch.device(device):
        before, _ = torch.get_default_dtype(), torch.set_default_dtype(dtype)
        try:
            target = LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
    heads = MedusaHeads.for_target(target, num_heads)
    for parameter in heads.parameters():
        parameter.normal_(0, 0.02)
    generator = torch.Generator().manual_seed(0)

    def text(count):
        return tuple(torch.randint(config.vocab_size, (count,), generator=generator).tolist())

    documents = [Continuation(str(i), None, text(prompt), text(tokens)) for i in range(num_documents)]
    forward, cuda = Forward(target), torch.device(device).type == "cuda"
    held = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    observed_pass(forward, heads, documents)
    peak = torch.cuda.max_memory_allocated() - held if cuda else None
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "peak_bytes": peak,
        "ranks_equal_a_sort": _ranks_equal_a_sort(forward, heads, documents[0]),
        **measured(forward, heads, documents, repeats),
    }


def _ranks_equal_a_sort(forward, heads, document):
    states = document_states(forward, [document])[0][:-1]
    true = torch.tensor(document.tokens[1:], device=states.device)
    logits = heads.project(heads.blocks[0](states), 0)
    order = logits.sort(dim=1, descending=True, stable=True).indices
    return bool(((order == true[:, None]).int().argmax(1) == ranks_of(logits, true)).all())


def main(output=None, num_prompts=5, max_new_tokens=128, repeats=3):
    """Measure on the demo target and print a line for each comparison."""
    target = load_target("demo", device="cpu", dtype="float32")
    heads = MedusaHeads.load(calibration_path(DEMO_HEADS), target.model)
    prompts = evenly(read_prompts(calibration_path(DEMO_PROMPTS), split="evaluation"), int(num_prompts))
    now = clock("cpu")[1]
    with tempfile.TemporaryDirectory() as work:
        start = now()
        store = Path(work) / "continuations.jsonl"
        documents = continue_prompts(target, prompts, store, max_new_tokens=int(max_new_tokens))
        generated = now() - start
    result = {
        **measured(Forward(target.model), heads, documents, int(repeats)),
        "generating_the_text_in_one_batch_s": generated,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
    }
    for name, what in (
        ("ours_over_bound", "times the forward and one product a head"),
        ("token_by_token_over_ours", "times faster than token by token"),
    ):
        low, high = result[name]["range"]
        print(f"the pass: {result[name]['median']:.2f} ({low:.2f} … {high:.2f}) {what}")
    print(f"{result['hits_apart']} of {result['hits']} hits within the first {TOP} ranks are counted elsewhere")
    if output:
        with open(output, "w", encoding="utf8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
