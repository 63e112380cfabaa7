"""treeopt heads: what a checkpoint of heads holds, and the same heads in another format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.options import require_torch

if TYPE_CHECKING:
    from torch import Tensor

    from treeopt.heads.checkpoint import Checkpoint

__all__ = ["heads"]

FORMATS = {
    "A": "blocks and an output embedding for each head",
    "B": "heads under a prefix, beside a model",
    "C": "blocks alone",
    "D": "vLLM's names",
}


@click.group()
def heads() -> None:
    """Look at a checkpoint of Medusa heads, or write it in another format.

    \b
    Example:
        treeopt heads inspect heads/
    """


@heads.command()
@click.argument("path", metavar="PATH_OR_ID")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: str, as_json: bool) -> None:
    """Print what a checkpoint holds, counted from its tensors, and where its config.json says otherwise.

    PATH_OR_ID is a file (.safetensors, .pt, .bin), the index of a sharded checkpoint, a directory, or a hub id.

    \b
    Example:
        treeopt heads inspect heads/
    """
    require_torch("treeopt heads inspect")
    from treeopt.heads.checkpoint import read_checkpoint

    summary = _summary(read_checkpoint(path))
    click.echo(json.dumps(summary) if as_json else _report(summary))


@heads.command()
@click.argument("path", metavar="PATH_OR_ID")
@click.option(
    "--to", "to", required=True, type=click.Choice(["A", "C", "D"]),
    help="A: medusa_lm_head.safetensors with an output embedding for each head. C: blocks alone, with the target's. "
    "D: model.safetensors as vLLM reads it.",
)  # fmt: skip
@click.option(
    "--target", metavar="PATH_OR_ID",
    help="The heads' target: its output embedding is what format C leaves out. Where its files allow it, only that is read.",
)  # fmt: skip
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False), help="A new or empty directory.")
def convert(path: str, to: str, target: str | None, output: str) -> None:
    """Write heads in another format, if that loses nothing.

    \b
    Example:
        treeopt heads convert heads/ --to D --target demo -o vllm-heads/
    """
    require_torch("treeopt heads convert")
    from treeopt.heads.checkpoint import read_checkpoint
    from treeopt.heads.convert import convert as write

    found = read_checkpoint(path)
    found.report()
    lm_head = None if target is None else _lm_head(target)
    write(found, to, Path(output), lm_head)
    click.echo(f"format {found.names.format} to {to}: {found.num_heads} heads of {found.num_layers} layers")
    click.echo(f"written to {output}", err=True)


def _lm_head(target: str) -> Tensor:
    """Return the target's output embedding, read from its files alone where their names are the model's."""
    from treeopt.heads.convert import read_lm_head
    from treeopt.targets.embedding import load_output_embedding, output_embedding_names

    found = read_lm_head(*output_embedding_names(target))
    return load_output_embedding(target) if found is None else found


def _summary(found: Checkpoint) -> dict[str, Any]:
    embeddings = {name for key, name in found.names.tensors.items() if key.startswith("lm_heads.")}
    shared = "the target's" if not embeddings else "one for all heads" if len(embeddings) < found.num_heads else "own"
    return {
        "source": str(found.source),
        "format": found.names.format,
        "prefix": found.names.prefix or None,
        "num_heads": found.num_heads,
        "num_layers": found.num_layers,
        "hidden_size": found.hidden_size,
        "bias": found.names.bias,
        "lm_head": shared,
        "vocabulary": found.vocabulary,
        "vocabulary_map": sorted(found.names.maps) or None,
        "dtypes": list(found.dtypes),
        "disagreements": list(found.disagreements),
    }


def _report(summary: dict[str, Any]) -> str:
    vocabulary, tokens = summary["vocabulary"], summary["vocabulary_map"]
    lines = [
        ("source", summary["source"]),
        ("format", f"{summary['format']}: {FORMATS[summary['format']]}"),
        ("prefix", summary["prefix"] or "none"),
        ("heads", summary["num_heads"]),
        ("layers", f"{summary['num_layers']} a head, {'with' if summary['bias'] else 'without'} bias"),
        ("hidden size", summary["hidden_size"]),
        ("lm_head", summary["lm_head"]),
        ("vocabulary", "the target's" if vocabulary is None else vocabulary),
        ("vocabulary map", ", ".join(tokens) if tokens else "none"),
        ("dtype", ", ".join(summary["dtypes"])),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join([*(f"{name:<{width}}  {value}" for name, value in lines), *summary["disagreements"]])
