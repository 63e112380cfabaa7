"""A target's output embedding: under which names its files may hold it, or the target loaded for its sake."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from treeopt.errors import TargetError
from treeopt.targets.demo import DEMO_NAME, demo_directory
from treeopt.targets.loading import dtype_keyword, loading_errors

__all__ = ["load_output_embedding", "output_embedding_names"]


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
    with loading_errors(name), torch.device("meta"):  # shapes alone
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(where))
    output = model.get_output_embeddings()
    if output is None:
        raise TargetError(f"`{name}` has no output embedding; give a causal language model")
    same = [key for key, value in model.named_parameters(remove_duplicate=False) if value is output.weight]
    # Files of a model without its head leave out the prefix of its body.
    bare = [key.removeprefix(f"{model.base_model_prefix}.") for key in same]
    return where, list(dict.fromkeys([*same, *bare]))


def load_output_embedding(name: str) -> Tensor:
    """Load a target into the memory of the CPU and return its output embedding, in the dtype of its files.

    For targets whose files have names that only transformers can translate.

    Parameters
    ----------
    name : str
        `demo`, a local directory, or a hub id.

    Raises
    ------
    TargetError
        If it cannot be loaded, or its files lack the output embedding.
    """
    where, names = output_embedding_names(name)
    transformers_logging.disable_progress_bar()
    with loading_errors(name):
        model, report = AutoModelForCausalLM.from_pretrained(
            where, output_loading_info=True, **{dtype_keyword(): "auto"}
        )
    # What is missing was filled with random values.
    missing = sorted(set(names) & set(report["missing_keys"]))
    if missing:
        raise TargetError(f"`{name}` lacks the tensor `{missing[0]}`; get the whole target again")
    weight: Tensor = model.get_output_embeddings().weight
    return weight.detach()
