"""Traces of separate runs joined into one."""

import numpy as np
import pytest

from treeopt import RankTrace
from treeopt.errors import TraceError
from treeopt.merging import merge_traces
from treeopt.prompts import Prompt, prompt_key, read_prompts

METADATA = {
    "target": "demo", "target_hash": "sha256:t", "heads": "demo", "heads_hash": "sha256:h", "dtype": "float32",
    "continuations": "generated", "max_new_tokens": "9", "acceptance_rule": "greedy", "seed": "0", "treeopt": "0.1.0",
}  # fmt: skip


def trace(number, lengths=(3, 2), domains=True, candidates=0, prompts=True, **changed):
    rng = np.random.default_rng(number)
    rows = sum(lengths)
    metadata = {**METADATA, "prompts_hash": f"sha256:{number}"}
    if candidates:
        metadata["temperature"] = "0.7"
    return RankTrace(
        rng.integers(-1, 9, (rows, 2)),
        np.cumsum([0, *lengths]),
        [f"d{i % 2}" for i in range(len(lengths))] if domains else None,
        {**metadata, **changed},
        rng.random((rows, 2, candidates)) if candidates else None,
        rng.random(rows) if candidates else None,
        [100 * number + i for i in range(len(lengths))] if prompts else None,
    )


def test_documents_stand_one_after_the_other_with_all_they_have():
    traces = [trace(1, candidates=4), trace(2, (1, 4, 0), candidates=4), trace(3, (5,), candidates=4)]
    merged, notes = merge_traces(traces, ["a", "b", "c"])
    assert notes == []
    assert merged.documents.tolist() == [0, 3, 5, 6, 10, 10, 15]
    assert merged.domains == ("d0", "d1", "d0", "d1", "d0", "d0")
    assert merged.prompts.tolist() == [100, 101, 200, 201, 202, 300]
    for name in ("ranks", "topk_probs", "entropies"):
        assert (getattr(merged, name) == np.concatenate([getattr(one, name) for one in traces])).all()
    for first, one in zip((0, 2, 5), traces):
        part = merged.select(range(first, first + one.num_documents))
        assert (part.ranks == one.ranks).all()
    hits, positions = merged.counts()
    assert (positions == sum(one.counts()[1] for one in traces)).all()
    assert hits.sum() == sum(one.counts()[0].sum() for one in traces)


def test_the_metadata_is_that_of_all():
    a, b = trace(1, seed="0", heads="demo"), trace(2, seed="7", heads="heads/", treeopt="0.2.0")
    merged, _ = merge_traces([a, b], ["a", "b"])
    assert merged.metadata == {
        **METADATA, "prompts_hash": "sha256:1, sha256:2", "seed": "0, 7", "heads": "demo, heads/", "treeopt": "0.1.0, 0.2.0",
    }  # fmt: skip
    again, _ = merge_traces([merged, trace(3)], ["ab", "c"])
    assert again.metadata["prompts_hash"] == "sha256:1, sha256:2, sha256:3"
    assert again.metadata["seed"] == "0, 7"


