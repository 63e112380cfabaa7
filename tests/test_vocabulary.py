import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoints import plain_logits, random_heads, tensors_of, write
from tests.reference import rank_of
from treeopt import RankTrace, read_tree
from treeopt.calibrate.continuations import Continuation
from treeopt.calibrate.observe import Candidates, observe
from treeopt.cli.options import load_models
from treeopt.errors import HeadsError
from treeopt.heads import MedusaHeads
from treeopt.heads.vocabulary import Columns, is_padding, mapped_ids, require_equal_vocabularies
from treeopt.targets.forward import Forward
from treeopt.targets.loading import fingerprint
from treeopt.trace import NO_GUESS

D2T = torch.tensor([0, 1, 1, 3, 3, 4])
IDS = [0, 2, 3, 6, 7, 9]
SHUFFLED = [7, 0, 11, 3, 2, 9]


def llama(vocabulary, hidden=8):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def ten():
    """A target of ten tokens."""
    return llama(10)


def test_offsets_of_a_draft_vocabulary_of_six_in_ten_name_their_targets():
    assert mapped_ids("f", {"d2t": D2T}).tolist() == IDS
    assert mapped_ids("f", {"token_map": torch.tensor(SHUFFLED)}).tolist() == SHUFFLED
    assert mapped_ids("f", {}) is None


@torch.no_grad()
def test_mapped_heads_draft_the_targets_tokens_and_rank_the_others_beyond_all(tmp_path, ten):
    blocks, embeddings = random_heads(hidden=8, rows=6)
    write(tmp_path, tensors_of("A", blocks, embeddings) | {"d2t": D2T})
    heads = MedusaHeads.load(tmp_path, ten)
    assert heads.vocabulary == 6
    hidden = torch.randn(4, 8)
    for head, drafted in enumerate(heads.draft(hidden, [6, 2, 3])):
        logits = plain_logits(blocks[head], embeddings[head], hidden)
        order = logits.sort(dim=-1, descending=True).indices[:, : drafted.shape[1]]
        assert drafted.tolist() == [[IDS[column] for column in row] for row in order.tolist()]
        ranks = heads.columns.ranks(
            heads.project(heads.blocks[head](hidden[:1]), head).expand(10, -1), torch.arange(10)
        )
        row = logits[0].tolist()
        assert ranks.tolist() == [rank_of(row, IDS.index(t)) if t in IDS else NO_GUESS for t in range(10)]


@given(st.permutations(range(9)), st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=9, max_size=9))
def test_equal_logits_go_to_the_lowest_token_in_whatever_order_the_map_is(tmp_path_factory, order, values):
    ids = [token + 1 for token in order[:5]]
    directory = tmp_path_factory.mktemp("mapped")
    blocks = [[(torch.zeros(8, 8), torch.zeros(8))]]
    embedding = torch.zeros(5, 8)
    embedding[:, 0] = torch.tensor(values[:5])
    write(directory, tensors_of("D", blocks, [embedding]) | {"token_map": torch.tensor(ids)}, stem="model")
    heads = MedusaHeads.load(directory, llama(10))
    expected = sorted(ids, key=lambda token: (-values[ids.index(token)], token))
    hidden = torch.eye(8)[:1]
    with torch.no_grad():
        assert heads.draft(hidden, [5])[0][0].tolist() == expected
        logits = heads.project(heads.blocks[0](hidden), 0)
        ranks = [int(heads.columns.ranks(logits, torch.tensor([token]))) for token in range(10)]
    assert ranks == [expected.index(token) if token in expected else NO_GUESS for token in range(10)]


@torch.no_grad()
def test_a_file_may_hold_all_rows_beside_its_map(tmp_path, tiny_target):
    blocks, embeddings = random_heads()
    ids = torch.tensor(SHUFFLED)
    whole = tensors_of("D", blocks, embeddings, prefix="medusa_heads.") | {"token_map": ids}
    write(tmp_path / "all", whole, stem="model", config={"truncated_vocab_size": 6, "vocab_size": 13})
    write(
        tmp_path / "six", tensors_of("D", blocks, [one[ids] for one in embeddings]) | {"token_map": ids}, stem="model"
    )
    first, second = (MedusaHeads.load(tmp_path / name, tiny_target) for name in ("all", "six"))
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert first.columns.ids.tolist() == sorted(SHUFFLED)


def mapped(directory, rows=6, format="D", **maps):
    stem = "model" if format == "D" else "medusa_lm_head"
    return write(directory, tensors_of(format, *random_heads(rows=rows)) | maps, stem=stem)


