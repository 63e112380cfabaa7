"""One step on the device: draft, verify, accept, compact. Nothing in it waits for the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treeopt.attention.passes import Pass
from treeopt.heads.medusa import MedusaHeads
from treeopt.targets.cache import RowCache
from treeopt.targets.forward import Forward
from treeopt.tree import DraftTree
from treeopt.verify.acceptance import Acceptance, AcceptedPaths, NodeScores, Processors, TreeIndex

__all__ = ["Drafter", "State", "Step", "StepOutcome"]


@dataclass(frozen=True, eq=False, slots=True)
class State:
    """Where the rows of a batch stand.

    Attributes
    ----------
    lengths : Tensor of int64, shape (rows,)
        Slots of the cache that hold the prefix; the root comes behind it.
    roots : Tensor of int64, shape (rows,)
        The token that the target has decided last.
    hidden : Tensor, shape (rows, hidden)
        The state it was decided from, which the heads read.
    """

    lengths: Tensor
    roots: Tensor
    hidden: Tensor

    def rows(self, kept: Sequence[int]) -> State:
        """Return the state of some rows."""
        index = torch.tensor(kept, device=self.roots.device)
        return State(self.lengths[index], self.roots[index], self.hidden[index])


@dataclass(frozen=True, eq=False, slots=True)
class StepOutcome:
    """What a step gave.

    Attributes
    ----------
    state : State
        The next one.
    accepted : AcceptedPaths
    tokens : Tensor of int64, shape (rows, nodes)
        Of the nodes.
    table : Tensor of int64, shape (rows, max_depth + 2)
        Accepted nodes, bonus token, tokens along the accepted path without the root: all that the host reads.
    """

    state: State
    accepted: AcceptedPaths
    tokens: Tensor
    table: Tensor


class Drafter:
    """The tokens of a tree's nodes, from the heads' guesses.

    Parameters
    ----------
    heads : MedusaHeads
    tree : DraftTree
    device : torch.device
    """

    def __init__(self, heads: MedusaHeads, tree: DraftTree, device: torch.device) -> None:
        self.heads = heads
        levels = [tree.ranks[tree.depths == depth] for depth in range(1, tree.max_depth + 1)]
        self._ranks = [int(ranks.max()) + 1 for ranks in levels]
        # Drafts of all depths stand side by side in one row; each node reads its place in it.
        offsets = np.concatenate([[0], np.cumsum(self._ranks)])
        places = [offsets[d - 1] + r for d, r in zip(tree.depths[1:].tolist(), tree.ranks[1:].tolist())]
        self._places = torch.tensor(places, dtype=torch.int64, device=device)

    def guesses(self, hidden: Tensor, depth: int | None = None) -> list[Tensor]:
        """Return the guesses of the first `depth` levels, of all by default."""
        return self.heads.draft(hidden, self._ranks[:depth])

    def __call__(self, roots: Tensor, hidden: Tensor) -> Tensor:
        """Return the tokens of the nodes, (rows, nodes)."""
        guesses = self.guesses(hidden)
        if not guesses:
            return roots[:, None]
        return torch.cat([roots[:, None], torch.cat(guesses, dim=1)[:, self._places]], dim=1)


class Step:
    """A step of tree decoding with one tree and one rule.

    Parameters
    ----------
    forward : Forward
    draft : Drafter
    index : TreeIndex
    rule : Acceptance
    """

    def __init__(self, forward: Forward, draft: Drafter, index: TreeIndex, rule: Acceptance) -> None:
        self.forward, self.draft, self.index, self.rule = forward, draft, index, rule

    def __call__(
        self,
        cache: RowCache,
        state: State,
        span: int,
        start: int | None = None,
        processors: Processors | None = None,
        texts: Sequence[Tensor] = (),
    ) -> StepOutcome:
        """Take a step in the first rows of the cache.

        Parameters
        ----------
        cache : RowCache
        state : State
        span : int
            Slots handed to attention; at least the longest prefix and the tree.
        start : int, optional
            The prefix length, where it is the same in every row.
        processors, texts
            See `NodeScores`.
        """
        index = self.index
        num_rows = len(state.roots)
        tokens = self.draft(state.roots, state.hidden)  # [rows, nodes]
        at = Pass(state.lengths, index.depths, index.mask, span, start, causal=False, words=index.words)
        hidden = self.forward.hidden(tokens, at, cache.at(at, slice(0, num_rows)))
        scores = NodeScores(
            self.forward.logits(hidden), tokens, index, self.forward.scaled, self.forward.exact, processors, texts
        )
        accepted = self.rule.accept(scores)
        path = index.paths[accepted.nodes]  # [rows, max_depth + 1]
        if index.max_depth:
            # The root stays where it is; the rest of the path moves up to follow it.
            cache.keep(state.lengths[:, None] + path[:, 1:], state.lengths + 1)
        rows = torch.arange(num_rows, device=tokens.device)
        return StepOutcome(
            State(state.lengths + accepted.lengths + 1, accepted.bonus, hidden[rows, accepted.nodes]),
            accepted,
            tokens,
            torch.cat([accepted.lengths[:, None], accepted.bonus[:, None], tokens.gather(1, path)[:, 1:]], dim=1),
        )
