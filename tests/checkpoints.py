"""Checkpoints of random heads in every published layout and container, and what such heads compute, in plain torch."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

CONTAINERS = ("safetensors", "pt", "sharded safetensors", "sharded bin")


def random_heads(num_heads=3, num_layers=2, hidden=32, rows=13, seed=5):
    """Return (blocks, embeddings): blocks[head][layer] is (weight, bias)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator) * 0.5

    blocks = [[(normal(hidden, hidden), normal(hidden)) for _ in range(num_layers)] for _ in range(num_heads)]
    return blocks, [normal(rows, hidden) for _ in range(num_heads)]


def plain_logits(blocks, embedding, states):
    """Return one head's logits, (rows of states, rows of the embedding)."""
    for weight, bias in blocks:
        states = states + torch.nn.functional.silu(states @ weight.T + bias)
    return states @ embedding.T


def tensors_of(format, blocks, embeddings, prefix=""):
    """Return the tensors under the names of a format, in a layout written out here once more."""
    found = {}
    for i, layers in enumerate(blocks):
        for j, (weight, bias) in enumerate(layers):
            stem = f"{prefix}blocks.{i}.layers.{j}" if format == "D" else f"{prefix}{i}.{j}.linear"
            found |= {f"{stem}.weight": weight, f"{stem}.bias": bias}
        if format == "D":
            found[f"{prefix}lm_heads.{i}.weight"] = embeddings[i].clone()
        elif format != "C":
            found[f"{prefix}{i}.{len(layers)}.weight"] = embeddings[i].clone()
    return found


def write(directory, tensors, container="safetensors", stem="medusa_lm_head", config=None):
    """Write tensors into a directory, sharded ones into three files and an index."""
    directory.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if container == "safetensors":
        save_file(tensors, directory / f"{stem}.safetensors")
    elif container == "pt":
        torch.save(tensors, directory / ("pytorch_model.bin" if stem == "model" else f"{stem}.pt"))
    else:
        _sharded(directory, tensors, container.removeprefix("sharded "), stem)
    return directory


def _sharded(directory, tensors, kind, stem):
    stem = stem if kind == "safetensors" else "pytorch_model"
    names = sorted(tensors)
    size = -(-len(names) // 3)
    weight_map = {}
    for number in range(3):
        file = f"{stem}-{number + 1:05d}-of-00003.{kind}"
        held = {name: tensors[name] for name in names[number * size : (number + 1) * size]}
        save_file(held, directory / file) if kind == "safetensors" else torch.save(held, directory / file)
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / f"{stem}.{kind}.index.json").write_text(json.dumps(index))


def whole_model(target, format, blocks, embeddings):
    """Return the tensors of a target, and the heads among them."""
    heads = tensors_of(format, blocks, embeddings, prefix="medusa_head.")
    return {name: value.detach().clone() for name, value in target.state_dict().items()} | heads
