import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from tests.reference import rank_of
from treeopt import RankTrace
from treeopt.calibrate.continuations import Continuation, continue_prompts, dataset_continuations
from treeopt.calibrate.observe import Candidates, batches, batches_of, document_states, observe
from treeopt.calibrate.run import CalibrationSettings, auto_batch_size, calibrate, spread
from treeopt.calibrate.store import DocumentStore
from treeopt.errors import TargetError, TraceError
from treeopt.prompts import Prompt, read_prompts
from treeopt.show import describe_trace
from treeopt.targets.forward import Forward
from treeopt.targets.greedy import greedy_continuations

SETTINGS = CalibrationSettings(max_new_tokens=9, batch_size=3)
JUDGED = CalibrationSettings(max_new_tokens=9, batch_size=3, candidates=Candidates(5, 0.7))


@pytest.fixture
def prompts(tiny_prompts):
    return read_prompts(tiny_prompts, split="calibration")


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batched_continuations_equal_generate(tiny_target, batch_size):
    prompts = [[3, 1, 4], [9, 2, 6, 5, 3, 5, 8], [7], [2, 7], [1, 8, 2, 8], [12]]
    plain = [
        tiny_target.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    eos = plain[0][5]  # an end-of-sequence token that some reach early and some never
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in plain]
    with torch.inference_mode():
        found = dict(
            greedy_continuations(tiny_target, prompts, max_new_tokens=12, eos_ids={eos}, batch_size=batch_size)
        )
    assert [found[i] for i in range(len(prompts))] == expected


def test_no_prompts_give_no_continuations(tiny_target):
    assert list(greedy_continuations(tiny_target, [], max_new_tokens=4, eos_ids=(), batch_size=2)) == []


@torch.no_grad()
def test_ranks_equal_a_sort_at_every_position(tiny_target, tiny_heads):
    documents = [
        Continuation("a", None, (3, 1, 4), (1, 5, 9, 2, 6, 5, 3)),
        Continuation("b", None, (7,), (2, 7, 1)),
        Continuation("c", None, (5, 5), (8,)),
    ]
    found = [one.ranks.tolist() for one in observe(Forward(tiny_target), tiny_heads, documents, Candidates())]
    for document, ranks in zip(documents, found):
        whole = torch.tensor([[*document.prompt, *document.tokens]])
        hidden = tiny_target.model(whole).last_hidden_state[0]
        for i in range(len(document.tokens)):
            logits = tiny_heads(hidden[len(document.prompt) - 1 + i])
            for head in range(4):
                true = i + 1 + head
                expected = rank_of(logits[head].tolist(), document.tokens[true]) if true < len(document.tokens) else -1
                assert ranks[i][head] == expected


def test_chunks_do_not_change_the_ranks(tiny_target, tiny_heads, monkeypatch):
    document = Continuation("a", None, (3, 1, 4), tuple(1 + i % 12 for i in range(40)))
    whole = [one.ranks.tolist() for one in observe(Forward(tiny_target), tiny_heads, [document], Candidates())]
    monkeypatch.setattr("treeopt.calibrate.observe.CHUNK_LOGITS", 3 * 13)
    assert [one.ranks.tolist() for one in observe(Forward(tiny_target), tiny_heads, [document], Candidates())] == whole


def test_batches_hold_every_document_once_within_the_limit():
    documents = [Continuation(str(i), None, (1,) * i, (2,) * (1 + i % 5)) for i in range(1, 20)]
    groups = list(batches(documents, 40))
    assert sorted(d.prompt_id for group in groups for d in group) == sorted(d.prompt_id for d in documents)
    for group in groups:
        width = max(d.num_inputs for d in group)
        assert len(group) == 1 or width * len(group) <= 40


def test_batches_take_little_padding_once_they_are_large_enough():
    sizes = [20 + (37 * i) % 400 for i in range(300)]
    groups = list(batches_of(sizes, 4096))
    assert sorted(i for group in groups for i in group) == list(range(300))
    padded = [len(group) * max(sizes[i] for i in group) for group in groups]
    assert max(padded) <= 4096
    assert sum(padded) <= 17 / 16 * sum(sizes)
    assert min(padded[:-1]) >= 512  # large enough for its products
    assert len(groups) < 60


