import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import CONTAINERS, plain_logits, random_heads, tensors_of, whole_model, write
from tests.reference import rank_of
from treeopt.errors import HeadsError
from treeopt.heads import MedusaHeads
from treeopt.heads import files as heads_files
from treeopt.heads.checkpoint import read_checkpoint
from treeopt.heads.formats import recognise

FORMATS = ("A", "B", "C", "D")
STEMS = {"A": "medusa_lm_head", "B": "model", "C": "medusa_lm_head", "D": "model"}


@pytest.fixture(scope="module")
def parts(tiny_target):
    """Blocks at random, and the target's own output embedding for every head."""
    blocks, _ = random_heads()
    return blocks, [tiny_target.get_output_embeddings().weight.detach()] * 3


def stored(format, target, blocks, embeddings):
    return whole_model(target, "A", blocks, embeddings) if format == "B" else tensors_of(format, blocks, embeddings)


def expected_ranks(parts, states, tokens):
    blocks, embeddings = parts
    rows = [plain_logits(blocks[h], embeddings[h], states).tolist() for h in range(len(blocks))]
    return [[rank_of(row, token) for row, token in zip(head, tokens.tolist())] for head in rows]


def found_ranks(heads, states, tokens):
    logits = [heads.project(heads.blocks[h](states), h) for h in range(heads.num_heads)]
    return [heads.columns.ranks(one, tokens).tolist() for one in logits]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_every_format_and_container_gives_the_ranks_of_plain_arithmetic(
    tmp_path, tiny_target, parts, format, container
):
    write(tmp_path, stored(format, tiny_target, *parts), container, STEMS[format])
    found = read_checkpoint(tmp_path)
    assert (found.names.format, found.num_heads, found.num_layers) == (format, 3, 2)
    assert (found.own_lm_heads, found.vocabulary) == ((False, None) if format == "C" else (True, 13))
    assert (found.hidden_size, found.dtypes, found.disagreements) == (32, ("float32",), ())
    heads = MedusaHeads.load(tmp_path, tiny_target)
    states, tokens = torch.randn(13, 32, generator=torch.Generator().manual_seed(2)), torch.arange(13)
    expected = expected_ranks(parts, states, tokens)
    assert found_ranks(heads, states, tokens) == expected
    first = heads.draft(states, [1, 1, 1])
    best = [plain_logits(parts[0][h], parts[1][h], states).argmax(-1) for h in range(3)]
    assert all(torch.equal(one[:, 0], other) for one, other in zip(first, best))


@pytest.mark.parametrize("format", ["A", "B", "D"])
@torch.no_grad()
def test_output_embeddings_of_their_own_are_used_head_by_head(tmp_path, tiny_target, format):
    own = random_heads()
    write(tmp_path, stored(format, tiny_target, *own), "safetensors", STEMS[format])
    states, tokens = torch.randn(13, 32), torch.arange(13)
    assert found_ranks(MedusaHeads.load(tmp_path, tiny_target), states, tokens) == expected_ranks(own, states, tokens)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_lacks_any_one_tensor_is_refused_naming_it(tmp_path, tiny_target, parts, format):
    whole = stored(format, tiny_target, *parts)
    heads = [name for name in whole if format != "B" or name.startswith("medusa_head.")]
    assert len(heads) == (12 if format == "C" else 15)
    for name in heads:
        write(tmp_path, {key: value for key, value in whole.items() if key != name}, "pt", STEMS[format])
        with pytest.raises(HeadsError, match=rf"lacks the tensor `{re.escape(name)}`"):
            read_checkpoint(tmp_path)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_with_any_one_tensor_of_another_shape_is_refused_naming_it(tmp_path, tiny_target, parts, format):
    whole = stored(format, tiny_target, *parts)
    for name in whole:
        if format == "B" and not name.startswith("medusa_head."):
            continue
        for wrong in (whole[name][:-1], whole[name][None], torch.tensor(1.0)):
            write(tmp_path, whole | {name: wrong}, "pt", STEMS[format])
            with pytest.raises(HeadsError, match=rf"`{re.escape(name)}` has shape .*, the other tensors need"):
                read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("format", "extra", "message"),
    [
        ("A", "surprise", r"`surprise`, which no Medusa head has"),
        ("A", "3.0.linear.weight", r"lacks the tensor `3.0.linear.bias`"),
        ("A", "0.3.weight", r"has `0.3.weight` beside 2 layers a head"),
        ("B", "medusa_head.norm", r"`medusa_head.norm`, which no Medusa head has"),
        ("B", "medusa_head.0.2.linear.weight", r"lacks the tensor `medusa_head.0.2.linear.bias`"),
        ("C", "model.norm.weight", r"`model.norm.weight`, which no Medusa head has"),
        ("C", "2.2.weight", r"lacks the tensor `0.2.weight`"),
        ("D", "blocks.0.norm.weight", r"`blocks.0.norm.weight`, which no Medusa head has"),
        ("D", "lm_heads.3.weight", r"lacks the tensor `blocks.3.layers.0.bias`"),
        ("D", "lm_head.weight", r"`lm_head.weight`, which no Medusa head has"),
    ],
)
def test_a_tensor_too_many_is_refused_and_named(tmp_path, tiny_target, parts, format, extra, message):
    write(tmp_path, stored(format, tiny_target, *parts) | {extra: torch.zeros(32)}, "safetensors", STEMS[format])
    with pytest.raises(HeadsError, match=message):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("wrong", [torch.full((32,), float("inf")), torch.zeros(32, dtype=torch.int64)])
