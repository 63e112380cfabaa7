import json

import numpy as np
import pytest

from treeopt import AcceptanceTable
from treeopt.errors import AcceptanceError


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([[0.5, float("nan")]], r"head `0` has rate nan at rank 1"),
        ([[0.5], [-0.1]], r"head `1` has rate -0.1 at rank 0"),
        ([[1.2]], r"head `0` has rate 1.2"),
        ([[0.6, 0.75, 0.8], [0.4, 0.5, 0.55]], r"cumulative top-k"),
        ([[0.3, 0.35, 0.36]], r"cumulative top-k"),
        ([[0.6, 0.7]], r"head `0` has rates that sum to 1.3"),
        ([], r"`rates` is empty"),
        ([0.5, 0.2], r"head `0` is 0.5"),
        ([["a"]], r"not a number"),
        ([["0.5"]], r"not a number"),
        ([[True]], r"not a number"),
        ([[10**400]], r"not a number"),
        ([[]], r"head `0`"),
    ],
)
def test_rates_that_are_no_accuracies_are_refused(rates, message):
    with pytest.raises(AcceptanceError, match=message):
        AcceptanceTable.from_rates(rates)


def test_rates_need_not_fall_from_rank_to_rank():
    assert AcceptanceTable.from_rates([[0.2, 0.6, 0.1]]).num_ranks == 3


def test_short_rows_are_filled_with_zeros():
    table = AcceptanceTable.from_rates([[0.5, 0.25], [0.5]])
    assert table.rates.tolist() == [[0.5, 0.25], [0.5, 0.0]]
    assert table.top(2).tolist() == [0.75, 0.5]


def test_each_head_is_divided_by_its_own_positions():
    table = AcceptanceTable.from_counts([[10, 5], [10, 5]], [20, 40])
    assert table.rates.tolist() == [[0.5, 0.25], [0.25, 0.125]]


@pytest.mark.parametrize(
    ("hits", "positions", "message"),
    [
        ([[3, 2]], [4], r"head `0` has 5 hits at 4 positions"),
        ([[-1, 2]], [4], r"negative count"),
        ([[1]], [4, 4], r"shape"),
        ([[0.5]], [4], r"whole numbers"),
        ([[0]], [0], r"must lie in 1"),
        ([[2**62, 2**62]], [10], r"recount"),
    ],
)
def test_counts_that_contradict_each_other_are_refused(hits, positions, message):
    with pytest.raises(AcceptanceError, match=message):
        AcceptanceTable.from_counts(hits, positions)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"schema": "treeopt.acceptance/2", "rates": [[0.5]]}, r"`schema` is 'treeopt.acceptance/2'"),
        ({"schema": "treeopt.acceptance/1", "rates": [[0.5]], "extra": 1}, r"`extra` is not a key"),
        ({"schema": "treeopt.acceptance/1"}, r"exactly one of `rates` and `hits`"),
        ({"schema": "treeopt.tree/1"}, r"this is a tree"),
        ("text", r"`schema` is 'str'"),
    ],
)
def test_a_table_file_with_other_keys_is_refused(tmp_path, data, message):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    with pytest.raises(AcceptanceError, match=message):
        AcceptanceTable.read(path)


def test_table_files_hold_rates_counts_or_bare_rows(tmp_path):
    path = tmp_path / "table.json"
    for data in (
        [[0.5, 0.25]],
        {"schema": "treeopt.acceptance/1", "rates": [[0.5, 0.25]], "source": "here"},
        {"schema": "treeopt.acceptance/1", "hits": [[2, 1]], "positions": [4]},
    ):
        path.write_text(json.dumps(data))
        assert AcceptanceTable.read(path).rates.tolist() == [[0.5, 0.25]]


def test_a_file_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("{")
    with pytest.raises(AcceptanceError, match=r"cannot be read as an acceptance table"):
        AcceptanceTable.read(path)


def test_rates_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        AcceptanceTable.from_rates(np.array([[0.5]])).rates[0, 0] = 1


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": 1, "schema": 2}', "[[NaN]]"])
def test_careless_json_is_refused(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(AcceptanceError, match=r"cannot be read as an acceptance table"):
        AcceptanceTable.read(path)
