"""How heads, and with Medusa-2 the target, are trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from treeopt.errors import HeadsError

__all__ = ["BACKBONES", "PRECISIONS", "RAMPS", "JointSettings", "TrainingSettings"]

BACKBONES = ("lora", "full")
RAMPS = ("none", "sine")
PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How heads are trained on a frozen target: Medusa-1, and the warm-up of Medusa-2.

    Attributes
    ----------
    num_heads, num_layers : int
        Of fresh heads; heads that are trained further keep their own.
    own_lm_heads : bool
        Whether each fresh head has an output embedding of its own, which is trained too.
    epochs : int
        0 only where heads are given.
    learning_rate : float
        Peak of a cosine that ends at 0, after a linear warm-up.
    warmup_steps : int
        A quarter of all steps at most.
    batch_size : int
        Positions of one pass.
    accumulate : int
        Passes of one optimiser step.
    weight_decay : float
    mixed_precision : {'no', 'bf16', 'fp16'}
        As transformers' Trainer takes it.
    seed : int
        Of the order of documents and positions.
    report_to : str
        Where transformers' Trainer logs beside the log file: none, tensorboard, wandb, …
    """

    num_heads: int = 5
    num_layers: int = 1
    own_lm_heads: bool = False
    epochs: int = 3
    learning_rate: float = 2e-3
    warmup_steps: int = 40
    batch_size: int = 256
    accumulate: int = 1
    weight_decay: float = 0.01
    mixed_precision: str = "no"
    seed: int = 0
    report_to: str = "none"

    def __post_init__(self) -> None:
        _require_one_of("mixed_precision", self.mixed_precision, PRECISIONS)
        for name in ("num_heads", "num_layers", "batch_size", "accumulate"):
            _require_whole(name, getattr(self, name), 1)
        for name in ("epochs", "warmup_steps", "seed"):
            _require_whole(name, getattr(self, name), 0)
        _require_number("learning_rate", self.learning_rate, above=0)
        _require_number("weight_decay", self.weight_decay)


@dataclass(frozen=True, slots=True)
class JointSettings:
    """How target and heads are trained together: Medusa-2 (Cai et al. 2024, arXiv 2401.10774, sections 2.2.2 and 2.3.2).

    Attributes
    ----------
    epochs : int
    learning_rate : float
        The target's peak; a cosine to 0 after a linear warm-up.
    heads_rate : float
        How many times the target's rate the heads are trained at.
    heads_weight : float
        λ0, the weight of the heads' loss beside that of the target.
    ramp : {'none', 'sine'}
        Whether λ0 rises from 0 along a quarter of a sine.
    distill : bool
        Whether the target's loss is the divergence from the target as it was, rather than the text's cross-entropy.
    backbone : {'lora', 'full'}
        What of the target is trained.
    lora_rank, lora_alpha : int
    lora_dropout : float
    lora_modules : tuple of str
        Last names of the linear modules that are adapted; all by default, a tied output embedding excepted.
    batch_tokens : int
        Tokens of one pass, padding included.
    accumulate : int
        Passes of one optimiser step.
    max_length : int
        Tokens of a document; what is longer is cut.
    warmup_steps : int
        A quarter of all steps at most.
    weight_decay : float
    gradient_checkpointing : bool
        Whether layers are computed again in the backward pass instead of kept.
    """

    epochs: int = 1
    learning_rate: float = 2e-4
    heads_rate: float = 4.0
    heads_weight: float = 0.2
    ramp: str = "none"
    distill: bool = False
    backbone: str = "lora"
    lora_rank: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    lora_modules: tuple[str, ...] = ()
    batch_tokens: int = 4096
    accumulate: int = 1
    max_length: int = 2048
    warmup_steps: int = 40
    weight_decay: float = 0.01
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        _require_one_of("backbone", self.backbone, BACKBONES)
        _require_one_of("ramp", self.ramp, RAMPS)
        for name in ("epochs", "lora_rank", "lora_alpha", "batch_tokens", "accumulate"):
            _require_whole(name, getattr(self, name), 1)
        _require_whole("max_length", self.max_length, 2)
        _require_whole("warmup_steps", self.warmup_steps, 0)
        for name in ("learning_rate", "heads_rate", "heads_weight"):
            _require_number(name, getattr(self, name), above=0)
        _require_number("weight_decay", self.weight_decay)
        _require_number("lora_dropout", self.lora_dropout, below=1)


def _require_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HeadsError(f"`{name}` is {value!r}; give a whole number of at least {least}")


def _require_number(name: str, value: float, *, above: float | None = None, below: float = math.inf) -> None:
    """Refuse what is not in [0, below), and not beyond `above` where that is given; NaN is in no range."""
    if not (0 <= value < below) or (above is not None and not value > above):
        least = "at least 0" if above is None else f"above {above}"
        most = "finite" if below == math.inf else f"below {below}"
        raise HeadsError(f"`{name}` is {value!r}; give a number {least} and {most}")


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise HeadsError(f"`{name}` is {value!r}; use {', '.join(allowed)}")
