"""Loading a target: the demo, a local directory or a hub id; its fingerprint, its prompts as token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from treeopt.errors import TargetError, first_line, require_module
from treeopt.targets.demo import DEMO_NAME, demo_directory
from treeopt.targets.placement import hand_over, require_whole

__all__ = ["DTYPES", "LoadedTarget", "dtype_keyword", "eos_ids", "fingerprint", "load_target", "loading_errors"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAMPLED_VALUES = 1024  # per parameter: enough to tell fine-tunes apart, and quick at 70B


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target with its tokenizer.

    Attributes
    ----------
    name : str
        What the user called it: demo, a directory or a hub id.
    model : PreTrainedModel
        In evaluation mode.
    tokenizer : PreTrainedTokenizerBase
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def num_tokens(self) -> int:
        """Tokens that the tokenizer knows; rows of the output embedding from there on are padding."""
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        return 1 + max(vocabulary.values())

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the token ids of a chat, the opening of the assistant's turn included.

        Without a chat template the turns are joined by line ends.

        Raises
        ------
        TargetError
            If the chat template refuses them: some take no system turn, or none of the assistant's first.
        """
        if self.tokenizer.chat_template is None:
            text = "\n".join(message["content"] for message in messages) + "\n"
            return list(self.tokenizer(text)["input_ids"])
        return _templated(self.name, self.tokenizer, messages, add_generation_prompt=True)

    def reply_ids(self, reply: str) -> list[int]:
        """Return the token ids of an assistant's reply, the end-of-sequence token included.

        Of several such tokens it is the one that the chat template writes there, else the tokenizer's own.
        """
        ids, ends = list(self.tokenizer(reply, add_special_tokens=False)["input_ids"]), eos_ids(self.model)
        return [*ids, *([_turn_end(self.name, self.tokenizer, ends)] if len(ends) > 1 else ends)]


def _templated(
    name: str, tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool
) -> list[int]:
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, return_dict=True
        )
    except Exception as error:  # a template raises what it likes
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise TargetError(
            f"the chat template of `{name}` refuses a prompt with turns of {roles} ({first_line(error)}); leave such prompts "
            "out"
        ) from error
    return list(encoded["input_ids"])


@lru_cache(maxsize=8)
def _turn_end(name: str, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]) -> int:
    """Return which end-of-sequence token closes an assistant's turn."""
    written: list[int] = []
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with suppress(TargetError):
            written = _templated(name, tokenizer, turns, add_generation_prompt=False)
    own = getattr(tokenizer, "eos_token_id", None)
    return next((token for token in (*reversed(written), own) if token in ends), min(ends))


def load_target(
    name: str, *, device: str = "auto", dtype: str = "auto", device_map: str | dict[str, Any] | None = None
) -> LoadedTarget:
    """Load a causal language model and its tokenizer.

    Parameters
    ----------
    name : str
        `demo`, a local directory, or a hub id; quantised as its configuration says.
    device : str
        A torch device, or `auto`: the first CUDA device if there is one, else the CPU.
    dtype : {'auto', 'float32', 'bfloat16', 'float16'}
        `auto` keeps the checkpoint's own on a GPU and takes float32 on a CPU.
    device_map : str or dict, optional
        How to spread a large model over devices, instead of `device`: what transformers takes under this name.

    Raises
    ------
    TargetError
        If it cannot be fetched, is no causal language model, or does not fit.
    MissingExtraError
        If accelerate, which places large and quantised models, is not installed.
    """
    where = demo_directory() if name == DEMO_NAME else name
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device_map is not None:
        require_module("--device-map", "accelerate", "large")
    transformers_logging.disable_progress_bar()
    with loading_errors(name):
        tokenizer = AutoTokenizer.from_pretrained(where)
        quantised = getattr(AutoConfig.from_pretrained(where), "quantization_config", None) is not None
        if quantised and device_map is None:
            require_module(f"--target {name}", "accelerate", "large")
            device_map = {"": device}
        # The parts of a quantised target have dtypes that belong together.
        keywords: dict[str, Any] = {dtype_keyword(): "auto" if quantised and dtype == "auto" else _dtype(dtype, device)}
        if device_map is None:
            model = AutoModelForCausalLM.from_pretrained(where, **keywords).to(device)
        else:
            model = AutoModelForCausalLM.from_pretrained(where, device_map=device_map, **keywords)
            require_whole(name, model)
            hand_over(model)
    return LoadedTarget(name=name, model=model.eval(), tokenizer=tokenizer)


@contextmanager
def loading_errors(name: str) -> Iterator[None]:
    """Turn what transformers raises while loading a target into one line that names it."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise TargetError(f"`{name}` cannot be loaded as a target: {reason}") from error


def dtype_keyword() -> str:
    """Return the name under which from_pretrained takes a dtype: it was renamed in transformers 5."""
    import transformers

    return "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"


def _dtype(name: str, device: str) -> torch.dtype | str:
    if name == "auto":
        return torch.float32 if device == "cpu" else "auto"
    if name not in DTYPES:
        raise TargetError(f"`--dtype {name}` is not known; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the end-of-sequence tokens that the target's generation settings or configuration name."""
    for source in (getattr(model, "generation_config", None), model.config.get_text_config()):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def fingerprint(module: torch.nn.Module) -> str:
    """Return a hash of a module's parameters: names, shapes, dtypes and evenly spaced values of each.

    It tells two fine-tunes apart wherever the weights came from, without reading every byte of a 70B model.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        flat = parameter.detach().reshape(-1)
        stride = max(1, flat.numel() // SAMPLED_VALUES)
        digest.update(flat[::stride].float().cpu().numpy().tobytes())
    return "sha256:" + digest.hexdigest()
