import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt import DraftTree
from treeopt.errors import TreeError
from treeopt.paths import as_path, closed, order_key

paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=6)


@given(paths, st.booleans())
def test_the_closure_is_the_smallest_tree_that_holds_the_paths(given_paths, dense):
    found = closed(given_paths, dense_siblings=dense)
    needed, waiting = set(), list(given_paths)
    while waiting:
        path = waiting.pop()
        if path in needed:
            continue
        needed.add(path)
        waiting += [path[:-1]] if len(path) > 1 else []
        waiting += [(*path[:-1], path[-1] - 1)] if dense and path[-1] > 0 else []
    assert found == needed
    DraftTree.from_paths(found)


def test_a_list_of_leaves_alone_becomes_a_tree():
    """What some engines accept: one leaf of depth 4 stands for 4 nodes, root excluded."""
    assert sorted(closed([(0, 0, 0, 0)]), key=order_key) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]


@pytest.mark.parametrize("given_path", [(), (-1,), (0.5,), 3, "ab"])
def test_what_is_no_path_is_refused(given_path):
    with pytest.raises(TreeError):
        as_path(given_path)


def test_a_rank_that_no_array_of_a_tree_holds_is_refused():
    assert as_path((2**31 - 1,)) == (2**31 - 1,)
    with pytest.raises(TreeError, match=r"a node at depth `2` has a rank of 1329 bits; ranks end at 2147483647"):
        as_path((0, 10**400))
