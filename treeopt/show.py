"""Trees and traces as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from treeopt.acceptance import AcceptanceTable
from treeopt.heldout import Comparison, Estimate
from treeopt.intervals import ratio_interval
from treeopt.latency import LatencyTable
from treeopt.optimize.built import BuiltTree
from treeopt.optimize.priced import states_probabilities
from treeopt.replays import Replay
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree

__all__ = [
    "aligned",
    "describe_comparison",
    "describe_replay",
    "describe_table",
    "describe_trace",
    "describe_tree",
    "head_rows",
]

TOPS = (1, 3, 5, 10)
# Heads are better along text that their target would say itself, so a report says whose text it is.
TEXTS = {"generated": ", along the target's own greedy text", "dataset": ", along the replies of the prompt file"}
MAX_DRAWN = 128  # nodes; larger trees are summarised by level
NOTHING = 1e-9  # a cost below is rounding
UNPRICED = (
    "path probabilities and E[L] unknown: the tree was imported without a trace or a table, and 0 stands for them"
)
CURVE_BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def describe_tree(built: BuiltTree, *, draw: bool = True) -> str:
    """Return levels, expected values, the E[L] curve and the drawn tree."""
    tree = built.tree
    lines = [
        f"{tree.num_nodes} nodes (root included), depth {tree.max_depth}, nodes at each depth: "
        + (", ".join(map(str, tree.level_widths)) or "none but the root"),
        *(_values(built) if states_probabilities(built) else [UNPRICED]),
    ]
    if built.certificate.nested:
        curve = ", ".join(f"{n}: {built.curve[n - 1]:.3f}" for n in _budgets(tree.num_nodes))
        lines.append(f"E[L] by nodes: {curve}")
    if draw and tree.num_nodes <= MAX_DRAWN:
        lines += ["", *_drawn(built)]
    elif draw:
        lines.append(f"(more than {MAX_DRAWN} nodes: not drawn)")
    return "\n".join(lines)


def describe_trace(trace: RankTrace, *, seed: int = 0) -> str:
    """Return what a trace holds and its per-head accuracies with intervals."""
    text = TEXTS.get(trace.metadata.get("continuations", ""), "")
    lines = [f"{trace.num_documents} documents, {trace.num_positions} positions, {trace.num_heads} heads{text}"]
    keys = ("target", "heads", "continuations", "dtype", "max_new_tokens")
    if stated := [f"{key} {trace.metadata[key]}" for key in keys if trace.metadata.get(key)]:
        lines.append(", ".join(stated))
    if trace.domains is not None:
        names, counts = np.unique(trace.domains, return_counts=True)
        lines.append("domains: " + ", ".join(f"{name or 'none'} {count}" for name, count in zip(names, counts)))
    if not (trace.ranks >= 0).any():
        return "\n".join([*lines, "no head was observed at any position"])
    lines += ["accuracy of each head, with 95 % intervals over documents:"]
    header = ["head", "positions", *(f"top-{top}" for top in TOPS)]
    rows = [
        [str(row["head"]), str(row["positions"]), *(_percent(row[f"top_{top}"]) for top in TOPS)]
        for row in head_rows(trace, seed=seed)
    ]
    return "\n".join([*lines, *aligned([header, *rows])])


def describe_table(table: AcceptanceTable) -> str:
    """Return the per-head accuracies of a table."""
    lines = [f"{table.num_heads} heads, {table.num_ranks} ranks"]
    header = ["head", *(f"top-{top}" for top in TOPS if top <= max(table.num_ranks, 1))]
    tops = [top for top in TOPS if top <= table.num_ranks]
    columns = [table.top(top) for top in tops]
    rows = [[str(head), *(f"{column[head]:.3f}" for column in columns)] for head in range(table.num_heads)]
    return "\n".join([*lines, *aligned([header, *rows])])


def describe_comparison(comparison: Comparison) -> str:
    """Return what left-out documents give, a line for each way to choose the tree, and how far predictions are off."""
    lines = [
        f"held-out tokens_per_step of {comparison.num_nodes} nodes: built on {comparison.num_folds - 1} of "
        f"{comparison.num_folds} parts of {comparison.num_documents} documents ({comparison.num_positions} positions), "
        "measured on the rest"
    ]
    header = ["chosen by", "predicted", "at all positions", "error", "gain", "replayed", "gain", "nodes shared"]
    rows = []
    for i, choice in enumerate(comparison.choices):
        gains = [_gain(choice.gain), _gain(choice.replayed_gain)] if i else ["", ""]
        own = [] if choice.own_value is None else [f"{choice.own_value:.4f}"]
        rows.append(
            [
                choice.name, f"{choice.predicted:.4f}", _estimated(choice.measured), f"{choice.error:+.4f}", gains[0],
                _estimated(choice.replayed), gains[1], f"{choice.shared_nodes:.1f}", *own,
            ]
        )  # fmt: skip
    own_header = [] if comparison.objective is None else [f"{comparison.objective} value"]
    replayed, averaged = comparison.splits.replayed, comparison.splits.averaged
    return "\n".join(
        [
            *lines,
            *aligned([[*header, *own_header], *rows]),
            f"built on a random half, {len(replayed)} times: the replay of that half is {np.mean(replayed):+.1%} off what the other "
            f"half takes (spread {np.std(replayed):.1%}), 1 + E[L] over its positions {np.mean(averaged):+.1%}",
        ]
    )


def describe_replay(found: Replay, *, seed: int = 0) -> str:
    """Return the exact tokens a step of greedy decoding on a trace, and how many steps accept how much."""
    low, high = found.interval(seed=seed)
    shares = ", ".join(
        f"{length}: {count / max(1, found.num_steps):.0%}" for length, count in enumerate(found.histogram)
    )
    return (
        f"replayed on the trace: {found.num_tokens} tokens in {found.num_steps} steps, tokens_per_step "
        f"{found.tokens_per_step:.4f} [{low:.4f}, {high:.4f}]; nodes accepted in a step {shares}"
    )


def describe_latency(table: LatencyTable) -> str:
    """Return the step times of every curve, with quartiles, and what each budget costs in plain steps."""
    lines = [", ".join(f"{key} {value}" for key, value in table.metadata.items())]
    for curve in table.curves:
        lines += ["", f"batch {curve.batch}, context {curve.context}: ms a step, drafting apart"]
        header = ["nodes", "verification", "quartiles of the step", "in plain steps"]
        rows = []
        for i, nodes in enumerate(curve.nodes.tolist()):
            pair = curve.quartiles[i] if curve.quartiles else None
            spread = f"[{1e3 * pair[0]:.2f}, {1e3 * pair[1]:.2f}]" if pair else ""
            rows.append(
                [str(nodes), f"{1e3 * curve.seconds[i]:.2f}", spread, f"{curve.seconds[i] / curve.plain_seconds:.2f}"]
            )
        lines += aligned([header, *rows])
        lines.append("drafting 1, 2, … levels: " + ", ".join(f"{1e3 * draft:.2f}" for draft in curve.draft_seconds))
    return "\n".join(lines)


def _estimated(estimate: Estimate) -> str:
    return f"{estimate.value:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"


def _gain(estimate: Estimate) -> str:
    return f"{estimate.value:+.4f} [{estimate.low:+.4f}, {estimate.high:+.4f}]"


def head_rows(trace: RankTrace, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return for each head its positions and top-k accuracies as (rate, low, high), for tables and JSON."""
    if not (trace.ranks >= 0).any():
        return []
    starts = trace.documents[:-1]
    nonempty = np.diff(trace.documents) > 0
    observed = _per_document(trace.ranks >= 0, starts[nonempty])
    rows: list[dict[str, Any]] = [
        {"head": head, "positions": int(observed[:, head].sum())} for head in range(trace.num_heads)
    ]
    for top in TOPS:
        hits = _per_document((trace.ranks >= 0) & (trace.ranks < top), starts[nonempty])
        low, high = ratio_interval(hits, observed, seed=seed)
        rates = hits.sum(axis=0) / np.maximum(observed.sum(axis=0), 1)
        for head, row in enumerate(rows):
            row[f"top_{top}"] = (float(rates[head]), float(low[head]), float(high[head]))
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with right-aligned columns, the first column left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    ]