def test_values_that_are_no_numbers_are_refused_and_named(tmp_path, tiny_target, parts, format, wrong):
    name = {"B": "medusa_head.1.0.linear.bias", "D": "blocks.1.layers.0.bias"}.get(format, "1.0.linear.bias")
    write(tmp_path, stored(format, tiny_target, *parts) | {name: wrong}, "safetensors", STEMS[format])
    with pytest.raises(HeadsError, match=rf"`{name}` holds NaN, infinities or no floating point"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("format", "config", "lines"),
    [
        ("A", {"medusa_num_heads": 2}, ["medusa_num_heads = 2, the weights hold 5: using 5"]),
        (
            "B",
            {"model_type": "llama", "hidden_size": 64, "medusa_num_heads": 2, "medusa_num_layers": 1},
            [
                "hidden_size = 64, the weights hold 32: using 32",
                "medusa_num_heads = 2, the weights hold 5: using 5",
                "medusa_num_layers = 1, the weights hold 2: using 2",
            ],
        ),
        ("C", {"medusa_num_heads": 2, "version": "2"}, ["medusa_num_heads = 2, the weights hold 5: using 5"]),
        (
            "D",
            {"num_heads": 2, "num_hidden_layers": 2, "medusa_fc_bias": False, "truncated_vocab_size": 13},
            [
                "num_heads = 2, the weights hold 5: using 5",
                "medusa_fc_bias = False, the weights hold True: using True",
            ],
        ),
        ("D", {"vocab_size": 99, "original_lm_head": True}, [
            "original_lm_head = True, the weights hold False: using False",
            "vocab_size = 99, the weights hold 13: using 13",
        ]),
    ],
)  # fmt: skip
def test_a_config_with_two_heads_beside_weights_of_five_is_overruled_and_one_line_says_so(
    tmp_path, tiny_target, capsys, format, config, lines
):
    blocks, embeddings = random_heads(num_heads=5)
    write(tmp_path, stored(format, tiny_target, blocks, embeddings), "safetensors", STEMS[format], config)
    assert MedusaHeads.load(tmp_path, tiny_target).num_heads == 5
    assert capsys.readouterr().err.splitlines() == [f"`{tmp_path / 'config.json'}` says {line}" for line in lines]


def test_copies_of_one_layer_load_as_they_are(tmp_path, tiny_target):
    blocks, embeddings = random_heads(num_layers=1)
    copied = [[tuple(part.clone() for part in layer) for layer in layers * 3] for layers in blocks]
    write(tmp_path, tensors_of("A", copied, embeddings))
    heads = MedusaHeads.load(tmp_path, tiny_target)
    assert heads.num_layers == 3
    assert all(torch.equal(block.linear.weight, blocks[0][0][0]) for block in heads.blocks[0])


