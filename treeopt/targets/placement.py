"""Targets that several devices share: what must be installed, what must fit, and where results are handed over."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from treeopt.errors import TargetError

__all__ = ["decoder_of", "hand_over", "is_spread", "require_whole"]


def require_whole(name: str, model: PreTrainedModel) -> None:
    """Refuse a target of which a part waits on the disk or beside the CPU, to be moved at every step.

    Raises
    ------
    TargetError
        Naming the part.
    """
    placed = device_map(model)
    off = [part for part, device in placed.items() if device == "disk"]
    if len(set(placed.values())) > 1:
        off += [part for part, device in placed.items() if device == "cpu"]
    if off:
        raise TargetError(
            f"`{name}` does not fit on the devices: `{off[0]}` would wait on {placed[off[0]]}; give more or larger devices, "
            "or a quantised target"
        )


def hand_over(model: PreTrainedModel) -> None:
    """Make hidden states and logits of a target on several devices come to the device that its inputs are on.

    Who runs decoder and output embedding one after the other, as a tree pass does, would otherwise get each on the device
    of its last layer.
    """
    if not is_spread(model):
        return
    device = model.device
    decoder = decoder_of(model)
    output: nn.Module = model.get_output_embeddings()

    def hidden_states(_module: nn.Module, _inputs: Any, result: Any) -> Any:
        result.last_hidden_state = result.last_hidden_state.to(device)
        return result

    def logits(_module: nn.Module, _inputs: Any, result: torch.Tensor) -> torch.Tensor:
        return result.to(device)

    decoder.register_forward_hook(hidden_states)
    output.register_forward_hook(logits)


def is_spread(model: PreTrainedModel) -> bool:
    """Return whether a target lies on several devices."""
    return len(set(device_map(model).values())) > 1


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of a target that ends with its last hidden states."""
    decoder: nn.Module = model.get_decoder()
    base: Any = model.base_model
    # Some families answer with themselves on transformers 4.57, some with their output embedding.
    return base if decoder is model or isinstance(decoder, nn.Linear) else decoder


def device_map(model: PreTrainedModel) -> dict[str, Any]:
    """Return where each part of a target is, as accelerate placed it; empty if it did not."""
    return getattr(model, "hf_device_map", None) or {}
