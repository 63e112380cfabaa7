"""treeopt trace: what is done with traces as files."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["trace"]


@click.group()
def trace() -> None:
    """Work on trace files.

    \b
    Example:
        treeopt trace merge a.safetensors b.safetensors -o both.safetensors
    """


@trace.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="The trace of all documents.")
def merge(files: tuple[str, ...], output: str) -> None:
    """Join traces of the same target and heads, calibrated alike on different prompts, into one.

    \b
    Example:
        treeopt trace merge monday.safetensors tuesday.safetensors -o both.safetensors
    """
    from treeopt.merging import merge_traces
    from treeopt.show import describe_trace
    from treeopt.trace import RankTrace

    merged, notes = merge_traces([RankTrace.read(file) for file in files], files)
    merged.write(Path(output))
    click.echo(describe_trace(merged))
    for note in [*notes, f"written to {output}"]:
        click.echo(note, err=True)
