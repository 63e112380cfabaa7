import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from safetensors.numpy import save_file

from tests.strategies import rank_arrays
from treeopt import RankTrace
from treeopt.errors import TraceError


@given(rank_arrays())
def test_each_head_counts_only_positions_it_observed(arrays):
    ranks, documents = arrays
    trace = RankTrace(ranks, documents)
    hits, positions = trace.counts()
    for head in range(trace.num_heads):
        seen = [rank for rank in ranks[:, head] if rank >= 0]
        assert positions[head] == len(seen)
        assert hits[head].tolist() == [seen.count(rank) for rank in range(hits.shape[1])]


def test_ranks_beyond_the_counted_ones_stay_in_the_denominator():
    trace = RankTrace([[0], [300], [300], [0]], [0, 4])
    table = trace.table(num_ranks=10)
    assert table.num_ranks == 10
    assert table.rates[0, 0] == 0.5
    assert table.rates[0].sum() == 0.5


def test_the_bytes_are_the_same_in_every_process(tmp_path):
    metadata = {name: name * 3 for name in "zyxwabc"}
    trace = RankTrace([[0, 2], [1, -1], [-1, -1]], [0, 3], ["math"], metadata)
    code = (
        "import sys; from treeopt import RankTrace; t = RankTrace([[0, 2], [1, -1], [-1, -1]], [0, 3], ['math'], "
        "{name: name * 3 for name in 'cbaxyzw'}); sys.stdout.buffer.write(t.to_bytes())"
    )
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == trace.to_bytes()


def test_a_written_trace_reads_back_equal(tmp_path):
    trace = RankTrace([[0, 2], [1, -1], [-1, -1]], [0, 3], ["math"], {"target": "demo"})
    trace.write(tmp_path / "trace.safetensors")
    again = RankTrace.read(tmp_path / "trace.safetensors")
    assert again == trace
    assert again.domains == ("math",)
    assert again.metadata == {"target": "demo"}
    assert again.ranks.dtype == np.int32


def test_prompt_keys_are_kept_selected_and_checked(tmp_path):
    trace = RankTrace([[0], [1], [2]], [0, 2, 3], prompts=[-5, 1 << 62])
    trace.write(tmp_path / "trace.safetensors")
    assert RankTrace.read(tmp_path / "trace.safetensors").prompts.tolist() == [-5, 1 << 62]
    assert trace.select([1, 0]).prompts.tolist() == [1 << 62, -5]
    assert trace.at([True, False, True]).prompts.tolist() == [-5, 1 << 62]
    assert RankTrace([[0]], [0, 1]).prompts is None
    for wrong in ([1], [1, 2, 3], [0.5, 1.0]):
        with pytest.raises(TraceError, match=r"`prompts` has shape .* for 2 documents; give one integer each"):
            RankTrace([[0], [1], [2]], [0, 2, 3], prompts=wrong)


def test_selected_documents_keep_their_rows_and_may_repeat():
    trace = RankTrace([[0], [1], [2], [3], [4]], [0, 2, 3, 5], ["a", "b", "c"])
    chosen = trace.select([2, 0, 2])
    assert chosen.ranks[:, 0].tolist() == [3, 4, 0, 1, 3, 4]
    assert chosen.documents.tolist() == [0, 2, 4, 6]
    assert chosen.domains == ("c", "a", "c")


@pytest.mark.parametrize(
    ("ranks", "documents", "domains", "message"),
    [
        ([[0.5]], [0, 1], None, r"give integers"),
        ([[-2]], [0, 1], None, r"holds -2"),
        ([[0]], [0, 2], None, r"must rise from 0 to the 1 positions"),
        ([[0], [0]], [0, 2, 1, 2], None, r"must rise"),
        ([[0]], [0, 1], ["a", "b"], r"2 entries for 1 documents"),
        ([[2**31]], [0, 1], None, r"ranks are 32 bits"),
        (np.array([[2**63]], dtype=np.uint64), [0, 1], None, r"integers of 64 bits"),
        ([[0], [0], [0]], np.array([0, 2, 1, 3], dtype=np.uint64), None, r"must rise"),
        ([0], [0, 1], None, r"give integers \(positions, heads\)"),
    ],
)
def test_parts_that_do_not_fit_are_refused(ranks, documents, domains, message):
    with pytest.raises(TraceError, match=message):
        RankTrace(ranks, documents, domains)


def test_a_head_that_saw_nothing_is_named():
    with pytest.raises(TraceError, match=r"head `1` was observed at no position"):
        RankTrace([[0, -1], [-1, -1]], [0, 2]).table()


