"""treeopt show: a tree, trace or table as text."""

from __future__ import annotations

from pathlib import Path

import click

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

    if path.suffix != ".json":
        return describe_trace(RankTrace.read(path))
    if _is_table(path):
        return describe_table(AcceptanceTable.read(path))
    return describe_tree(read_tree(path))


def _is_table(path: Path) -> bool:
    """Tell a table from a tree by its first characters: a list, or the table's schema."""
    try:
        start = path.read_text(encoding="utf8")[:200].lstrip()
    except (OSError, UnicodeDecodeError):
        return False
    return start.startswith("[") or "treeopt.acceptance/" in start
