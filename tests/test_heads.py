import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from treeopt.errors import HeadsError
from treeopt.heads import MedusaHeads


@pytest.fixture
def saved(tmp_path, tiny_heads):
    tiny_heads.save(tmp_path)
    return tmp_path


def rewrite(directory, change):
    path = directory / "medusa_lm_head.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_saved_heads_load_to_equal_logits(saved, tiny_target, tiny_heads):
    again = MedusaHeads.load(saved, tiny_target)
    hidden = torch.randn(2, 32)
    assert torch.equal(again(hidden), tiny_heads(hidden))
    assert (again.num_heads, again.num_layers) == (4, 1)


def test_the_file_holds_residual_blocks_only(saved):
    names = set(load_file(saved / "medusa_lm_head.safetensors"))
    assert names == {f"{head}.0.linear.{kind}" for head in range(4) for kind in ("weight", "bias")}


def test_heads_are_counted_from_the_weights_and_one_line_says_so(saved, tiny_target, capsys):
    (saved / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    assert MedusaHeads.load(saved, tiny_target).num_heads == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "says medusa_num_heads = 2, the weights hold 4: using 4" in line


def test_a_config_that_agrees_is_not_mentioned(saved, tiny_target, capsys):
    MedusaHeads.load(saved, tiny_target)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("2.0.linear.bias"), r"lacks the tensor `2.0.linear.bias`"),
        (lambda t: t.pop("0.0.linear.weight"), r"lacks the tensor `0.0.linear.weight`"),
        (lambda t: t.update({"surprise": torch.zeros(1)}), r"has the tensor `surprise`"),
        (lambda t: t.update({"1.1.linear.weight": torch.zeros(32, 32)}), r"lacks the tensor `0.1.linear.bias`"),
        (lambda t: t.update({"0.0.linear.weight": torch.zeros(16, 16)}), r"`0.0.linear.weight` has shape \(16, 16\)"),
        (lambda t: t.update({"0.1.weight": torch.zeros(13, 32)}), r"lacks the tensor `1.1.weight`"),
        (
            lambda t: t.update({f"{h}.5.weight": torch.zeros(13, 32) for h in range(4)}),
            r"lacks the tensor `0.1.weight`",
        ),
        (lambda t: t.update({"0.0.linear.bias": torch.full((32,), float("nan"))}), r"`0.0.linear.bias` holds NaN"),
        (lambda t: t.update({"0.0.linear.bias": torch.zeros(32, dtype=torch.int32)}), r"no floating point"),
        (lambda t: t.update({"999999999.0.linear.bias": torch.zeros(32)}), r"names head 999999999 but holds 9 tensors"),
        (lambda t: (t.clear(), t.update({"0.1.weight": torch.zeros(1)})), r"holds no residual block"),
    ],
)
def test_broken_checkpoints_are_refused_with_the_tensor_named(saved, tiny_target, change, message):
    rewrite(saved, change)
    with pytest.raises(HeadsError, match=message):
        MedusaHeads.load(saved, tiny_target)


def test_own_output_embeddings_that_copy_the_targets_give_equal_logits(tmp_path, tiny_target, tiny_heads):
    tensors = {name.removeprefix("blocks."): value for name, value in tiny_heads.state_dict().items()}
    embedding = tiny_target.get_output_embeddings().weight.detach()
    tensors |= {f"{head}.1.weight": embedding.clone() for head in range(4)}
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    hidden = torch.randn(3, 32)
    for path in (tmp_path, tmp_path / "medusa_lm_head.pt"):
        own = MedusaHeads.load(path, tiny_target)
        assert own.lm_heads is not None
        states = tiny_heads.states(hidden)
        # Head by head: a product of all heads' rows at once may round otherwise.
        assert all(torch.equal(own.project(states[h], h), tiny_heads.project(states[h], h)) for h in range(4))
        assert all(map(torch.equal, own.draft(hidden, [2, 3]), tiny_heads.draft(hidden, [2, 3])))


