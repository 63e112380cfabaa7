"""treeopt check: every defect of a file."""

from __future__ import annotations

import click

__all__ = ["check"]


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
def check(file: str) -> None:
    """Name every defect of FILE, one a line, and exit with 1; say in one line that there is none, and exit with 0.

    FILE is a tree file, a JSON list of paths, a table of accuracies or a trace. A reader refuses the file for any of the
    defects, but names only the first.

    \b
    Example:
        treeopt check tree.json
    """
    from treeopt.checking import check_file

    report = check_file(file)
    if not report.defects:
        click.echo(f"{file} is sound: {report.summary}")
        return
    for defect in report.defects:
        click.echo(defect)
    raise SystemExit(1)
