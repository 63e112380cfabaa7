"""Tree decoding beside the target's own `generate`: equal tokens, steps, time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from treeopt.attention.passes import Pass
from treeopt.intervals import ratio_interval
from treeopt.prompts import Prompt
from treeopt.targets.forward import Forward
from treeopt.targets.limits import room_for
from treeopt.targets.loading import LoadedTarget
from treeopt.verify.texts import Decoded
from treeopt.verify.verifier import TreeVerifier

__all__ = ["Comparison", "Difference", "compare", "summarize"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two decodes of a prompt part.

    Attributes
    ----------
    position : int
        Index among the new tokens.
    plain, tree : int or None
        Token of each decode; None where it has ended.
    top2_gap : float
        Logit of the target's best token after the common text, less that of its second.
    near_tie : bool
        Whether the gap is within the rounding of the dtype, so that the order of summation decides.
    """

    position: int
    plain: int | None
    tree: int | None
    top2_gap: float
    near_tie: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt decoded plainly and with the tree.

    Attributes
    ----------
    prompt_id : str
    domain : str or None
    decoded : Decoded
    difference : Difference or None
    plain_seconds, tree_seconds : float
        Wall time of each, prompt pass included.
    """

    prompt_id: str
    domain: str | None
    decoded: Decoded
    difference: Difference | None
    plain_seconds: float
    tree_seconds: float


def compare(
    target: LoadedTarget, verifier: TreeVerifier, prompts: Sequence[Prompt], *, max_new_tokens: int = 128
) -> Iterator[Comparison]:
    """Decode each prompt with `generate` and with the tree, one after the other.

    Parameters
    ----------
    target : LoadedTarget
    verifier : TreeVerifier
    prompts : sequence of Prompt
    max_new_tokens : int

    Yields
    ------
    Comparison
    """
    for prompt in prompts:
        ids = target.prompt_ids(prompt.messages)
        limit = room_for(target.model, len(ids), max_new_tokens)
        start = time.perf_counter()
        plain = plain_greedy(target, ids, limit, verifier.eos_ids)
        middle = time.perf_counter()
        decoded = verifier.decode([ids], max_new_tokens)[0]
        end = time.perf_counter()
        difference = None if plain == decoded.tokens else _difference(target, ids, plain, decoded.tokens)
        yield Comparison(prompt.id, prompt.domain, decoded, difference, middle - start, end - middle)


@torch.inference_mode()
def plain_greedy(target: LoadedTarget, ids: Sequence[int], max_new_tokens: int, eos: Iterable[int]) -> list[int]:
    """Return the new tokens of transformers' own greedy decoding."""
    given = torch.tensor([list(ids)], device=target.model.device)
    pad = target.tokenizer.pad_token_id
    eos = sorted(eos)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos or None,
        pad_token_id=pad if pad is not None else (eos or [0])[0],
    )
    output: Any = target.model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
    new: list[int] = output[0, len(ids) :].tolist()
    return new


def summarize(comparisons: Sequence[Comparison], predicted: float, *, seed: int = 0) -> dict[str, Any]:
    """Return measured beside predicted tokens per step, over all prompts and by domain, for tables and JSON.

    Parameters
    ----------
    comparisons : sequence of Comparison
    predicted : float
        1 + E[L] of the tree under its acceptance model.
    seed : int
        Of the bootstrap over prompts.
    """
    domains: dict[str, list[Comparison]] = defaultdict(list)
    for comparison in comparisons:
        domains[comparison.domain or "none"].append(comparison)
    return {
        "predicted_tokens_per_step": predicted,
        "all": _measured(comparisons, seed),
        "domains": {name: _measured(group, seed) for name, group in sorted(domains.items())},
        "seed": seed,
        "differences": {c.prompt_id: asdict(c.difference) for c in comparisons if c.difference is not None},
    }


def _measured(group: Sequence[Comparison], seed: int) -> dict[str, Any]:
    steps = [c.decoded.num_steps for c in group]
    tokens = [len(c.decoded.tokens) - 1 for c in group]
    low, high = ratio_interval(tokens, steps, seed=seed)
    plain, tree = [c.plain_seconds for c in group], [c.tree_seconds for c in group]
    time_low, time_high = ratio_interval(plain, tree, seed=seed)
    return {
        "prompts": len(group),
        "new_tokens": sum(tokens) + len(group),
        "num_steps": sum(steps),
        "tokens_per_step": sum(tokens) / sum(steps) if sum(steps) else 1.0,
        "tokens_per_step_interval": [float(low), float(high)] if sum(steps) else [1.0, 1.0],
        "time_ratio": sum(plain) / sum(tree),
        "time_ratio_interval": [float(time_low), float(time_high)],
    }


@torch.inference_mode()
def _difference(target: LoadedTarget, ids: Sequence[int], plain: list[int], tree: list[int]) -> Difference:
    shared = next((i for i, (a, b) in enumerate(zip(plain, tree)) if a != b), min(len(plain), len(tree)))
    forward = Forward(target.model)
    whole = torch.tensor([[*ids, *plain[:shared]]], device=forward.device)
    text = Pass.text(1, whole.shape[1], forward.device)
    logits = forward.logits(forward.hidden(whole, text, None)[0, -1]).float()
    best = logits.topk(2).values
    gap = float(best[0] - best[1])
    # A sum of the model's width rounds by a few units in the last place of the largest logit.
    rounding = 8 * torch.finfo(target.model.dtype).eps * float(logits.abs().max())
    near_tie = target.model.dtype != torch.float32 and gap <= rounding
    token = [tokens[shared] if shared < len(tokens) else None for tokens in (plain, tree)]
    return Difference(shared, token[0], token[1], gap, near_tie)
