"""One forward pass of a target over a cache, through an attention backend of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from treeopt.attention.backends import AUTO, BACKENDS, NATIVE, Needs, choose
from treeopt.attention.passes import Pass
from treeopt.attention.serving import Served, serving
from treeopt.errors import TargetError
from treeopt.products import project
from treeopt.targets.cache import cache_keyword
from treeopt.targets.limits import check_architecture, context_length, head_dim, window_of
from treeopt.targets.placement import decoder_of

__all__ = ["Forward"]


class Forward:
    """The target split in two: hidden states, and the logits of those that are asked for.

    Parameters
    ----------
    target : PreTrainedModel
        A causal language model with an output embedding.
    attention : str
        Name of the attention backend to be tried first, or `auto`.

    Attributes
    ----------
    attention : str
        The backend in use.
    refused : dict of str to str
        Why the backends before it are not.
    """

    def __init__(self, target: PreTrainedModel, attention: str = AUTO) -> None:
        check_architecture(target)
        self.target = target
        self.decoder = decoder_of(target)
        self.lm_head = target.get_output_embeddings()
        self.device = target.device  # hidden states and logits come back to it, also from a target on several devices
        self._cache_keyword = cache_keyword(self.decoder)
        self._config: Any = target.config.get_text_config()
        self._context = context_length(target)
        self._asked = attention
        self._span = 0
        self.attention, self.refused = choose(self._needs(0), attention)

    def reserve(self, num_slots: int) -> None:
        """Choose the backend anew for texts of up to so many slots: a sliding window may be shorter.

        Raises
        ------
        TargetError
            If only the target's own attention serves it, and its window is shorter than the texts.
        """
        self._span = num_slots
        if self.attention != NATIVE:
            self.attention, self.refused = choose(self._needs(num_slots), self._asked)
        self._check_window(native=self.attention == NATIVE)

    def hidden(self, ids: Tensor, at: Pass, cache: Cache | None) -> Tensor:
        """Return the last hidden states, after the final norm.

        Parameters
        ----------
        ids : Tensor of int64, shape (rows, tokens)
        at : Pass
            Where the tokens stand and what they see. Without a cache the slots are the tokens themselves.
        cache : Cache or None

        Returns
        -------
        Tensor, shape (rows, tokens, hidden)

        Raises
        ------
        TargetError
            If the target has a sliding window shorter than the texts and does not tell its attention.
        """
        if at.span > self._span:
            self.reserve(at.span)
        if self.attention != NATIVE:
            with serving(self._config, BACKENDS[self.attention], at) as served:
                # The backend reads the pass; a mask of four dimensions only keeps the target from making one.
                hidden = self._run(
                    ids, at, cache, torch.zeros((1, 1, 1, 1), dtype=self.target.dtype, device=ids.device)
                )
            if served.calls:
                self._check_window(native=False, served=served)
                return hidden
            # Nothing came to the backend: this architecture computes its attention by itself. Slots are written again.
            self.refused = {**self.refused, self.attention: "the target's layers do not look attention up by name"}
            self.attention = NATIVE
            self._check_window(native=True)
        return self._run(ids, at, cache, at.bias(self.target.dtype, ids.device))

    def _run(self, ids: Tensor, at: Pass, cache: Cache | None, mask: Tensor) -> Tensor:
        keywords = {self._cache_keyword: cache, "use_cache": cache is not None}
        positions, entrance = at.positions(self._context), self.target.device
        output = self.decoder(
            input_ids=ids.to(entrance),
            position_ids=positions.to(entrance),
            attention_mask=mask.to(entrance),
            **keywords,
        )
        hidden: Tensor = output.last_hidden_state.to(self.device)
        return hidden

    def _needs(self, num_slots: int) -> Needs:
        window = window_of(self.target)
        return Needs(
            device=self.device,
            dtype=self.target.dtype,
            head_dim=head_dim(self._config),
            window=window if window is not None and window < num_slots else None,
            softcap=getattr(self._config, "attn_logit_softcapping", None) is not None,
            sinks=self._config.model_type == "gpt_oss",
        )

    def _check_window(self, *, native: bool, served: Served | None = None) -> None:
        window = self._needs(self._span).window
        if window is None or (not native and (served is None or served.windows)):
            return
        reason = "its own attention is handed one mask for all layers" if native else "it does not tell its attention"
        raise TargetError(
            f"prompt, new tokens and tree take {self._span} slots, more than `{self._config.model_type}`'s sliding window "
            f"of {window}, and {reason}; use fewer new tokens or shorter prompts"
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the output embedding's product with `hidden`, (..., vocabulary).

        Soft-caps and positive scales that some families apply afterwards are increasing functions: they change no
        rank but among numbers that they round to one; see `exact`.
        """
        return project(self.lm_head, hidden)

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        return int(self.lm_head.weight.shape[0])

    def scaled(self, logits: Tensor) -> Tensor:
        """Return what the target makes of `logits`: scales and soft-caps, which matter where probabilities are read."""
        if (scale := getattr(self._config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(self._config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(self._config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def exact(self, logits: Tensor) -> Tensor:
        """Return `logits`, scaled where scaling could merge the largest: a soft-cap rounds neighbours to one number."""
        scales = ("final_logit_softcapping", "logit_scale", "logits_scaling")
        return self.scaled(logits) if any(getattr(self._config, name, None) is not None for name in scales) else logits

    def true_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that the target's own forward gives, scales and soft-caps included, (..., vocabulary)."""
        return self.scaled(self.logits(hidden))
