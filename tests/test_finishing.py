"""Groups of documents, stores of several processes, documents read one at a time."""

import json
from collections import Counter

import pytest

from treeopt.calibrate.continuations import MOST_BATCHES, decoding_groups
from treeopt.calibrate.documents import Continuation, Documents, documents_hash
from treeopt.calibrate.finishing import finish
from treeopt.calibrate.processes import Processes
from treeopt.calibrate.store import DocumentStore
from treeopt.errors import TraceError
from treeopt.prompts import Prompt

NAMES = [f"d{i}" for i in range(8)]
GROUPS = [[0, 3, 1], [2], [5, 4, 7, 6]]


class Stopped(Exception):
    pass


def work(group):
    for i in group:
        yield i, [i, *group], 1  # as a product does, the value depends on what stands beside


def finished(path, work=work):
    return dict(finish(path, {"a": 1}, NAMES, GROUPS, work, Processes(), "things"))


@pytest.mark.parametrize("after", range(8))
def test_what_is_finished_does_not_depend_on_where_a_run_was_interrupted(tmp_path, after):
    left = iter(range(after))

    def interrupted(group):
        for found in work(group):
            if next(left, None) is None:
                raise Stopped
            yield found

    with pytest.raises(Stopped):
        finished(tmp_path / "a.jsonl", interrupted)
    begun = Counter()

    def counting(group):
        begun[tuple(group)] += 1
        return work(group)

    assert finished(tmp_path / "a.jsonl", counting) == finished(tmp_path / "whole.jsonl")
    whole = [group for end, group in zip((3, 4, 8), GROUPS) if after >= end]
    assert [list(group) for group in begun] == [group for group in GROUPS if group not in whole]


def test_documents_that_another_process_finished_but_nobody_sees_are_named(tmp_path):
    class Elsewhere(Processes):
        def share(self, label, num_units):
            yield 0

    with pytest.raises(
        TraceError, match=r"lacks 5 documents that other processes finished, 'd2' the first; choose a -o"
    ):
        finish(tmp_path / "a.jsonl", {}, NAMES, GROUPS, work, Elsewhere(), "things")


def test_every_process_writes_its_own_file_and_reads_all(tmp_path):
    path = tmp_path / "a [x].b.jsonl"
    with DocumentStore(path, {"a": 1}, 0) as first, DocumentStore(path, {"a": 1}, 12) as other:
        first.append("x", [1])
        other.append("y", [2, 3])
        assert dict(first) == {"x": [1]}
        first.look()
        assert dict(first) == {"x": [1], "y": [2, 3]}
        other.append("z", [])
        first.look()
        assert list(first) == ["x", "y", "z"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a [x].b.12.jsonl", "a [x].b.jsonl"]
    with DocumentStore(path, {"a": 1}, 3) as third:
        assert dict(third) == {"x": [1], "y": [2, 3], "z": []}


def test_where_two_files_hold_a_document_all_processes_read_the_same(tmp_path):
    path = tmp_path / "a.jsonl"
    for process in (2, 1):
        path.with_name(f"a.{process}.jsonl").write_text(f'{{"a":1}}\n{{"id":"x","value":[{process}]}}\n')
    for process in (0, 1, 2, 3):
        with DocumentStore(path, {"a": 1}, process) as store:
            assert store["x"] == [1]


def test_another_process_s_unfinished_line_is_left_to_it(tmp_path):
    path, other = tmp_path / "a.jsonl", tmp_path / "a.1.jsonl"
    text = '{"a":1}\n{"id":"x","value":[1]}\n{"id":"y","va'
    other.write_text(text)
    with DocumentStore(path, {"a": 1}) as store:
        assert dict(store) == {"x": [1]}
        assert other.read_text() == text
        other.write_text(text + 'lue":[2]}\n')
        store.look()
        assert dict(store) == {"x": [1], "y": [2]}


def test_another_process_s_file_of_other_settings_is_refused(tmp_path):
    (tmp_path / "a.7.jsonl").write_text(json.dumps({"a": 2}) + "\n")
    (tmp_path / "a.07.jsonl").write_text("no store")
    (tmp_path / "ab.jsonl").write_text("no store")
    with pytest.raises(TraceError, match=r"a\.7\.jsonl` was left by a run with another a"):
        DocumentStore(tmp_path / "a.jsonl", {"a": 1})


@pytest.mark.parametrize(("count", "batch"), [(0, 4), (1, 4), (4, 4), (5, 4), (37, 4), (1000, 4), (1000, 1), (9, 64)])
def test_decoding_groups_hold_every_prompt_once_in_even_parts_the_longest_first(count, batch):
    lengths = [(7 * i) % 23 for i in range(count)]
    groups = decoding_groups(lengths, batch)
    assert sorted(i for group in groups for i in group) == list(range(count))
    sizes = {len(group) for group in groups}
    assert not count or max(sizes) - min(sizes) <= 1
    assert all(len(group) <= batch * MOST_BATCHES for group in groups)
    assert len(groups) >= min(-(-count // batch), 32)
    ordered = [lengths[i] for group in groups for i in group]
    assert ordered == sorted(ordered, reverse=True)


def test_a_group_is_one_batch_until_it_is_a_small_part_of_the_run():
    assert max(map(len, decoding_groups([5] * 500, 8))) == 8
    assert max(map(len, decoding_groups([5] * 600, 8))) == 16
    assert max(map(len, decoding_groups([5] * 9999, 8))) == 32


def test_documents_are_made_when_they_are_asked_for_and_not_kept():
    asked = []

    def ids(prompt):
        asked.append(prompt.id)
        return [1, 2]

    prompts = [Prompt(f"p{i}", (), "d") for i in range(4)]
    documents = Documents(prompts, ids, lambda prompt: [3] * (1 + int(prompt.id[1])))
    assert (len(documents), asked) == (4, [])
    assert documents[2] == Continuation("p2", "d", (1, 2), (3, 3, 3))
    assert documents[-1:] == [Continuation("p3", "d", (1, 2), (3,) * 4)]
    assert documents[2] == documents[2]
    assert asked == ["p2", "p3", "p2", "p2"]
    assert documents.survey() == ([2, 3, 4, 5], documents_hash(list(documents)))
