"""treeopt report: a trace and its trees as one HTML page."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.compare import read_any_tree
from treeopt.cli.latency import curve_of, latency_options
from treeopt.cli.options import kind_of, seed_option

if TYPE_CHECKING:
    from treeopt.report import ShownTree
    from treeopt.trace import RankTrace

__all__ = ["report"]


@click.command()
@click.argument("trace", type=click.Path(dir_okay=False))
@click.argument("trees", nargs=-1, metavar="[TREE]...")
@latency_options
@click.option(
    "--reference",
    type=click.Path(dir_okay=False),
    help="Another trace: also say whether the heads guess as they did on it.",
)
@seed_option
@click.option(
    "-o", "--output", default="report.html", show_default=True, type=click.Path(dir_okay=False),
    help="Page; - writes it to stdout.",
)  # fmt: skip
def report(
    trace: str,
    trees: tuple[str, ...],
    latency: str | None,
    latency_model: str | None,
    batch: int,
    context: int | None,
    reference: str | None,
    seed: int,
    output: str,
) -> None:
    """Write one HTML page about TRACE: accuracies, tokens a step against nodes, trees, and how they compare.

    A TREE is a tree file, a JSON list of paths, chain:K, or dense:7,6; without one the best tree is shown. The page holds
    everything it needs and loads nothing; it can be printed.

    \b
    Example:
        treeopt report trace.safetensors tree.json --latency latency.json -o report.html
    """
    from treeopt.files import replacing
    from treeopt.latency import LatencyTable
    from treeopt.report import ReportInputs, report_page
    from treeopt.trace import RankTrace

    found = RankTrace.read(trace)
    options = {
        "--latency": latency, "--latency-model": latency_model, "--batch": batch if latency else None,
        "--context": context, "--reference": reference, "--seed": seed or None,
    }  # fmt: skip
    inputs = ReportInputs(
        name=trace,
        trace=found,
        trees={name: _tree(name, found) for name in trees},
        curve=None if latency is None else curve_of(latency, latency_model, batch, context),
        machine={} if latency is None else LatencyTable.read(latency, model=latency_model).metadata,
        reference=None if reference is None else (reference, RankTrace.read(reference)),
        commands=_commands(trace, found, trees, options),
        seed=seed,
    )
    page = report_page(inputs).encode(errors="replace")  # a name may hold half a sign
    if output == "-":
        sys.stdout.buffer.write(page)
        return
    with replacing(Path(output)) as temporary:
        temporary.write_bytes(page)
    click.echo(f"written to {output}", err=True)


def _tree(name: str, trace: RankTrace) -> ShownTree:
    """Return a tree with its path probabilities: those of its file, or those of the trace's accuracies."""
    from treeopt.document import read_tree
    from treeopt.optimize.models import HeadModel, path_probabilities
    from treeopt.report import ShownTree
    from treeopt.show import describe_tree

    if Path(name).is_file() and kind_of(Path(name)) == "tree":
        built = read_tree(name)
        return ShownTree(built.tree, built.path_probabilities, describe_tree(built, draw=False).splitlines())
    tree = read_any_tree(name)
    tree.require_heads(trace.num_heads)
    return ShownTree(tree, path_probabilities(HeadModel(trace.table()), tree))


def _commands(name: str, trace: RankTrace, trees: tuple[str, ...], options: dict[str, Any]) -> list[str]:
    """Return the commands that calibrate, build and report again, as far as the trace tells them."""
    known = trace.metadata
    given = {
        "--target": known.get("target"),
        "--heads": known.get("heads") if known.get("heads") != "demo" else None,
        "--dtype": known.get("dtype"),
        "--continuations": known.get("continuations"),
        "--max-new-tokens": known.get("max_new_tokens"),
        "--candidates": None if trace.topk_probs is None else trace.topk_probs.shape[2],
        "--temperature": known.get("temperature") if trace.topk_probs is not None else None,
    }
    lines = [_command(["calibrate"], {**given, "-o": name})] if known.get("target") else []
    lines += [_command(["build", name], {"--nodes": nodes, "-o": tree}) for tree, nodes in _rebuildable(name, trees)]
    lines.append(_command(["report", name, *trees], {**options, "-o": "report.html"}))
    return lines


def _rebuildable(trace: str, trees: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return the tree files, and their budgets, that `treeopt build` makes from this trace without any other option."""
    from treeopt.cli.recipes import file_hash
    from treeopt.document import read_tree

    found = []
    for name in trees:
        if Path(name).is_file() and kind_of(Path(name)) == "tree":
            built = read_tree(name)
            plain = built.certificate.objective == "expected_accepted" and not built.constraints.active
            known = built.provenance
            if plain and known.get("model") == "independent" and known.get("sha256") == file_hash(Path(trace)):
                found.append((name, built.constraints.num_nodes))
    return found


def _command(words: list[str], options: dict[str, Any]) -> str:
    flags = [text for flag, value in options.items() if value is not None for text in (flag, str(value))]
    return shlex.join(["treeopt", *words, *flags])
