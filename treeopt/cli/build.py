"""treeopt build: a trace or a table of accuracies in, a tree file out."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.cli.options import kind_of, seed_option
from treeopt.files import cache_directory

if TYPE_CHECKING:
    from treeopt.acceptance import AcceptanceTable
    from treeopt.trace import RankTrace

__all__ = ["LAST_CALIBRATION", "build"]

LAST_CALIBRATION = "last-calibration"  # in the cache directory: the path of the newest trace
TRACE_KEYS = ("target", "target_hash", "heads", "heads_hash", "prompts_hash", "continuations", "dtype")


@click.command()
@click.argument("source", required=False, metavar="[TRACE|TABLE]", type=click.Path(dir_okay=False))
@click.option("--nodes", default=64, show_default=True, type=int, help="Tokens in one pass, root included.")
@click.option("--max-depth", type=int, help="Deepest level.  [default: the number of heads]")
@click.option("--max-rank", type=int, help="Largest rank in any path.  [default: no limit]")
@seed_option
@click.option(
    "-o", "--output", default="tree.json", show_default=True, type=click.Path(dir_okay=False),
    help="Tree file; - writes it to stdout.",
)  # fmt: skip
def build(source: str | None, nodes: int, max_depth: int | None, max_rank: int | None, seed: int, output: str) -> None:
    """Build the tree with the largest expected acceptance E[L] at a budget of nodes.

    SOURCE is a trace (.safetensors) of `treeopt calibrate`, or a table of accuracies (.json): a list of rows, one a
    head, with the accuracy of rank 0, 1, …. Without it the newest calibration is taken, or the bundled one.

    \b
    Example:
        treeopt build --nodes 64 -o tree.json
    """
    from treeopt.document import to_bytes, write_tree
    from treeopt.optimize import best_tree, certified
    from treeopt.show import describe_tree

    table, trace, provenance = _read(_source(source))
    built = best_tree(table, nodes, max_depth=max_depth, max_rank=max_rank, provenance=provenance)
    if trace is not None:
        built = certified(built, trace, seed=seed)
    summary = describe_tree(built, draw=False)
    if output == "-":
        click.echo(summary, err=True)
        sys.stdout.buffer.write(to_bytes(built))
        return
    write_tree(built, output)
    click.echo(summary)
    click.echo(f"written to {output}", err=True)


def _source(given: str | None) -> Path:
    if given is not None:
        return Path(given)
    pointer = cache_directory() / LAST_CALIBRATION
    if pointer.is_file():
        last = Path(pointer.read_text(encoding="utf8", errors="replace").strip())
        if last.is_file():
            click.echo(f"building from the newest calibration, {last}", err=True)
            return last
    click.echo("building from the bundled calibration of the demo target", err=True)
    return calibration_path(DEMO_TRACE)


def _read(path: Path) -> tuple[AcceptanceTable, RankTrace | None, dict[str, str]]:
    from treeopt.acceptance import AcceptanceTable
    from treeopt.trace import RankTrace

    if kind_of(path) != "trace":
        table = AcceptanceTable.read(path)
        return table, None, {"source": "acceptance table", "sha256": _sha256(path)}
    trace = RankTrace.read(path)
    return trace.table(), trace, trace_provenance(trace.metadata, _sha256(path))


def trace_provenance(metadata: Mapping[str, str], sha256: str) -> dict[str, str]:
    """Return what a tree file says of the trace it was built from."""
    stated = {key: metadata[key] for key in TRACE_KEYS if metadata.get(key)}
    return {"source": "trace", "sha256": sha256, **stated}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
