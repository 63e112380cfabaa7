"""The demo target end to end: minutes, not seconds."""

import json
from pathlib import Path

import pytest
import torch

from tests.benchmarks import pairs
from treeopt import RankTrace, read_tree
from treeopt.agreement import replay_disagreements, trace_of
from treeopt.bundled import DEMO_HEADS, DEMO_PROMPTS, DEMO_TRACE, calibration_path
from treeopt.calibrate.continuations import Continuation
from treeopt.calibrate.run import CalibrationSettings, calibrate
from treeopt.heads import MedusaHeads
from treeopt.prompts import evenly, read_prompts
from treeopt.targets.loading import fingerprint
from treeopt.verify import TreeVerifier
from treeopt.verify.compare import compare

pytestmark = pytest.mark.heavy
TREES = Path(__file__).parents[1] / "trees"


@pytest.fixture(scope="module")
def heads(demo_target):
    return MedusaHeads.load(calibration_path(DEMO_HEADS), demo_target.model)


def test_the_converted_weights_speak(demo_target):
    ids = torch.tensor([demo_target.prompt_ids([{"role": "user", "content": "What is the capital of France?"}])])
    output = demo_target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert demo_target.tokenizer.decode(output[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_digits_are_single_tokens_and_text_comes_back(demo_target):
    text = "In 1984, x² + y² = 25;  naïve “quotes”\n\tdef f(x): return 'é'"
    ids = demo_target.tokenizer(text)["input_ids"]
    assert demo_target.tokenizer.decode(ids) == text
    assert [demo_target.tokenizer.decode([token]) for token in demo_target.tokenizer("1984")["input_ids"]] == list(
        "1984"
    )


@pytest.mark.parametrize("nodes", [16, 64])
def test_the_bundled_trees_give_the_targets_own_output_in_the_replayed_steps(demo_target, heads, nodes):
    built = read_tree(TREES / f"demo-{nodes}.json")
    prompts = evenly(read_prompts(calibration_path(DEMO_PROMPTS), split="evaluation"), 2)
    verifier = TreeVerifier(demo_target.model, heads, built.tree)
    found = list(compare(demo_target, verifier, prompts, max_new_tokens=64))
    assert [comparison.difference for comparison in found] == [None] * 2
    tokens = sum(len(comparison.decoded.tokens) - 1 for comparison in found)
    assert tokens / sum(comparison.decoded.num_steps for comparison in found) > 1.3
    decoded = [comparison.decoded for comparison in found]
    documents = [
        Continuation(prompt.id, None, tuple(demo_target.prompt_ids(prompt.messages)), tuple(row.tokens))
        for prompt, row in zip(prompts, decoded)
    ]
    assert replay_disagreements(built.tree, trace_of(demo_target, heads, documents), documents, decoded) == []


def test_the_bundled_heads_clearly_beat_untrained_ones(demo_target, heads, tmp_path):
    prompts = evenly(read_prompts(calibration_path(DEMO_PROMPTS), split="evaluation"), 8)
    settings = CalibrationSettings(max_new_tokens=64)
    trained = calibrate(demo_target, heads, prompts, tmp_path / "trained.safetensors", settings).table()
    untrained_heads = MedusaHeads.for_target(demo_target.model, heads.num_heads)
    untrained = calibrate(demo_target, untrained_heads, prompts, tmp_path / "untrained.safetensors", settings).table()
    # The ten best guesses of each: the first alone are too few to be told apart in eight documents.
    assert (trained.rates[:, :10].sum(axis=1) > 1.5 * untrained.rates[:, :10].sum(axis=1)).all()


def test_the_bundled_trace_is_of_the_bundled_heads_and_target(demo_target, heads):
    metadata = RankTrace.read(calibration_path(DEMO_TRACE)).metadata
    assert metadata["target_hash"] == fingerprint(demo_target.model)
    assert metadata["heads_hash"] == fingerprint(heads)
    provenance = json.loads((TREES / "demo-64.json").read_text())["provenance"]
    assert provenance["heads_hash"] == metadata["heads_hash"]


def test_a_calibration_of_a_few_prompts_repeats_the_bundled_ranks(demo_target, heads, tmp_path):
    bundled = RankTrace.read(calibration_path(DEMO_TRACE))
    prompts = read_prompts(calibration_path(DEMO_PROMPTS), split="calibration")
    chosen = [0, 40, 90]
    settings = CalibrationSettings(max_new_tokens=int(bundled.metadata["max_new_tokens"]))
    again = calibrate(demo_target, heads, [prompts[i] for i in chosen], tmp_path / "t.safetensors", settings)
    expected = bundled.select(chosen)
    assert again.documents.tolist() == expected.documents.tolist()
    # The products are summed in another order: logits deep in the tail may change places, shallow ranks do not.
    shallow = (expected.ranks < 16) | (again.ranks < 16)
    assert (again.ranks[shallow] == expected.ranks[shallow]).mean() > 0.999


def test_the_committed_recipe_of_medusa_2_gives_a_pair_that_decodes_like_its_target(run, tmp_path, monkeypatch):
    monkeypatch.chdir(TREES.parent)  # its paths begin there
    few = ["--limit", 3, "--max-new-tokens", 16, "--dtype", "float32", "--batch-tokens", 256]
    trained = run("train", "--recipe", "calibration/recipes/demo_medusa2.json", *few, "-o", tmp_path / "out")
    assert trained.exit_code == 0, trained.output
    assert "the target's perplexity of the text" in trained.stdout
    pair = ["--target", tmp_path / "out" / "target", "--heads", tmp_path / "out"]
    verified = run("verify", TREES / "demo-16.json", *pair, "--limit", 1, "--max-new-tokens", 32)
    assert verified.exit_code == 0, verified.output
    monkeypatch.setattr(pairs, "NEW_TOKENS", 16)
    bundled, after = pairs.main(tmp_path / "pairs.json", [tmp_path / "out"], limit=1)["pairs"]
    assert len(bundled["top_1"]) == len(after["top_1"]) == 5
    # One step of training changes the target's text little.
    assert after["text_before"]["tokens_per_step"] == pytest.approx(bundled["own_text"]["tokens_per_step"], rel=0.5)
