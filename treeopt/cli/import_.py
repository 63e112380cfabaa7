"""treeopt import: another decoder's file as a tree file."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from treeopt.cli.engines import engine_of
from treeopt.cli.options import seed_option

if TYPE_CHECKING:
    from treeopt.optimize import BuiltTree
    from treeopt.tree import DraftTree

__all__ = ["import_"]


@click.command("import")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--from", "engine_name", required=True, metavar="ENGINE", help="Whose form; see treeopt export --list.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Take path probabilities from a trace's accuracies.")
@click.option("--table", type=click.Path(dir_okay=False), help="Take path probabilities from a table of accuracies.")
@seed_option
@click.option(
    "-o", "--output", default="tree.json", show_default=True, type=click.Path(dir_okay=False),
    help="Tree file; - writes it to stdout.",
)  # fmt: skip
def import_(file: str, engine_name: str, trace: str | None, table: str | None, seed: int, output: str) -> None:
    """Read another decoder's FILE and write its tree as a tree file.

    With --trace or --table the tree is priced under independent heads, and its certificate says what the best tree of as
    many nodes would have. Without them the file's path probabilities are 0 and its provenance calls them unknown.

    \b
    Examples:
        treeopt import choices.json --from medusa -o tree.json
        treeopt import choices.json --from medusa --trace trace.safetensors -o tree.json
    """
    from treeopt.document import to_bytes, write_tree
    from treeopt.engines import read_engine_file
    from treeopt.show import describe_tree

    if trace is not None and table is not None:
        raise click.UsageError("--trace and --table both give accuracies; give one")
    engine = engine_of(engine_name)
    tree = read_engine_file(engine, file)
    provenance = {"source": "import", "engine": engine.name, "imported_sha256": _sha256(file)}
    built = _priced(tree, provenance, trace, table, seed)
    if output == "-":
        click.echo(describe_tree(built, draw=False), err=True)
        sys.stdout.buffer.write(to_bytes(built))
        return
    write_tree(built, output)
    click.echo(describe_tree(built, draw=False))
    click.echo(f"written to {output}", err=True)


def _priced(tree: DraftTree, provenance: dict[str, str], trace: str | None, table: str | None, seed: int) -> BuiltTree:
    from treeopt.acceptance import AcceptanceTable
    from treeopt.cli.recipes import trace_provenance
    from treeopt.optimize import HeadModel, Sample, certified
    from treeopt.optimize.priced import priced, unpriced
    from treeopt.trace import RankTrace

    if trace is not None:
        found = RankTrace.read(trace)
        model = HeadModel(found.table())
        known = {
            **trace_provenance(found.metadata, _sha256(trace)),
            **provenance,
            "priced_by": "trace",
            "model": "independent",
        }
        return certified(priced(tree, model, provenance=known), model, [Sample(found)], seed=seed)
    if table is not None:
        known = {**provenance, "priced_by": "acceptance table", "sha256": _sha256(table), "model": "independent"}
        return priced(tree, HeadModel(AcceptanceTable.read(table)), provenance=known)
    return unpriced(tree, provenance=provenance)


def _sha256(name: str) -> str:
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()
