"""treeopt build: a trace or a table of accuracies in, a tree file out."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.cli.limits import limit_options, limits_of
from treeopt.cli.options import kind_of, seed_option
from treeopt.files import cache_directory

if TYPE_CHECKING:
    from treeopt.heldout import Comparison
    from treeopt.optimize import BuiltTree
    from treeopt.optimize.from_trace import Aim
    from treeopt.optimize.limits import Limits

__all__ = ["LAST_CALIBRATION", "build"]

LAST_CALIBRATION = "last-calibration"  # in the cache directory: the path of the newest trace
MODELS = ("independent", "joint")  # as in treeopt.optimize.from_trace, which a command imports only when it runs
OBJECTIVES = ("expected-accepted", "mixture", "robust", "typical")
PROGRAMS = ("robust", "typical")  # solved by an integer program, as are these limits under some models
PROGRAM_LIMITS = {"max_children", "level_caps", "max_leaves", "dense_siblings", "level_regular", "must_include"}
TRACE_KEYS = ("target", "target_hash", "heads", "heads_hash", "prompts_hash", "continuations", "dtype")


@click.command()
@click.argument("source", required=False, metavar="[TRACE|TABLE]", type=click.Path(dir_okay=False))
@limit_options
@click.option(
    "--model", type=click.Choice(MODELS), default=MODELS[0], show_default=True,
    help="How likely a path is: from each head's accuracy alone, or from counts of whole paths in the trace, shrunk "
    "toward the former as far as held-out documents say.",
)  # fmt: skip
@click.option(
    "--objective", type=click.Choice(OBJECTIVES), default=OBJECTIVES[0], show_default=True,
    help="What to maximise: E[L] over all positions, over domains by --weight, in the worst domain, or under typical "
    "acceptance.",
)  # fmt: skip
@click.option(
    "--weight", "weights", multiple=True, metavar="DOMAIN=W", help="Of --objective mixture; one a domain that counts."
)
@click.option(
    "--epsilon", type=float, help="Of --objective typical: a guess passes above min(ε, δ·exp(−H)).  [default: 0.09]"
)
@click.option("--delta", type=float, help="Of --objective typical.  [default: 0.3]")
@click.option(
    "--compare", "with_comparison", is_flag=True,
    help="Also build under every model on part of the documents, and print its predictions beside what the others give.",
)  # fmt: skip
@seed_option
@click.option(
    "-o", "--output", default="tree.json", show_default=True, type=click.Path(dir_okay=False),
    help="Tree file; - writes it to stdout.",
)  # fmt: skip
def build(
    source: str | None,
    model: str,
    objective: str,
    weights: tuple[str, ...],
    epsilon: float | None,
    delta: float | None,
    with_comparison: bool,
    seed: int,
    output: str,
    **options: Any,
) -> None:
    """Build the tree with the largest expected acceptance E[L] at a budget of nodes.

    SOURCE is a trace (.safetensors) of `treeopt calibrate`, or a table of accuracies (.json): a list of rows, one a
    head, with the accuracy of rank 0, 1, …. Without it the newest calibration is taken, or the bundled one.

    Limits can be combined freely; what each costs in E[L] is printed. The tree is proven optimal under its model, or a
    bound is printed beside it.

    \b
    Examples:
        treeopt build --nodes 64 -o tree.json
        treeopt build trace.safetensors --nodes 32 --max-children 4 --must-include 0,0,0
        treeopt build trace.safetensors --objective robust --compare
    """
    from treeopt.document import to_bytes, write_tree
    from treeopt.show import describe_comparison, describe_tree

    limits = limits_of(options)
    path = _source(source)
    if objective in PROGRAMS or PROGRAM_LIMITS.intersection(limits.active):
        click.echo("searching: at most a minute, and as long again for each limit whose cost is stated", err=True)
    if kind_of(path) == "trace":
        aim = _aim(model, objective, weights, epsilon, delta)
        built, comparison = _from_trace(path, limits, aim, seed, with_comparison)
    else:
        needing = {
            "--model": model != MODELS[0],
            "--objective": objective != OBJECTIVES[0],
            "--compare": with_comparison,
        }
        _aim(model, objective, weights, epsilon, delta)
        built, comparison = _from_table(path, limits, [name for name, given in needing.items() if given]), None
    summary = describe_tree(built, draw=False)
    if comparison is not None:
        summary += "\n\n" + describe_comparison(comparison)
    if output == "-":
        click.echo(summary, err=True)
        sys.stdout.buffer.write(to_bytes(built))
        return
    write_tree(built, output)
    click.echo(summary)
    click.echo(f"written to {output}", err=True)


def _aim(model: str, objective: str, weights: tuple[str, ...], epsilon: float | None, delta: float | None) -> Aim:
    from treeopt.optimize.from_trace import Aim
    from treeopt.typical import DELTA, EPSILON

    if bool(weights) != (objective == "mixture"):
        raise click.UsageError("--weight and --objective mixture belong together; give both or neither")
    if (epsilon is not None or delta is not None) and objective != "typical":
        raise click.UsageError("--epsilon and --delta are those of --objective typical; give that too or drop them")
    return Aim(
        model=model,
        objective=objective,
        weights=dict(map(_weight, weights)) if weights else None,
        epsilon=EPSILON if epsilon is None else epsilon,
        delta=DELTA if delta is None else delta,
    )


def _weight(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        return name, float(number)
    except ValueError:
        raise click.UsageError(f"--weight {text} is not of the form DOMAIN=W; write coding=2 for example") from None


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


def _from_trace(
    path: Path, limits: Limits, aim: Aim, seed: int, with_comparison: bool
) -> tuple[BuiltTree, Comparison | None]:
    from treeopt.heldout import compare_models
    from treeopt.optimize.from_trace import tree_from_trace
    from treeopt.trace import RankTrace

    trace = RankTrace.read(path)
    provenance = trace_provenance(trace.metadata, _sha256(path))
    built = tree_from_trace(trace, limits, aim, seed=seed, provenance=provenance)
    return built, compare_models(trace, limits, aim, seed=seed) if with_comparison else None


def _from_table(path: Path, limits: Limits, needing: list[str]) -> BuiltTree:
    from treeopt.acceptance import AcceptanceTable
    from treeopt.errors import AcceptanceError
    from treeopt.optimize import best_tree_under

    if needing:
        raise AcceptanceError(
            f"`{needing[0]}` needs a trace, and `{path}` is a table of accuracies; make a trace with treeopt calibrate"
        )
    provenance = {"source": "acceptance table", "sha256": _sha256(path), "model": MODELS[0]}
    return best_tree_under(limits, AcceptanceTable.read(path), provenance=provenance)


def trace_provenance(metadata: Mapping[str, str], sha256: str) -> dict[str, str]:
    """Return what a tree file says of the trace it was built from."""
    stated = {key: metadata[key] for key in TRACE_KEYS if metadata.get(key)}
    return {"source": "trace", "sha256": sha256, **stated}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