@pytest.mark.parametrize(
    ("format", "rows", "maps", "message"),
    [
        ("D", 6, {}, r"guess 6 tokens, the target has 13 in 13 rows, and there is no `token_map`"),
        ("A", 12, {}, r"guess 12 tokens, the target has 13"),
        ("D", 6, {"token_map": [0, 1, 2, 3, 4, 13]}, r"maps a draft token to 13, the target has 13 tokens"),
        ("D", 6, {"token_map": [0, 1, 2, 3, 4, -1]}, r"sends draft token 5 to -1; tokens start at 0"),
        ("D", 6, {"token_map": [0, 1, 2, 3, 4, 2]}, r"sends draft tokens 2 and 5 both to 2"),
        ("A", 6, {"d2t": [0, 0, 0, 0, 0, -1]}, r"`d2t` sends draft tokens 4 and 5 both to 4"),
        (
            "D",
            6,
            {"token_map": [0.0, 1.0]},
            r"`token_map` has shape \(2,\) and dtype torch.float32; give a list of int",
        ),
        ("D", 6, {"token_map": [[0, 1]]}, r"`token_map` has shape \(1, 2\)"),
        ("D", 5, {"token_map": IDS}, r"`lm_heads.0.weight` has 5 rows, `token_map` 6; they must be equal"),
        ("D", 8, {"token_map": IDS}, r"`lm_heads.0.weight` has 8 rows, `token_map` 6; they must be equal"),
        ("A", 13, {"d2t": [0] * 6}, r"`0.2.weight` has 13 rows, `d2t` 6; they must be equal"),
        ("C", 6, {"token_map": IDS}, r"has a `token_map` but no output embeddings"),
        ("D", 6, {"token_map": IDS, "d2t": [0] * 6}, r"`token_map` and `d2t` name different tokens"),
        ("D", 6, {"d2t": [0] * 6, "t2d": [True] * 5 + [False] * 8}, r"`t2d` marks other tokens than `d2t` names"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path, tiny_target, format, rows, maps, message):
    mapped(tmp_path, rows, format, **{name: torch.tensor(values) for name, values in maps.items()})
    with pytest.raises(HeadsError, match=message):
        MedusaHeads.load(tmp_path, tiny_target)


def test_maps_that_agree_are_read(tmp_path, tiny_target):
    flags = torch.zeros(13, dtype=torch.bool)
    flags[IDS] = True
    mapped(tmp_path, token_map=torch.tensor(IDS), d2t=D2T, t2d=flags)
    assert MedusaHeads.load(tmp_path, tiny_target).columns.ids.tolist() == IDS


@torch.no_grad()
def test_mapped_heads_save_and_load_again_and_their_fingerprint_knows_the_map(tmp_path, tiny_target):
    heads = MedusaHeads.load(mapped(tmp_path / "first", token_map=torch.tensor(SHUFFLED)), tiny_target)
    heads.save(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["truncated_vocab_size"], config["vocab_size"]) == (6, 13)
    again = MedusaHeads.load(tmp_path / "again", tiny_target)
    assert fingerprint(again) == fingerprint(heads)
    hidden = torch.randn(3, 32)
    assert all(map(torch.equal, again.draft(hidden, [3, 2]), heads.draft(hidden, [3, 2])))
    other = MedusaHeads.load(
        mapped(tmp_path / "other", token_map=torch.tensor([*sorted(SHUFFLED)[:5], 12])), tiny_target
    )
    plain = {name: value for name, value in other.state_dict().items() if name != "columns.ids"}
    other.load_state_dict({**heads.state_dict(), "columns.ids": other.columns.ids})
    assert plain.keys() < other.state_dict().keys()
    assert fingerprint(other) != fingerprint(heads)


@torch.no_grad()
def test_a_column_that_pads_the_vocabulary_never_wins(tmp_path):
    target = llama(51200)
    # Every hidden state likes the pads best; untrained heads repeat what the target's output embedding says.
    target.get_output_embeddings().weight[51190:] = 50.0
    hidden = torch.ones(2, 8)
    assert int(target.get_output_embeddings()(hidden)[0].argmax()) >= 51190
    blocks, _ = random_heads(hidden=8, rows=1)
    write(tmp_path, tensors_of("C", blocks, [None] * 3))
    heads = MedusaHeads.load(tmp_path, target, num_tokens=51190)
    assert heads.vocabulary == 51190
    assert all(int(drafted.max()) < 51190 for drafted in heads.draft(hidden, [40, 40, 40]))
    logits = heads.project(heads.states(hidden)[0], 0)
    assert heads.columns.ranks(logits, torch.tensor([51189, 51190])).tolist()[1] == NO_GUESS
    assert heads.embedding(0).shape == (51190, 8)


def test_the_command_line_counts_the_tokenizers_tokens(tmp_path, tiny_directory, tiny_heads_directory):
    shutil.copytree(tiny_directory, tmp_path / "target")
    path = tmp_path / "target" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for word in ("10", "11", "12"):
        del tokenizer["model"]["vocab"][word]
    path.write_text(json.dumps(tokenizer))
    target, heads, _ = load_models(str(tmp_path / "target"), str(tiny_heads_directory), "cpu", "auto")
    assert (target.num_tokens, heads.vocabulary, target.model.config.vocab_size) == (10, 10, 13)


@pytest.mark.parametrize(("rows", "target_rows"), [(51200, 51200), (51190, 51200), (51200, 51190), (51190, 51190)])
@torch.no_grad()
def test_padded_vocabularies_go_together(tmp_path, rows, target_rows):
    _, embeddings = random_heads(num_heads=1, hidden=8, rows=rows)
    embeddings[0][51190:] = 50.0
    write(tmp_path, tensors_of("A", [[(torch.zeros(8, 8), torch.zeros(8))]], embeddings))
    heads = MedusaHeads.load(tmp_path, llama(target_rows), num_tokens=51190)
    hidden = torch.ones(1, 8)
    assert heads.draft(hidden, [1])[0].tolist() == [[int((hidden @ embeddings[0][:51190].T).argmax())]]


@pytest.mark.parametrize(
    ("rows", "tokens", "right"),
    [(51200, 51190, True), (51200, 51200, True), (51200, 50000, False), (32064, 32000, False), (32001, 32000, False)],
)
def test_padding_is_rounding_up_to_a_power_of_two(rows, tokens, right):
    assert is_padding(rows, tokens) is right


def test_sizes_that_differ_by_more_than_padding_are_refused():
    require_equal_vocabularies("f", 32000, 32000, 31990)
    with pytest.raises(HeadsError, match=r"`f`: the heads guess 32064 tokens, the target has 32000 in 32000 rows"):
        require_equal_vocabularies("f", 32064, 32000, 32000)


def test_more_guesses_than_there_are_columns_are_refused(tmp_path, tiny_target):
    heads = MedusaHeads.load(mapped(tmp_path, token_map=torch.tensor(IDS)), tiny_target)
    with pytest.raises(HeadsError, match=r"`rank 6` is asked for, but the heads have 6 guesses; prune the tree"):
        heads.draft(torch.zeros(1, 32), [7])
    with pytest.raises(HeadsError, match=r"`rank 13` is asked for"):
        Columns(13).guesses(torch.zeros(1, 13), 14)


@torch.no_grad()
def test_calibration_ranks_mapped_tokens_and_judges_the_targets_own(tmp_path, tiny_target):
    blocks, embeddings = random_heads(rows=6)
    directory = write(
        tmp_path, tensors_of("D", blocks, embeddings) | {"token_map": torch.tensor(SHUFFLED)}, stem="model"
    )
    heads = MedusaHeads.load(directory, tiny_target)
    document = Continuation("a", None, (3, 1, 4), (1, 5, 9, 2, 6, 5, 3, 0, 7, 11))
    (seen,) = observe(Forward(tiny_target), heads, [document], Candidates(num_ranks=4))
    whole = torch.tensor([[*document.prompt, *document.tokens]])
    hidden = tiny_target.model(whole).last_hidden_state[0]
    spread = tiny_target(whole).logits[0].softmax(-1)
    for i in range(10):
        for head in range(3):
            if i + 1 + head >= 10:
                assert seen.ranks[i, head] == -1
                continue
            row = plain_logits(blocks[head], embeddings[head], hidden[2 + i : 3 + i])[0].tolist()
            token = document.tokens[i + 1 + head]
            best = sorted(range(6), key=lambda column: -row[column])
            assert seen.ranks[i, head] == (best.index(SHUFFLED.index(token)) if token in SHUFFLED else NO_GUESS)
            judged = [spread[3 + i + head, SHUFFLED[column]] for column in best[:4]]
            torch.testing.assert_close(seen.topk_probs[i, head], torch.stack(judged), atol=1e-5, rtol=0)


def test_mapped_heads_are_calibrated_built_and_verified(run, tmp_path, tiny_directory, tiny_target, tiny_prompts):
    embedding = tiny_target.get_output_embeddings().weight.detach()
    blocks, _ = random_heads()
    quiet = [[(weight * 0.1, bias * 0.1) for weight, bias in layers] for layers in blocks]
    ids = torch.tensor([1, 2, 3, 5, 8, 12])
    write(tmp_path / "heads", tensors_of("D", quiet, [embedding[ids]] * 3) | {"token_map": ids}, stem="model")
    models = ["--target", tiny_directory, "--heads", tmp_path / "heads", "--prompts", tiny_prompts]
    calibrated = run("calibrate", *models, "--max-new-tokens", 20)
    assert calibrated.exit_code == 0, calibrated.output
    ranks = RankTrace.read("trace.safetensors").ranks
    assert set(ranks[ranks >= 6].tolist()) == {NO_GUESS}
    assert (ranks[ranks >= 0] < 6).any()
    built = run("build", "trace.safetensors", "--nodes", 300)
    assert built.exit_code == 0, built.output
    assert 0 < read_tree("tree.json").tree.max_rank < 6
    verified = run("verify", "tree.json", *models, "--max-new-tokens", 20, "--check-replay")
    assert verified.exit_code == 0, verified.output
    assert "4 of 4 prompts give exactly the target's own greedy output" in verified.stdout
    assert "replay takes exactly the counted steps in 4 of 4 documents" in verified.stdout
