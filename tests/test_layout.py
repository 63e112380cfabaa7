import numpy as np
import pytest
from hypothesis import given

from tests.strategies import rates
from treeopt import RankTrace, best_tree, chain, dense_tree
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.plot import layout as module
from treeopt.plot.layout import drawn_part, lay_out

DEMO = RankTrace.read(calibration_path(DEMO_TRACE)).table()
PAGE = {"width": 590.0, "height": 230.0, "largest": 30.0, "font_size": 9.0}


def laid_out(built):
    return lay_out(built.tree, built.path_probabilities, **PAGE)


@given(rates(max_heads=4, max_ranks=6))
def test_nodes_are_in_rows_by_depth_in_order_apart_and_on_the_page(table):
    built = best_tree(table, 30)
    tree, found = built.tree, laid_out(built)
    for depth in range(tree.max_depth + 1):
        level = np.flatnonzero(tree.depths == depth)
        assert np.ptp(found.y[level]) == 0.0
        gaps = np.diff(found.x[level]) - (found.diameters[level][1:] + found.diameters[level][:-1]) / 2
        assert (gaps >= -1e-9).all()
    assert (found.x - found.diameters / 2 >= -1e-6).all()
    assert (found.x + found.diameters / 2 <= PAGE["width"] + 1e-6).all()
    assert found.y.max() <= PAGE["height"] + 1e-9


@given(rates(max_heads=4, max_ranks=6))
def test_no_two_edges_cross(table):
    tree, found = (built := best_tree(table, 30)).tree, laid_out(built)
    for depth in range(1, tree.max_depth + 1):
        level = np.flatnonzero(tree.depths == depth)
        assert (np.diff(found.x[tree.parents[level]]) >= 0).all()
        assert (np.diff(found.x[level]) > 0).all()


@pytest.mark.parametrize("num_nodes", [2, 16, 64, 128, 512])
def test_likelier_nodes_are_never_smaller_and_labels_fit_into_their_circles(num_nodes):
    built = best_tree(DEMO, num_nodes)
    found = laid_out(built)
    order = np.argsort(-built.path_probabilities[1:], kind="stable")
    assert (np.diff(found.diameters[1:][order]) <= 1e-9).all()
    assert not found.labelled[0]
    for node in np.flatnonzero(found.labelled):
        width, height = 0.64 * 9.0 * len(str(built.tree.ranks[node])), 0.73 * 9.0
        assert np.hypot(width, height) <= found.diameters[node] + 1e-6


@pytest.mark.parametrize("num_nodes", [2, 9, 16, 32])
def test_small_trees_show_every_rank(num_nodes):
    assert laid_out(best_tree(DEMO, num_nodes)).labelled[1:].all()


def test_64_nodes_of_the_demo_show_all_ranks_and_512_those_of_the_likeliest():
    assert laid_out(best_tree(DEMO, 64)).labelled[1:].all()
    large = laid_out(best_tree(DEMO, 512))
    assert 8 <= large.labelled.sum() < 511
    assert large.labelled[1]


@pytest.mark.parametrize(
    "tree",
    [chain(0), chain(4), dense_tree([1]), dense_tree([40, 1, 1]), dense_tree([2, 254]), dense_tree([511])],
    ids=str,
)
def test_the_smallest_the_narrowest_and_the_widest_trees_have_a_layout(tree):
    found = lay_out(tree, np.linspace(1.0, 0.1, tree.num_nodes), **PAGE)
    assert (found.diameters > 0).all()
    assert (found.x - found.diameters / 2 >= -1e-6).all()
    assert (found.x + found.diameters / 2 <= PAGE["width"] + 1e-6).all()
    assert np.isfinite(np.concatenate([found.x, found.y, found.diameters])).all()


def test_of_a_huge_tree_the_likeliest_nodes_are_drawn(monkeypatch):
    monkeypatch.setattr(module, "MAX_DRAWN", 40)
    built = best_tree(DEMO, 300)
    tree, probabilities = drawn_part(built.tree, built.path_probabilities)
    small = best_tree(DEMO, 40)
    assert tree == small.tree
    assert probabilities.tolist() == small.path_probabilities.tolist()
