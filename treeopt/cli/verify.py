"""treeopt verify: does the tree give the target's own output, and in how many steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.options import (
    attention_option,
    attention_used,
    load_models,
    prompts_option,
    prompts_path,
    require_torch,
    seed_option,
    target_options,
)

if TYPE_CHECKING:
    from treeopt.heads import MedusaHeads
    from treeopt.optimize import BuiltTree
    from treeopt.prompts import Prompt
    from treeopt.targets.loading import LoadedTarget
    from treeopt.verify.compare import Comparison

__all__ = ["verify"]


@click.command()
@click.argument("tree", type=click.Path(dir_okay=False))
@target_options
@prompts_option
@click.option("--split", default="evaluation", show_default=True, help="Prompts of this split; all if none is stated.")
@click.option("--limit", type=click.IntRange(1), help="Decode so many prompts, spread evenly over the file.")
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--allow-near-ties", is_flag=True, help="Below float32: exit 0 when every difference is a near tie.")
@click.option(
    "--check-replay", is_flag=True,
    help="Also record the heads' ranks along the outputs, and check that their replay takes exactly the steps counted.",
)  # fmt: skip
@attention_option
@seed_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(
    tree: str,
    target: str,
    heads_name: str | None,
    device: str,
    device_map: str | None,
    dtype: str,
    prompt_files: tuple[str, ...],
    split: str,
    limit: int | None,
    max_new_tokens: int,
    allow_near_ties: bool,
    check_replay: bool,
    attention: str,
    seed: int,
    as_json: bool,
) -> None:
    """Decode prompts with the tree and plainly, and compare token by token.

    Prints measured beside predicted tokens per step, by domain, with 95 % intervals over prompts, and how much faster
    or slower the tree was. Exits 1 when any output differs.

    \b
    Example:
        treeopt verify tree.json --limit 4
    """
    require_torch("treeopt verify")
    from treeopt.document import read_tree
    from treeopt.optimize.priced import states_probabilities
    from treeopt.progress import Progress
    from treeopt.prompts import evenly, read_prompt_files
    from treeopt.verify import TreeVerifier
    from treeopt.verify.compare import compare, summarize

    built = read_tree(tree)
    prompts = read_prompt_files(prompts_path(prompt_files), split=split)
    chosen = evenly(prompts, limit or len(prompts))
    loaded, heads, _ = load_models(target, heads_name, device, dtype, device_map)
    verifier = TreeVerifier(loaded.model, heads, built.tree, attention=attention)
    click.echo(attention_used(verifier, attention), err=True)
    found = []
    with Progress("verify", total=len(chosen), unit="prompts") as progress:
        for comparison in compare(loaded, verifier, chosen, max_new_tokens=max_new_tokens):
            found.append(comparison)
            progress.add(documents=1, tokens=2 * len(comparison.decoded.tokens))
    result = summarize(found, built.tokens_per_step, seed=seed)
    result["attention"] = verifier.attention
    if not states_probabilities(built):
        result["predicted_tokens_per_step"] = None
    if check_replay:
        result["replay"] = _replayed(built, loaded, heads, chosen, found)
    click.echo(json.dumps(result) if as_json else _report(result, built.tree.num_nodes))
    differences = [comparison.difference for comparison in found if comparison.difference is not None]
    if any(not (allow_near_ties and difference.near_tie) for difference in differences):
        raise SystemExit(1)
    if check_replay and result["replay"]["disagreements"]:
        raise SystemExit(1)


def _replayed(
    built: BuiltTree, loaded: LoadedTarget, heads: MedusaHeads, prompts: Sequence[Prompt], found: Sequence[Comparison]
) -> dict[str, Any]:
    """Return whether the replay of the outputs takes the steps that were counted."""
    from dataclasses import asdict

    from treeopt.agreement import replay_disagreements, trace_of
    from treeopt.calibrate.continuations import Continuation

    documents = [
        Continuation(prompt.id, prompt.domain, tuple(loaded.prompt_ids(prompt.messages)), tuple(one.decoded.tokens))
        for prompt, one in zip(prompts, found)
    ]
    decoded = [one.decoded for one in found]
    disagreements = replay_disagreements(built.tree, trace_of(loaded, heads, documents), documents, decoded)
    return {"documents": len(documents), "disagreements": [asdict(one) for one in disagreements]}


def _report(result: dict[str, Any], num_nodes: int) -> str:
    from treeopt.show import aligned

    header = ["domain", "prompts", "tokens", "steps", "tokens/step", "95 % interval", "time ratio", "95 % interval"]
    rows = [_row(name, measured) for name, measured in result["domains"].items()]
    total, predicted = result["all"], result["predicted_tokens_per_step"]
    equal = total["prompts"] - len(result["differences"])
    lines = [
        *aligned([header, *rows, _row("all", total)]),
        f"predicted tokens_per_step {'unknown' if predicted is None else f'{predicted:.4f}'}, measured {total['tokens_per_step']:.4f}, "
        f"{num_nodes} nodes, {total['num_steps']} steps; time ratio: plain decoding over tree decoding",
        f"{equal} of {total['prompts']} prompts give exactly the target's own greedy output",
    ]
    if "replay" in result:
        wrong = result["replay"]["disagreements"]
        total_documents = result["replay"]["documents"]
        lines.append(
            f"replay takes exactly the counted steps in {total_documents - len(wrong)} of {total_documents} documents"
        )
        lines += [f"`{one['document']}`: replayed {one['replayed']} steps, counted {one['counted']}" for one in wrong]
    for prompt, difference in result["differences"].items():
        kind = "a near tie" if difference["near_tie"] else "not a near tie"
        lines.append(
            f"`{prompt}` differs from new token {difference['position']} on: plain {difference['plain']}, "
            f"tree {difference['tree']}; the target's best two logits are {difference['top2_gap']:.2e} apart ({kind})"
        )
    return "\n".join(lines)


def _row(name: str, measured: dict[str, Any]) -> list[str]:
    low, high = measured["tokens_per_step_interval"]
    time_low, time_high = measured["time_ratio_interval"]
    return [
        name,
        str(measured["prompts"]),
        str(measured["new_tokens"]),
        str(measured["num_steps"]),
        f"{measured['tokens_per_step']:.3f}",
        f"[{low:.3f}, {high:.3f}]",
        f"{measured['time_ratio']:.2f}",
        f"[{time_low:.2f}, {time_high:.2f}]",
    ]
