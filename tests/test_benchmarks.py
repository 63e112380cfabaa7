"""The benchmarks run, and what they show holds here too, with room for a busy machine."""

import json

import pytest
import torch

from tests.benchmarks import calibration, gpu
from tests.benchmarks.optimizer import main
from treeopt.attention import dense
from treeopt.attention.backends import BACKENDS, Backend


@pytest.mark.heavy
def test_the_search_is_far_faster_than_plain_ones_and_grows_no_faster_than_n_log_n(tmp_path, capsys):
    main(tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    ratios = {(row["other"], row["num_nodes"]): row["ratio"] for row in result["comparisons"]}
    assert ratios["all-neighbours rescan", 512] > 400
    assert ratios["plain heap", 10**6] > 8
    assert result["nodes_64"]["median_s"] < 1e-3
    assert all(row["over_n_log_n"] < 1.5 for row in result["growth"])
    assert "times faster than the plain heap" in capsys.readouterr().out


def test_the_checks_for_a_gpu_run_through_on_a_cpu(tmp_path):
    result = gpu.main(tmp_path / "result.json", rehearse=True)
    assert json.loads((tmp_path / "result.json").read_text())["rehearsal"] is True
    rows = [row for row in (*result["accuracy"], *result["greedy equality"]) if "right" in row]
    assert all(row["right"] for row in rows)
    assert {row["backend"] for row in rows} == {"sdpa", "eager", "native"}
    assert {row["backend"]: row["refused"] for row in result["accuracy"] if "refused" in row} == {
        "triton": "it is for CUDA devices", "flex": "it is for CUDA devices",
    }  # fmt: skip
    assert [sorted(row["milliseconds"]) for row in result["steps tiny"]] == [["bare forward", "step"]] * 4
    assert result["decoding tiny"]["budgets"][1]["steps"] == 11
    assert result["calibration tiny"]["ranks_equal_a_sort"]


def test_a_wrong_backend_is_seen_by_the_checks_for_a_gpu(monkeypatch):
    wrong = Backend(lambda *args, **keywords: dense.attend(*args, **keywords) * 1.01, dense.refusal)
    monkeypatch.setattr(gpu, "BACKENDS", {**BACKENDS, "sdpa": wrong})
    rows = gpu.accuracy(gpu.Plan(rehearse=True))
    assert {row["backend"] for row in rows if not row.get("right", True)} == {"sdpa"}


TINY = {
    "vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checks_of_the_calibration_pass_run_at_any_shape(dtype):
    found = calibration.calibration_checks(
        "cpu", dtype, TINY, num_documents=2, prompt=5, tokens=300, num_heads=3, repeats=1
    )
    assert torch.get_default_dtype() == torch.float32
    assert found["ranks_equal_a_sort"]
    assert (found["continuation_tokens"], found["prompt_tokens"]) == (600, 10)
    assert found["hits"] > 0
    # In bfloat16 the same product of another shape orders near ties otherwise.
    assert dtype != torch.float32 or found["hits_apart"] == 0
    assert found["token_by_token_over_ours"]["median"] > 1


@pytest.mark.heavy
def test_the_calibration_pass_is_near_its_bound_and_far_from_token_by_token(tmp_path):
    result = calibration.main(tmp_path / "result.json", num_prompts=1, max_new_tokens=128, repeats=1)
    assert json.loads((tmp_path / "result.json").read_text())["ours_over_bound"] == result["ours_over_bound"]
    assert result["ours_over_bound"]["median"] < 1.5
    assert result["token_by_token_over_ours"]["median"] > 4
    assert result["hits_apart"] <= 2
