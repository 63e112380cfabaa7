"""The parts of a report, each a section of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from treeopt.budget import BudgetChoice
from treeopt.curves import NodeCurve, rank_curves
from treeopt.drift import Drift
from treeopt.latency import LatencyCurve
from treeopt.report.charts import accuracy_charts, node_chart, speed_chart, step_chart
from treeopt.report.markup import Markup, element, estimate, joined, table
from treeopt.show import TOPS, head_rows
from treeopt.sidebyside import TreeRow
from treeopt.trace import RankTrace

__all__ = [
    "accuracies",
    "calibrated",
    "commands",
    "comparison",
    "drifted",
    "machine",
    "nodes",
    "section",
]

NUM_RANKS = 10
DOMAINS_A_TABLE = 8  # columns that fit on paper
TEXTS = {"generated": "The target wrote the documents itself", "dataset": "The documents were given"}
KNOWN = (
    ("target", "target"), ("target_hash", "hash of its weights"), ("heads", "heads"), ("heads_hash", "hash of the heads"),
    ("prompts_hash", "hash of the prompts"), ("continuations", "text"), ("max_new_tokens", "tokens a prompt, at most"),
    ("dtype", "number format"), ("acceptance_rule", "acceptance"), ("temperature", "temperature"), ("seed", "seed"),
    ("treeopt", "calibrated by treeopt"),
)  # fmt: skip


def section(title: str, *content: str | Markup) -> Markup:
    """Return a section with its heading."""
    return element("section", element("h2", title), "\n", *content)


def calibrated(name: str, trace: RankTrace) -> Markup:
    """Return what a trace was taken from and how much it holds."""
    known = dict(KNOWN)
    facts = [
        ("trace", name),
        ("documents", f"{trace.num_documents:,}"),
        ("positions", f"{trace.num_positions:,}"),
        ("heads observed", str(trace.num_heads)),
        *((told, trace.metadata[key]) for key, told in KNOWN if trace.metadata.get(key)),
        *((key, value) for key, value in sorted(trace.metadata.items()) if key not in known),
    ]
    if trace.domains is not None:
        names, counts = np.unique(np.array(trace.domains, dtype=object).astype(str), return_counts=True)
        facts.append(("domains", ", ".join(f"{name or 'none'} {count}" for name, count in zip(names, counts))))
    wrote = TEXTS.get(trace.metadata.get("continuations", ""), "The target read the documents")
    rows = joined(joined([element("dt", told), element("dd", value)]) for told, value in facts)
    return section(
        "What was calibrated",
        element(
            "p",
            f"{wrote}; at every position each head's guesses were ranked, and the rank of the token that really came was "
            "kept. Everything below follows from these ranks.",
        ),
        element("dl", rows),
    )


def accuracies(trace: RankTrace, seed: int) -> Markup:
    """Return how often each head is right, as a table and charts."""
    header = [
        "head",
        "guesses token",
        "positions",
        *(f"one of its first {top}" if top > 1 else "its first guess" for top in TOPS),
    ]
    rows = [
        [
            str(row["head"]), str(row["head"] + 2), f"{row['positions']:,}",
            *(estimate(*row[f"top_{top}"]) for top in TOPS),
        ]
        for row in head_rows(trace, seed=seed)
    ]  # fmt: skip
    alone, together = (rank_curves(trace, NUM_RANKS, together=sums, seed=seed) for sums in (False, True))
    return section(
        "How often the heads are right",
        element("p", "Token 1 is the target's own. In brackets, and as bars: 95 % intervals over documents."),
        element("div", *accuracy_charts(alone, together), class_="charts"),
        table(header, rows, caption="Share of positions at which the right token is among a head's guesses"),
    )


def nodes(curve: NodeCurve, chosen: int) -> Markup:
    """Return what more nodes bring."""
    return section(
        "What more nodes bring",
        element(
            "p",
            "Each tree is the best of its size under independent heads. Predicted is 1 + E[L], the sum of the probabilities of "
            "all paths, over all positions alike. Replayed counts the exact steps of greedy decoding on the trace; decoding "
            "jumps over what it accepts, so it stands more often at hard positions. The band is the 95 % interval over "
            "documents.",
        ),
        element("div", node_chart(curve, chosen), class_="charts"),
    )


def machine(curve: LatencyCurve, choice: BudgetChoice, metadata: Mapping[str, str]) -> Markup:
    """Return step times, tokens a second and the budget that they choose."""
    verdict = (
        "Do not speculate here: plain decoding gives the most tokens per second."
        if choice.num_nodes == 1
        else f"{choice.num_nodes} nodes give the most tokens per second: {choice.speedup:.2f} times those of plain decoding, predicted."
    )
    shown = [i for i, n in enumerate(choice.nodes.tolist()) if n & (n - 1) == 0 or i == choice.best]
    speeds = choice.tokens_per_second
    rows = [
        [
            f"{choice.nodes[i]}{' (most)' if i == choice.best else ''}", f"{choice.tokens_per_step[i]:.3f}",
            f"{1e3 * choice.seconds[i]:.2f}", f"{speeds[i]:.1f}", f"{speeds[i] / speeds[0]:.3f}",
        ]
        for i in shown
    ]  # fmt: skip
    told = ", ".join(f"{key} {value}" for key, value in metadata.items() if value)
    return section(
        "On this machine",
        element("p", verdict, class_="lead"),
        element("p", f"Step times at batch {curve.batch}, after {curve.context:,} token{'s' * (curve.context != 1)}. {told}", class_="note"),
        element("div", step_chart(curve), speed_chart(choice, curve.max_nodes), class_="charts"),
        table(
            ["nodes", "tokens per step", "ms a step", "tokens / s", "times plain"], rows,
            caption="Steps include drafting; tokens per step are replayed",
        ),
    )  # fmt: skip


def comparison(rows: Sequence[TreeRow]) -> Markup:
    """Return trees beside each other, overall and by domain."""
    timed = any(row.speedup is not None for row in rows)
    header = ["tree", "nodes", "depth", "tokens per step", "more than the chain", *(["times plain"] if timed else [])]
    lines = [
        [
            row.name, str(row.num_nodes), str(row.max_depth), estimate(row.tokens_per_step, row.low, row.high),
            estimate(row.gain, row.gain_low, row.gain_high, "+") if i else "",
            *(["not measured" if row.speedup is None else f"{row.speedup:.2f}"] if timed else []),
        ]
        for i, row in enumerate(rows)
    ]  # fmt: skip
    domains = sorted(rows[0].domains)
    parts = [table(header, lines, caption="Replayed on the trace, 95 % intervals over the same documents in brackets")]
    for start in range(0, len(domains), DOMAINS_A_TABLE):
        some = domains[start : start + DOMAINS_A_TABLE]
        by_domain = [[row.name, *(f"{row.domains[domain]:.2f}" for domain in some)] for row in rows]
        named = [domain or "none" for domain in some]
        parts.append(table(["tree", *named], by_domain, caption="Tokens per step by domain"))
    return section("Beside other trees", *parts)


def drifted(name: str, drift: Drift, num_nodes: int) -> Markup:
    """Return whether heads guess otherwise than on a reference."""
    named = ", ".join(map(str, drift.significant))
    verdict = f"Heads {named} differ beyond chance." if named else "No head differs beyond chance."
    rows = [
        [
            str(head.head), *(estimate(*difference, "+") for difference in head.differences),
            f"{head.effect_size:+.3f}", f"{head.p_value:.4f}",
        ]
        for head in drift.heads
    ]  # fmt: skip
    gain = drift.gain
    return section(
        "Drift",
        element("p", f"{verdict} Compared with {name}, at 5 % shared among the heads.", class_="lead"),
        table(
            ["head", "its first guess", "one of its first 3", "one of its first 10", "effect size h", "p"], rows,
            caption="Accuracy on this trace minus that on the reference, 95 % intervals in brackets",
        ),
        element(
            "p",
            f"Building {num_nodes} nodes anew changes tokens per step on left-out documents by {gain.value:+.4f} "
            f"({gain.low:+.4f} … {gain.high:+.4f}).",
        ),
    )  # fmt: skip


def commands(lines: Sequence[str]) -> Markup:
    """Return the commands that make the page again."""
    return section("Make it again", element("pre", element("code", "\n".join(lines))))
