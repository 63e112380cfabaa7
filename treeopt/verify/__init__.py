"""Verification: one target pass over a tree, the longest accepted path, a compacted cache."""

from treeopt.verify.verifier import Decoded, TreeVerifier

__all__ = ["Decoded", "TreeVerifier"]
