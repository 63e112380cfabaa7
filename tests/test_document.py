import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import mask_from_consumer
from tests.strategies import rates
from treeopt import best_tree, read_tree, write_tree
from treeopt.document import MAX_BYTES, from_json, to_bytes
from treeopt.errors import DocumentError, TreeError
from treeopt.optimize import Limits


@pytest.fixture
def built():
    return best_tree([[0.6, 0.2], [0.5, 0.1]], num_nodes=5, provenance={"source": "test"})


LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "max_depth": st.integers(0, 3), "max_rank": st.integers(0, 2), "rank_caps": st.lists(st.integers(0, 2), max_size=3),
        "max_children": st.integers(0, 3), "level_caps": st.lists(st.integers(0, 4), max_size=3),
        "dense_siblings": st.booleans(), "level_regular": st.booleans(), "max_leaves": st.integers(1, 5),
    },
)  # fmt: skip


@given(rates(), st.integers(1, 30), LIMITS)
def test_a_written_tree_reads_back_to_the_same_bytes(rows, num_nodes, limits):
    built = best_tree(rows, num_nodes, **limits)
    again = from_json(json.loads(to_bytes(built)))
    assert again.tree == built.tree
    assert to_bytes(again) == to_bytes(built)
    assert again.expected_accepted == built.expected_accepted


def test_packed_and_dense_masks_of_the_file_agree(built):
    document = json.loads(to_bytes(built))
    assert (mask_from_consumer(document) == np.array(document["attention_mask"], dtype=bool)).all()


def test_a_large_tree_is_written_with_the_packed_mask_only(tmp_path):
    built = best_tree(np.full((4, 8), 1 / 8), num_nodes=600)
    write_tree(built, tmp_path / "tree.json")
    assert json.loads((tmp_path / "tree.json").read_text())["attention_mask"] is None
    assert read_tree(tmp_path / "tree.json").tree == built.tree


def test_the_file_of_a_small_tree_is_this_text():
    built = best_tree([[0.5, 0.25]], num_nodes=3, max_rank=4, must_include=[(0,)], provenance={"source": "test"})
    assert to_bytes(built).decode() == (
        "{\n"
        '  "schema": "treeopt.tree/1",\n'
        '  "num_nodes": 3,\n'
        '  "max_depth": 1,\n'
        '  "paths": [[],[0],[1]],\n'
        '  "parents": [-1,0,0],\n'
        '  "depths": [0,1,1],\n'
        '  "ranks": [-1,0,1],\n'
        '  "position_ids": [0,1,1],\n'
        '  "attention_mask": [[1,0,0],[1,1,0],[1,0,1]],\n'
        '  "packed_mask": [["0000000000000001"],["0000000000000003"],["0000000000000005"]],\n'
        '  "retrieve": [[0,1],[0,2]],\n'
        '  "retrieve_valid": [[1,1],[1,1]],\n'
        '  "expected_accepted": 0.75,\n'
        '  "tokens_per_step": 1.75,\n'
        '  "path_probabilities": [1.0,0.5,0.25],\n'
        '  "added": [0,1,2],\n'
        '  "curve": [0.0,0.5,0.75],\n'
        '  "constraints": {"num_nodes":3,"max_depth":null,"max_rank":4,"rank_caps":[],"max_children":null,"level_caps":[],'
        '"dense_siblings":false,"level_regular":false,"must_include":[[0]],"max_leaves":null},\n'
        '  "certificate": {"objective":"expected_accepted","value":0.75,"upper_bound":0.75,"optimal":true,"nested":false,'
        '"last_included":0.25,"first_excluded":0.0,"unconstrained_value":0.75,'
        '"constraint_costs":{"max_rank":0.0,"must_include":0.0},"parts":{},'
        '"expected_accepted_interval":null,"nodes_within_noise":null},\n'
        '  "provenance": {"source":"test"}\n'
        "}\n"
    )


