"""treeopt build: a trace or a table of accuracies in, a tree file out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.cli.engines import EngineLimits, set_option
from treeopt.cli.latency import curve_of, describe_choice, latency_options
from treeopt.cli.limits import limit_options, limits_of, named_limits
from treeopt.cli.options import kind_of, seed_option
from treeopt.cli.recipes import TableRecipe, TraceRecipe
from treeopt.files import cache_directory

if TYPE_CHECKING:
    from treeopt.optimize.from_trace import Aim

__all__ = ["LAST_CALIBRATION", "build"]

LAST_CALIBRATION = "last-calibration"  # in the cache directory: the path of the newest trace
MODELS = ("independent", "joint")  # as in treeopt.optimize.from_trace, which a command imports only when it runs
STEPS = "tokens-per-step"
OBJECTIVES = ("expected-accepted", "mixture", "robust", STEPS, "typical")
PROGRAMS = ("robust", "typical")  # solved by an integer program, as are these limits under some models
PROGRAM_LIMITS = {"max_children", "level_caps", "max_leaves", "dense_siblings", "level_regular", "must_include"}


@click.command()
@click.argument("source", required=False, metavar="[TRACE|TABLE]", type=click.Path(dir_okay=False))
@limit_options
@click.option(
    "--for",
    "engine_name",
    metavar="ENGINE",
    help="Build within what another decoder can take; see treeopt export --list.",
)
@set_option
@latency_options
@click.option(
    "--model", type=click.Choice(MODELS), default=MODELS[0], show_default=True,
    help="How likely a path is: from each head's accuracy alone, or from counts of whole paths in the trace, shrunk "
    "toward the former as far as held-out documents say.",
)  # fmt: skip
@click.option(
    "--objective", type=click.Choice(OBJECTIVES), default=OBJECTIVES[0], show_default=True,
    help="What to maximise: E[L] over all positions, over domains by --weight, in the worst domain, the replayed tokens a "
    "step, or E[L] under typical acceptance.",
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
    nodes: int | None,
    engine_name: str | None,
    settings: tuple[str, ...],
    latency: str | None,
    latency_model: str | None,
    batch: int,
    context: int | None,
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
        treeopt build trace.safetensors --nodes auto --latency latency.json
        treeopt build trace.safetensors --for vllm -o tree.json
    """
    from treeopt.auto import auto_budget
    from treeopt.document import to_bytes, write_tree
    from treeopt.show import describe_tree

    if (nodes is None) != (latency is not None):
        raise click.UsageError("--nodes auto and --latency belong together; give both or neither")
    engine = EngineLimits.of(engine_name, settings)
    limits = engine.join(limits_of(options, 1 if nodes is None else nodes), named_limits(click.get_current_context()))
    path = _source(source)
    aim = _aim(model, objective, weights, epsilon, delta)
    recipe: TraceRecipe | TableRecipe
    if kind_of(path) == "trace":
        recipe = TraceRecipe(path, aim, objective == STEPS, limits, seed)
    else:
        given = {"--model": model != MODELS[0], "--objective": objective != OBJECTIVES[0], "--compare": with_comparison}
        recipe = TableRecipe(path, limits, [name for name, is_given in given.items() if is_given])
    if objective in PROGRAMS or PROGRAM_LIMITS.intersection(limits.active):
        click.echo("searching: at most a minute, and as long again for each limit whose cost is stated", err=True)
    parts = []
    num_nodes = limits.num_nodes
    if latency is not None:
        choice = auto_budget(recipe.build, curve_of(latency, latency_model, batch, context), recipe.trace)
        parts.append(describe_choice(choice))
        num_nodes = choice.num_nodes
    built, notes = engine.build(recipe, num_nodes)
    parts.append("\n".join([describe_tree(built, draw=False), *notes, *recipe.notes(built)]))
    if with_comparison:
        parts.append(recipe.compare(num_nodes))
    summary = "\n\n".join(parts)
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
        objective=OBJECTIVES[0] if objective == STEPS else objective,
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