@torch.no_grad()
def test_blocks_without_a_bias_compute_as_with_one_of_zeros(tmp_path, tiny_target):
    blocks, embeddings = random_heads()
    whole = tensors_of("D", blocks, embeddings)
    write(tmp_path, {name: value for name, value in whole.items() if not name.endswith("bias")}, stem="model")
    assert read_checkpoint(tmp_path).names.bias is False
    plain = [[(weight, torch.zeros(32)) for weight, _ in layers] for layers in blocks], embeddings
    states, tokens = torch.randn(13, 32), torch.arange(13)
    assert found_ranks(MedusaHeads.load(tmp_path, tiny_target), states, tokens) == expected_ranks(plain, states, tokens)


@torch.no_grad()
def test_one_output_embedding_for_all_heads_is_shared_where_the_config_says_so(tmp_path, tiny_target):
    blocks, embeddings = random_heads()
    whole = tensors_of("D", blocks, embeddings[:1] * 3)
    del whole["lm_heads.1.weight"], whole["lm_heads.2.weight"]
    write(tmp_path, whole, stem="model")
    with pytest.raises(HeadsError, match=r"lacks the tensor `lm_heads.1.weight`"):
        MedusaHeads.load(tmp_path, tiny_target)
    write(tmp_path, whole, stem="model", config={"original_lm_head": True})
    heads = MedusaHeads.load(tmp_path, tiny_target)
    assert len({one.weight.data_ptr() for one in heads.lm_heads}) == 1
    states, tokens = torch.randn(13, 32), torch.arange(13)
    expected = expected_ranks((blocks, embeddings[:1] * 3), states, tokens)
    assert found_ranks(heads, states, tokens) == expected
    heads.save(tmp_path / "saved")
    assert found_ranks(MedusaHeads.load(tmp_path / "saved", tiny_target), states, tokens) == expected


@pytest.mark.parametrize("format", ["A", "D"])
def test_heads_are_found_under_any_prefix(tmp_path, format):
    blocks, embeddings = random_heads()
    write(tmp_path, tensors_of(format, blocks, embeddings, prefix="model.medusa_heads."))
    found = read_checkpoint(tmp_path)
    assert (found.names.prefix, found.names.format) == ("model.medusa_heads.", "B" if format == "A" else "D")
    assert torch.equal(found.tensors["blocks.2.1.linear.weight"], blocks[2][1][0])


def test_two_sets_of_blocks_are_told_apart_by_name_or_refused():
    def names(prefix):
        return [f"{prefix}0.0.linear.weight", f"{prefix}0.0.linear.bias", f"{prefix}0.1.weight"]

    assert recognise("f", [*names("medusa_head."), *names("tower.")]).prefix == "medusa_head."
    with pytest.raises(HeadsError, match=r"residual blocks under `head\.` and `tower\.`"):
        recognise("f", [*names("head."), *names("tower.")])


def test_of_a_sharded_model_only_the_shards_with_heads_are_opened(tmp_path, tiny_target):
    whole = whole_model(tiny_target, "A", *random_heads())
    write(tmp_path, whole, "sharded safetensors", "model")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    holding = {shard for name, shard in index.items() if name.startswith("medusa_head.")}
    others = set(index.values()) - holding
    assert others
    for shard in others:
        (tmp_path / shard).write_bytes(b"not to be opened")
    assert read_checkpoint(tmp_path).num_heads == 3
    (tmp_path / min(holding)).unlink()
    with pytest.raises(HeadsError, match=rf"names `{min(holding)}`, which is not there"):
        read_checkpoint(tmp_path)


def test_of_a_whole_model_only_the_heads_tensors_are_read(tmp_path, tiny_target, monkeypatch):
    write(tmp_path, whole_model(tiny_target, "A", *random_heads()), stem="model")
    asked = []

    class Recording:
        def __init__(self, *arguments, **keywords):
            self.opened = honest(*arguments, **keywords)

        def __enter__(self):
            self.opened.__enter__()
            return self

        def __exit__(self, *exception):
            return self.opened.__exit__(*exception)

        def keys(self):
            return self.opened.keys()

        def get_tensor(self, name):
            asked.append(name)
            return self.opened.get_tensor(name)

    honest = heads_files.safe_open
    monkeypatch.setattr(heads_files, "safe_open", Recording)
    read_checkpoint(tmp_path)
    assert len(asked) == 15
    assert all(name.startswith("medusa_head.") for name in asked)


