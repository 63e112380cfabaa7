"""Step times of the verifier on this machine, against nodes, batch size and context."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from treeopt.attention.backends import AUTO
from treeopt.auto import nested_tree
from treeopt.calibrate.store import DocumentStore
from treeopt.errors import LatencyError
from treeopt.heads.medusa import MedusaHeads
from treeopt.latency import LatencyCurve, LatencyTable
from treeopt.optimize import BuiltTree
from treeopt.progress import Progress
from treeopt.targets.cache import RowCache
from treeopt.targets.limits import context_length
from treeopt.targets.loading import LoadedTarget, fingerprint
from treeopt.tree import DraftTree, chain
from treeopt.verify.fixed import FixedStep
from treeopt.verify.step import State
from treeopt.verify.verifier import TreeVerifier

__all__ = ["ProfileSettings", "profile"]


@dataclass(frozen=True)
class ProfileSettings:
    """What is measured.

    Attributes
    ----------
    nodes : tuple of int
        Budgets, root included, ascending; 1 is plain decoding.
    batches, contexts : tuple of int
        Every pair is measured.
    repeats : int
        Timed steps of each budget, after one that is not; the median is kept.
    attention : str
        See `TreeVerifier`.
    """

    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (128, 1024)
    repeats: int = 9
    attention: str = AUTO


def profile(
    target: LoadedTarget, heads: MedusaHeads, largest: BuiltTree, settings: ProfileSettings, work: Path
) -> LatencyTable:
    """Time one step of the bundled verifier for trees of many sizes.

    Budgets are timed in turn, so that a busy moment falls on all of them. Verification and drafting are told apart.

    Parameters
    ----------
    target : LoadedTarget
    heads : MedusaHeads
    largest : BuiltTree
        Its nested trees are what is timed; it has at least as many nodes as the largest budget.
    settings : ProfileSettings
    work : Path
        Keeps finished pairs of batch and context, so that an interrupted run goes on where it was.

    Raises
    ------
    LatencyError
        If a context and the largest tree do not fit the target.
    """
    if 1 not in settings.nodes:
        raise LatencyError("`nodes` lacks 1, plain decoding; add it")
    longest = max(settings.contexts) + max(settings.nodes)
    if longest > context_length(target.model):
        raise LatencyError(
            f"`contexts` and `nodes` reach {longest} tokens, but the target ends at {context_length(target.model)}; give less"
        )
    trees = [nested_tree(largest, n) for n in settings.nodes if n <= largest.tree.num_nodes]
    header = {
        "schema": "treeopt.profile/1",
        "target": fingerprint(target.model),
        "device": _device_name(target.model.device),
        "dtype": str(target.model.dtype),
        "nodes": [tree.num_nodes for tree in trees],
        "repeats": settings.repeats,
        "attention": settings.attention,
    }
    pairs = [(batch, context) for batch in settings.batches for context in settings.contexts]
    with DocumentStore(work, header) as kept, torch.inference_mode():
        done = sum(f"{batch} {context}" in kept for batch, context in pairs)
        with Progress("profile", total=len(pairs), done=done, unit="curves") as progress:
            for batch, context in pairs:
                if f"{batch} {context}" not in kept:
                    timer = _Timer(target, heads, trees, batch, context, settings.attention)
                    kept.append(f"{batch} {context}", [timer.measure(settings.repeats)])
                    progress.add(documents=1)
        curves = tuple(LatencyCurve.of(**kept[f"{batch} {context}"][0]) for batch, context in pairs)
    return LatencyTable(curves, _metadata(target, heads, settings))


class _Timer:
    """Verifiers of all trees over one prefix of random tokens."""

    def __init__(
        self,
        target: LoadedTarget,
        heads: MedusaHeads,
        trees: Sequence[DraftTree],
        batch: int,
        context: int,
        attention: str,
    ) -> None:
        self.batch, self.context, self.trees = batch, context, trees
        self.verifiers = [TreeVerifier(target.model, heads, tree, attention=attention) for tree in trees]
        device = target.model.device
        vocabulary = target.model.get_output_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (batch, context + 1), generator=generator)
        self.cache = RowCache(target.model, batch, context + trees[-1].num_nodes + 1)
        states = [self.verifiers[0].prefill(self.cache, row, tokens[row, :-1].tolist()) for row in range(batch)]
        lengths = torch.full((batch,), context, device=states[0].device)
        self.state = State(lengths, tokens[:, -1].to(lengths.device), torch.stack(states))
        self.synchronize: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def measure(self, repeats: int) -> dict[str, Any]:
        """Return a curve's fields."""
        calls = [self._step(verifier) for verifier in self.verifiers]
        deepest = self.verifiers[-1]
        depths = range(1, self.trees[-1].max_depth + 1)
        calls += [lambda d=d: deepest.guesses(self.state.hidden, d) for d in depths]  # type: ignore[misc]
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(repeats + 1):
            for call, taken in zip(calls, times):
                self.synchronize()
                start = time.perf_counter()
                call()
                self.synchronize()
                if turn:
                    taken.append(time.perf_counter() - start)
        medians = [statistics.median(taken) for taken in times]
        steps, drafts = medians[: len(self.trees)], medians[len(self.trees) :]
        # What drafting took is priced by depth; the rest of a step is verification.
        verified = [max(step - ([0.0, *drafts][tree.max_depth]), 0.1 * step) for step, tree in zip(steps, self.trees)]
        return {
            "nodes": [tree.num_nodes for tree in self.trees],
            "seconds": verified,
            "plain_seconds": steps[0],
            "draft_seconds": drafts,
            "batch": self.batch,
            "context": self.context,
            "quartiles": [_quartiles(taken) for taken in times[: len(self.trees)]],
        }

    def _step(self, verifier: TreeVerifier) -> Callable[[], object]:
        """Return what a decode does once a step: the pass, and the one transfer of what was accepted."""
        if not verifier.captures:
            span = self.context + verifier.tree.num_nodes
            return lambda: verifier.step(self.cache, self.state, span, self.context).table.tolist()
        fixed = FixedStep(verifier.step, self.cache, self.state, capture=True)

        def captured() -> object:
            fixed.begin(self.state)
            return fixed().tolist()

        return captured


def _quartiles(taken: Sequence[float]) -> list[float]:
    low, _, high = statistics.quantiles(taken, n=4) if len(taken) > 1 else [taken[0]] * 3
    return [low, high]


def _metadata(target: LoadedTarget, heads: MedusaHeads, settings: ProfileSettings) -> dict[str, str]:
    return {
        "target": target.name,
        "target_hash": fingerprint(target.model),
        "device": _device_name(target.model.device),
        "threads": str(torch.get_num_threads()),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "attention": TreeVerifier(target.model, heads, chain(0), attention=settings.attention).attention,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "repeats": str(settings.repeats),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
