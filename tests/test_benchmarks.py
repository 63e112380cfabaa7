"""The benchmarks run, and what they show holds here too, with room for a busy machine."""

import json

import pytest
import torch

from tests.benchmarks import calibration
from tests.benchmarks.optimizer import main


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