FREE = {field.name: field.default for field in dataclasses.fields(Limits)} | {"num_nodes": 5}


def changed(built, **changes):
    document = json.loads(to_bytes(built))
    for key, value in changes.items():
        if value is None:
            del document[key]
        else:
            document[key] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "treeopt.tree/2"}, r"`schema` is 'treeopt.tree/2'"),
        ({"surprise": 1}, r"`surprise` is not a key"),
        ({"parents": None}, r"`parents` is missing"),
        ({"parents": [-1, 0, 0, 1, 1]}, r"`parents` does not follow"),
        ({"depths": [0, 1, 1, 2, 3]}, r"`depths` does not follow"),
        ({"attention_mask": [[1]]}, r"`attention_mask` does not follow"),
        ({"packed_mask": [["00"]]}, r"`packed_mask` does not follow"),
        ({"retrieve": [[0]]}, r"`retrieve` does not follow"),
        ({"expected_accepted": 9.0}, r"`expected_accepted` does not follow"),
        ({"paths": [[0], [1]]}, r"begins with \[\]"),
        ({"paths": [[], [True]]}, r"holds True"),
        ({"paths": [[], [0], [0]]}, r"node `\(0\)` is given twice"),
        ({"path_probabilities": [1.0]}, r"must hold 5 numbers"),
        ({"path_probabilities": [1.0, 2.0, 0.1, 0.1, 0.1]}, r"must lie in \[0, 1\]"),
        ({"path_probabilities": [1.0, 0.1, 0.1, 0.5, 0.1]}, r"node `3` is likelier than its parent"),
        ({"added": [0, 1, 1, 2, 3]}, r"`added` must name each node"),
        ({"constraints": {"num_nodes": 5}}, r"`constraints` must have exactly the keys"),
        ({"certificate": {}}, r"`certificate` must have exactly the keys"),
        ({"constraints": {**FREE, "num_nodes": 4}}, r"in `constraints`, `num_nodes` is 4, but the tree has 5"),
        ({"constraints": {**FREE, "max_rank": 0}}, r"`max_rank` allows rank 0 at depth 1, but the tree holds \(1\)"),
        (
            {"constraints": {**FREE, "level_caps": [2, 1]}},
            r"`level_caps` allows 1 nodes at depth 2, but the tree has 2",
        ),
        ({"constraints": {**FREE, "must_include": [[5]]}}, r"must_include is \[\[5\]\]; give paths of the tree"),
        ({"constraints": {**FREE, "must_include": 5}}, r"must_include is 5; give paths of the tree"),
        ({"constraints": {**FREE, "dense_siblings": 1}}, r"`dense_siblings` is 1; give True or False"),
        ({"constraints": {**FREE, "max_leaves": 2.5}}, r"`max_leaves` is 2.5; give a whole number"),
        ({"constraints": {**FREE, "max_depth": 1}}, r"`max_depth` is 1, but the tree has depth 2"),
        ({"path_probabilities": [1.0, 10**400, 0.1, 0.1, 0.1]}, r"int too large|must lie in"),
        ({"provenance": {"a": 1}}, r"`provenance` must map text to text"),
    ],
)
def test_each_defect_of_a_file_has_its_own_error(tmp_path, built, changes, message):
    path = tmp_path / "tree.json"
    path.write_text(changed(built, **changes))
    with pytest.raises((DocumentError, TreeError), match=message):
        read_tree(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1, "schema": 2}', r"`schema` is given twice"),
        ('{"schema": NaN}', r"`NaN` is no JSON number"),
        ('{"schema": -Infinity}', r"`-Infinity` is no JSON number"),
        ("[1]", r"holds list, not an object"),
        ('{"schema": ', r"no tree file: not JSON: Expecting value at line 1, column 12"),
        ('{"schema": %s}' % ("9" * 5000), r"no tree file: Exceeds the limit"),
        ("[" * 100_000, r"nested too deeply"),
    ],
)
def test_careless_json_is_refused(tmp_path, text, message):
    path = tmp_path / "tree.json"
    path.write_text(text)
    with pytest.raises(DocumentError, match=message):
        read_tree(path)