def test_an_index_that_places_a_tensor_wrongly_is_refused(tmp_path):
    write(tmp_path, tensors_of("A", *random_heads()), "sharded safetensors")
    path = tmp_path / "medusa_lm_head.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    name = next(name for name, shard in index["weight_map"].items() if shard == shards[0])
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {name: shards[2]}}))
    with pytest.raises(HeadsError, match=rf"`{name}`, which the index places there"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"index.json` is not JSON"),
        ("{}", r"has no `weight_map`"),
        ('{"weight_map": {"a": 1}}', r"has no `weight_map`"),
        ('{"weight_map": {"a": "../b"}}', r"places `a` in `../b`, which is no file name"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, text, message):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(HeadsError, match=message):
        read_checkpoint(tmp_path)


def test_an_index_of_any_name_and_a_file_given_by_name_are_read(tmp_path):
    write(tmp_path, tensors_of("A", *random_heads()), "sharded safetensors", "heads")
    assert read_checkpoint(tmp_path).num_heads == 3
    assert read_checkpoint(tmp_path / "heads.safetensors.index.json").num_heads == 3


def test_files_of_torch_from_before_archives_are_read(tmp_path):
    blocks, embeddings = random_heads()
    path = tmp_path / "medusa_lm_head.pt"
    torch.save(tensors_of("A", blocks, embeddings), path, _use_new_zipfile_serialization=False)
    assert torch.equal(read_checkpoint(path).tensors["blocks.2.1.linear.weight"], blocks[2][1][0])


def test_shards_of_a_hub_id_are_fetched_when_they_are_needed(tmp_path, tiny_target, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    remote, cache = tmp_path / "remote", tmp_path / "cache"
    write(remote, whole_model(tiny_target, "A", *random_heads()), "sharded safetensors", "model")
    cache.mkdir()
    asked = []

    def download(repository, name):
        asked.append(name)
        if not (remote / name).is_file():
            raise EntryNotFoundError(name)
        (cache / name).write_bytes((remote / name).read_bytes())
        return str(cache / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert read_checkpoint("somebody/whole-model").num_heads == 3
    index = json.loads((remote / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {shard for name, shard in index.items() if name.startswith("medusa_head.")}
    fetched = {name for name in asked if (cache / name).is_file()}
    assert fetched == {"model.safetensors.index.json", *needed}
    assert needed < set(index.values())


def test_heads_loaded_from_a_file_do_not_change_with_it(tmp_path, tiny_target):
    write(tmp_path, tensors_of("A", *random_heads()), "pt")
    heads = MedusaHeads.load(tmp_path, tiny_target)
    before = {name: value.clone() for name, value in heads.state_dict().items()}
    path = tmp_path / "medusa_lm_head.pt"
    with path.open("r+b") as file:
        file.write(b"\x7f" * path.stat().st_size)
    assert all(torch.equal(value, before[name]) for name, value in heads.state_dict().items())


def test_heads_of_another_hidden_size_are_refused(tmp_path, tiny_target):
    write(tmp_path, tensors_of("C", *random_heads(hidden=16)))
    with pytest.raises(HeadsError, match=r"hidden size 16, the target's is 32; these heads belong to another target"):
        MedusaHeads.load(tmp_path, tiny_target)


def test_heads_with_embeddings_of_their_own_do_not_claim_the_version_without(tmp_path, tiny_target):
    MedusaHeads(tiny_target.get_output_embeddings(), 32, 2, own_lm_heads=True).save(tmp_path / "own")
    MedusaHeads.for_target(tiny_target, 2).save(tmp_path / "shared")
    assert "version" not in json.loads((tmp_path / "own" / "config.json").read_text())
    assert json.loads((tmp_path / "shared" / "config.json").read_text())["version"] == "2"
    assert set(load_file(tmp_path / "own" / "medusa_lm_head.safetensors")) > {"0.1.weight", "1.1.weight"}


def test_a_config_with_a_key_twice_is_said_to_be_no_json(tmp_path, tiny_target, capsys):
    save_file(tensors_of("C", *random_heads()), tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_heads": 2}')
    MedusaHeads.load(tmp_path, tiny_target)
    assert "is not JSON and is not read" in capsys.readouterr().err