def test_merging_step_by_step_gives_the_same_bytes(tmp_path):
    traces = [trace(i, candidates=2) for i in range(4)]
    whole, _ = merge_traces(traces, "abcd")
    left, _ = merge_traces([merge_traces(traces[:2], "ab")[0], merge_traces(traces[2:], "cd")[0]], ["ab", "cd"])
    assert left.to_bytes() == whole.to_bytes()
    whole.write(tmp_path / "t.safetensors")
    assert RankTrace.read(tmp_path / "t.safetensors") == whole


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (trace(2, target="other", target_hash="sha256:u"), r"`a` and `b` have different target: demo \(sha256:t\) and other \(sha256:u\)"),
        (trace(2, heads_hash="sha256:i"), r"`a` and `b` have different heads: demo \(sha256:h\) and demo \(sha256:i\)"),
        (trace(2, dtype="bfloat16"), r"different dtype: float32 and bfloat16; calibrate one anew"),
        (trace(2, continuations="dataset"), r"different continuations: generated and dataset"),
        (trace(2, max_new_tokens="10"), r"different max_new_tokens: 9 and 10"),
        (trace(2, acceptance_rule="typical"), r"different acceptance_rule"),
        (trace(1), r"`a` and `b` both hold the prompts sha256:1; merge each trace once"),
        (trace(2, target_hash=""), r"`b` does not state its target_hash; only traces of treeopt calibrate"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_refused_naming_both(second, message):
    with pytest.raises(TraceError, match=message):
        merge_traces([trace(1), second], ["a", "b"])


def test_a_prompt_that_two_sets_share_is_refused():
    a, b = trace(1, (3, 2, 1)), trace(2, (1, 1, 1))
    shared = RankTrace(b.ranks, b.documents, b.domains, b.metadata, prompts=[7, 102, 101])
    with pytest.raises(
        TraceError, match=r"`a` and `b` share 2 prompts, document 2 of the one and 1 of the other first"
    ):
        merge_traces([a, shared], ["a", "b"])


def test_a_merged_trace_does_not_take_one_of_its_parts_again():
    merged, _ = merge_traces([trace(1), trace(2)], ["a", "b"])
    with pytest.raises(TraceError, match=r"`ab` and `b` both hold the prompts sha256:2"):
        merge_traces([merged, trace(2)], ["ab", "b"])


def test_one_trace_is_nothing_to_merge():
    with pytest.raises(TraceError, match=r"`a` is 1 trace; give two or more"):
        merge_traces([trace(1)], ["a"])


def test_what_only_some_have_is_left_out_and_said():
    merged, notes = merge_traces(
        [trace(1, candidates=4), trace(2, domains=False, prompts=False), trace(3, candidates=4)], ["a", "b", "c"]
    )
    assert merged.domains is merged.topk_probs is merged.entropies is merged.prompts is None
    assert "temperature" not in merged.metadata
    assert notes == [
        "the merged trace has no domains: `a` has them, `b` has none, `c` has them",
        "the merged trace has no probabilities of guesses: `a` has 4 a head, `b` has none, `c` has 4 a head",
        "the merged trace has no prompt keys: `a` has them, `b` has none, `c` has them",
    ]
    merged, notes = merge_traces([trace(1, candidates=4), trace(2, candidates=3)], ["a", "b"])
    assert merged.topk_probs is None
    assert notes == ["the merged trace has no probabilities of guesses: `a` has 4 a head, `b` has 3 a head"]
    assert merge_traces([trace(1, domains=False), trace(2, domains=False)], ["a", "b"])[1] == []
    with pytest.raises(TraceError, match=r"different temperature: 0.7 and 1.0"):
        merge_traces([trace(1, candidates=4), trace(2, candidates=4, temperature="1.0")], ["a", "b"])


def test_prompts_are_told_apart_by_what_is_in_them_not_by_their_number():
    a = Prompt("1", ({"role": "user", "content": "x"},), "math", reply="y")
    b = Prompt("2", ({"role": "user", "content": "x"},), reply="z")
    c = Prompt("1", ({"role": "user", "content": "w"},), "math", reply="y")
    assert prompt_key(a, with_reply=False) == prompt_key(b, with_reply=False)
    assert prompt_key(a, with_reply=True) != prompt_key(b, with_reply=True)
    assert prompt_key(a, with_reply=False) != prompt_key(c, with_reply=False)
    assert -(1 << 63) <= prompt_key(a, with_reply=True) < 1 << 63


# From the command line


@pytest.fixture
def calibrated(run, tiny_directory, tiny_heads_directory, tiny_prompts, tmp_path):
    """Calibrate on two splits of a file, and on all of it."""
    models = ["--target", tiny_directory, "--heads", tiny_heads_directory, "--prompts", tiny_prompts]
    for split in ("calibration", "evaluation"):
        result = run("calibrate", *models, "--split", split, "--max-new-tokens", 12, "-o", f"{split}.safetensors")
        assert result.exit_code == 0, result.output
    rows = [f'{{"id": "{p.id}", "prompt": "{p.messages[0]["content"]}"}}\n' for p in read_prompts(tiny_prompts)]
    (tmp_path / "all.jsonl").write_text("".join(rows))
    run("calibrate", *models[:4], "--prompts", "all.jsonl", "--max-new-tokens", 12, "-o", "all.safetensors")


def test_traces_of_two_runs_are_merged_and_read_by_build(run, calibrated):
    result = run("trace", "merge", "calibration.safetensors", "evaluation.safetensors", "-o", "both.safetensors")
    assert result.exit_code == 0, result.output
    assert "8 documents, 96 positions, 4 heads" in result.stdout
    assert "written to both.safetensors" in result.stderr
    built = run("build", "both.safetensors", "--nodes", 6)
    assert built.exit_code == 0, built.output


def test_the_same_prompts_of_another_file_are_refused_in_one_line(run, calibrated):
    result = run("trace", "merge", "all.safetensors", "calibration.safetensors", "-o", "both.safetensors")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: `all.safetensors` and `calibration.safetensors` share 4 prompts")
    assert len(result.stderr.splitlines()) == 1
