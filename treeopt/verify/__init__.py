"""Verification: one target pass over a tree, the longest accepted path, a compacted cache."""

from treeopt.verify.acceptance import Greedy
from treeopt.verify.sampling import Sample
from treeopt.verify.texts import Decoded
from treeopt.verify.typical import Typical
from treeopt.verify.verifier import TreeVerifier

__all__ = ["Decoded", "Greedy", "Sample", "TreeVerifier", "Typical"]
