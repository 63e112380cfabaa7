from hypothesis import given

from tests.strategies import rank_arrays, trees
from treeopt import DraftTree, RankTrace
from treeopt.walk import accepted_nodes, document_of_position, observed_acceptance


@given(trees(max_nodes=12, max_rank=4), rank_arrays())
def test_walking_equals_looking_every_path_up(tree, arrays):
    ranks, documents = arrays
    trace = RankTrace(ranks, documents)
    found = accepted_nodes(tree, trace)
    assert found.shape == (len(ranks), min(tree.max_depth, 3))
    for row, nodes in zip(ranks.tolist(), found.tolist()):
        for depth, node in enumerate(nodes, 1):
            path = tuple(row[:depth])
            assert node == (tree.paths.index(path) if path in tree.paths else -1)


@given(rank_arrays())
def test_every_position_belongs_to_its_document(arrays):
    ranks, documents = arrays
    found = document_of_position(RankTrace(ranks, documents))
    for document in range(len(documents) - 1):
        assert (found[documents[document] : documents[document + 1]] == document).all()
    assert len(found) == len(ranks)


def test_acceptance_is_counted_by_document_and_depth_over_what_was_observed():
    trace = RankTrace([[0, 1], [1, 0], [0, -1], [-1, -1], [0, 0], [0, -1], [-1, -1]], [0, 4, 7])
    accepted, observed = observed_acceptance(DraftTree.from_paths([(0,), (0, 0), (0, 1)]), trace)
    assert accepted.tolist() == [[2, 1], [2, 1]]
    assert observed.tolist() == [[3, 2], [2, 1]]
