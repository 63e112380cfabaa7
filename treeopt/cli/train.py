"""treeopt train: Medusa heads for a frozen target, on text of the target's own."""

from __future__ import annotations

import math
from pathlib import Path

import click

from treeopt.cli.options import MAX_SEED, device_map_option, prompts_path, require_one_placement, require_torch

__all__ = ["train"]


def _finite(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Refuse NaN, which no range does: every comparison with it is false."""
    if math.isnan(value):
        raise click.BadParameter(f"{value} is no rate", ctx, param)
    return value


@click.command()
@click.option(
    "--target", default="demo", show_default=True, metavar="PATH_OR_ID",
    help="A Hugging Face directory or hub id; demo is SmolLM2-135M-Instruct, fetched once.",
)  # fmt: skip
@click.option("--device", default="auto", show_default=True)
@device_map_option
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True
)
@click.option(
    "--prompts", "prompt_files", multiple=True, type=click.Path(dir_okay=False),
    help="Prompt file; may be repeated.  [default: the bundled chat prompts]",
)  # fmt: skip
@click.option("--split", default="train", show_default=True, help="Prompts of this split; all if none is stated.")
@click.option(
    "--continuations", type=click.Choice(["generated", "dataset"]), default="generated", show_default=True,
    help="Text of the target's own, or the replies in the prompt file.",
)  # fmt: skip
@click.option("--max-new-tokens", default=256, show_default=True, type=click.IntRange(2), help="Most tokens a prompt.")
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(1), help="Prompts continued together.")
@click.option("--num-heads", default=5, show_default=True, type=click.IntRange(1))
@click.option("--num-layers", default=1, show_default=True, type=click.IntRange(1), help="Residual blocks a head.")
@click.option("--epochs", default=3, show_default=True, type=click.IntRange(1))
@click.option(
    "--learning-rate", default=2e-3, show_default=True, type=click.FloatRange(0, 1, min_open=True), callback=_finite,
)  # fmt: skip
@click.option("--positions", default=256, show_default=True, type=click.IntRange(1), help="Positions of one step.")
@click.option(
    "--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Seed of the order of the data."
)
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False), help="Directory for the heads.")
def train(
    target: str,
    device: str,
    device_map: str | None,
    dtype: str,
    prompt_files: tuple[str, ...],
    split: str,
    continuations: str,
    max_new_tokens: int,
    batch_size: int,
    num_heads: int,
    num_layers: int,
    epochs: int,
    learning_rate: float,
    positions: int,
    seed: int,
    output: str,
) -> None:
    """Train Medusa heads: the target is frozen, user turns are not learnt.

    The target first continues the prompts; text and training state are kept in OUTPUT.partial/ so that an interrupted
    run goes on where it was. The text stays there for another training; delete the folder when it is not needed.

    \b
    Example:
        treeopt train --target demo --num-heads 4 -o heads/
    """
    require_torch("treeopt train")
    require_one_placement(device, device_map)
    import torch

    from treeopt.calibrate.continuations import continue_prompts, dataset_continuations
    from treeopt.prompts import read_prompt_files
    from treeopt.targets.loading import load_target
    from treeopt.training import TrainingSettings, train_heads

    prompts = read_prompt_files(prompts_path(prompt_files), split=split)
    loaded = load_target(target, device=device, dtype=dtype, device_map=device_map)
    work = Path(f"{Path(output).resolve()}.partial")
    if continuations == "dataset":
        documents = dataset_continuations(loaded, prompts, max_new_tokens=max_new_tokens)
    else:
        store = work / "continuations.jsonl"
        documents = continue_prompts(loaded, prompts, store, max_new_tokens=max_new_tokens, batch_size=batch_size)
    settings = TrainingSettings(
        num_heads=num_heads,
        num_layers=num_layers,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_size=positions,
        seed=seed,
    )
    state = work / "training.pt"
    heads, accuracies = train_heads(loaded, documents, settings, state)
    heads.save(output, dtype=torch.bfloat16)
    state.unlink(missing_ok=True)
    tokens = sum(len(document.tokens) for document in documents)
    click.echo(f"{len(documents)} documents, {tokens} tokens; top-1 accuracy of each head on held-out documents:")
    click.echo("  ".join(f"head {head} {accuracy:.3f}" for head, accuracy in enumerate(accuracies)))
    click.echo(f"written to {output}", err=True)
