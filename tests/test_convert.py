import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import random_heads, tensors_of, whole_model, write
from treeopt.errors import HeadsError
from treeopt.heads import MedusaHeads
from treeopt.heads.checkpoint import read_checkpoint
from treeopt.heads.convert import convert, read_lm_head
from treeopt.targets.embedding import load_output_embedding, output_embedding_names

FILES = {"A": "medusa_lm_head.safetensors", "C": "medusa_lm_head.safetensors", "D": "model.safetensors"}


@pytest.fixture(scope="module")
def lm_head(tiny_target):
    return tiny_target.get_output_embeddings().weight.detach()


@pytest.fixture
def source(tmp_path, tiny_target, lm_head):
    """Write heads whose output embeddings are the target's, in a format."""

    def written(format, **changes):
        tensors = tensors_of("A" if format == "B" else format, random_heads()[0], [lm_head] * 3)
        if format == "B":
            tensors = whole_model(tiny_target, "A", random_heads()[0], [lm_head] * 3)
        return write(tmp_path / "source", tensors | changes, stem="model" if format in "BD" else "medusa_lm_head")

    return written


@pytest.mark.parametrize("to", ["A", "C", "D"])
@pytest.mark.parametrize("format", ["A", "B", "C", "D"])
@torch.no_grad()
def test_every_format_is_written_in_every_other_exactly(tmp_path, tiny_target, lm_head, source, format, to):
    directory = source(format)
    convert(read_checkpoint(directory), to, tmp_path / "written", lm_head)
    assert sorted(path.name for path in (tmp_path / "written").iterdir()) == sorted(["config.json", FILES[to]])
    expected = tensors_of(to, random_heads()[0], [lm_head] * 3)
    stored = load_file(tmp_path / "written" / FILES[to])
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
    found = read_checkpoint(tmp_path / "written")
    assert (found.names.format, found.disagreements) == (to, ())
    hidden = torch.randn(5, 32)
    before, after = MedusaHeads.load(directory, tiny_target), MedusaHeads.load(tmp_path / "written", tiny_target)
    assert all(map(torch.equal, before.draft(hidden, [4, 3, 2]), after.draft(hidden, [4, 3, 2])))


def test_heads_with_embeddings_of_their_own_go_between_a_and_d_without_a_target(tmp_path):
    own = random_heads()
    write(tmp_path / "a", tensors_of("A", *own))
    convert(read_checkpoint(tmp_path / "a"), "D", tmp_path / "d")
    convert(read_checkpoint(tmp_path / "d"), "A", tmp_path / "back")
    assert (tmp_path / "back" / FILES["A"]).read_bytes() == (tmp_path / "a" / FILES["A"]).read_bytes()
    assert json.loads((tmp_path / "d" / "config.json").read_text()) == {
        "architectures": ["MedusaModel"],
        "hidden_size": 32,
        "medusa_fc_bias": True,
        "model_type": "medusa",
        "num_heads": 3,
        "num_hidden_layers": 2,
        "original_lm_head": False,
        "truncated_vocab_size": 13,
        "vocab_size": 13,
    }


def test_blocks_without_a_bias_become_blocks_with_one_of_zeros(tmp_path):
    whole = tensors_of("D", *random_heads())
    write(tmp_path / "d", {name: value for name, value in whole.items() if not name.endswith("bias")}, stem="model")
    convert(read_checkpoint(tmp_path / "d"), "A", tmp_path / "a")
    stored = load_file(tmp_path / "a" / FILES["A"])
    assert torch.equal(stored["1.1.linear.weight"], whole["blocks.1.layers.1.weight"])
    assert all(not value.any() for name, value in stored.items() if name.endswith("bias"))
    assert sum(name.endswith("bias") for name in stored) == 6


@pytest.mark.parametrize(("format", "name"), [("A", "1.2.weight"), ("D", "lm_heads.1.weight")])
def test_an_output_embedding_that_differs_in_one_bit_is_not_left_out(tmp_path, lm_head, source, format, name):
    changed = lm_head.clone()
    changed[7, 3] = torch.nextafter(changed[7, 3], torch.tensor(torch.inf))
    found = read_checkpoint(source(format, **{name: changed}))
    with pytest.raises(HeadsError, match=rf"`{name}` differs from the target's output embedding in 1 of 416 values"):
        convert(found, "C", tmp_path / "c", lm_head)
    assert not (tmp_path / "c").exists()


