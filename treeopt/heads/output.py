"""The target's output embedding, as heads need it: its sizes, its device, and the dtype that it computes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treeopt.errors import HeadsError

__all__ = ["OutputEmbedding", "num_rows"]


@dataclass(frozen=True)
class OutputEmbedding:
    """An output embedding and where heads that go with it belong.

    Attributes
    ----------
    module : nn.Module
    rows : int
        Its logits; more than `num_tokens` where it is padded.
    num_tokens : int
        Tokens that a head may guess, from token 0 on.
    hidden_size : int
    device : torch.device
        For a target spread over several devices, that of the last layer.
    dtype : torch.dtype
        Of the hidden states it reads, also where its weight is quantised.
    """

    module: nn.Module
    rows: int
    num_tokens: int
    hidden_size: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, target: nn.Module, num_tokens: int | None = None) -> OutputEmbedding:
        """Describe a target's output embedding.

        Parameters
        ----------
        target : PreTrainedModel
        num_tokens : int, optional
            Tokens that the target's tokenizer knows; the configuration's `vocab_size` by default.

        Raises
        ------
        HeadsError
            If the target has none, or keeps it off every device.
        """
        module: Any = getattr(target, "get_output_embeddings", lambda: None)()
        if module is None:
            raise HeadsError(f"`{type(target).__name__}` has no output embedding; give a causal language model")
        weight: Tensor = module.weight
        if weight.device.type == "meta":
            raise HeadsError(
                f"`{type(target).__name__}` keeps its output embedding off the devices, and heads need it there; give the "
                "target more memory"
            )
        rows = num_rows(module)
        config: Any = getattr(target, "config", None)
        stated = getattr(config.get_text_config(), "vocab_size", rows) if config is not None else rows
        return cls(
            module=module,
            rows=rows,
            num_tokens=min(rows, num_tokens or stated),
            hidden_size=int(getattr(module, "in_features", weight.shape[1])),
            device=weight.device,
            dtype=_compute_dtype(module, target),
        )


def _compute_dtype(module: Any, target: Any) -> torch.dtype:
    dtype: torch.dtype = module.weight.dtype
    if dtype.is_floating_point and dtype.itemsize > 1:
        return dtype
    stated: torch.dtype = getattr(module, "compute_dtype", None) or target.dtype
    return stated


def num_rows(module: nn.Module) -> int:
    """Return the number of logits of an output embedding, whose weight may be packed."""
    weight: Any = module.weight
    return int(getattr(module, "out_features", weight.shape[0]))
