import numpy as np
from hypothesis import given

from tests.reference import ancestors
from tests.strategies import trees
from treeopt import DraftTree, TreeBuffers, chain


@given(trees(max_nodes=80, max_rank=20))
def test_every_node_sees_itself_and_its_ancestors_and_nothing_else(tree):
    buffers = TreeBuffers.of(tree)
    expected = ancestors(tree.paths)
    assert [np.flatnonzero(row).tolist() for row in buffers.attention_mask] == expected
    assert buffers.position_ids.tolist() == [len(path) for path in tree.paths]


@given(trees(max_nodes=80, max_rank=20))
def test_packed_words_hold_the_mask_bit_by_bit(tree):
    buffers = TreeBuffers.of(tree)
    num_nodes = tree.num_nodes
    assert buffers.packed_mask.shape == (num_nodes, -(-num_nodes // 64))
    for row, words in zip(buffers.attention_mask, buffers.packed_mask.tolist()):
        assert [bool(words[j // 64] >> (j % 64) & 1) for j in range(num_nodes)] == row.tolist()
        assert sum(word.bit_count() for word in words) == row.sum()


@given(trees())
def test_each_leaf_has_one_row_from_the_root_to_it(tree):
    buffers = TreeBuffers.of(tree)
    for leaf, row, valid in zip(tree.leaves, buffers.retrieve, buffers.retrieve_valid):
        path = tree.paths[leaf]
        assert [tree.paths[node] for node in row[valid]] == [path[:i] for i in range(len(path) + 1)]
        assert (row[~valid] == -1).all()
        assert valid.sum() == len(path) + 1


def test_one_level_of_four_is_a_column_and_a_diagonal():
    buffers = TreeBuffers.of(DraftTree.from_paths([(0,), (1,), (2,), (3,)]))
    expected = np.eye(5, dtype=bool)
    expected[:, 0] = True
    assert (buffers.attention_mask == expected).all()
    assert buffers.position_ids.tolist() == [0, 1, 1, 1, 1]


def test_the_root_alone_has_a_mask_of_one():
    buffers = TreeBuffers.of(chain(0))
    assert buffers.attention_mask.tolist() == [[True]]
    assert buffers.retrieve.tolist() == [[0]]
    assert buffers.packed_mask.tolist() == [[1]]
