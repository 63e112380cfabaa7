"""Under which names a target's files may hold its output embedding, without loading the target."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from treeopt.errors import TargetError
from treeopt.targets.demo import DEMO_NAME, demo_directory

__all__ = ["output_embedding_names"]


def output_embedding_names(name: str) -> tuple[str | Path, list[str]]:
    """Return where a target's files are, and the names that its output embedding may have there.

    A tied embedding is stored under the name of the input's.

    Parameters
    ----------
    name : str
        `demo`, a local directory, or a hub id.

    Raises
    ------
    TargetError
        If the target's configuration cannot be had, or describes no causal language model.
    """
    where = demo_directory() if name == DEMO_NAME else name
    try:
        with torch.device("meta"):  # shapes alone
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(where))
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TargetError(f"`{name}` cannot be described as a target: {reason}") from error
    output = model.get_output_embeddings()
    if output is None:
        raise TargetError(f"`{name}` has no output embedding; give a causal language model")
    same = [key for key, value in model.named_parameters(remove_duplicate=False) if value is output.weight]
    # Files of a model without its head leave out the prefix of its body.
    bare = [key.removeprefix(f"{model.base_model_prefix}.") for key in same]
    return where, list(dict.fromkeys([*same, *bare]))