def test_a_trace_holds_domains_denominators_and_hashes(tiny_loaded, tiny_heads, prompts, tmp_path):
    trace = calibrate(tiny_loaded, tiny_heads, prompts, tmp_path / "t.safetensors", SETTINGS, heads_name="tiny")
    assert RankTrace.read(tmp_path / "t.safetensors") == trace
    assert trace.documents.tolist() == [0, 9, 18, 27, 36]
    assert trace.domains == ("odd", "even", "odd", "even")
    assert trace.counts()[1].tolist() == [4 * 8, 4 * 7, 4 * 6, 4 * 5]
    assert trace.metadata["target_hash"].startswith("sha256:")
    assert trace.metadata["continuations"] == "generated"
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.parametrize("ends", [False, True])
def test_the_models_own_text_given_as_a_data_set_gives_the_same_trace(
    tiny_loaded, tiny_heads, prompts, tmp_path, monkeypatch, ends
):
    if ends:  # with an end-of-sequence token that one document reaches early
        (first, *_) = continue_prompts(tiny_loaded, prompts, tmp_path / "look.jsonl", max_new_tokens=9)
        monkeypatch.setattr(tiny_loaded.model.generation_config, "eos_token_id", first.tokens[6])
    generated = calibrate(tiny_loaded, tiny_heads, prompts, tmp_path / "a.safetensors", JUDGED)
    documents = continue_prompts(tiny_loaded, prompts, tmp_path / "store.jsonl", max_new_tokens=9)
    assert ends == (min(len(document.tokens) for document in documents) < 9)
    stop = tiny_loaded.model.generation_config.eos_token_id
    replies = [
        Prompt(p.id, p.messages, p.domain, p.split, " ".join(str(i) for i in document.tokens if i != stop))
        for p, document in zip(prompts, documents)
    ]
    settings = replace(JUDGED, continuations="dataset")
    dataset = calibrate(tiny_loaded, tiny_heads, replies, tmp_path / "b.safetensors", settings)
    for name in ("documents", "ranks", "topk_probs", "entropies"):
        assert (getattr(dataset, name) == getattr(generated, name)).all()
    assert dataset.metadata["continuations"] == "dataset"
    assert describe_trace(generated).splitlines()[0].endswith("4 heads, along the target's own greedy text")
    assert describe_trace(dataset).splitlines()[0].endswith("4 heads, along the replies of the prompt file")
    assert describe_trace(dataset).splitlines()[2:] == describe_trace(generated).splitlines()[2:]


def test_the_two_texts_are_chosen_on_the_command_line(run, tiny_directory, tiny_heads_directory, tiny_prompts):
    models = ["--target", tiny_directory, "--heads", tiny_heads_directory, "--prompts", tiny_prompts]
    for text in ("generated", "dataset"):
        result = run("calibrate", *models, "--max-new-tokens", 9, "--continuations", text, "-o", f"{text}.safetensors")
        assert result.exit_code == 0, result.output
        assert run("show", f"{text}.safetensors").stdout == result.stdout
    assert "along the replies of the prompt file" in result.stdout
    assert RankTrace.read("dataset.safetensors") != RankTrace.read("generated.safetensors")


def test_the_data_sets_own_text_is_taken_as_it_is(tiny_loaded, prompts):
    documents = dataset_continuations(tiny_loaded, prompts, max_new_tokens=4)
    assert documents[0].tokens == (1, 5, 3, 7)
    without = Prompt("x", prompts[0].messages)
    with pytest.raises(TraceError, match=r"prompt `x` has no reply"):
        dataset_continuations(tiny_loaded, [without])


def test_too_short_continuations_are_refused(tiny_loaded, tiny_heads, prompts, tmp_path):
    with pytest.raises(TraceError, match=r"raise --max-new-tokens"):
        calibrate(tiny_loaded, tiny_heads, prompts, tmp_path / "t.safetensors", CalibrationSettings(max_new_tokens=3))


