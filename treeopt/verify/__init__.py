"""Verification: one target pass over a tree, the longest accepted path, a compacted cache."""

from treeopt.verify.acceptance import Greedy
from treeopt.verify.sampling import Sample
from treeopt.verify.typical import Typical
from treeopt.verify.verifier import Decoded, TreeVerifier

__all__ = ["Decoded", "Greedy", "Sample", "TreeVerifier", "Typical"]
