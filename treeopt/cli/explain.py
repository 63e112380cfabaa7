"""treeopt explain: whether and why a tree pays on a machine."""

from __future__ import annotations

import click

from treeopt.cli.latency import curve_of, latency_options

__all__ = ["explain"]


@click.command()
@click.argument("tree", type=click.Path(dir_okay=False))
@latency_options
@click.option(
    "--trace",
    type=click.Path(dir_okay=False),
    help="Take tokens a step from the exact replay of a trace, not from E[L].",
)
def explain(
    tree: str, latency: str | None, latency_model: str | None, batch: int, context: int | None, trace: str | None
) -> None:
    """Say whether decoding with TREE is faster than plain decoding on a measured machine, and why.

    A step with the tree gives m tokens and costs drafting and one verification; plain decoding takes m steps for them.
    The tree pays if m times a plain step takes longer.

    \b
    Example:
        treeopt explain tree.json --latency latency.json
    """
    from treeopt.document import read_tree
    from treeopt.optimize.priced import states_probabilities
    from treeopt.replays import replay
    from treeopt.trace import RankTrace

    if latency is None:
        raise click.UsageError("--latency is needed: measure one with treeopt profile")
    built = read_tree(tree)
    if trace is None and not states_probabilities(built):
        raise click.UsageError(
            f"the path probabilities of {tree} are unknown; give --trace, or import it again with one"
        )
    curve = curve_of(latency, latency_model, batch, context)
    rate = built.tokens_per_step if trace is None else replay(built.tree, RankTrace.read(trace)).tokens_per_step
    if built.tree.num_nodes > curve.max_nodes:
        raise click.UsageError(
            f"the tree has {built.tree.num_nodes} nodes and the curve ends at {curve.max_nodes}; measure further or prune"
        )
    draft = 1e3 * float(curve.drafting(built.tree.max_depth))
    verify, plain = 1e3 * float(curve.at(built.tree.num_nodes)), 1e3 * curve.plain_seconds
    ratio = rate * plain / (draft + verify)
    source = "1 + E[L]" if trace is None else "replayed"
    click.echo(
        f"m = {rate:.4f} tokens a step ({source}), {built.tree.num_nodes} nodes, {built.tree.max_depth} levels drafted\n"
        f"plain decoding of m tokens: m × {plain:.3f} ms = {rate * plain:.3f} ms\n"
        f"one step with the tree: drafting {draft:.3f} ms + verification {verify:.3f} ms = {draft + verify:.3f} ms\n"
        f"{_verdict(ratio)}; it breaks even at m = {(draft + verify) / plain:.4f}"
    )


def _verdict(ratio: float) -> str:
    if ratio > 1.0:
        return f"speculation pays: {ratio:.3f} times the tokens a second of plain decoding"
    return f"speculation does not pay: {ratio:.3f} times the tokens a second of plain decoding"