def test_a_device_that_is_too_small_is_one_line_with_a_remedy(tiny_loaded, tiny_heads, prompts, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …")

    monkeypatch.setattr("treeopt.targets.forward.Forward.hidden", full)
    with pytest.raises(TargetError, match=r"do not fit cpu: give a smaller --batch-size than 3; finished"):
        calibrate(tiny_loaded, tiny_heads, prompts, tmp_path / "t.safetensors", SETTINGS)


# Interruptions


class Stopped(Exception):
    pass


@pytest.mark.parametrize("phase", ["continuations.jsonl", "ranks.jsonl"])
@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_calibration_goes_on_and_ends_in_the_same_bytes(
    tiny_loaded, tiny_heads, prompts, tmp_path, monkeypatch, phase, after
):
    whole = calibrate(tiny_loaded, tiny_heads, prompts, tmp_path / "whole.safetensors", SETTINGS)
    kept = []
    append = DocumentStore.append

    def stopping(store, document, value):
        if store.path.name == phase:
            if len(kept) == after:
                raise Stopped
            kept.append(document)
        append(store, document, value)

    monkeypatch.setattr(DocumentStore, "append", stopping)
    with pytest.raises(Stopped):
        calibrate(tiny_loaded, tiny_heads, prompts, tmp_path / "t.safetensors", SETTINGS)
    assert not (tmp_path / "t.safetensors").exists()

    redone = []

    def counting(store, document, value):
        if store.path.name == phase:
            redone.append(document)
        append(store, document, value)

    monkeypatch.setattr(DocumentStore, "append", counting)
    again = calibrate(tiny_loaded, tiny_heads, prompts, tmp_path / "t.safetensors", SETTINGS)
    assert again == whole
    assert sorted(kept + redone) == sorted(prompt.id for prompt in prompts)


def test_a_line_cut_by_a_kill_is_dropped_and_the_rest_kept(tmp_path):
    path = tmp_path / "store.jsonl"
    with DocumentStore(path, {"a": 1}) as store:
        store.append("x", [1, 2])
        store.append("y", [3])
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        with DocumentStore(path, {"a": 1}) as store:
            done = {key: value for key, value in {"x": [1, 2], "y": [3]}.items() if key in store}
            assert dict(store) == done
            for key in {"x", "y"} - set(done):
                store.append(key, {"x": [1, 2], "y": [3]}[key])
        with DocumentStore(path, {"a": 1}) as store:
            assert dict(store) == {"x": [1, 2], "y": [3]}


def test_a_store_of_other_settings_or_a_damaged_one_is_refused(tmp_path):
    path = tmp_path / "store.jsonl"
    with DocumentStore(path, {"a": 1, "b": 2}) as store:
        store.append("x", [1])
    with pytest.raises(TraceError, match=r"another b; delete it to start anew"):
        DocumentStore(path, {"a": 1, "b": 3})
    for damage in (
        '{"a": 1, "b": 2}\n{"id"\n',
        "5\n",
        '{"a": 1, "b": 2}\n5\n',
        '{"a": 1, "b": 2}\n{"id": "x", "value": 1}\n',
    ):
        path.write_text(damage)
        with pytest.raises(TraceError, match=r"is damaged"):
            DocumentStore(path, {"a": 1, "b": 2})


def test_a_second_run_on_the_same_output_is_refused(tmp_path):
    path = tmp_path / "store.jsonl"
    with DocumentStore(path, {"a": 1}), pytest.raises(TraceError, match=r"is being written by another run"):
        DocumentStore(path, {"a": 1})
    with DocumentStore(path, {"a": 1}) as again:
        assert dict(again) == {}


def test_names_and_seeds_do_not_stand_in_the_way_of_going_on(tiny_loaded, tiny_heads, prompts, tmp_path, monkeypatch):
    output = tmp_path / "t.safetensors"
    monkeypatch.setattr("treeopt.calibrate.run.shutil.rmtree", lambda *args, **keywords: None)
    calibrate(tiny_loaded, tiny_heads, prompts, output, SETTINGS, heads_name="heads")
    settings = CalibrationSettings(max_new_tokens=9, batch_size=5, seed=7)
    again = calibrate(tiny_loaded, tiny_heads, prompts, output, settings, heads_name="./heads")
    assert again.metadata["heads"] == "./heads"


def test_a_changed_chat_template_does_not_join_old_continuations(
    tiny_loaded, tiny_heads, prompts, tmp_path, monkeypatch
):
    output = tmp_path / "t.safetensors"
    monkeypatch.setattr("treeopt.calibrate.run.shutil.rmtree", lambda *args, **keywords: None)
    calibrate(tiny_loaded, tiny_heads, prompts, output, SETTINGS)
    monkeypatch.setattr(tiny_loaded.tokenizer, "chat_template", "{{ messages[0]['content'] }} 9")
    with pytest.raises(TraceError, match=r"another prompts; delete it"):
        calibrate(tiny_loaded, tiny_heads, prompts, output, SETTINGS)


# The context's end and sliding windows


def test_continuations_stop_where_the_context_ends(tiny_target):
    prompt = [1 + i % 12 for i in range(250)]
    with torch.inference_mode():
        found = dict(greedy_continuations(tiny_target, [prompt], max_new_tokens=40, eos_ids=(), batch_size=2))
    assert len(found[0]) == 6
    with pytest.raises(TargetError, match=r"300 tokens and fills the context of 256"):
        list(greedy_continuations(tiny_target, [[1] * 300], max_new_tokens=4, eos_ids=(), batch_size=2))


@torch.no_grad()
def test_texts_longer_than_a_sliding_window_are_read_through_it():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=13, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    torch.manual_seed(0)
    target = MistralForCausalLM(config).eval()
    with torch.no_grad():
        target.lm_head.weight.normal_(0, 1)
    (found,) = greedy_continuations(target, [[1, 2, 3]], max_new_tokens=25, eos_ids=(), batch_size=2)
    ids = torch.tensor([[1, 2, 3]])
    own = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=25, do_sample=False, eos_token_id=None
    )
    assert found == (0, own[0, 3:].tolist())
    document = Continuation("a", None, (1, 2, 3), tuple(found[1]))
    (states,) = document_states(Forward(target), [document])
    expected = target.model(own[:, :-1]).last_hidden_state[0, 2:]
    assert (states - expected).abs().max() < 1e-5


