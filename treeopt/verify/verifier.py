"""The bundled verifier: drafts a tree of tokens, checks it in one target pass, keeps what the target agrees with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from treeopt.errors import TargetError
from treeopt.heads.medusa import MedusaHeads
from treeopt.targets.cache import RowCache
from treeopt.targets.forward import Forward
from treeopt.targets.limits import check_architecture, check_window, context_length, room_for
from treeopt.targets.loading import eos_ids
from treeopt.tree import DraftTree
from treeopt.verify.acceptance import AcceptedPaths, TreeIndex, accept_greedily

__all__ = ["Decoded", "TreeVerifier"]


@dataclass(slots=True)
class Decoded:
    """What a decode of one prompt gave.

    Attributes
    ----------
    tokens : list of int
        New tokens, up to and including the end-of-sequence token.
    accepted : list of int
        Tokens of each step less one: the accepted nodes, root excluded, up to the end of the text. The first token
        comes from the prompt's own pass, not from a step.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Verification passes."""
        return len(self.accepted)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that the steps gave, over their number."""
        return (len(self.tokens) - 1) / self.num_steps if self.accepted else 1.0


class TreeVerifier:
    """Greedy decoding with a draft tree: the target's own greedy output in fewer passes.

    Parameters
    ----------
    target : PreTrainedModel
        Any causal language model of transformers with a position for every token.
    heads : MedusaHeads
    tree : DraftTree

    Raises
    ------
    TreeError
        If the tree is deeper than there are heads, naming the nodes out of reach.
    TargetError
        If the tree ranks beyond the vocabulary, or the architecture cannot take a tree.
    """

    def __init__(self, target: PreTrainedModel, heads: MedusaHeads, tree: DraftTree) -> None:
        tree.require_heads(heads.num_heads)
        check_architecture(target)
        vocabulary = target.get_output_embeddings().weight.shape[0]
        if tree.max_rank >= vocabulary:
            raise TargetError(
                f"the tree uses rank {tree.max_rank} but the vocabulary has {vocabulary} tokens; prune it"
            )
        self.target, self.heads, self.tree = target, heads, tree
        self.eos_ids = eos_ids(target)
        self._forward = Forward(target)
        self._index = TreeIndex.of(tree, target.device)
        levels = [tree.ranks[tree.depths == depth] for depth in range(1, tree.max_depth + 1)]
        self._ranks = [int(ranks.max()) + 1 for ranks in levels]
        # Drafts of all depths stand side by side in one row; each node reads its place in it.
        offsets = np.concatenate([[0], np.cumsum(self._ranks)])
        places = [offsets[d - 1] + r for d, r in zip(tree.depths[1:].tolist(), tree.ranks[1:].tolist())]
        self._places = torch.tensor(places, dtype=torch.int64, device=target.device)

    @torch.inference_mode()
    def generate(self, input_ids: Tensor, max_new_tokens: int = 64, attention_mask: Tensor | None = None) -> Tensor:
        """Decode a batch of prompts.

        Parameters
        ----------
        input_ids : Tensor of int64, shape (batch, prompt)
        max_new_tokens : int
        attention_mask : Tensor, shape (batch, prompt), optional
            0 where a prompt is padded.

        Returns
        -------
        Tensor of int64, shape (batch, prompt + new)
            Rows that ended early are filled with the padding token, as transformers' `generate` does.
        """
        kept = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        prompts = [row[mask].tolist() for row, mask in zip(input_ids, kept)]
        decoded = self.decode(prompts, max_new_tokens)
        width = max(len(row.tokens) for row in decoded)
        padded = [row.tokens + [self._pad_id()] * (width - len(row.tokens)) for row in decoded]
        return torch.cat([input_ids, torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)], dim=1)

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 64) -> list[Decoded]:
        """Decode prompts together and report what every step accepted.

        Parameters
        ----------
        prompts : sequence of sequences of int
            Token ids, at least one each.
        max_new_tokens : int
            At least 1; fewer are made where the context ends.

        Returns
        -------
        list of Decoded
            One per prompt.

        Raises
        ------
        TargetError
            If a prompt is empty or fills the context.
        """
        if not prompts:
            return []
        limits = [room_for(self.target, len(prompt), max_new_tokens) for prompt in prompts]
        capacity = max(map(len, prompts)) + max(limits) + self.tree.num_nodes
        check_window(self.target, capacity)
        cache = RowCache(self.target, len(prompts), capacity)
        rows = [Decoded() for _ in prompts]
        states = []
        for row, prompt in enumerate(prompts):
            token, state = self.prefill(cache, row, prompt)
            rows[row].tokens.append(token)
            states.append(state)
        hidden = torch.stack(states)
        while active := [i for i, row in enumerate(rows) if not _ended(row.tokens, limits[i], self.eos_ids)]:
            accepted, tokens, after = self.step(cache, [rows[i].tokens[-1] for i in active], hidden[active], active)
            hidden[active] = after
            for i, path in zip(active, self._new_tokens(accepted, tokens)):
                emitted = _cut(path, limits[i] - len(rows[i].tokens), self.eos_ids)
                # What was accepted behind the end of the sequence leaves the cache again.
                cache.truncate(i, cache.lengths[i] - (len(path) - 1) + len(emitted))
                rows[i].accepted.append(len(emitted) - 1)
                rows[i].tokens.extend(emitted)
        return rows

    def prefill(self, cache: RowCache, row: int, prompt: Sequence[int]) -> tuple[int, Tensor]:
        """Run a prompt into a row of the cache; return the first token and the state that it was decided from."""
        device = self._forward.device
        ids = torch.tensor([list(prompt)], device=device)
        positions = torch.arange(len(prompt), device=device)[None]
        visible = (positions <= positions[0, :, None])[None]
        view = cache.at(0, len(prompt), rows=torch.tensor([row], device=device))
        last = self._forward.hidden(ids, positions, visible, view)[:, -1]
        cache.lengths[row] = len(prompt)
        return int(self._forward.logits(last).argmax(-1)), last[0]

    def step(
        self, cache: RowCache, roots: list[int], hidden: Tensor, active: list[int]
    ) -> tuple[AcceptedPaths, Tensor, Tensor]:
        """Draft, verify, accept and compact; return the accepted paths, the nodes' tokens and the next hidden states."""
        device, index = self._forward.device, self._index
        lengths = torch.tensor([cache.lengths[i] for i in active], device=device)
        tokens = self.draft(torch.tensor(roots, device=device), hidden)  # [batch, nodes]
        slots = lengths[:, None] + torch.arange(self.tree.num_nodes, device=device)
        rows = torch.tensor(active, device=device)
        view = cache.at(slots, self.tree.num_nodes, rows=None if len(active) == len(cache.lengths) else rows)
        positions = (lengths[:, None] + index.depths).clamp(max=context_length(self.target) - 1)
        states = self._forward.hidden(tokens, positions, self._visible(lengths, int(slots.max()) + 1), view)
        accepted = accept_greedily(tokens, self._forward.logits(states).argmax(-1), index)
        # The root stays where it is; the rest of the path moves up to follow it.
        kept = lengths[:, None] + index.paths[accepted.nodes][:, 1:]
        if kept.shape[1]:
            cache.keep(kept, rows, lengths + 1)
        for i, length in zip(active, accepted.lengths.tolist()):
            cache.lengths[i] += length + 1
        return accepted, tokens, states[torch.arange(len(active), device=device), accepted.nodes]

    def draft(self, roots: Tensor, hidden: Tensor, *, depth: int | None = None) -> Tensor:
        """Return the tokens of the nodes, (batch, nodes), or the guesses of the first `depth` levels alone."""
        guesses = self.heads.draft(hidden, self._ranks[:depth])
        if not guesses:
            return roots[:, None]
        if depth is not None:
            return torch.cat(guesses, dim=1)
        return torch.cat([roots[:, None], torch.cat(guesses, dim=1)[:, self._places]], dim=1)

    def _visible(self, lengths: Tensor, span: int) -> Tensor:
        """Every node sees its row's whole prefix, and of the tree itself and its ancestors: (batch, nodes, span)."""
        num_nodes = self.tree.num_nodes
        offset = torch.arange(span, device=lengths.device) - lengths[:, None]  # [batch, span]; node of each slot
        in_tree = (offset >= 0) & (offset < num_nodes)
        tree_part = self._index.mask[:, offset.clamp(0, num_nodes - 1)].movedim(0, 1)  # [batch, nodes, span]
        return torch.where(in_tree[:, None], tree_part, (offset < 0)[:, None])

    def _new_tokens(self, accepted: AcceptedPaths, tokens: Tensor) -> list[list[int]]:
        """Return each row's accepted tokens followed by the bonus token: the step's one transfer to the host."""
        path = tokens.gather(1, self._index.paths[accepted.nodes])
        table = torch.cat([accepted.lengths[:, None], accepted.bonus[:, None], path[:, 1:]], dim=1).tolist()
        return [[*row[2 : 2 + row[0]], row[1]] for row in table]

    def _pad_id(self) -> int:
        for source in (self.target.generation_config, self.target.config):
            pad = getattr(source, "pad_token_id", None)
            if pad is not None:
                return int(pad)
        return min(self.eos_ids, default=0)


def _ended(tokens: Sequence[int], limit: int, eos: Collection[int]) -> bool:
    return len(tokens) >= limit or tokens[-1] in eos


def _cut(path: Sequence[int], room: int, eos: Collection[int]) -> list[int]:
    """Return the tokens up to the end of the sequence or of the room."""
    kept = []
    for token in path[:room]:
        kept.append(token)
        if token in eos:
            break
    return kept
