import json
from pathlib import Path

import numpy as np
import pytest

from treeopt.errors import LatencyError
from treeopt.latency import LatencyCurve, LatencyTable

A800 = Path(__file__).parent / "data" / "caddtree_verify_cost_A800.json"


def test_between_measured_budgets_the_time_is_interpolated_or_the_next_buckets():
    assert LatencyCurve.of([1, 5], [1.0, 3.0]).at([1, 2, 5]).tolist() == [1.0, 1.5, 3.0]
    assert LatencyCurve.of([1, 4, 8], [1.0, 3.0, 7.0], between="step").at([1, 2, 4, 5, 8]).tolist() == [1, 3, 3, 7, 7]


def test_drafting_is_priced_by_depth_and_the_last_price_stands_for_deeper_levels():
    assert LatencyCurve.of([1], [1.0]).drafting([0, 3]).tolist() == [0.0, 0.0]
    assert LatencyCurve.of([1], [1.0], draft_seconds=0.5).drafting([0, 1, 4]).tolist() == [0.0, 0.5, 0.5]
    assert LatencyCurve.of([1], [1.0], draft_seconds=[0.5, 0.7]).drafting([0, 1, 2, 3]).tolist() == [0.0, 0.5, 0.7, 0.7]


def test_a_plain_step_is_the_pass_of_one_node_unless_it_is_given():
    assert LatencyCurve.of([1, 2], [1.0, 2.0]).plain_seconds == 1.0
    assert LatencyCurve.of([2, 4], [1.0, 2.0], plain_seconds=0.8).plain_seconds == 0.8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [1.0]), r"give two lists of one length"),
        (([], []), r"give two lists of one length"),
        (([2, 1], [1.0, 1.0]), r"ascend from 1 on"),
        (([0, 1], [1.0, 1.0]), r"ascend from 1 on"),
        (([1.5], [1.0]), r"ascend from 1 on"),
        (([2], [1.0]), r"`plain_seconds` is missing"),
        (([1], [0.0]), r"`seconds` must be positive"),
        (([1], [float("nan")]), r"`seconds` must be positive"),
        (([1], [1.0], {"draft_seconds": -1.0}), r"`draft_seconds` must be finite and not negative"),
        (([1], [1.0], {"batch": 0}), r"`batch` is 0"),
        (([1], [1.0], {"context": -1}), r"`context` is -1"),
        (([1], [1.0], {"between": "spline"}), r"`between` is 'spline'; give one of linear, step"),
    ],
)
def test_what_is_no_curve_is_refused(arguments, message):
    nodes, seconds, *keywords = arguments
    with pytest.raises(LatencyError, match=message):
        LatencyCurve.of(nodes, seconds, **(keywords[0] if keywords else {}))


def test_a_written_table_reads_back(tmp_path):
    curves = (
        LatencyCurve.of(
            [1, 8], [0.1, 0.25], draft_seconds=[0.01, 0.02], batch=2, context=64, quartiles=[(0.1, 0.2)] * 2
        ),
        LatencyCurve.of([1, 8], [0.1, 0.3], plain_seconds=0.09, between="step"),
    )
    LatencyTable(curves, {"device": "cpu"}).write(tmp_path / "latency.json")
    again = LatencyTable.read(tmp_path / "latency.json")
    assert again.metadata == {"device": "cpu"}
    for before, after in zip(curves, again.curves):
        for name in ("nodes", "seconds"):
            assert getattr(before, name).tolist() == getattr(after, name).tolist()
        for name in ("plain_seconds", "draft_seconds", "batch", "context", "between", "quartiles"):
            assert getattr(before, name) == getattr(after, name)


def test_a_csv_is_read_by_batch_and_context(tmp_path):
    (tmp_path / "a.csv").write_text("nodes,seconds\n4,0.2\n1,0.1\n")
    (curve,) = LatencyTable.read(tmp_path / "a.csv").curves
    assert (curve.nodes.tolist(), curve.seconds.tolist()) == ([1, 4], [0.1, 0.2])
    (tmp_path / "b.csv").write_text("batch,context,nodes,seconds\n1,0,1,1\n1,9,1,2\n2,0,1,3\n")
    table = LatencyTable.read(tmp_path / "b.csv")
    assert table.curve(1, 9).plain_seconds == 2
    assert table.curve(2).plain_seconds == 3


def test_published_cost_models_count_the_root_too():
    table = LatencyTable.read(A800, model="Qwen3-8B")
    curve = table.curve(1, 2000)
    assert (curve.nodes[0], curve.max_nodes, curve.draft_seconds) == (1, 513, (0.0065,))
    assert curve.plain_seconds == 0.03410136
    assert [one.context for one in table.curves][:3] == [1, 1000, 2000]
    assert LatencyTable.read(A800).metadata["model"] == "Qwen3-8B"  # the only one needs no name
    with pytest.raises(LatencyError, match=r"`model` is Llama; the file has Qwen3-8B; name one of them"):
        LatencyTable.read(A800, model="Llama")


def test_the_nearest_measured_context_is_taken_and_an_unmeasured_batch_refused():
    table = LatencyTable(tuple(LatencyCurve.of([1], [1.0], context=context) for context in (100, 1000)))
    assert table.curve().context == 100
    assert table.curve(1, 600).context == 1000
    assert table.curve(1, 550).context == 100
    with pytest.raises(LatencyError, match=r"`batch` 4 was not measured; the file has 1"):
        table.curve(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", r"`schema` is None"),
        ('{"schema": "treeopt.latency/1", "curves": []}', r"`curves` must be a list"),
        ('{"schema": "treeopt.latency/1", "curves": [{"nodes": [1]}]}', r"missing, unknown or misshapen keys"),
        ('{"schema": "treeopt.latency/1", "metadata": 3, "curves": [{}]}', r"`metadata` must map text to text"),
        ("{broken", r"is no table of latencies"),
        ("a,b\n1,2\n", r"needs a header with `nodes` and `seconds`"),
        ("nodes,seconds\nx,1\n", r"is no table of latencies"),
        ('{"models": {"a": {}}}', r"`a` lacks"),
    ],
)
def test_files_that_are_no_table_are_refused_by_name(tmp_path, text, message):
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(LatencyError, match=message) as error:
        LatencyTable.read(path)
    assert str(path) in str(error.value)


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(LatencyError, match=r"make one with treeopt profile"):
        LatencyTable.read(tmp_path / "none.json")


def test_the_published_file_is_what_was_copied():
    data = json.loads(A800.read_text())
    assert np.diff(data["models"]["Qwen3-8B"]["curves"]["1"]["n"]).min() > 0