def test_equal_embeddings_in_two_dtypes_are_equal_only_if_their_values_are(tmp_path, lm_head, source):
    rounded = lm_head.to(torch.bfloat16)
    found = read_checkpoint(source("A", **{f"{head}.2.weight": rounded.clone() for head in range(3)}))
    convert(found, "C", tmp_path / "c", rounded.float())
    with pytest.raises(HeadsError, match=r"`0.2.weight` differs from the target's output embedding in \d+ of 416"):
        convert(found, "C", tmp_path / "d", lm_head)


@pytest.mark.parametrize(
    ("format", "to", "give", "message"),
    [
        ("A", "C", None, r"output embeddings of its own, and format C leaves them out .*; give --target"),
        ("C", "A", None, r"reads the target's output embedding, and format A holds a copy of it; give --target"),
        ("C", "D", None, r"format D holds a copy of it; give --target"),
        ("A", "C", torch.zeros(14, 32), r"`0.2.weight` has shape \(13, 32\), the target's output embedding \(14, 32\)"),
        ("C", "A", torch.zeros(13, 4, dtype=torch.int8), r"shape \(13, 4\) and dtype torch.int8; give a target whose"),
        ("C", "A", torch.zeros(13, 16), r"hidden size 32, the target's is 16; these heads belong to another target"),
    ],
)
def test_a_conversion_that_needs_another_target_is_refused(tmp_path, source, format, to, give, message):
    with pytest.raises(HeadsError, match=message):
        convert(read_checkpoint(source(format)), to, tmp_path / "written", give)


def test_a_vocabulary_map_goes_to_d_alone(tmp_path, lm_head):
    ids = torch.tensor([7, 0, 11, 3, 2, 9])
    write(tmp_path / "mapped", tensors_of("A", *random_heads(rows=6)) | {"token_map": ids})
    found = read_checkpoint(tmp_path / "mapped")
    for to in ("A", "C"):
        with pytest.raises(HeadsError, match=rf"has a vocabulary map, which format {to} has no place for"):
            convert(found, to, tmp_path / "written", lm_head)
    with pytest.raises(HeadsError, match=r"states the target's vocabulary beside one; give --target"):
        convert(found, "D", tmp_path / "written")
    convert(found, "D", tmp_path / "written", lm_head)
    again = read_checkpoint(tmp_path / "written")
    assert torch.equal(again.ids, ids)
    assert again.disagreements == ()
    assert json.loads((tmp_path / "written" / "config.json").read_text())["vocab_size"] == 13


def test_a_directory_that_holds_anything_is_left_alone(tmp_path, lm_head, source):
    directory = source("A")
    before = sorted((path.name, path.read_bytes()) for path in directory.iterdir())
    with pytest.raises(HeadsError, match=r"`.*source` is not empty; give a new directory"):
        convert(read_checkpoint(directory), "D", directory, lm_head)
    assert sorted((path.name, path.read_bytes()) for path in directory.iterdir()) == before


SIZES = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(("kind", "tied"), [("Llama", False), ("Llama", True), ("GPTNeoX", False)])
def test_a_targets_output_embedding_is_found_by_name_or_by_loading(tmp_path, kind, tied):
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        **SIZES, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    found = read_lm_head(*output_embedding_names(str(tmp_path)))
    # GPT-NeoX has another name in files than in the model of some versions.
    for one in [load_output_embedding(str(tmp_path)), *([] if found is None else [found])]:
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, model.get_output_embeddings().weight)
    assert kind == "GPTNeoX" or found is not None


