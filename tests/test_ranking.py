import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import rank_of
from treeopt.heads.ranking import ranks_of, top_ranked

VALUES = st.lists(st.sampled_from([-2.5, -0.0, 0.0, 1e-3, 1.0, 10.01, 10.02, float("-inf")]), min_size=1, max_size=12)


@given(VALUES, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_ranks_and_top_tokens_follow_one_order(values, dtype):
    logits = torch.tensor([values], dtype=dtype)
    rounded = logits[0].tolist()
    order = top_ranked(logits, len(values))[0].tolist()
    assert order == sorted(range(len(values)), key=lambda i: (-rounded[i], i))
    for token in range(len(values)):
        assert int(ranks_of(logits, torch.tensor([token]))) == rank_of(rounded, token)


def test_values_that_tie_after_rounding_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 10.01, 10.02]], dtype=torch.bfloat16)
    assert top_ranked(logits, 2).tolist() == [[1, 2]]
    assert ranks_of(logits, torch.tensor([2])).tolist() == [1]
    assert int(logits.argmax()) == 1


def test_batches_are_ranked_row_by_row():
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 50)
    top = top_ranked(logits, 7)
    assert torch.equal(top, logits.sort(dim=-1, descending=True, stable=True).indices[..., :7])


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_any_number_of_rows_is_ranked(rows):
    logits = torch.randn(rows, 9)
    assert ranks_of(logits, torch.zeros(rows, dtype=torch.int64)).shape == (rows,)


def test_a_logit_that_is_no_number_never_makes_its_token_the_first():
    nan = float("nan")
    assert ranks_of(torch.tensor([[1.0, nan, 2.0], [nan, nan, nan]]), torch.tensor([1, 0])).tolist() == [3, 3]
    assert ranks_of(torch.tensor([[1.0, nan, 2.0]]), torch.tensor([2])).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_rows_with_and_without_ties_are_ranked_as_one(dtype, monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(11, 40).to(dtype)
    logits[::3] = logits[::3].round()  # many ties
    tokens = torch.randint(40, (11,))
    expected = [rank_of(row.tolist(), int(token)) for row, token in zip(logits, tokens)]
    monkeypatch.setattr("treeopt.heads.ranking.BLOCK_LOGITS", 3 * 40)
    assert ranks_of(logits, tokens).tolist() == expected
