"""The bundled verifier: drafts a tree of tokens, checks it in one target pass, keeps what the target agrees with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treeopt.attention.backends import AUTO
from treeopt.attention.passes import Pass
from treeopt.errors import TargetError, first_line
from treeopt.heads.medusa import MedusaHeads
from treeopt.targets.cache import RowCache
from treeopt.targets.forward import Forward
from treeopt.targets.limits import check_architecture, check_frequencies, room_for, window_of
from treeopt.targets.loading import eos_ids
from treeopt.targets.placement import is_spread
from treeopt.tree import DraftTree, chain
from treeopt.verify.acceptance import Acceptance, Greedy, NodeScores, Processors, TreeIndex
from treeopt.verify.fixed import FixedStep
from treeopt.verify.selfcheck import check_target
from treeopt.verify.step import Drafter, State, Step
from treeopt.verify.texts import Decoded, Heard, Stop, Texts, padded, paths_of, unpadded

__all__ = ["TreeVerifier"]

CAPACITY_UNIT = 1024  # slots; a captured step serves every text that fits the same number of units


class TreeVerifier:
    """Decoding with a draft tree: under greedy acceptance the target's own greedy output, in fewer passes.

    Parameters
    ----------
    target : PreTrainedModel
        Any causal language model of transformers with a position for every token.
    heads : MedusaHeads
    tree : DraftTree
    acceptance : Acceptance
        `Greedy()`, `Typical(...)` or `Sample(...)`.
    attention : {'auto', 'triton', 'flex', 'sdpa', 'eager', 'native'}
        The backend to be tried first; see `attention` for the one in use and `refused` for those that cannot serve.
    cuda_graph : bool
        Whether to capture a step as a CUDA graph, on one GPU and where the rule draws no random numbers.

    Attributes
    ----------
    captures : bool
        Whether decoding without processors runs a captured step.

    Raises
    ------
    TreeError
        If the tree is deeper than there are heads, naming the nodes out of reach.
    TargetError
        If the tree ranks beyond the vocabulary, the architecture cannot take a tree, or a tree pass gives other logits
        than sequential forwards.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        heads: MedusaHeads,
        tree: DraftTree,
        *,
        acceptance: Acceptance | None = None,
        attention: str = AUTO,
        cuda_graph: bool = True,
    ) -> None:
        tree.require_heads(heads.num_heads)
        check_architecture(target)
        if tree.max_rank >= heads.vocabulary:
            raise TargetError(
                f"the tree uses rank {tree.max_rank} but the vocabulary has {heads.vocabulary} tokens; prune it"
            )
        self.target, self.heads, self.tree = target, heads, tree
        self.acceptance = Greedy() if acceptance is None else acceptance
        self.eos_ids = eos_ids(target)
        self._forward = Forward(target, attention)
        check_target(self._forward)
        self._index = TreeIndex.of(tree, self._forward.device)
        self._root = TreeIndex.of(chain(0), self._forward.device)
        self._draft = Drafter(heads, tree, self._forward.device)
        self.step = Step(self._forward, self._draft, self._index, self.acceptance)
        on_one_gpu = target.device.type == "cuda" and not is_spread(target)
        self.captures = cuda_graph and on_one_gpu and not self.acceptance.random
        self._fixed: FixedStep | None = None
        self._fixed_with: list[object] = []

    @property
    def attention(self) -> str:
        """The attention backend in use."""
        return self._forward.attention

    @property
    def refused(self) -> dict[str, str]:
        """Why the backends before it are not in use."""
        return self._forward.refused

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
        decoded = self.decode(unpadded(input_ids, attention_mask), max_new_tokens)
        return padded(input_ids, [row.tokens for row in decoded], self.pad_id())

    @torch.inference_mode()
    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 64,
        *,
        processors: Processors | None = None,
        shown: Sequence[Sequence[int]] | None = None,
        stop: Stop | None = None,
        heard: Heard | None = None,
    ) -> list[Decoded]:
        """Decode prompts together and report what every step accepted.

        Parameters
        ----------
        prompts : sequence of sequences of int
            Token ids, at least one each.
        max_new_tokens : int
            At least 1; fewer are made where the context ends.
        processors : callable, optional
            Logits processors of transformers; each is given the text that leads to a node, the node included.
        shown : sequence of sequences of int, optional
            What processors see in the place of each prompt: a padded row, say. The prompts by default.
        stop : callable, optional
            Asked at every new token, see `Stop`, beside the target's end-of-sequence tokens.
        heard : callable, optional
            Called with a row and its new tokens as soon as they are decided.

        Returns
        -------
        list of Decoded
            One per prompt.

        Raises
        ------
        TargetError
            If a prompt is empty or fills the context.
        """
        prompts = [list(map(int, prompt)) for prompt in prompts]  # rows of a tensor, too
        if not len(prompts):
            return []
        limits = [room_for(self.target, len(prompt), max_new_tokens) for prompt in prompts]
        captured = self.captures and processors is None
        capacity = self._capacity(max(map(len, prompts)) + max(limits) + self.tree.num_nodes, captured)
        check_frequencies(self.target, min(map(len, prompts)), capacity)
        self._forward.reserve(capacity)
        check_target(self._forward)
        decode = Texts(prompts, shown or prompts, limits, self.eos_ids, processors, stop, heard, self._forward.device)
        cache = self._cache(len(prompts), capacity, captured)
        states = [self._begin(cache, row, decode) for row in range(len(prompts))]
        device = self._forward.device
        state = State(
            torch.tensor([len(prompt) for prompt in prompts], device=device),
            torch.tensor([row.tokens[-1] for row in decode.rows], device=device),
            torch.stack(states),
        )
        if captured:
            self._finish_fixed(cache, state, decode)
        else:
            self._finish(cache, state, decode)
        return decode.rows

    def guesses(self, hidden: Tensor, depth: int | None = None) -> list[Tensor]:
        """Return the heads' guesses for the first `depth` levels of the tree, of all by default."""
        return self._draft.guesses(hidden, depth)

    def prefill(self, cache: RowCache, row: int, prompt: Sequence[int]) -> Tensor:
        """Run a prompt into a row of the cache; return the last hidden state, which decides the first token."""
        device = self._forward.device
        at = Pass.text(1, len(prompt), device)
        ids = torch.tensor([list(prompt)], device=device)
        last = self._forward.hidden(ids, at, cache.at(at, slice(row, row + 1)))[0, -1]
        cache.lengths[row] = len(prompt)
        return last

    def first_token(self, hidden: Tensor, prompt: Sequence[int], processors: Processors | None = None) -> int:
        """Return the token behind a prompt: acceptance in a tree of its last token alone."""
        text = torch.tensor(list(prompt), device=hidden.device)
        scores = NodeScores(
            self._forward.logits(hidden)[None, None],
            text[None, -1:],
            self._root,
            self._forward.scaled,
            self._forward.exact,
            processors,
            [text[:-1]],
        )
        return int(self.acceptance.accept(scores).bonus)

    def _begin(self, cache: RowCache, row: int, decode: Texts) -> Tensor:
        hidden = self.prefill(cache, row, decode.prompts[row])
        decode.take(row, [self.first_token(hidden, decode.shown[row], decode.processors)])
        return hidden

    def _finish(self, cache: RowCache, state: State, decode: Texts) -> None:
        """Step until every row has ended; the going rows are the first of the cache, so that none is copied for a step."""
        going = list(range(len(decode.rows)))
        while True:
            kept = [place for place, row in enumerate(going) if not decode.ended[row]]
            if not kept:
                return
            if len(kept) < len(going):
                for place, source in enumerate(kept):
                    if place != source:
                        cache.move(source, place)
                going, state = [going[place] for place in kept], state.rows(kept)
            lengths = cache.lengths[: len(going)]
            outcome = self.step(
                cache,
                state,
                max(lengths) + self.tree.num_nodes,
                lengths[0] if len(set(lengths)) == 1 else None,
                decode.processors,
                decode.before(going),
            )
            state = outcome.state
            for place, (row, path) in enumerate(zip(going, paths_of(outcome.table))):
                cache.lengths[place] += len(path)
                taken = decode.take(row, path)
                # What was accepted behind the end of the text leaves the cache again; a bonus token never was in it.
                cache.truncate(place, cache.lengths[place] - len(path) + 1 + taken)

    def _finish_fixed(self, cache: RowCache, state: State, decode: Texts) -> None:
        """Step in fixed memory; rows that have ended stand still."""
        if all(decode.ended):
            return
        fixed = self._fixed or self._captured(cache, state)
        self._fixed = fixed
        fixed.begin(state)
        for row, ended in enumerate(decode.ended):
            if ended:
                fixed.end(row)
        while not all(decode.ended):
            for row, path in enumerate(paths_of(fixed())):
                if not decode.ended[row]:
                    decode.take(row, path)
                    if decode.ended[row]:
                        fixed.end(row)

    def _captured(self, cache: RowCache, state: State) -> FixedStep:
        try:
            return FixedStep(self.step, cache, state, capture=True)
        except RuntimeError as error:
            reason = first_line(error)
            raise TargetError(
                f"a step of `{self.target.config.model_type}` cannot be captured ({reason}); give cuda_graph=False"
            ) from error

    def _capacity(self, needed: int, captured: bool) -> int:
        """Return the slots of a cache: for a captured step a round number, within a window that the texts fit."""
        if not captured:
            return needed
        rounded = -(-needed // CAPACITY_UNIT) * CAPACITY_UNIT
        window = window_of(self.target)
        return rounded if window is None or needed > window else min(rounded, window)

    def _weights(self) -> list[object]:
        """Return what tells whether the target is still where and what it was: a graph holds its memory."""
        parameters = (next(self.target.parameters()), self._forward.lm_head.weight)
        return [part for one in parameters for part in (one.data_ptr(), one.dtype, one.device)]

    def _cache(self, num_rows: int, capacity: int, captured: bool) -> RowCache:
        """Return a cache; that of a captured step again where it is large enough, since the graph holds its memory."""
        if not captured:
            return RowCache(self.target, num_rows, capacity)
        if self._fixed is not None and self._fixed_with == self._weights():
            kept = self._fixed.cache
            if len(kept.lengths) == num_rows and kept.capacity == capacity:
                kept.clear()
                return kept
            del kept  # before the larger one is made
        self._fixed, self._fixed_with = None, self._weights()
        return RowCache(self.target, num_rows, capacity)

    def pad_id(self) -> int:
        """Return the token that fills rows which ended early."""
        for source in (self.target.generation_config, self.target.config):
            pad = getattr(source, "pad_token_id", None)
            if pad is not None:
                return int(pad)
        for source in (self.target.generation_config, self.target.config):
            eos = getattr(source, "eos_token_id", None)
            if eos is not None:
                return int(eos if isinstance(eos, int) else eos[0])
        return 0
