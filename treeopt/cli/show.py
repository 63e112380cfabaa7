"""treeopt show: a tree, trace or table as text."""

from __future__ import annotations

from pathlib import Path

import click

from treeopt.cli.options import kind_of

__all__ = ["show"]


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
def show(file: str) -> None:
    """Print a tree file, a trace or a table of accuracies as text.

    \b
    Example:
        treeopt show tree.json
    """
    click.echo(_describe(Path(file)))


def _describe(path: Path) -> str:
    from treeopt.acceptance import AcceptanceTable
    from treeopt.document import read_tree
    from treeopt.show import describe_table, describe_trace, describe_tree
    from treeopt.trace import RankTrace

    kind = kind_of(path)
    if kind == "trace":
        return describe_trace(RankTrace.read(path))
    return describe_table(AcceptanceTable.read(path)) if kind == "table" else describe_tree(read_tree(path))
