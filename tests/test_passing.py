import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.strategies import trees
from treeopt.errors import AcceptanceError
from treeopt.optimize import PassingModel


def depth_passed(position, paths):
    """Deepest path all whose guesses pass at one position."""
    good = [len(path) for path in paths if all(position[depth][rank] for depth, rank in enumerate(path))]
    return max(good, default=0)


passes = hnp.arrays(bool, st.tuples(st.integers(1, 7), st.just(3), st.integers(1, 3)))


@given(passes, trees(max_nodes=10, max_rank=4, max_depth=3))
def test_coverage_is_the_mean_depth_that_passes(array, tree):
    inside = [path for path in tree.paths[1:] if max(path) < array.shape[2]]
    expected = np.mean([depth_passed(position, inside) for position in array])
    assert PassingModel(array).covered(tree.paths[1:]) == pytest.approx(expected)


@given(passes)
def test_conditionals_are_shares_of_the_positions_at_which_the_path_passes(array):
    model = PassingModel(array)
    for path in [(), (0,), (0, 0), (0, 0, 0)]:
        rows = [position for position in array if all(position[d][r] for d, r in enumerate(path))]
        expected = {}
        if rows and len(path) < 3:
            shares = np.mean([position[len(path)] for position in rows], axis=0)
            expected = {rank: share for rank, share in enumerate(shares) if share > 0}
        assert {rank: rate for rate, rank in model.children(path)} == pytest.approx(expected)


@given(passes, trees(max_nodes=10, max_rank=2, max_depth=3))
def test_sets_that_pass_together_add_up_to_the_coverage(array, tree):
    model = PassingModel(array)
    together = list(model.together(tree.paths[1:]))
    assert len({members for members, _ in together}) == len(together)
    assert sum(share for _, share in together) == pytest.approx(model.covered(tree.paths[1:]))


def test_what_is_no_array_of_passes_is_refused():
    with pytest.raises(AcceptanceError, match=r"give booleans \(positions, heads, ranks\)"):
        PassingModel([[1, 0]])
    with pytest.raises(AcceptanceError, match="no positions"):
        PassingModel(np.zeros((0, 2, 2), dtype=bool))
