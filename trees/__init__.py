"""Exported trees, each rebuilt byte for byte by a test."""