def test_an_oversize_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "tree.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(DocumentError, match=r"at most 67108864"):
        read_tree(path)


def test_bytes_that_are_no_text_and_missing_files_are_refused(tmp_path):
    (tmp_path / "tree.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(DocumentError, match="not UTF-8 text"):
        read_tree(tmp_path / "tree.json")
    with pytest.raises(DocumentError, match="No such file"):
        read_tree(tmp_path / "none.json")


def test_a_process_killed_while_it_writes_leaves_the_old_file_whole(tmp_path, built):
    path = tmp_path / "tree.json"
    write_tree(built, path)
    before = path.read_bytes()
    code = (
        "import sys, time; from treeopt.files import replacing; from pathlib import Path\n"
        "with replacing(Path(sys.argv[1])) as part:\n"
        "    part.write_text('half'); print('ready', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert path.read_bytes() == before


def test_an_interrupted_write_removes_its_part_and_keeps_the_old_file(tmp_path, built):
    from treeopt.files import replacing

    path = tmp_path / "tree.json"
    write_tree(built, path)

    def interrupted():
        with replacing(path) as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [entry.name for entry in tmp_path.iterdir()] == ["tree.json"]
    assert read_tree(path).tree == built.tree


def test_reading_and_writing_64_nodes_is_quick(built):
    start = time.perf_counter()
    data = to_bytes(best_tree(np.full((4, 8), 1 / 8), num_nodes=64))
    from_json(json.loads(data))
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("first_excluded", 2.0, r"`first_excluded` is 2.0; give a number from 0 to 1"),
        ("unconstrained_value", -1, r"`unconstrained_value` is -1"),
        (
            "objective",
            "speed",
            r"`objective` is 'speed'; give one of expected_accepted, mixture, robust, tokens_per_step, typical",
        ),
        ("optimal", 1, r"`optimal` is 1; give true or false"),
        ("nested", None, r"`nested` is None; give true or false"),
        ("upper_bound", 0.5, r"`upper_bound` is 0.5 for a value of 1.2"),
        ("upper_bound", 1.5, r"`upper_bound` is 1.5 for a value of 1.2"),
        ("constraint_costs", [1], r"`constraint_costs` is \[1\]; give an object of numbers"),
        ("parts", {"math": "much"}, r"`math` is 'much'; give a number from 0 to 5"),
        ("expected_accepted_interval", [5, 1], r"must give `expected_accepted_interval`"),
    ],
)
def test_a_certificate_out_of_range_is_refused(tmp_path, built, key, value, message):
    document = json.loads(to_bytes(built))
    document["certificate"] |= {"expected_accepted_interval": [0.1, 0.2], "nodes_within_noise": 0, key: value}
    (tmp_path / "tree.json").write_text(json.dumps(document))
    with pytest.raises(DocumentError, match=message):
        read_tree(tmp_path / "tree.json")


def test_a_file_that_no_reader_takes_is_not_written(tmp_path, built, monkeypatch):
    monkeypatch.setattr("treeopt.document.MAX_BYTES", 100)
    with pytest.raises(DocumentError, match=r"the file of 5 nodes would have \d+ bytes"):
        write_tree(built, tmp_path / "tree.json")
    assert list(tmp_path.iterdir()) == []


def test_links_are_written_through_and_pipes_and_folders_are_not_replaced(tmp_path, built):
    import threading

    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_tree(built, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_bytes() == to_bytes(built)
    os.mkfifo(tmp_path / "pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_tree(built, tmp_path / "pipe")
    reader.join()
    assert received == [to_bytes(built)]
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(IsADirectoryError, match="give the name of a file"):
        write_tree(built, tmp_path)
