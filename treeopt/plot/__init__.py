"""Pictures: where nodes stand (networkx), and figures of trees, traces and step times (matplotlib)."""
