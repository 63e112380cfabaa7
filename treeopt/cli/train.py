"""treeopt train: Medusa heads, on a frozen target or together with it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.options import prompts_path, require_one_placement, require_torch
from treeopt.cli.train_options import JOINT, given, recipe_of, training_options
from treeopt.errors import require_module

if TYPE_CHECKING:
    from treeopt.calibrate.processes import Processes
    from treeopt.prompts import Prompt
    from treeopt.targets.loading import LoadedTarget
    from treeopt.training import JointSettings, Sample, Trained, TrainingSettings

__all__ = ["train"]


@click.command()
@training_options
@click.pass_context
def train(ctx: click.Context, /, **options: Any) -> None:
    """Train Medusa heads: only what the assistant says is learnt.

    The target first continues the prompts. Medusa-1 then trains heads on the frozen target; Medusa-2 goes on with both
    together and also writes the target that comes of it, OUTPUT/target. Text and checkpoints are kept in OUTPUT.partial/
    so that an interrupted run goes on where it was; delete the folder when it is not needed. torchrun shares the work
    among processes, a GPU each.

    \b
    Examples:
        treeopt train --target demo --num-heads 4 -o heads/
        treeopt train --recipe recipe.json -o medusa2/
    """
    require_torch("treeopt train")
    require_module("treeopt train", "accelerate", "train")
    _check(ctx, options)
    from treeopt.calibrate.processes import joined
    from treeopt.heads import MedusaHeads
    from treeopt.prompts import read_prompt_files
    from treeopt.targets.loading import load_target
    from treeopt.training import require_reporter
    from treeopt.training import train as run
    from treeopt.training.report import write

    settings, joint = _settings(options)
    require_reporter(settings.report_to)
    _require_writable(Path(options["output"]))
    with joined(options["device"], options["timeout"]) as processes:
        prompts = read_prompt_files(
            prompts_path(options["prompt_files"]), split=options["split"], limit=options["limit"]
        )
        target = load_target(
            options["target"], device=processes.device, dtype=options["dtype"], device_map=options["device_map"]
        )
        heads = None
        if options["heads_name"] is not None:
            heads = MedusaHeads.load(options["heads_name"], target.model, num_tokens=target.num_tokens)
        work = Path(f"{Path(options['output']).resolve()}.partial")
        samples = _samples(target, prompts, work, options, processes)
        trained = run(target, samples, settings, work, joint=joint, heads=heads, processes=processes)
        if processes.rank == 0:
            write(trained, target.tokenizer, samples, Path(options["output"]), work, recipe_of(ctx))
            _say(trained, samples, options["output"])


def _check(ctx: click.Context, options: dict[str, Any]) -> None:
    """Refuse options that contradict each other, before anything is loaded."""
    require_one_placement(options["device"], options["device_map"])
    if options["epochs"] == 0 and options["heads_name"] is None:
        raise click.UsageError("--epochs 0 leaves fresh heads as they are; give --heads, or at least one epoch")
    if options["epochs"] == 0 and options["method"] == "medusa-1":
        raise click.UsageError("--epochs 0 trains nothing with --method medusa-1; give at least one epoch")
    if options["method"] == "medusa-1":
        idle = [name for name in JOINT if given(ctx, name)]
        if idle:
            raise click.UsageError(
                f"--{idle[0].replace('_', '-')} belongs to --method medusa-2; give it or leave this out"
            )
    if options["heads_name"] is not None:
        idle = [name for name in ("num_heads", "num_layers", "own_lm_heads") if given(ctx, name)]
        if idle:
            raise click.UsageError(f"--{idle[0].replace('_', '-')} is that of fresh heads; --heads has its own")


def _require_writable(output: Path) -> None:
    """Refuse a directory that nothing can be written into, before hours are spent on what belongs there."""
    if output.is_dir():
        with tempfile.TemporaryFile(dir=output):
            pass


def _settings(options: dict[str, Any]) -> tuple[TrainingSettings, JointSettings | None]:
    from treeopt.training import JointSettings, TrainingSettings

    settings = TrainingSettings(
        batch_size=options["positions"],
        **{
            name: options[name]
            for name in (
                "num_heads", "num_layers", "own_lm_heads", "epochs", "learning_rate", "warmup_steps", "accumulate",
                "mixed_precision", "seed", "report_to",
            )
        },
    )  # fmt: skip
    if options["method"] == "medusa-1":
        return settings, None
    return settings, JointSettings(**{field: options[name] for name, field in JOINT.items()})


def _samples(
    target: LoadedTarget, prompts: list[Prompt], work: Path, options: dict[str, Any], processes: Processes
) -> list[Sample]:
    from treeopt.calibrate.continuations import generated_documents
    from treeopt.training import conversations, whole

    if options["continuations"] == "dataset":
        return conversations(target, prompts, max_new_tokens=options["max_new_tokens"])
    documents = generated_documents(
        target, prompts, work / "continuations.jsonl", processes,
        max_new_tokens=options["max_new_tokens"], batch_size=options["batch_size"],
    )  # fmt: skip
    return [whole(document) for document in documents]


def _say(trained: Trained, samples: list[Sample], output: str) -> None:
    from treeopt.training.report import describe

    click.echo(describe(trained, samples))
    click.echo(
        f"written to {output}" + (f", the target to {output}/target" if trained.target is not None else ""), err=True
    )