def test_architectures_without_attention_or_with_turned_logits_are_refused(tiny_target, monkeypatch):
    monkeypatch.setattr(tiny_target.config, "logit_scale", -1.0, raising=False)
    with pytest.raises(TargetError, match=r"`llama` has logit_scale -1.0"):
        Forward(tiny_target)


def test_a_killed_calibration_leaves_nothing_broken_and_goes_on(
    tiny_directory, tiny_heads_directory, tiny_prompts, tmp_path
):
    output = tmp_path / "t.safetensors"
    arguments = ["calibrate", "--target", str(tiny_directory), "--heads", str(tiny_heads_directory)]
    arguments += ["--prompts", str(tiny_prompts), "--max-new-tokens", "200", "--batch-size", "1", "-o", str(output)]
    command = [sys.executable, "-m", "treeopt", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store = tmp_path / "t.safetensors.partial" / "continuations.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (store.exists() and len(store.read_text().splitlines()) >= 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = [json.loads(line)["id"] for line in store.read_text().splitlines(keepends=True)[1:] if line.endswith("\n")]
    assert kept
    assert not output.exists()
    subprocess.run(command, check=True, capture_output=True)
    assert RankTrace.read(output).num_documents == 4
    assert not store.parent.exists()


# Sizes


def test_a_limit_of_tokens_leaves_prompts_out_evenly(prompts):
    assert [p.id for p in spread(prompts, SETTINGS, 18)] == ["p1", "p7"]
    assert spread(prompts, SETTINGS, None) == prompts
    assert len(spread(prompts, SETTINGS, 1)) == 1


def test_the_automatic_batch_shrinks_with_the_cache_it_needs(tiny_target):
    assert auto_batch_size(tiny_target, 128) == 64
    assert auto_batch_size(tiny_target, 1 << 22) == 1


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_guesses_are_judged_by_the_targets_distribution_behind_the_documents_own_text(
    tiny_target, tiny_heads, temperature, monkeypatch
):
    monkeypatch.setattr("treeopt.calibrate.observe.CHUNK_LOGITS", 3 * 13)  # chunks of three rows
    document = Continuation("a", None, (3, 1, 4), (1, 5, 9, 2, 6, 5, 3))
    (found,) = observe(Forward(tiny_target), tiny_heads, [document], Candidates(4, temperature))
    whole = [*document.prompt, *document.tokens]
    distributions = (tiny_target(torch.tensor([whole])).logits[0] / temperature).softmax(dim=-1)
    hidden = tiny_target.model(torch.tensor([whole])).last_hidden_state[0]
    first = len(document.prompt)  # place of the document's token 0
    for i in range(len(document.tokens)):
        after = distributions[first + i]
        entropy = -(after * after.log()).sum() if i < len(document.tokens) - 1 else torch.tensor(0.0)
        assert found.entropies[i].item() == pytest.approx(entropy.item(), abs=1e-5)
        for head in range(4):
            guesses = tiny_heads(hidden[first - 1 + i])[head].sort(descending=True, stable=True).indices[:4]
            judge = first + i + head  # its distribution follows token i + head
            expected = distributions[judge][guesses].tolist() if i + 1 + head < len(document.tokens) else [0.0] * 4
            assert found.topk_probs[i, head].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_trace_with_candidates_resumes_and_holds_them(tiny_loaded, tiny_heads, prompts, tmp_path, monkeypatch):
    settings = JUDGED
    monkeypatch.setattr("treeopt.calibrate.run.OBSERVED_TOKENS", 1)  # a document a batch, so that some are left
    whole = calibrate(tiny_loaded, tiny_heads, prompts, tmp_path / "a.safetensors", settings)
    assert whole.topk_probs.shape == (36, 4, 5)
    assert whole.metadata["temperature"] == "0.7"
    plain = calibrate(tiny_loaded, tiny_heads, prompts, tmp_path / "b.safetensors", SETTINGS)
    assert (plain.ranks == whole.ranks).all()
    assert plain.topk_probs is None
    assert "temperature" not in plain.metadata
    append, output = DocumentStore.append, tmp_path / "c.safetensors"

    def stopping(self, document, value):
        if self.path.name == "ranks.jsonl" and len(self) == 2:
            raise Stopped
        append(self, document, value)

    with monkeypatch.context() as patch:
        patch.setattr(DocumentStore, "append", stopping)
        with pytest.raises(Stopped):
            calibrate(tiny_loaded, tiny_heads, prompts, output, settings)
    assert calibrate(tiny_loaded, tiny_heads, prompts, output, settings) == whole


def test_a_run_with_other_candidates_is_in_the_way(tiny_loaded, tiny_heads, prompts, tmp_path, monkeypatch):
    output = tmp_path / "t.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr("treeopt.calibrate.run.assemble", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            calibrate(tiny_loaded, tiny_heads, prompts, output, SETTINGS)
    settings = CalibrationSettings(max_new_tokens=9, batch_size=3, candidates=Candidates(5))
    with pytest.raises(TraceError, match=r"another candidates"):
        calibrate(tiny_loaded, tiny_heads, prompts, output, settings)


TINY = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "keywords"),
    [
        ("Gemma2", {"final_logit_softcapping": 0.5}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Granite", {"logits_scaling": 4.0}),
        ("Llama", {}),
    ],
)
def test_true_logits_are_those_of_the_targets_own_forward(family, keywords):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**TINY, **keywords)
    target = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in target.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    forward = Forward(target)
    own = target(ids).logits[0]
    hidden = target.get_decoder()(ids).last_hidden_state[0]
    assert forward.true_logits(hidden) == pytest.approx(own, abs=1e-5)
    assert keywords == {} or not torch.allclose(forward.logits(hidden), own, atol=1e-3)
    assert forward.vocabulary == 23
