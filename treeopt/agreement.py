"""Whether the replay of a trace and the verifier's own steps agree, document by document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treeopt.calibrate.continuations import Continuation
from treeopt.calibrate.observe import Candidates, batches, observe
from treeopt.calibrate.run import OBSERVED_TOKENS
from treeopt.heads.medusa import MedusaHeads
from treeopt.replays import replay
from treeopt.targets.forward import Forward
from treeopt.targets.loading import LoadedTarget
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree
from treeopt.verify.texts import Decoded

__all__ = ["Disagreement", "replay_disagreements", "trace_of"]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A document whose replay takes other steps than the verifier took.

    Attributes
    ----------
    document : str
    replayed, counted : int
        Steps.
    """

    document: str
    replayed: int
    counted: int


def trace_of(target: LoadedTarget, heads: MedusaHeads, documents: Sequence[Continuation]) -> RankTrace:
    """Return the heads' ranks along documents, in their order.

    Parameters
    ----------
    target : LoadedTarget
    heads : MedusaHeads
    documents : sequence of Continuation
    """
    forward = Forward(target.model)
    ranks: dict[str, np.ndarray] = {}
    with torch.inference_mode():
        for batch in batches(documents, OBSERVED_TOKENS):
            for document, observation in zip(batch, observe(forward, heads, batch, Candidates())):
                ranks[document.prompt_id] = observation.ranks.cpu().numpy()
    rows = [ranks[document.prompt_id] for document in documents]
    return RankTrace(np.concatenate(rows), np.concatenate([[0], np.cumsum([len(row) for row in rows])]))


def replay_disagreements(
    tree: DraftTree, trace: RankTrace, documents: Sequence[Continuation], decoded: Sequence[Decoded]
) -> list[Disagreement]:
    """Return the documents of which replay and verifier count other steps; none if all is well.

    Parameters
    ----------
    tree : DraftTree
    trace : RankTrace
        Of the documents.
    documents : sequence of Continuation
    decoded : sequence of Decoded
        What the verifier gave for each document with the tree.
    """
    steps = replay(tree, trace).steps.tolist()
    return [
        Disagreement(document.prompt_id, replayed, row.num_steps)
        for document, replayed, row in zip(documents, steps, decoded)
        if replayed != row.num_steps
    ]
