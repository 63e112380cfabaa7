"""The benchmarks run, and what they show holds here too, with room for a busy machine."""

import json

import pytest

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