def test_files_that_are_no_trace_are_refused(tmp_path):
    path = tmp_path / "trace.safetensors"
    with pytest.raises(TraceError, match=r"cannot be read: No such file"):
        RankTrace.read(path)
    for content in (b"", b"\x00" * 4, b"hello world, hello world"):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"no safetensors file or is cut off"):
            RankTrace.read(path)
    whole = RankTrace([[0]], [0, 1]).to_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(TraceError, match=r"cut off"):
        RankTrace.read(path)
    save_file({"ranks": np.zeros((1, 1), dtype=np.int32)}, path)
    with pytest.raises(TraceError, match=r"has schema None"):
        RankTrace.read(path)
    save_file({"ranks": np.zeros((1, 1), dtype=np.int32)}, path, metadata={"schema": "treeopt.trace/1"})
    with pytest.raises(TraceError, match=r"lacks the tensor 'documents'"):
        RankTrace.read(path)


@pytest.mark.parametrize(
    ("domains", "message"), [("no json", "not JSON"), ("5", "list of texts"), ('{"a": 1}', "list of")]
)
def test_domains_that_are_no_list_of_texts_are_refused(tmp_path, domains, message):
    path = tmp_path / "trace.safetensors"
    tensors = {"ranks": np.zeros((1, 1), dtype=np.int32), "documents": np.array([0, 1])}
    save_file(tensors, path, metadata={"schema": "treeopt.trace/1", "domains": domains})
    with pytest.raises(TraceError, match=message):
        RankTrace.read(path)


def test_documents_and_ranks_out_of_range_are_refused():
    trace = RankTrace([[0], [1]], [0, 1, 2])
    for documents in ([-1], [2]):
        with pytest.raises(TraceError, match=r"must lie in 0 … 1"):
            trace.select(documents)
    with pytest.raises(TraceError, match=r"`num_ranks` is 0"):
        trace.table(0)


def probable_trace():
    ranks, documents = [[0, 2], [1, -1], [-1, -1], [0, -1], [-1, -1]], [0, 3, 5]
    probs = np.linspace(0, 1, 30).reshape(5, 2, 3)
    return RankTrace(ranks, documents, ["math", "code"], topk_probs=probs, entropies=[0.5, 1, 0, 2, 0])


def test_probabilities_and_entropies_are_written_read_and_selected(tmp_path):
    trace = probable_trace()
    trace.write(tmp_path / "trace.safetensors")
    again = RankTrace.read(tmp_path / "trace.safetensors")
    assert again == trace
    assert again.topk_probs.dtype == np.float16
    chosen = trace.select([1, 0])
    assert chosen.topk_probs.tolist() == trace.topk_probs[[3, 4, 0, 1, 2]].tolist()
    assert chosen.entropies.tolist() == [2, 0, 0.5, 1, 0]
    assert RankTrace(trace.ranks, trace.documents, ["math", "code"]) != trace


def test_a_domain_is_the_trace_of_its_documents():
    trace = probable_trace()
    assert trace.domain("code") == trace.select([1])
    with pytest.raises(TraceError, match=r"`law` is no domain of the trace; it has code, math"):
        trace.domain("law")
    with pytest.raises(TraceError, match=r"it has none"):
        RankTrace([[0]], [0, 1]).domain("law")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entropies": None}, "belong together"),
        ({"topk_probs": None}, "belong together"),
        ({"topk_probs": np.zeros((5, 1, 3))}, r"`topk_probs` has shape \(5, 1, 3\)"),
        ({"topk_probs": np.zeros((5, 2))}, r"`topk_probs` has shape \(5, 2\)"),
        ({"entropies": [0.0] * 4}, r"`entropies` \(4,\)"),
        ({"topk_probs": np.full((5, 2, 3), 1.5)}, r"must lie in \[0, 1\]"),
        ({"topk_probs": np.full((5, 2, 3), np.nan)}, r"must lie in \[0, 1\]"),
        ({"entropies": [0, 0, 0, 0, np.inf]}, "be finite"),
        ({"entropies": [0, 0, 0, 0, -1.0]}, "from 0 on"),
    ],
)
def test_probabilities_that_do_not_fit_are_refused(changes, message):
    trace = probable_trace()
    with pytest.raises(TraceError, match=message):
        RankTrace(
            trace.ranks, trace.documents, **{"topk_probs": trace.topk_probs, "entropies": trace.entropies, **changes}
        )
