"""treeopt compare: any number of trees on one trace, or one trace against another."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.latency import curve_of, latency_options
from treeopt.cli.options import kind_of, seed_option
from treeopt.errors import TreeError

if TYPE_CHECKING:
    from treeopt.drift import Drift
    from treeopt.sidebyside import TreeRow
    from treeopt.tree import DraftTree

__all__ = ["compare"]


@click.command()
@click.argument("trace", type=click.Path(dir_okay=False))
@click.argument("trees", nargs=-1, metavar="TREE...")
@latency_options
@click.option(
    "--reference", type=click.Path(dir_okay=False),
    help="Another trace: test whether the heads' ranks differ from it, and what building anew would gain.",
)  # fmt: skip
@click.option(
    "--nodes", type=click.IntRange(1), default=64, show_default=True, help="Of the trees built for --reference."
)
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False), help="Also write the table to a CSV file.")
@seed_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def compare(
    trace: str,
    trees: tuple[str, ...],
    latency: str | None,
    latency_model: str | None,
    batch: int,
    context: int | None,
    reference: str | None,
    nodes: int,
    csv_file: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Replay trees on TRACE and compare each with the first: exact tokens a step, by domain, and predicted speed.

    A TREE is a tree file, a JSON list of paths such as published ones, chain:K for K first guesses, or dense:7,6 for
    every guess of given widths.

    \b
    Examples:
        treeopt compare trace.safetensors tree.json chain:4 dense:7,6 --latency latency.json
        treeopt compare new.safetensors --reference trace.safetensors
    """
    from treeopt.drift import measure_drift
    from treeopt.optimize.limits import Limits
    from treeopt.sidebyside import compare_trees
    from treeopt.trace import RankTrace

    if not trees and reference is None:
        raise click.UsageError("nothing to compare: name trees, or another trace with --reference")
    found = RankTrace.read(trace)
    result: dict[str, Any] = {}
    texts = []
    if trees:
        curve = None if latency is None else curve_of(latency, latency_model, batch, context)
        rows = compare_trees({name: read_any_tree(name) for name in trees}, found, curve=curve, seed=seed)
        result["trees"] = [asdict(row) for row in rows]
        texts.append(_table(rows))
        if csv_file is not None:
            _write_csv(rows, Path(csv_file))
    if reference is not None:
        drift = measure_drift(RankTrace.read(reference), found, Limits(nodes), seed=seed)
        result["drift"] = {**asdict(drift), "significant": drift.significant}
        texts.append(_drift(drift, nodes))
    click.echo(json.dumps(result) if as_json else "\n\n".join(texts))


def read_any_tree(name: str) -> DraftTree:
    """Return the tree that an argument names; see `compare`."""
    from treeopt import strictjson
    from treeopt.document import read_tree
    from treeopt.tree import DraftTree, chain, dense_tree

    kind, _, numbers = name.partition(":")
    if kind in ("chain", "dense") and numbers:
        if not all(entry.isdecimal() for entry in numbers.split(",")):
            raise TreeError(f"`{name}` is no shape; write chain:4 or dense:7,6")
        widths = list(map(int, numbers.split(",")))
        return dense_tree(widths) if kind == "dense" else chain(widths[0])
    path = Path(name)
    if kind_of(path) == "tree":
        return read_tree(path).tree
    paths = strictjson.parse(path.read_bytes()) if kind_of(path) == "table" else None
    if not isinstance(paths, list) or not all(isinstance(one, list) for one in paths):
        raise TreeError(f"`{name}` is neither a tree file nor a list of paths; give one, chain:K or dense:W,W")
    try:
        return DraftTree.from_paths(paths)
    except TreeError as error:
        raise TreeError(f"`{name}`: {error}") from error


def _table(rows: list[TreeRow]) -> str:
    from treeopt.show import aligned

    domains = sorted(rows[0].domains)
    header = ["tree", "nodes", "depth", "tokens/step", "95 % interval", "to the first", "95 % interval", "shared"]
    header += [*(["times plain"] if any(row.speedup is not None for row in rows) else []), *domains]
    lines = []
    for i, row in enumerate(rows):
        cells = [
            row.name, str(row.num_nodes), str(row.max_depth), f"{row.tokens_per_step:.4f}", f"[{row.low:.4f}, {row.high:.4f}]",
            *([f"{row.gain:+.4f}", f"[{row.gain_low:+.4f}, {row.gain_high:+.4f}]"] if i else ["", ""]),
            str(row.shared_nodes),
        ]  # fmt: skip
        if "times plain" in header:
            cells.append("beyond" if row.speedup is None else f"{row.speedup:.3f}")
        lines.append([*cells, *(f"{row.domains[domain]:.3f}" for domain in domains)])
    return "\n".join(aligned([header, *lines]))


def _drift(drift: Drift, nodes: int) -> str:
    from treeopt.show import aligned

    header = [
        "head",
        "top-1",
        "95 % interval",
        "top-3",
        "95 % interval",
        "top-10",
        "95 % interval",
        "effect size h",
        "p",
    ]
    rows = []
    for head in drift.heads:
        cells = [
            cell for value, low, high in head.differences for cell in (f"{value:+.3f}", f"[{low:+.3f}, {high:+.3f}]")
        ]
        rows.append([str(head.head), *cells, f"{head.effect_size:+.3f}", f"{head.p_value:.4f}"])
    named = ", ".join(map(str, drift.significant))
    verdict = f"heads {named} differ beyond chance" if named else "no head differs beyond chance"
    gain = drift.gain
    return "\n".join(
        [
            "accuracy on the trace minus that on the reference:",
            *aligned([header, *rows]),
            f"{verdict} (5 %, shared among the heads)",
            f"building {nodes} nodes anew changes tokens_per_step on left-out documents by {gain.value:+.4f} "
            f"[{gain.low:+.4f}, {gain.high:+.4f}]",
        ]
    )


def _write_csv(rows: list[TreeRow], path: Path) -> None:
    from treeopt.files import replacing

    text = io.StringIO()
    domains = sorted(rows[0].domains)
    writer = csv.writer(text, lineterminator="\n")
    plain = [name for name in asdict(rows[0]) if name != "domains"]
    writer.writerow([*plain, *domains])
    for row in rows:
        values = asdict(row)
        writer.writerow(
            [*("" if values[name] is None else values[name] for name in plain), *(row.domains[d] for d in domains)]
        )
    with replacing(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf8")
