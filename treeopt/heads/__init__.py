"""Decoding heads: modules, checkpoints, and the order of their guesses."""

from treeopt.heads.medusa import MedusaHeads

__all__ = ["MedusaHeads"]
