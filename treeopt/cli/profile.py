"""treeopt profile: how long a step of the verifier takes on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from treeopt.cli.limits import Numbers
from treeopt.cli.options import attention_option, load_models, require_torch, target_options

__all__ = ["profile"]


@click.command()
@target_options
@click.option(
    "--nodes", type=Numbers(), default="1,2,4,8,16,32,64,128,256,512", show_default=True,
    help="Budgets to time, root included; 1 is plain decoding.",
)  # fmt: skip
@click.option("--batch", "batches", type=Numbers(), default="1", show_default=True, help="Sequences decoded together.")
@click.option(
    "--context", "contexts", type=Numbers(), default="128,1024", show_default=True, help="Tokens before the tree."
)
@click.option("--repeats", type=click.IntRange(3), default=9, show_default=True, help="Timed steps of each budget.")
@attention_option
@click.option(
    "--trace", type=click.Path(dir_okay=False), help="Time the best trees of this trace.  [default: the bundled one]"
)
@click.option("-o", "--output", default="latency.json", show_default=True, type=click.Path(dir_okay=False))
def profile(
    target: str,
    heads_name: str | None,
    device: str,
    device_map: str | None,
    dtype: str,
    nodes: tuple[int, ...],
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    repeats: int,
    attention: str,
    trace: str | None,
    output: str,
) -> None:
    """Time one step of the verifier for trees of many sizes, and of plain decoding, on this machine.

    Every pair of batch and context gives a curve: medians of steps that are timed in turn. Finished curves are kept in
    OUTPUT.partial, so that an interrupted run goes on where it was. The file is read by build --nodes auto and explain.

    \b
    Example:
        treeopt profile --batch 1,4 --context 128,1024 -o latency.json
    """
    require_torch("treeopt profile")
    from treeopt.bundled import DEMO_TRACE, calibration_path
    from treeopt.optimize import best_tree
    from treeopt.profiling import ProfileSettings
    from treeopt.profiling import profile as measure
    from treeopt.show import describe_latency
    from treeopt.trace import RankTrace

    loaded, heads, _ = load_models(target, heads_name, device, dtype, device_map)
    table = RankTrace.read(trace or calibration_path(DEMO_TRACE)).table()
    largest = best_tree(table, max(nodes), max_depth=heads.num_heads)
    settings = ProfileSettings(tuple(sorted(set(nodes))), batches, contexts, repeats, attention)
    work = Path(f"{Path(output).resolve()}.partial")
    found = measure(loaded, heads, largest, settings, work)
    found.write(output)
    work.unlink()
    click.echo(describe_latency(found))
    click.echo(f"written to {output}", err=True)
