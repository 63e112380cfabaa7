"""treeopt calibrate: prompts in, a trace of ranks out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from treeopt.cli.build import LAST_CALIBRATION
from treeopt.cli.options import (
    WholeOrAuto,
    load_models,
    prompts_option,
    prompts_path,
    require_torch,
    seed_option,
    target_options,
    timeout_option,
)

if TYPE_CHECKING:
    from treeopt.trace import RankTrace

__all__ = ["calibrate"]


@click.command()
@target_options
@prompts_option
@click.option("--split", default="calibration", show_default=True, help="Prompts of this split; all if none is stated.")
@click.option(
    "--continuations", type=click.Choice(["generated", "dataset"]), default="generated", show_default=True,
    help="Text of the target's own, or the replies in the prompt file.",
)  # fmt: skip
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(2), help="Most tokens a prompt.")
@click.option("--max-tokens", type=click.IntRange(1), help="Most tokens in all: prompts are left out evenly.")
@click.option(
    "--batch-size", type=WholeOrAuto(), default="auto", show_default=True, help="Prompts continued together, or auto."
)
@click.option(
    "--candidates", default=0, show_default=True, type=click.IntRange(0, 64), metavar="R",
    help="Also record the target's probability of each head's R best guesses: what build --objective typical needs.",
)  # fmt: skip
@click.option(
    "--temperature", default=1.0, show_default=True, type=click.FloatRange(0, 100, min_open=True),
    help="Temperature of these probabilities.",
)  # fmt: skip
@timeout_option
@seed_option
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
@click.option("-o", "--output", default="trace.safetensors", show_default=True, type=click.Path(dir_okay=False))
def calibrate(
    target: str,
    heads_name: str | None,
    device: str,
    device_map: str | None,
    dtype: str,
    prompt_files: tuple[str, ...],
    split: str,
    continuations: str,
    max_new_tokens: int,
    max_tokens: int | None,
    batch_size: int | None,
    candidates: int,
    temperature: float,
    timeout: int,
    seed: int,
    as_json: bool,
    output: str,
) -> None:
    """Run target and heads once and record every head's rank of every true token.

    First the target continues the prompts greedily; then one pass over each document counts ranks. Both phases keep
    finished documents in OUTPUT.partial/, so that an interrupted run goes on where it was. torchrun shares the documents
    among processes, a GPU each where there are several; the trace is the same, byte for byte.

    \b
    Examples:
        treeopt calibrate --target demo -o trace.safetensors
        torchrun --nproc-per-node 8 -m treeopt calibrate --target PATH --heads PATH
    """
    require_torch("treeopt calibrate")
    from treeopt.calibrate.observe import Candidates
    from treeopt.calibrate.processes import joined
    from treeopt.calibrate.run import CalibrationSettings, auto_batch_size, calibrate_together, spread
    from treeopt.prompts import read_prompt_files

    if temperature != 1.0 and not candidates:
        raise click.UsageError("--temperature is that of --candidates; give both or neither")
    with joined(device, timeout) as processes:
        prompts = read_prompt_files(prompts_path(prompt_files), split=split)
        loaded, heads, name = load_models(target, heads_name, processes.device, dtype, device_map)
        size = processes.least(batch_size or auto_batch_size(loaded.model, max_new_tokens))
        settings = CalibrationSettings(continuations, max_new_tokens, size, seed, Candidates(candidates, temperature))
        chosen = spread(prompts, settings, max_tokens)
        trace = calibrate_together(loaded, heads, chosen, Path(output), settings, processes, heads_name=name)
    if trace is not None:
        _report(trace, seed, as_json, output)


def _report(trace: RankTrace, seed: int, as_json: bool, output: str) -> None:
    from treeopt.files import cache_directory, replacing
    from treeopt.show import describe_trace, head_rows

    click.echo(json.dumps(head_rows(trace, seed=seed)) if as_json else describe_trace(trace, seed=seed))
    click.echo(f"written to {output}", err=True)
    try:
        with replacing(cache_directory() / LAST_CALIBRATION) as pointer:
            pointer.write_text(str(Path(output).resolve()), encoding="utf8")
    except OSError as error:
        click.echo(f"treeopt build will not find it by itself: `{cache_directory()}`: {error.strerror}", err=True)
