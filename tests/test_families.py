"""Tree passes through every family of targets, on tiny random models."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers

from treeopt import dense_tree
from treeopt.attention import Pass
from treeopt.attention.backends import BACKENDS as BACKENDS_BY_NAME
from treeopt.attention.serving import serving
from treeopt.errors import TargetError
from treeopt.heads import MedusaHeads
from treeopt.targets import greedy
from treeopt.targets.cache import RowCache
from treeopt.targets.forward import Forward
from treeopt.targets.limits import check_frequencies
from treeopt.verify import TreeVerifier, selfcheck
from treeopt.verify import verifier as verifier_module
from treeopt.verify.acceptance import TreeIndex

SIZES = {
    "vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
GPT = {"vocab_size": 29, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
FEWER = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "head_dim")}
FAMILIES = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", SIZES),
    "Mistral": ("MistralConfig", "MistralForCausalLM", SIZES | {"sliding_window": 12}),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SIZES),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", SIZES),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", SIZES),
    "Gemma2": ("Gemma2Config", "Gemma2ForCausalLM", SIZES | {"sliding_window": 12}),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", SIZES | {"sliding_window": 12}),
    "Phi3": ("Phi3Config", "Phi3ForCausalLM", SIZES | {"sliding_window": 12}),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel", GPT),
    "GPTNeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", FEWER),
    "OPT": ("OPTConfig", "OPTForCausalLM", FEWER | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "GPT-OSS": ("GptOssConfig", "GptOssForCausalLM", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Falcon": ("FalconConfig", "FalconForCausalLM", FEWER),
}
BACKENDS = ("sdpa", "eager", "native")
# Where a backend asked for by name cannot serve, the next that can is taken.
TAKEN = {
    ("Gemma2", "sdpa"): "eager", ("GPT-OSS", "sdpa"): "eager", ("Falcon", "sdpa"): "native", ("Falcon", "eager"): "native",
}  # fmt: skip
MASKED_ONCE = [
    "Mistral",
    "Gemma2",
    "Gemma3",
    "Phi3",
    "GPT-OSS",
]  # their own attention needs a mask for each kind of layer
TREE = dense_tree([3, 2, 2])
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]


@pytest.fixture(scope="module")
def targets():
    made = {}

    def target(family):
        if family not in made:
            config_name, model_name, sizes = FAMILIES[family]
            torch.manual_seed(0)
            config = getattr(transformers, config_name)(**sizes, pad_token_id=0, eos_token_id=None, bos_token_id=None)
            made[family] = getattr(transformers, model_name)(config).eval()
            with torch.no_grad():
                for parameter in made[family].parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0, 0.15)
        return made[family]

    return target


def plain(target, prompt, max_new_tokens):
    ids = torch.tensor([prompt])
    output = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("family", "backend"),
    [(f, b) for f in FAMILIES for b in BACKENDS if not (b == "native" and f in MASKED_ONCE)],
)
def test_tree_logits_equal_sequential_ones(targets, family, backend):
    target = targets(family)
    forward, index = Forward(target, backend), TreeIndex.of(TREE, torch.device("cpu"))
    prefix = torch.tensor([PROMPTS[1]])
    nodes = torch.randint(29, (1, TREE.num_nodes), generator=torch.Generator().manual_seed(1))
    cache = RowCache(target, 1, 8 + TREE.num_nodes)
    with torch.inference_mode():
        text = Pass.text(1, 8, torch.device("cpu"))
        forward.hidden(prefix, text, cache.at(text))
        tree = Pass(torch.tensor([8]), index.depths, index.mask, 8 + TREE.num_nodes, 8)
        logits = forward.true_logits(forward.hidden(nodes, tree, cache.at(tree)))[0]
        for node in range(TREE.num_nodes):
            path = index.paths[node, : int(index.depths[node]) + 1]
            whole = torch.cat([prefix, nodes[:, path]], dim=1)
            expected = target(whole, use_cache=False).logits[0, -1]
            assert (logits[node] - expected).abs().max() < 1e-5 * max(1, float(expected.abs().max()))
    assert forward.attention == TAKEN.get((family, backend), backend)


@pytest.mark.parametrize("family", MASKED_ONCE)
def test_a_window_that_the_targets_own_attention_cannot_follow_is_refused(targets, family):
    target = targets(family)
    forward = Forward(target, "native")
    window = target.config.sliding_window
    with pytest.raises(TargetError, match=rf"more than `\w+`'s sliding window of {window}, and its own attention"):
        forward.reserve(window + 1)


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_to_its_own_greedy_output_beyond_its_window(targets, family, backend):
    target = targets(family)
    verifier = TreeVerifier(target, MedusaHeads.for_target(target, 3), TREE, attention=backend)
    decoded = verifier.decode(PROMPTS, 14)
    assert [row.tokens for row in decoded] == [plain(target, prompt, 14) for prompt in PROMPTS]


def test_a_window_that_no_layer_names_is_refused(targets, monkeypatch):
    target = targets("Llama")
    monkeypatch.setattr(target.config, "sliding_window", 20, raising=False)
    verifier = TreeVerifier(target, MedusaHeads.for_target(target, 3), TREE)
    with pytest.raises(TargetError, match=r"sliding window of 20, and it does not tell its attention"):
        verifier.decode(PROMPTS, 14)


def test_windows_of_other_names_are_known():
    config = transformers.GPTNeoConfig(
        vocab_size=29, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=20, max_position_embeddings=128, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    verifier = TreeVerifier(transformers.GPTNeoForCausalLM(config).eval(), Heads(), TREE)
    with pytest.raises(TargetError, match=r"more than `gpt_neo`'s sliding window of 20"):
        verifier.decode(PROMPTS, 14)


class Heads:
    num_heads, vocabulary = 3, 29

    def draft(self, hidden, ranks):
        return [torch.arange(count).repeat(len(hidden), 1) for count in ranks]


@pytest.mark.parametrize(
    "stated",
    [
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 20}},
        {"rope_parameters": {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 20}}},
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 20},
    ],
    ids=str,
)
def test_a_text_that_may_cross_the_length_of_other_frequencies_is_refused(stated):
    config = SimpleNamespace(model_type="phi3", **stated)
    target = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    for shortest, longest in ((5, 20), (21, 90)):
        check_frequencies(target, shortest, longest)
    for shortest, longest in ((5, 21), (20, 21)):
        with pytest.raises(
            TargetError, match=rf"`phi3` has other .* beyond 20 tokens, and prompts of {shortest} tokens"
        ):
            check_frequencies(target, shortest, longest)
    config.rope_parameters = config.rope_scaling = {"rope_type": "linear"}
    check_frequencies(target, 5, 90)


def test_frequencies_are_looked_at_before_anything_is_decoded(targets, monkeypatch):
    target, seen = targets("Llama"), []
    for module in (verifier_module, greedy):
        monkeypatch.setattr(module, "check_frequencies", lambda *arguments: seen.append(arguments[1:]))
    TreeVerifier(target, MedusaHeads.for_target(target, 3), TREE).decode(PROMPTS, 4)
    list(greedy.greedy_continuations(target, PROMPTS, max_new_tokens=4, eos_ids=(), batch_size=2))
    assert seen == [(5, 8 + 4 + TREE.num_nodes), (5, 8 + 4)]


def test_soft_caps_that_round_neighbours_to_one_number_leave_the_lowest_token():
    config = transformers.Gemma2Config(**SIZES, pad_token_id=0, eos_token_id=None, bos_token_id=None)
    torch.manual_seed(0)
    target = transformers.Gemma2ForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        target.get_output_embeddings().weight.normal_(0, 3)
    verifier = TreeVerifier(target, MedusaHeads.for_target(target, 3), dense_tree([]))
    decoded = verifier.decode(PROMPTS, 14)
    assert [row.tokens for row in decoded] == [plain(target, prompt, 14) for prompt in PROMPTS]


def test_an_architecture_that_cannot_run_a_tree_is_named():
    config = transformers.XGLMConfig(
        vocab_size=29, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, max_position_embeddings=128,
        pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    target = transformers.XGLMForCausalLM(config).eval()
    with pytest.raises(TargetError, match=r"`xglm` (cannot be run with a tree over a cache|with \w+ attention gives)"):
        TreeVerifier(target, MedusaHeads.for_target(target, 3), TREE)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_target_in_float64_is_taken(targets, implementation):
    target = copy.deepcopy(targets("Llama")).double()
    target.config._attn_implementation = implementation
    for attention in ("sdpa", "eager", "native"):
        verifier = TreeVerifier(target, MedusaHeads.for_target(target, 3), TREE, attention=attention)
        assert [row.tokens for row in verifier.decode(PROMPTS, 6)] == [plain(target, prompt, 6) for prompt in PROMPTS]


def test_a_second_thread_on_one_target_is_an_error_and_leaves_it_whole(targets):
    target = targets("Llama")
    before = target.config._attn_implementation
    at = Pass.text(1, 3, torch.device("cpu"))
    with (
        serving(target.config, BACKENDS_BY_NAME["sdpa"], at),
        pytest.raises(TargetError, match=r"decoding in another thread; give each thread a model"),
    ):
        Forward(target).hidden(torch.tensor([[1, 2, 3]]), at, None)
    assert target.config._attn_implementation == before
    assert Forward(target).hidden(torch.tensor([[1, 2, 3]]), at, None).shape == (1, 3, 32)


def test_attention_in_chunks_is_refused_by_name(targets, monkeypatch):
    target = targets("Llama")
    monkeypatch.setattr(target.config, "attention_chunk_size", 64, raising=False)
    with pytest.raises(TargetError, match=r"`llama` attends in chunks of 64 positions"):
        Forward(target)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_targets_own_attention_is_handed_an_additive_mask_which_both_of_its_kinds_read(targets, implementation):
    """A mask of booleans is added as 0 and 1 by eager attention, without a word."""
    target = targets("Llama")
    index = TreeIndex.of(TREE, torch.device("cpu"))
    tree = Pass(torch.tensor([0]), index.depths, index.mask, TREE.num_nodes, 0)
    nodes = torch.randint(29, (1, TREE.num_nodes), generator=torch.Generator().manual_seed(1))
    before = target.config._attn_implementation
    target.config._attn_implementation = implementation
    try:
        with torch.inference_mode():
            native = Forward(target, "native").hidden(nodes, tree, None)
            ours = Forward(target, "eager").hidden(nodes, tree, None)
            boolean = target.model(
                nodes, position_ids=tree.positions(128), attention_mask=tree.seen()[:, None], use_cache=False
            ).last_hidden_state
    finally:
        target.config._attn_implementation = before
    assert (native - ours).abs().max() < 1e-5
    assert ((boolean - ours).abs().max() < 1e-5) == (implementation == "sdpa")


def test_an_unknown_backend_is_refused(targets):
    with pytest.raises(TargetError, match=r"`attention` is 'flash'; use auto, triton, flex, sdpa, eager or native"):
        Forward(targets("Llama"), "flash")


def test_the_targets_own_configuration_is_left_as_it_was(targets):
    target = targets("Llama")
    before = target.config._attn_implementation
    plain_logits = target(torch.tensor(PROMPTS[:1])).logits
    TreeVerifier(target, MedusaHeads.for_target(target, 3), TREE).decode(PROMPTS, 5)
    assert target.config._attn_implementation == before
    assert torch.equal(target(torch.tensor(PROMPTS[:1])).logits, plain_logits)


# The self-check


def check(target, monkeypatch, spoil):
    """Run the self-check with a pass that a test has spoilt."""
    monkeypatch.setattr(selfcheck, "_checked", type(selfcheck._checked)())
    monkeypatch.setattr(selfcheck, "Pass", spoil)
    selfcheck.check_target(Forward(target))


class Honest(Pass):
    pass


class FlatPositions(Pass):
    """Places the nodes behind one another, as a text."""

    def positions(self, context):
        return self.starts[:, None] + torch.arange(self.num_tokens)


class SeeingSiblings(Pass):
    """Lets every node see all before it."""

    def seen(self, window=None):
        text = replace(self, visible=torch.ones_like(self.among).tril())
        return Pass.seen(text, window)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "OPT", "GPTNeoX", "Gemma2"])
@pytest.mark.parametrize("spoil", [FlatPositions, SeeingSiblings])
def test_a_tree_pass_that_is_wrong_is_an_error_at_the_start(targets, monkeypatch, family, spoil):
    check(targets(family), monkeypatch, Honest)
    with pytest.raises(TargetError, match=r"attention gives a tree other logits than a text \(by .*choose another"):
        check(targets(family), monkeypatch, spoil)


def test_the_self_check_runs_when_a_verifier_is_made_and_once_a_backend(targets, monkeypatch):
    target, seen = targets("Llama"), []
    monkeypatch.setattr(selfcheck, "_checked", type(selfcheck._checked)())
    original = selfcheck._tree_logits
    monkeypatch.setattr(selfcheck, "_tree_logits", lambda *args: seen.append(args[0].attention) or original(*args))
    heads = MedusaHeads.for_target(target, 3)
    for attention in ("sdpa", "sdpa", "eager"):
        TreeVerifier(target, heads, TREE, attention=attention)
    assert seen == ["sdpa", "eager"]
