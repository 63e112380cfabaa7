import pytest

from tests.reference_search import features, obeyed
from treeopt import DraftTree, best_tree, dense_tree
from treeopt.errors import ConstraintError
from treeopt.optimize import Limits

TREE = DraftTree.from_paths([(0,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 5)])


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_nodes": 6}, "`num_nodes` is 6, but the tree has 7"),
        ({"max_depth": 2}, "`max_depth` is 2, but the tree has depth 3"),
        ({"max_rank": 4}, r"`max_rank` allows rank 4 at depth 3, but the tree holds \(0,0,5\)"),
        ({"rank_caps": (9, 0)}, r"`rank_caps` allows rank 0 at depth 2, but the tree holds \(0,1\)"),
        ({"max_children": 1}, r"`max_children` is 1, but node \(\) has 2"),
        ({"level_caps": (2, 2)}, "`level_caps` allows 2 nodes at depth 2, but the tree has 3"),
        ({"dense_siblings": True}, r"`dense_siblings` needs node \(1\), the left sibling of \(2\); add it"),
        (
            {"level_regular": True},
            r"`level_regular` needs equally many children at level 1, but \(0\) has 2 and \(2\) has 1",
        ),
        ({"must_include": [(1, 1)]}, r"`must_include` names \(1,1\), which the tree lacks"),
        ({"max_leaves": 2}, "`max_leaves` is 2, but the tree has 3 leaves"),
    ],
    ids=str,
)
def test_a_tree_that_breaks_a_limit_is_refused_by_name(keywords, message):
    with pytest.raises(ConstraintError, match=message):
        Limits(**{"num_nodes": 99, **keywords}).check(TREE)


def test_a_tree_at_its_limits_obeys():
    Limits(
        num_nodes=7, max_depth=3, max_rank=5, rank_caps=(2, 1, 5), max_children=2, level_caps=(2, 3, 1), max_leaves=3,
        must_include=((0, 0, 5),),
    ).check(TREE)  # fmt: skip
    Limits(num_nodes=99, dense_siblings=True, level_regular=True).check(dense_tree([3, 2, 1]))
    Limits(num_nodes=1, level_regular=True, max_leaves=1).check(dense_tree([]))


@pytest.mark.parametrize(
    "keywords", [{"max_children": 2}, {"level_regular": True}, {"dense_siblings": True}, {"max_leaves": 3}]
)
def test_the_check_agrees_with_the_twin_on_trees_that_were_not_built_for_it(keywords):
    limits, agreed = Limits(num_nodes=99, **keywords), set()
    for seed in range(40):
        rates = [[((seed * 7 + 3 * h + r * 5) % 8) / 24 for r in range(3)] for h in range(2)]
        tree = best_tree(rates, 3 + seed % 9).tree
        paths = list(tree.paths[1:])
        fine = bool(obeyed_row(paths, limits))
        try:
            limits.check(tree)
            found = True
        except ConstraintError:
            found = False
        assert found == fine, (paths, limits)
        agreed.add(found)
    assert agreed == {True, False}


def obeyed_row(paths, limits):
    import numpy as np

    depth = max(map(len, paths), default=0)
    return obeyed(np.array([features(set(paths), depth, 0)]), limits, depth)[0]


def test_limits_name_what_is_given_and_can_be_taken_away():
    limits = Limits(num_nodes=8, max_depth=0, dense_siblings=True, level_caps=(2,))
    assert limits.active == ("max_depth", "level_caps", "dense_siblings")
    assert limits.without("max_depth", "level_caps") == Limits(num_nodes=8, dense_siblings=True)
