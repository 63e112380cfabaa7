"""Where `treeopt build` takes its trees from: a trace, or a table of accuracies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from treeopt.errors import AcceptanceError

if TYPE_CHECKING:
    from treeopt.optimize import BuiltTree
    from treeopt.optimize.from_trace import Aim
    from treeopt.optimize.limits import Limits
    from treeopt.trace import RankTrace

__all__ = ["TableRecipe", "TraceRecipe", "file_hash", "trace_provenance"]

TRACE_KEYS = ("target", "target_hash", "heads", "heads_hash", "prompts_hash", "continuations", "dtype")
MAX_HINTED_NODES = 512  # for larger trees the hint would take longer than the search


class TraceRecipe:
    """Trees from a trace.

    Parameters
    ----------
    path : Path
    aim : Aim
    by_steps : bool
        Whether trees are chosen by replayed tokens a step instead of the aim's objective.
    limits : Limits
        Whose budget is replaced by each tree's.
    seed : int
    """

    def __init__(self, path: Path, aim: Aim, by_steps: bool, limits: Limits, seed: int) -> None:
        from treeopt.trace import RankTrace

        self.aim, self.by_steps, self.limits, self.seed = aim, by_steps, limits, seed
        self.trace: RankTrace = RankTrace.read(path)
        self.provenance = trace_provenance(self.trace.metadata, file_hash(path))

    def build(self, num_nodes: int, *, certify: bool = False) -> BuiltTree:
        """Return the tree of a budget."""
        from treeopt.optimize.from_trace import tree_from_trace
        from treeopt.visited import tree_for_steps

        limits = replace(self.limits, num_nodes=num_nodes)
        if self.by_steps:
            return tree_for_steps(self.trace, limits, self.aim.model, seed=self.seed, provenance=self.provenance)[0]
        return tree_from_trace(
            self.trace, limits, self.aim, seed=self.seed, provenance=self.provenance, certify=certify
        )

    def notes(self, built: BuiltTree) -> list[str]:
        """Return what the trace says of a tree beyond its certificate."""
        from treeopt.heldout import MIN_DOCUMENTS, steps_gain
        from treeopt.replays import replay
        from treeopt.show import describe_replay

        lines = [describe_replay(replay(built.tree, self.trace), seed=self.seed)]
        hinted = built.tree.num_nodes <= MAX_HINTED_NODES and self.trace.num_documents >= MIN_DOCUMENTS
        if hinted and not self.by_steps and self.aim.objective == "expected-accepted":
            gain = steps_gain(self.trace, built.constraints, self.aim.model, seed=self.seed)
            if gain.low > 0.0:
                lines.append(
                    f"--objective tokens-per-step would give {gain.value:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}] "
                    "tokens_per_step on left-out documents"
                )
        return lines

    def compare(self, num_nodes: int) -> str:
        """Return the held-out comparison at a budget."""
        from treeopt.heldout import compare_ways
        from treeopt.show import describe_comparison

        limits = replace(self.limits, num_nodes=num_nodes)
        return describe_comparison(compare_ways(self.trace, limits, self.aim, seed=self.seed))


class TableRecipe:
    """Trees from a table of accuracies.

    Parameters
    ----------
    path : Path
    limits : Limits
        Whose budget is replaced by each tree's.
    needing_trace : sequence of str
        Options given that a table cannot serve.
    """

    trace = None

    def __init__(self, path: Path, limits: Limits, needing_trace: Sequence[str]) -> None:
        from treeopt.acceptance import AcceptanceTable

        if needing_trace:
            raise AcceptanceError(
                f"`{needing_trace[0]}` needs a trace, and `{path}` is a table of accuracies; make a trace with treeopt "
                "calibrate"
            )
        self.limits, self.table = limits, AcceptanceTable.read(path)
        self.provenance = {"source": "acceptance table", "sha256": file_hash(path), "model": "independent"}

    def build(self, num_nodes: int, *, certify: bool = False) -> BuiltTree:
        """Return the tree of a budget; a table has no documents that its certificate could resample."""
        from treeopt.optimize import best_tree_under

        return best_tree_under(replace(self.limits, num_nodes=num_nodes), self.table, provenance=self.provenance)

    def notes(self, built: BuiltTree) -> list[str]:
        """Return nothing: a table knows no more than the certificate."""
        return []

    def compare(self, num_nodes: int) -> str:
        """Return nothing: a table cannot be split."""
        return ""


def trace_provenance(metadata: Mapping[str, str], sha256: str) -> dict[str, str]:
    """Return what a tree file says of the trace it was built from."""
    stated = {key: metadata[key] for key in TRACE_KEYS if metadata.get(key)}
    return {"source": "trace", "sha256": sha256, **stated}


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
