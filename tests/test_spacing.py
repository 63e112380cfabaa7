import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from treeopt.plot.spacing import spaced


@st.composite
def rows(draw):
    count = draw(st.integers(1, 6))
    wanted = draw(st.lists(st.floats(-5, 25), min_size=count, max_size=count))
    sizes = draw(st.lists(st.floats(0.1, 3), min_size=count, max_size=count))
    return np.array(wanted), np.array(sizes)


@given(rows())
def test_things_keep_their_order_do_not_touch_and_stay_inside(row):
    wanted, sizes = row
    found = spaced(wanted, sizes, 0.0, 20.0)
    gaps = np.diff(found) - (sizes[1:] + sizes[:-1]) / 2
    assert (gaps >= -1e-9).all()
    assert found[0] - sizes[0] / 2 >= -1e-9
    assert found[-1] + sizes[-1] / 2 <= 20.0 + 1e-9


@given(rows())
def test_no_other_places_are_nearer_to_where_things_want_to_be(row):
    wanted, sizes = row
    found = spaced(wanted, sizes, 0.0, 20.0)
    limits = [{"type": "ineq", "fun": lambda x: x[0] - sizes[0] / 2}]
    limits.append({"type": "ineq", "fun": lambda x: 20.0 - x[-1] - sizes[-1] / 2})
    limits.append({"type": "ineq", "fun": lambda x: np.append(np.diff(x) - (sizes[1:] + sizes[:-1]) / 2, 0.0)})
    best = minimize(lambda x: ((x - wanted) ** 2).sum(), found + 0.01, constraints=limits, method="SLSQP")
    assert ((found - wanted) ** 2).sum() <= best.fun + 1e-4 * (1 + best.fun)


def test_what_does_not_fit_sticks_out_at_the_end_and_nothing_gives_nothing():
    assert spaced([1.0, 1.0], [4.0, 4.0], 0.0, 6.0).tolist() == [2.0, 6.0]
    assert spaced([], [], 0.0, 1.0).size == 0
    assert spaced([0.5], [1.0], 0.0, 9.0).tolist() == pytest.approx([0.5])