def test_heads_with_own_embeddings_save_and_load_again(tmp_path, tiny_target):
    heads = MedusaHeads(tiny_target.get_output_embeddings(), 32, num_heads=2, num_layers=2, own_lm_heads=True)
    heads.save(tmp_path)
    again = MedusaHeads.load(tmp_path, tiny_target)
    assert again.num_layers == 2
    assert all(map(torch.equal, again.state_dict().values(), heads.state_dict().values()))


def test_files_that_are_no_checkpoint_are_refused(tmp_path, tiny_target):
    with pytest.raises(HeadsError, match=r"holds no medusa_lm_head.safetensors or medusa_lm_head.pt"):
        MedusaHeads.load(tmp_path, tiny_target)
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"cut")
    with pytest.raises(HeadsError, match=r"cannot be read"):
        MedusaHeads.load(tmp_path, tiny_target)


class Payload:
    def __reduce__(self):
        return (print, ("this ran",))


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, tiny_target, capsys):
    torch.save({"0.0.linear.weight": Payload()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(HeadsError, match=r"more than tensors"):
        MedusaHeads.load(tmp_path, tiny_target)
    assert "this ran" not in capsys.readouterr().out


def test_untrained_heads_repeat_the_targets_own_logits(tiny_target):
    heads = MedusaHeads.for_target(tiny_target, num_heads=2, num_layers=2)
    hidden = torch.randn(1, 32)
    torch.testing.assert_close(heads(hidden)[1], tiny_target.get_output_embeddings()(hidden))


def test_the_targets_embedding_is_neither_saved_nor_a_parameter(tiny_heads, tiny_target):
    embedding = tiny_target.get_output_embeddings().weight
    assert all(parameter is not embedding for parameter in tiny_heads.parameters())


def test_drafts_are_the_best_ranks_of_each_head(tiny_heads):
    hidden = torch.randn(2, 32)
    logits = tiny_heads(hidden)
    drafts = tiny_heads.draft(hidden, [3, 1])
    for head, draft in enumerate(drafts):
        order = logits[head].sort(dim=-1, descending=True, stable=True).indices
        assert torch.equal(draft, order[:, : draft.shape[1]])
    assert tiny_heads.draft(hidden, []) == []


@pytest.mark.parametrize("keywords", [{"num_heads": 0}, {"num_layers": 0}])
def test_no_heads_or_layers_are_refused(tiny_target, keywords):
    with pytest.raises(HeadsError, match=r"give at least 1 of each"):
        MedusaHeads.for_target(tiny_target, **keywords)


def test_a_config_that_is_no_object_is_passed_over(saved, tiny_target):
    (saved / "config.json").write_text("[]")
    assert MedusaHeads.load(saved, tiny_target).num_heads == 4


def test_a_hub_id_is_fetched_with_its_config(saved, tiny_target, tiny_heads, monkeypatch, capsys):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    asked = []

    def download(repository, name):
        asked.append((repository, name))
        if not (saved / name).is_file():
            raise EntryNotFoundError(name)
        return str(saved / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    (saved / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    again = MedusaHeads.load("somebody/some-heads", tiny_target)
    assert asked == [("somebody/some-heads", "medusa_lm_head.safetensors"), ("somebody/some-heads", "config.json")]
    assert "says medusa_num_heads = 2" in capsys.readouterr().err
    assert all(map(torch.equal, again.state_dict().values(), tiny_heads.state_dict().values()))
    (saved / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(HeadsError, match=r"`somebody/some-heads` on the hub holds no"):
        MedusaHeads.load("somebody/some-heads", tiny_target)


@pytest.mark.parametrize("kind", ["ConnectionError", "LocalEntryNotFoundError"])
def test_a_hub_that_is_out_of_reach_is_named(tiny_target, monkeypatch, kind):
    import huggingface_hub
    from huggingface_hub import errors

    def download(repository, name):
        raise getattr(errors, kind, ConnectionError)("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(HeadsError, match=r"not to be had from the hub \(no route\)"):
        MedusaHeads.load("somebody/some-heads", tiny_target)
