"""Every example of every command's help is run, with a small target in the place of the demo's."""

import json
import re
import shlex

import click
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from treeopt import RankTrace
from treeopt.cli import main
from treeopt.cli import options as cli_options
from treeopt.heads import MedusaHeads
from treeopt.targets import embedding, loading

WORDS = 520  # more than the ranks of the largest tree that `profile` times


def commands(group=main, prefix=()):
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, (*prefix, name))
        else:
            yield (*prefix, name), command


def examples():
    for path, command in commands():
        text = re.split(r"Examples?:", command.help)
        lines = re.findall(r"^ +((?:torchrun .*)?treeopt .+)$", text[1], re.M) if len(text) > 1 else []
        yield from ((" ".join(path), line) for line in lines or ["no example"])


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("demo")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", unk_token="0").save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=2048, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def folder(run, target, tmp_path, monkeypatch):
    """A folder with what the examples name; the demo target, its heads and its prompts are small ones."""
    rows = [
        {
            "id": f"p{i}",
            "domain": "ab"[i % 2],
            "split": split,
            "messages": [{"role": "user", "content": f"{i} 7 {i + 3}"}],
        }
        for i, split in enumerate(["train", "calibration", "evaluation"] * 4)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    MedusaHeads.for_target(LlamaForCausalLM.from_pretrained(target), 5).save(tmp_path / "heads")
    bundled = {cli_options.DEMO_HEADS: tmp_path / "heads", cli_options.DEMO_PROMPTS: tmp_path / "prompts.jsonl"}
    monkeypatch.setattr(cli_options, "calibration_path", bundled.__getitem__)
    for module in (loading, embedding):
        monkeypatch.setattr(module, "demo_directory", lambda: target)
    ranks = np.random.default_rng(0).geometric(0.3, (600, 5)) - 1
    for i, name in enumerate(("trace", "new", "a", "b", "monday", "tuesday")):
        keys = np.arange(12) + 12 * i
        metadata = {"target_hash": "t", "heads_hash": "h", "continuations": "generated", "prompts_hash": name}
        trace = RankTrace(ranks, np.arange(0, 601, 50), list("aabb" * 3), metadata, prompts=keys)
        trace.write(tmp_path / f"{name}.safetensors")
    curves = [{"nodes": [1, 64], "seconds": [0.01, 0.02], "batch": 1, "context": 1024}]
    (tmp_path / "latency.json").write_text(json.dumps({"schema": "treeopt.latency/1", "curves": curves}))
    recipe = {"schema": "treeopt.recipe/1", "method": "medusa-2", "num_heads": 2, "epochs": 1, "max_new_tokens": 8}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "choices.json").write_text("[[0], [1], [0, 0]]")
    assert run("build", "trace.safetensors", "--nodes", 9, "-o", "tree.json").exit_code == 0
    return tmp_path


@pytest.mark.parametrize(("command", "line"), list(examples()))
def test_every_example_runs(run, folder, target, command, line):
    words = shlex.split(line.replace("PATH_OR_ID", "PATH"))
    assert " ".join(words).partition("treeopt ")[2].startswith(command), f"`{command}` has no example"
    named = {"--target": str(target), "--heads": str(folder / "heads")}
    arguments = [named.get(before, word) if word == "PATH" else word for before, word in zip(["", *words], words)][
        words.index("treeopt") + 1 :
    ]  # of torchrun's line what each process runs
    if words[-2:] == ["-o", "heads/"]:
        arguments[-1] = "new-heads/"  # those of the folder are another run's
    result = run(*arguments)
    assert result.exit_code == 0, result.output


def test_every_command_is_looked_at():
    assert {"heads inspect", "heads convert", "trace merge", "verify", "profile"} <= {name for name, _ in examples()}
    assert len(dict(examples())) == len(list(commands()))
