"""treeopt plot: a tree, a trace or the step times of a machine as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from treeopt.cli.latency import curve_of, latency_options
from treeopt.cli.options import kind_of, seed_option
from treeopt.errors import PictureError, require_module

if TYPE_CHECKING:
    from collections.abc import Mapping

    from treeopt.latency import LatencyCurve
    from treeopt.plot.paper import Figure

__all__ = ["plot"]

PICTURES = ("accuracies", "nodes")
NUM_RANKS = 10
LARGEST = 512  # nodes up to which a trace's trees are built, unless more are asked for
MAX_ABOUT = 88  # signs that fit below a title


@click.command()
@click.argument("file", metavar="TREE|TRACE|LATENCY", type=click.Path(dir_okay=False))
@click.option(
    "--picture", type=click.Choice(PICTURES), default=None,
    help="Of a trace: how often heads are right by rank, or tokens a step against nodes.  [default: accuracies]",
)  # fmt: skip
@click.option(
    "--nodes", type=click.IntRange(1), help="Of --picture nodes: the budget to mark, root included.  [default: 64]"
)
@latency_options
@click.option(
    "--trace", type=click.Path(dir_okay=False),
    help="Of a latency file: also tokens a second of this trace's best trees.  Of a list of paths: its accuracies.",
)  # fmt: skip
@seed_option
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False), help="Picture; its name ends in .svg or .png."
)
def plot(
    file: str,
    picture: str | None,
    nodes: int | None,
    latency: str | None,
    latency_model: str | None,
    batch: int,
    context: int | None,
    trace: str | None,
    seed: int,
    output: str,
) -> None:
    """Draw a tree, a trace, or step times of a machine; what FILE holds decides.

    A tree is drawn with the rank of every guess and the probability of its path. A trace gives the accuracies of its
    heads, or predicted and replayed tokens a step against nodes, with a budget marked: 64, --nodes, or the one chosen by
    --latency. A latency file gives step times against nodes, and with --trace the number of nodes that pays most.

    \b
    Examples:
        treeopt plot tree.json -o tree.svg
        treeopt plot trace.safetensors --picture nodes --nodes 32 -o nodes.svg
        treeopt plot latency.json --trace trace.safetensors --context 1024 -o machine.png
    """
    require_module("treeopt plot", "matplotlib", "plot")
    from treeopt.plot.paper import picture_kind, save

    picture_kind(Path(output))  # before the work, not after it
    path = Path(file)
    kind = _kind(path)
    marks = {"--picture": picture, "--nodes": nodes, "--latency": latency}
    if kind != "trace" and (given := [name for name, value in marks.items() if value is not None]):
        raise click.UsageError(f"{given[0]} goes with a trace, and {file} is a {kind}")
    if kind == "trace":
        if trace is not None:
            raise click.UsageError(f"--trace goes with a latency file or a list of paths, and {file} is a trace itself")
        times = None if latency is None else curve_of(latency, latency_model, batch, context)
        made = _of_trace(path, picture, nodes, times, seed)
    elif kind == "latency file":
        made = _of_latency(path, latency_model, batch, context, trace)
    else:
        made = _of_tree(path, kind, trace)
    save(made, Path(output))
    click.echo(f"written to {output}", err=True)


def _kind(path: Path) -> str:
    """Tell what a file holds: a trace, tree, latency file or list of paths.

    Raises
    ------
    PictureError
        For a table of accuracies, and what is none of these.
    """
    from treeopt import strictjson

    kind = kind_of(path)
    if kind == "trace":
        with path.open("rb") as file:
            header = file.readline(200)
        return "latency file" if b"nodes" in header and b"seconds" in header else "trace"
    if kind == "tree":
        return kind
    data = strictjson.parse(path.read_bytes())
    if isinstance(data, dict) and ("models" in data or str(data.get("schema")).startswith("treeopt.latency/")):
        return "latency file"
    whole = [rank for row in data for rank in row] if isinstance(data, list) and all(map(_is_list, data)) else [None]
    if whole and all(type(rank) is int for rank in whole):
        return "list of paths"
    raise PictureError(
        f"`{path}` is no tree, trace or latency file; of a table of accuracies, build a tree and plot that"
    )


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _of_tree(path: Path, kind: str, trace: str | None) -> Figure:
    from treeopt.cli.compare import read_any_tree
    from treeopt.document import read_tree
    from treeopt.optimize.models import HeadModel, path_probabilities
    from treeopt.plot.tree import draw_tree
    from treeopt.trace import RankTrace

    if kind == "tree":
        if trace is not None:
            raise click.UsageError(
                f"--trace goes with a latency file or a list of paths; {path} has its own probabilities"
            )
        built = read_tree(path)
        return draw_tree(built.tree, built.path_probabilities)
    if trace is None:
        raise PictureError(
            f"`{path}` is a list of paths without probabilities; give --trace, whose accuracies decide them"
        )
    found = RankTrace.read(trace)
    tree = read_any_tree(str(path))
    tree.require_heads(found.num_heads)
    return draw_tree(tree, path_probabilities(HeadModel(found.table()), tree))


def _of_trace(path: Path, picture: str | None, nodes: int | None, times: LatencyCurve | None, seed: int) -> Figure:
    from treeopt.auto import auto_budget
    from treeopt.curves import describe_source, node_curve, rank_curves
    from treeopt.optimize import best_tree
    from treeopt.plot.trace import draw_accuracies, draw_nodes
    from treeopt.trace import RankTrace

    found = RankTrace.read(path)
    about = describe_source(found)
    if (picture or PICTURES[0]) == PICTURES[0]:
        if nodes is not None or times is not None:
            raise click.UsageError("--nodes and --latency mark a budget of --picture nodes; give that too or drop them")
        alone, together = (rank_curves(found, NUM_RANKS, together=sums, seed=seed) for sums in (False, True))
        return draw_accuracies(alone, together, about)
    if times is None:
        chosen = nodes or 64
        curve = node_curve(found, max(LARGEST, chosen), seed=seed)
        return draw_nodes(curve, min(chosen, curve.built.tree.num_nodes), about)
    if nodes is not None:
        raise click.UsageError("--latency chooses the budget that --nodes names; give one of the two")
    curve = node_curve(found, max(LARGEST, times.max_nodes), seed=seed)
    choice = auto_budget(lambda num_nodes: best_tree(found.table(), num_nodes), times, found)
    return draw_nodes(curve, choice.num_nodes, about, why=", most tokens/s")


def _of_latency(path: Path, model: str | None, batch: int, context: int | None, trace: str | None) -> Figure:
    from treeopt.auto import auto_budget
    from treeopt.latency import LatencyTable
    from treeopt.optimize import best_tree
    from treeopt.plot.latency import draw_steps
    from treeopt.trace import RankTrace

    table = LatencyTable.read(path, model=model)
    chosen = table.curve(batch, context)
    about = _about(table.metadata)
    if trace is None and context is None:
        return draw_steps([curve for curve in table.curves if curve.batch == chosen.batch], about)
    if trace is None:
        return draw_steps([chosen], about)
    found = RankTrace.read(trace)
    accuracies = found.table()
    return draw_steps([chosen], about, auto_budget(lambda num_nodes: best_tree(accuracies, num_nodes), chosen, found))


def _about(metadata: Mapping[str, str]) -> str:
    keys = ("target", "model", "device", "threads", "dtype", "torch")
    from treeopt.curves import printable

    stated = (
        printable(", ".join(f"{key} {metadata[key]}" for key in keys if metadata.get(key))) or "step times as given"
    )
    return stated if len(stated) <= MAX_ABOUT else stated[: MAX_ABOUT - 1] + "…"