@pytest.mark.filterwarnings("ignore")
def test_a_target_whose_files_lack_the_output_embedding_is_refused_not_made_up(run, tmp_path, tiny_directory):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_bytes((tiny_directory / "config.json").read_bytes())
    stored = load_file(tiny_directory / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, tmp_path / "target" / "model.safetensors", metadata={"format": "pt"})
    write(tmp_path / "heads", tensors_of("C", *random_heads()))
    result = run("heads", "convert", "heads", "--to", "A", "--target", tmp_path / "target", "-o", "x")
    assert result.exit_code == 1
    assert "lacks the tensor `lm_head.weight`; get the whole target again" in result.stderr
    assert not (tmp_path / "x").exists()


def test_the_bundled_heads_are_inspected_truly(run):
    from treeopt.bundled import DEMO_HEADS, calibration_path

    tensors = load_file(calibration_path(DEMO_HEADS) / "medusa_lm_head.safetensors")
    result = run("heads", "inspect", calibration_path(DEMO_HEADS), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "source": str(calibration_path(DEMO_HEADS) / "medusa_lm_head.safetensors"),
        "format": "C",
        "prefix": None,
        "num_heads": len({name.split(".")[0] for name in tensors}),
        "num_layers": len({name.split(".")[1] for name in tensors}),
        "hidden_size": tensors["0.0.linear.weight"].shape[1],
        "bias": True,
        "lm_head": "the target's",
        "vocabulary": None,
        "vocabulary_map": None,
        "dtypes": sorted({str(value.dtype).removeprefix("torch.") for value in tensors.values()}),
        "disagreements": [],
    }
    text = run("heads", "inspect", calibration_path(DEMO_HEADS)).stdout
    assert "heads           5\n" in text
    assert "layers          2 a head, with bias\n" in text
    assert "lm_head         the target's\n" in text


def test_inspect_says_where_the_config_is_wrong_and_what_is_mapped(run, tmp_path):
    blocks, embeddings = random_heads(num_heads=5, rows=6)
    tensors = tensors_of("D", blocks, embeddings, prefix="medusa_heads.") | {
        "token_map": torch.tensor([0, 2, 3, 6, 7, 9])
    }
    write(tmp_path / "d", tensors, stem="model", config={"num_heads": 2, "truncated_vocab_size": 6, "vocab_size": 10})
    result = run("heads", "inspect", tmp_path / "d")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (
        "format D: vLLM's names", "prefix medusa_heads.", "heads 5", "lm_head own", "vocabulary 6",
        "vocabulary map token_map", "dtype float32",
    ):  # fmt: skip
        assert line in lines
    assert lines[-1] == f"`{tmp_path / 'd' / 'config.json'}` says num_heads = 2, the weights hold 5: using 5"
    assert result.stderr == ""


def test_heads_are_converted_from_the_command_line(run, tmp_path, tiny_directory, tiny_heads_directory):
    result = run("heads", "convert", tiny_heads_directory, "--to", "D", "--target", tiny_directory, "-o", "d")
    assert result.exit_code == 0, result.output
    assert result.stdout == "format C to D: 4 heads of 1 layers\n"
    assert result.stderr == "written to d\n"
    assert run("heads", "convert", "d", "--to", "C", "--target", tiny_directory, "-o", "c").exit_code == 0
    for name in ("medusa_lm_head.safetensors", "config.json"):
        assert (tmp_path / "c" / name).read_bytes() == (tiny_heads_directory / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["inspect", "nowhere"], 1, "Error: `nowhere` holds no medusa_lm_head.safetensors or medusa_lm_head.pt or"),
        (["convert", "nowhere", "--to", "A", "-o", "x"], 1, "Error: `nowhere` holds no"),
        (["convert", "nowhere", "--to", "B", "-o", "x"], 2, "'B' is not one of 'A', 'C', 'D'"),
    ],
)
def test_errors_of_the_command_line_are_one_line(run, arguments, status, message):
    result = run("heads", *arguments)
    assert result.exit_code == status
    assert message in result.stderr
    assert status == 2 or result.stderr.count("\n") == 1


def test_a_target_that_is_none_is_refused(run, tiny_heads_directory, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    arguments = ["--to", "A", "--target", tmp_path / "target", "-o", "x"]
    result = run("heads", "convert", tiny_heads_directory, *arguments)
    assert result.exit_code == 1
    assert "cannot be loaded as a target" in result.stderr
    assert result.stderr.count("\n") == 1
