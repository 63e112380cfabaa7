import copy
import importlib.util
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.checkpoints import random_heads, tensors_of, write
from tests.pretended import PretendedDevices, place, placed
from treeopt import DraftTree, RankTrace
from treeopt.attention import Pass
from treeopt.calibrate.continuations import Continuation
from treeopt.calibrate.observe import Candidates, observe
from treeopt.errors import HeadsError, MissingExtraError, TargetError
from treeopt.heads import MedusaHeads
from treeopt.heads.output import OutputEmbedding
from treeopt.targets import loading
from treeopt.targets.forward import Forward
from treeopt.targets.loading import load_target
from treeopt.targets.placement import hand_over, require_whole
from treeopt.verify import TreeVerifier

SPLIT = {
    "model.embed_tokens": "cuda:0",
    "model.rotary_emb": "cuda:0",
    "model.layers.0": "cuda:0",
    "model.layers.1": "cuda:1",
    "model.norm": "cuda:1",
    "lm_head": "cuda:1",
}
DOCUMENT = Continuation("a", None, (3, 1, 4), (1, 5, 9, 2, 6, 5, 3))


@torch.no_grad()
def test_a_device_map_of_the_cpu_alone_loads_the_same_target(tiny_directory, tiny_loaded, tiny_heads_directory):
    mapped = load_target(str(tiny_directory), device_map={"": "cpu"})
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(mapped.model(ids).logits, tiny_loaded.model(ids).logits)
    heads = MedusaHeads.load(tiny_heads_directory, mapped.model, num_tokens=mapped.num_tokens)
    assert (heads.vocabulary, mapped.num_tokens) == (13, 13)
    tree = DraftTree.from_paths([(0,), (1,), (0, 0)])
    expected = TreeVerifier(tiny_loaded.model, heads, tree).decode([[3, 1, 4]], 12)
    assert TreeVerifier(mapped.model, heads, tree).decode([[3, 1, 4]], 12) == expected


def test_a_target_with_a_part_on_the_disk_is_refused(tiny_directory):
    with pytest.raises(TargetError, match=r"does not fit on the devices: `lm_head` would wait on disk"):
        load_target(str(tiny_directory), device_map={"model": "cpu", "lm_head": "disk"})


def test_a_loaded_target_hands_its_results_over(monkeypatch, tiny_directory):
    given = []
    monkeypatch.setattr(loading, "hand_over", given.append)
    assert given == [load_target(str(tiny_directory), device_map={"": "cpu"}).model]


def test_calibration_takes_a_device_map(run, tiny_directory, tiny_heads_directory, tiny_prompts):
    models = ["--target", tiny_directory, "--heads", tiny_heads_directory, "--prompts", tiny_prompts]
    for arguments in (["-o", "plain"], ["-o", "mapped", "--device-map", "auto"]):
        result = run("calibrate", *models, "--max-new-tokens", 8, *arguments)
        assert result.exit_code == 0, result.output
    assert RankTrace.read("mapped") == RankTrace.read("plain")


def test_training_takes_a_device_map(run, tiny_directory, tiny_prompts):
    result = run(
        "train", "--target", tiny_directory, "--prompts", tiny_prompts, "--max-new-tokens", 8, "--num-heads", 1,
        "--epochs", 1, "--device-map", "auto", "-o", "heads",
    )  # fmt: skip
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "command",
    [
        ["calibrate", "--heads", "nowhere"],
        ["verify", "tree.json", "--heads", "nowhere"],
        ["profile", "--heads", "nowhere"],
        ["train", "-o", "heads"],
    ],
)
def test_a_device_and_a_device_map_are_a_contradiction(run, table, command):
    run("build", table, "-o", "tree.json")
    result = run(*command, "--target", "nowhere", "--device", "cpu", "--device-map", "auto")
    assert result.exit_code == 2
    assert "--device and --device-map both say where the target goes" in result.stderr


def without_accelerate(monkeypatch):
    honest = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else honest(name))


def test_without_accelerate_one_line_says_what_to_install(run, monkeypatch, tiny_directory, tiny_heads_directory):
    without_accelerate(monkeypatch)
    models = ["--target", tiny_directory, "--heads", tiny_heads_directory]
    result = run("calibrate", *models, "--device-map", "auto")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: `--device-map` needs `accelerate`, which is not installed: pip install 'treeopt[large]'\n"
    )


