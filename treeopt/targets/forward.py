"""One forward pass of a target over a cache, with the mask and positions that the caller states."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from treeopt.targets.cache import cache_keyword
from treeopt.targets.limits import check_architecture

__all__ = ["Forward"]


class Forward:
    """The target split in two: hidden states, and the logits of those that are asked for.

    Parameters
    ----------
    target : PreTrainedModel
        A causal language model with an output embedding.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        check_architecture(target)
        self.target = target
        self.decoder = target.get_decoder()
        self.lm_head = target.get_output_embeddings()
        self.device = target.device
        self._cache_keyword = cache_keyword(self.decoder)

    def hidden(self, ids: Tensor, positions: Tensor, visible: Tensor, cache: Cache | None) -> Tensor:
        """Return the last hidden states, after the final norm.

        Parameters
        ----------
        ids : Tensor of int64, shape (batch, tokens)
        positions : Tensor of int64, shape (batch, tokens)
        visible : Tensor of bool, shape (batch, tokens, slots)
            True where a token may attend to a slot of the cache.
        cache : Cache or None
            Without a cache the slots are the tokens themselves.

        Returns
        -------
        Tensor, shape (batch, tokens, hidden)
        """
        # Additive, because a bool mask is right for sdpa only: eager attention would add it as 0 and 1.
        dtype = self.target.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        mask.masked_fill_(~visible, torch.finfo(dtype).min)
        keywords = {self._cache_keyword: cache, "use_cache": cache is not None}
        output = self.decoder(input_ids=ids, position_ids=positions, attention_mask=mask[:, None], **keywords)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the output embedding's product with `hidden`, (..., vocabulary).

        Soft-caps and positive scales that some families apply afterwards are increasing functions: they change no
        argmax and no rank, which is all that is read from it.
        """
        logits: Tensor = self.lm_head(hidden)
        return logits

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        return int(self.lm_head.weight.shape[0])

    def true_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that the target's own forward gives, scales and soft-caps included, (..., vocabulary)."""
        logits, config = self.logits(hidden), self.target.config.get_text_config()
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits
