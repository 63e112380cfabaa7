"""Target models: the demo target, loading, and the KV cache that a tree pass runs over."""