def _per_document(flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return np.add.reduceat(flags.astype(np.int64), starts, axis=0)


def _percent(value: Any) -> str:
    rate, low, high = value
    return f"{rate:.3f} [{low:.3f}, {high:.3f}]"


def _values(built: BuiltTree) -> Iterator[str]:
    yield f"expected_accepted E[L] {built.expected_accepted:.4f}, tokens_per_step {built.tokens_per_step:.4f}"
    yield from _notes(built)


def _notes(built: BuiltTree) -> Iterator[str]:
    limits, proven = built.constraints, built.certificate
    if proven.noise is not None:
        within = proven.noise.nodes_within_noise
        yield f"95 % interval of E[L] over documents [{proven.noise.low:.4f}, {proven.noise.high:.4f}]" + (
            f"; {within} nodes cannot be told from the best one left out" if within is not None else ""
        )
    yield from _objective_notes(built)
    if built.tree.num_nodes < limits.num_nodes:
        yield (
            f"{limits.num_nodes} nodes were asked for, {built.tree.num_nodes} exist: no other path within the limits has "
            "a probability above 0"
            if not set(limits.active) - {"max_depth", "max_rank", "rank_caps"}
            else f"{limits.num_nodes} nodes were asked for; within the limits no tree of more than {built.tree.num_nodes} is better"
        )
    for name in limits.active:
        cost = proven.constraint_costs.get(name, 0.0)
        told = f"costs {cost:.4f} of {_valued(built)}" if cost > NOTHING else "does not bind"
        yield f"{_option(name, getattr(limits, name))} {told}"
    if len(limits.active) > 1:
        yield f"all limits together cost {max(0.0, proven.unconstrained - proven.value):.4f} of {_valued(built)}"


def _objective_notes(built: BuiltTree) -> Iterator[str]:
    proven = built.certificate
    if proven.objective == "typical":
        yield f"under typical acceptance E[L] {proven.value:.4f} on the trace, tokens_per_step {1 + proven.value:.4f}"
    if proven.objective == "tokens_per_step":
        yield f"chosen by replay: tokens_per_step {1 + proven.value:.4f} on the trace; no tree is claimed to be the best of all"
        return
    if proven.objective == "robust":
        worst = min(proven.parts, key=lambda name: proven.parts[name])
        yield f"in its worst domain, {worst}, E[L] {proven.value:.4f}"
    if proven.parts:
        yield "E[L] by domain: " + ", ".join(f"{name} {value:.4f}" for name, value in sorted(proven.parts.items()))
    if proven.optimal:
        yield f"proven optimal: no tree within the limits has more {_valued(built)} under this model"
    else:
        yield f"not proven optimal: no tree within the limits has more than {proven.bound:.4f} of {_valued(built)}"


def _valued(built: BuiltTree) -> str:
    return {"typical": "typical E[L]", "robust": "worst-domain E[L]"}.get(built.certificate.objective, "E[L]")


def _option(name: str, value: object) -> str:
    """Write a limit as the command line takes it."""
    flag = "--" + name.replace("_", "-")
    if value is True:
        return flag
    if name == "must_include" and isinstance(value, tuple):
        return " ".join(f"{flag} {','.join(map(str, path))}" for path in value)
    return f"{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


def _budgets(num_nodes: int) -> list[int]:
    return sorted({n for n in CURVE_BUDGETS if n <= num_nodes} | {num_nodes})


def _drawn(built: BuiltTree) -> Iterator[str]:
    """Draw the tree: a line a node, its rank and the probability of its whole path."""
    tree = built.tree
    children = _children(tree)

    def draw(node: int, indent: str) -> Iterator[str]:
        for i, child in enumerate(children[node]):
            last = i == len(children[node]) - 1
            yield f"{indent}{'└' if last else '├'}─ {tree.ranks[child]}  {built.path_probabilities[child]:.4f}"
            yield from draw(child, indent + ("   " if last else "│  "))

    yield "root"
    yield from draw(0, "")


def _children(tree: DraftTree) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
    for node, parent in enumerate(tree.parents[1:].tolist(), 1):
        children[parent].append(node)
    return children
