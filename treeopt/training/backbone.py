"""What of a target is trained, how it was before, and the target that comes of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from treeopt.errors import TargetError, require_module
from treeopt.targets.forward import Forward
from treeopt.targets.placement import is_spread
from treeopt.training.settings import JointSettings

__all__ = ["Backbone", "adapted_modules", "backbone_of", "require_trainable"]


class Backbone:
    """A target of which something is trained.

    Parameters
    ----------
    target : PreTrainedModel
        Changed in place.
    original : PreTrainedModel, optional
        As it was, where that is asked for.
    dtypes : mapping of str to torch.dtype, optional
        Of the parameters as they were; their own by default.

    Attributes
    ----------
    target : PreTrainedModel
    forward : Forward
        Of the target.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        original: PreTrainedModel | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self.target, self.forward = target, Forward(target)
        self._original = None if original is None else Forward(original)
        self._dtypes = dict(dtypes or {})

    @contextmanager
    def original(self) -> Iterator[Forward]:
        """Give the forward of the target as it was."""
        assert self._original is not None
        yield self._original

    def merged(self) -> PreTrainedModel:
        """Return the trained target in the dtypes that it was given in, nothing beside it; training is over then."""
        # One by one: the target's own `to` would round what it keeps in float32, its rotary frequencies among them.
        for name, parameter in self.target.named_parameters():
            parameter.data = parameter.data.to(self._dtypes.get(name, parameter.dtype))
        return self.target


class _Adapted(Backbone):
    """A target with low-rank adapters (Hu et al. 2021, arXiv 2106.09685) in its linear modules."""

    def __init__(self, target: PreTrainedModel, settings: JointSettings) -> None:
        from peft import LoraConfig, get_peft_model

        names = adapted_modules(target, settings.lora_modules)
        config = LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            lora_dropout=settings.lora_dropout,
            target_modules=names,
            fan_in_fan_out=isinstance(target.get_submodule(names[0]), Conv1D),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers deprecates what peft asks it
            # Some targets have modules of both kinds, and peft finds out by itself which is which.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set", UserWarning)
            self._wrapped: Any = get_peft_model(target, config)
        super().__init__(target)

    @contextmanager
    def original(self) -> Iterator[Forward]:
        with self._wrapped.disable_adapter():
            yield self.forward

    def merged(self) -> PreTrainedModel:
        merged: PreTrainedModel = self._wrapped.merge_and_unload()
        return merged


def require_trainable(target: PreTrainedModel, settings: JointSettings) -> None:
    """Refuse a target that cannot be trained in the way that the settings ask for.

    Raises
    ------
    TargetError
        If it is quantised, spread over several devices, or has no module of the names given.
    MissingExtraError
        If peft, which adapters need, is not installed.
    """
    if settings.backbone == "lora":
        require_module("treeopt train --method medusa-2", "peft", "train")
        adapted_modules(target, settings.lora_modules)
    if getattr(target, "is_quantized", False) or getattr(target, "quantization_method", None) is not None:
        raise TargetError(
            "a quantised target cannot be trained: adapters do not merge into it without loss; use --method medusa-1, or "
            "the target before quantisation"
        )
    if is_spread(target):
        raise TargetError("a target on several devices cannot be trained here; use --method medusa-1 or one device")


def backbone_of(target: PreTrainedModel, settings: JointSettings, seed: int = 0) -> Backbone:
    """Make a target trainable in the way that the settings ask for; see `require_trainable`.

    Parameters
    ----------
    target : PreTrainedModel
    settings : JointSettings
    seed : int
        Of the adapters' first values.
    """
    if settings.gradient_checkpointing:
        # Renamed in transformers 5; the old name warns there.
        new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        enable = getattr(target, new, None) or getattr(target, old)
        enable({"use_reentrant": False})
    if settings.backbone == "lora":
        target.requires_grad_(False)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return _Adapted(target, settings)
    original = copy.deepcopy(target).requires_grad_(False).eval() if settings.distill else None
    # Steps of a small rate are lost in the eight bits of a bfloat16.
    dtypes = {name: parameter.dtype for name, parameter in target.named_parameters()}
    return Backbone(target.float().requires_grad_(True), original, dtypes)


def adapted_modules(target: PreTrainedModel, wanted: tuple[str, ...]) -> list[str]:
    """Return the full names of the linear modules that get adapters.

    A tied output embedding gets none: merging would change the input embedding with it.

    Raises
    ------
    TargetError
        If a name in `wanted` is that of no linear module, or of a tied output embedding.
    """
    output: nn.Module = target.get_output_embeddings()
    tied = output.weight is target.get_input_embeddings().weight
    linear = {name: module for name, module in target.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    free = [name for name, module in linear.items() if not (tied and module is output)]
    last = {name.rsplit(".", 1)[-1] for name in free}
    for name in wanted:
        if name not in last:
            raise TargetError(
                f"`--lora-modules {name}` is no linear module that can be adapted; use {', '.join(sorted(last))}"
            )
    return [name for name in free if not wanted or name.rsplit(".", 1)[-1] in wanted]
