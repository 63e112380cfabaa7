"""Fixtures shared by the tests: tiny targets with random weights, and the demo target."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker a core: threads of theirs would wait for one another

# Wall times of a busy machine are no property of the code. CI runs the same examples every time; by hand they vary.
settings.register_profile(
    "treeopt", deadline=None, derandomize=bool(os.environ.get("CI")), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("treeopt")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Keep the tests' last calibration out of the user's cache; the demo target, once fetched, is shared."""
    from treeopt.files import cache_directory

    before, shared = os.environ.get("TREEOPT_CACHE"), cache_directory() / "targets"
    own = tmp_path_factory.mktemp("cache")
    shared.mkdir(parents=True, exist_ok=True)
    (own / "targets").symlink_to(shared)
    os.environ["TREEOPT_CACHE"] = str(own)
    yield
    if before is None:
        del os.environ["TREEOPT_CACHE"]
    else:
        os.environ["TREEOPT_CACHE"] = before


@pytest.fixture(scope="session")
def tiny_target():
    """Return a two-layer Llama of 13 tokens whose greedy output is lively, without an end-of-sequence token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # at the default scale every prompt ends in one repeated token
    return model


@pytest.fixture
def fresh(tiny_target):
    """Return a function that gives copies of the tiny target that may be spent."""
    from transformers import LlamaForCausalLM

    from treeopt.targets.loading import LoadedTarget

    def make():
        model = LlamaForCausalLM(tiny_target.config).eval()
        model.load_state_dict(tiny_target.state_dict())
        return LoadedTarget("tiny", model, None)

    return make


@pytest.fixture(scope="session")
def tiny_heads(tiny_target):
    """Return four heads of the tiny target with random blocks."""
    import torch

    from treeopt.heads import MedusaHeads

    torch.manual_seed(1)
    heads = MedusaHeads.for_target(tiny_target, num_heads=4)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0, 0.5)
    return heads


@pytest.fixture(scope="session")
def demo_target():
    """Return the demo target in float32."""
    from treeopt.targets.loading import load_target

    return load_target("demo")


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory, tiny_target):
    """Return a directory with the tiny target and a tokenizer of its 13 words, loadable like any other."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("target")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(13)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", unk_token="0").save_pretrained(directory)
    tiny_target.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_heads_directory(tmp_path_factory, tiny_heads):
    """Return a directory with the tiny target's heads."""
    directory = tmp_path_factory.mktemp("heads")
    tiny_heads.save(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_loaded(tiny_directory):
    """Return the tiny target with its tokenizer."""
    from treeopt.targets.loading import load_target

    return load_target(str(tiny_directory))


@pytest.fixture(scope="session")
def tiny_prompts(tmp_path_factory):
    """Return a file of twelve prompts in two domains and three splits."""
    import json

    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    splits = ["train", "calibration", "evaluation"]
    rows = [
        {
            "id": f"p{i}",
            "domain": "even" if i % 2 == 0 else "odd",
            "split": splits[i % 3],
            "messages": [
                {"role": "user", "content": f"{1 + i} {12 - i} 3"},
                {"role": "assistant", "content": f"{i} 5 {(3 * i) % 13} 7 8"},
            ],
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run treeopt in an empty directory."""
    import inspect

    from click.testing import CliRunner

    from treeopt.cli import main

    monkeypatch.chdir(tmp_path)

    def invoke(*arguments):
        # Up to click 8.1 the two streams are kept apart on request only.
        apart = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
        return CliRunner(**apart).invoke(main, [str(argument) for argument in arguments], prog_name="treeopt")

    return invoke


@pytest.fixture
def table(tmp_path):
    """Write a table of two heads and three ranks."""
    path = tmp_path / "table.json"
    path.write_text(json.dumps([[0.5, 0.2, 0.1], [0.4, 0.1, 0.05]]))
    return path
