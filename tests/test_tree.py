import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import trees
from treeopt import DraftTree, TreeoptError, chain, dense_tree
from treeopt.errors import TreeError


@given(trees())
def test_nodes_are_sorted_by_depth_then_path(tree):
    assert list(tree.paths) == sorted(tree.paths, key=lambda path: (len(path), path))
    assert tree.depths.tolist() == [len(path) for path in tree.paths]
    assert [tree.paths[parent] for parent in tree.parents[1:]] == [path[:-1] for path in tree.paths[1:]]


@given(trees(), st.randoms(use_true_random=False))
def test_any_order_of_paths_or_parents_gives_the_same_tree(tree, random):
    paths = list(tree.paths[1:])
    random.shuffle(paths)
    assert DraftTree.from_paths(paths) == tree
    order = list(range(tree.num_nodes))
    random.shuffle(order)
    place = {node: i for i, node in enumerate(order)}
    parents = [-1 if node == 0 else place[tree.parents[node]] for node in order]
    again = DraftTree.from_parents(parents, [int(tree.ranks[node]) for node in order])
    assert again == tree
    assert hash(again) == hash(tree)


@given(trees())
def test_leaves_are_the_nodes_that_are_no_parents(tree):
    assert set(tree.leaves) == set(range(tree.num_nodes)) - set(tree.parents.tolist())


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (1, 0)], r"node `\(1,0\)` has no parent; add `\(1\)`"),
        ([(0,), (0, 0, 0)], r"node `\(0,0,0\)` has no parent; add `\(0,0\)`"),
        ([(0,), (0,)], r"node `\(0\)` is given twice"),
        ([(0,), (-1,)], r"node `\(-1\)` has a negative rank"),
        ([()], r"node `\(\)` is the root"),
        ([(0.5,)], r"not a sequence of integer ranks"),
        ([0], r"node `0` is not a sequence"),
    ],
)
def test_paths_that_are_no_tree_are_refused_by_name(paths, message):
    with pytest.raises(TreeError, match=message):
        DraftTree.from_paths(paths)


@pytest.mark.parametrize(
    ("parents", "ranks", "message"),
    [
        ([-1, 2, 1], [0, 0, 0], r"node `1` is never reached from the root"),
        ([0, 0], [0, 0], r"has 0 roots"),
        ([-1, -1], [0, 0], r"has 2 roots"),
        ([-1, 5], [0, 0], r"node `1` has parent 5"),
        ([-1, 0], [0, -2], r"node `1` has rank -2"),
        ([-1, 0, 0], [0, 3, 3], r"same parent and rank"),
        ([-1, 0], [0], r"two lists of one length"),
        ([-1.0, 0.0], [0, 0], r"give integers"),
    ],
)
def test_parents_that_are_no_tree_are_refused_by_name(parents, ranks, message):
    with pytest.raises(TreeError, match=message):
        DraftTree.from_parents(parents, ranks)


def test_a_dense_tree_of_four_levels_of_eight_has_4680_drafts():
    tree = dense_tree([8, 8, 8, 8])
    assert tree.num_nodes == 1 + 8 + 64 + 512 + 4096
    assert len(tree.leaves) == 4096
    assert tree == DraftTree.from_paths(tree.paths[1:])


def test_a_chain_is_one_guess_a_level_and_depth_zero_is_the_root_alone():
    assert chain(3).paths == ((), (0,), (0, 0), (0, 0, 0))
    assert chain(0).num_nodes == 1
    assert chain(0).max_depth == 0
    assert chain(0).level_widths == ()


@pytest.mark.parametrize("build", [lambda: chain(-1), lambda: dense_tree([2, 0])])
def test_impossible_shapes_are_refused(build):
    with pytest.raises(TreeoptError, match="give"):
        build()


@given(trees(), st.integers(0, 4), st.integers(-1, 4))
def test_pruning_keeps_exactly_the_paths_within_the_limits(tree, max_depth, max_rank):
    kept = tree.prune(max_depth=max_depth, max_rank=max_rank)
    expected = [p for p in tree.paths if len(p) <= max_depth and all(rank <= max_rank for rank in p)]
    assert list(kept.paths) == expected


def test_arrays_of_a_tree_cannot_be_written():
    tree = chain(2)
    for array in (tree.parents, tree.ranks, tree.depths, tree.leaves):
        assert isinstance(array, np.ndarray)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