@pytest.fixture
def quantised_directory(tmp_path, tiny_directory):
    """Copy the tiny target, and let its configuration say that it is quantised."""
    directory = tmp_path / "quantised"
    shutil.copytree(tiny_directory, directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_quantised_target_needs_accelerate(monkeypatch, quantised_directory):
    without_accelerate(monkeypatch)
    with pytest.raises(MissingExtraError, match=r"`--target .*quantised` needs `accelerate`.*treeopt\[large\]"):
        load_target(str(quantised_directory))


@pytest.mark.parametrize(
    ("given", "dtype", "placed_by"),
    [({}, "auto", {"": "cpu"}), ({"dtype": "bfloat16"}, torch.bfloat16, {"": "cpu"}), ({"device_map": "auto"}, "auto", "auto")],
)  # fmt: skip
def test_a_quantised_target_is_placed_by_transformers_and_never_moved(
    monkeypatch, quantised_directory, tiny_target, given, dtype, placed_by
):
    asked = {}

    def loaded(where, **keywords):
        asked.update(keywords)
        model = copy.deepcopy(tiny_target)
        model.to = lambda *_: pytest.fail("a quantised target was moved")
        return model

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", loaded)
    load_target(str(quantised_directory), device="cpu" if "device_map" not in given else "auto", **given)
    assert asked == {"device_map": placed_by, loading.dtype_keyword(): dtype}


class Packed(nn.Linear):
    """An output embedding of bytes and one scale a row, two values to a byte's row: quantised, as some are."""

    def __init__(self, weight, compute_dtype):
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.scale = weight.abs().amax(dim=1, keepdim=True) / 127
        values = (weight / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(values.reshape(-1, 1), requires_grad=False)
        self.compute_dtype = compute_dtype

    def plain(self):
        return self.weight.reshape(self.out_features, self.in_features) * self.scale

    def forward(self, hidden):
        return hidden @ self.plain().to(hidden.dtype).T


@torch.no_grad()
def test_heads_of_a_target_with_a_quantised_output_embedding_follow_its_compute_dtype(tmp_path, tiny_target):
    target = copy.deepcopy(tiny_target)
    packed = Packed(tiny_target.get_output_embeddings().weight, torch.float16)
    target.set_output_embeddings(packed)
    output = OutputEmbedding.of(target)
    assert (output.rows, output.hidden_size, output.dtype) == (13, 32, torch.float16)
    packed.compute_dtype = None
    assert OutputEmbedding.of(target).dtype == torch.float32
    blocks, _ = random_heads()
    heads = MedusaHeads.load(write(tmp_path, tensors_of("C", blocks, [None] * 3)), target)
    plain = copy.deepcopy(tiny_target)
    plain.get_output_embeddings().weight.copy_(packed.plain())
    hidden = torch.randn(4, 32)
    same = MedusaHeads.load(tmp_path, plain)
    assert all(map(torch.equal, heads.draft(hidden, [3, 2]), same.draft(hidden, [3, 2])))
    with pytest.raises(HeadsError, match=r"`lm_head` of the target is quantised"):
        heads.embedding(0)


def test_heads_of_a_target_whose_output_embedding_is_nowhere_are_refused(tiny_target):
    target = copy.deepcopy(tiny_target)
    target.set_output_embeddings(nn.Linear(32, 13, bias=False, device="meta"))
    with pytest.raises(HeadsError, match=r"keeps its output embedding off the devices"):
        MedusaHeads.for_target(target)


@pytest.mark.parametrize(
    ("parts", "named"),
    [({"a": 0, "b": "disk"}, "`b` would wait on disk"), ({"a": 0, "b": 1, "c": "cpu"}, "`c` would wait on cpu")],
)
def test_a_target_of_which_a_part_is_left_out_does_not_fit(parts, named):
    with pytest.raises(TargetError, match=rf"`big` does not fit on the devices: {named}"):
        require_whole("big", SimpleNamespace(hf_device_map=parts))


def test_a_target_on_devices_alone_fits():
    require_whole("big", SimpleNamespace(hf_device_map={"a": 0, "b": 1}))
    require_whole("small", SimpleNamespace(hf_device_map={"": "cpu"}))
    require_whole("plain", SimpleNamespace())


def spread(target):
    """Return a copy of a target on two pretended devices, its parts fetching their inputs as accelerate's do."""
    from accelerate.utils import send_to_device

    model = copy.deepcopy(target)
    for name, device in SPLIT.items():
        part = model.get_submodule(name)
        for tensor in (*part.parameters(), *part.buffers()):
            place(tensor, device)

        def fetch(_module, arguments, keywords, device=device):
            # A cache stays where it is.
            return send_to_device(arguments, device), send_to_device(keywords, device, skip_keys="past_key_values")

        part.register_forward_pre_hook(fetch, with_kwargs=True)
    model.hf_device_map = SPLIT
    return model


def test_the_pretended_devices_see_a_mixture():
    with PretendedDevices():
        first, second = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
        assert (first.device, first.to(second.device).device) == (torch.device("cuda:0"), torch.device("cuda:1"))
        assert (first * 2).sum().device == torch.device("cuda:0")
        with pytest.raises(RuntimeError, match=r"add on \['cuda:0', 'cuda:1'\]"):
            torch.add(first, second)


@pytest.mark.parametrize("format", ["C", "D"])
@torch.no_grad()
def test_heads_stand_where_the_last_layer_is_and_results_where_the_inputs_are(tmp_path, tiny_target, format):
    blocks, embeddings = random_heads(rows=6)
    tensors = tensors_of(format, blocks, embeddings) | ({} if format == "C" else {"token_map": torch.arange(1, 12, 2)})
    write(tmp_path, tensors, stem="medusa_lm_head" if format == "C" else "model")
    alone = MedusaHeads.load(tmp_path, tiny_target)
    (expected,) = observe(Forward(tiny_target), alone, [DOCUMENT], Candidates(num_ranks=3))
    model = spread(tiny_target)
    with PretendedDevices():
        hand_over(model)
        heads = MedusaHeads.load(tmp_path, model)
        assert {str(placed(parameter)) for parameter in heads.parameters()} == {"cuda:1"}
        forward = Forward(model, "sdpa")
        assert str(forward.device) == "cuda:0"
        (found,) = observe(forward, heads, [DOCUMENT], Candidates(num_ranks=3))
        ids = torch.tensor([[3, 1]], device=forward.device)
        state = forward.hidden(ids, Pass.text(1, 2, forward.device), None)[:, -1]
        drafts = heads.draft(state, [2, 1])
        assert {str(one.device) for one in (state, forward.logits(state), found.ranks, *drafts)} == {"cuda:0"}
    assert torch.equal(found.ranks, expected.ranks)
    torch.testing.assert_close(found.topk_probs, expected.topk_probs)


@torch.no_grad()
def test_a_target_on_one_device_is_left_as_it_is(tiny_target):
    model = copy.deepcopy(tiny_target)
    model.hf_device_map = {"": "cpu"}
    hand_over(model)
    assert not model.get_decoder()._forward_hooks
    assert not model.get_output_embeddings()._forward_hooks


@torch.inference_mode()
def test_a_tree_is_decoded_on_several_devices_as_on_one(tiny_target, tiny_heads_directory):
    from treeopt.targets.greedy import greedy_continuations

    tree, prompts = DraftTree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]), [[3, 1, 4], [5, 9], [2]]
    alone = MedusaHeads.load(tiny_heads_directory, tiny_target)
    expected = TreeVerifier(tiny_target, alone, tree).decode(prompts, 16)
    model = spread(tiny_target)
    with PretendedDevices():
        hand_over(model)
        heads = MedusaHeads.load(tiny_heads_directory, model)
        # Kernels and graphs are for devices that are no pretence.
        verifier = TreeVerifier(model, heads, tree, attention="sdpa")
        assert not verifier.captures
        assert verifier.decode(prompts, 16) == expected
        found = dict(greedy_continuations(model, prompts, max_new_tokens=16, eos_ids=(), batch_size=2))
    assert [found[i] for i in range(3)] == [row.tokens for row in expected]
