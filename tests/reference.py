"""Slow, obvious twins of the fast code: what the tests compare against."""

from __future__ import annotations

import itertools
import json

import numpy as np


def all_paths(rates, max_depth=None, max_rank=None):
    """Every path of positive probability with its probability, multiplied from the root down."""
    depth = len(rates) if max_depth is None else min(max_depth, len(rates))
    found = {}
    for length in range(1, depth + 1):
        ranks = [range(len(row) if max_rank is None else min(len(row), max_rank + 1)) for row in rates[:length]]
        for path in itertools.product(*ranks):
            probability = 1.0
            for head, rank in enumerate(path):
                probability *= rates[head][rank]
            if probability > 0:
                found[path] = probability
    return found


def prefix_closed_sets(paths, size):
    """Every set of `size` paths that holds the parent of each of its members."""
    for chosen in itertools.combinations(sorted(paths), size):
        members = set(chosen)
        if all(len(path) == 1 or path[:-1] in members for path in members):
            yield members


def best_sum(rates, num_nodes, max_depth=None, max_rank=None):
    """Largest E[L] of any tree with at most `num_nodes` nodes, root included, by trying all."""
    paths = all_paths(rates, max_depth, max_rank)
    size = min(num_nodes - 1, len(paths))
    return max((sum(paths[path] for path in members) for members in prefix_closed_sets(paths, size)), default=0.0)


def ancestors(paths):
    """For each node the indices of its prefixes, itself included; paths begin with the root's ()."""
    return [[j for j, other in enumerate(paths) if path[: len(other)] == other] for path in paths]


def rank_of(logits, token):
    """Place of a token when all are sorted by falling logit, equal logits by rising id."""
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i)).index(token)


def greedy_walk(tree, tokens, argmax):
    """Walk from the root to the child that carries the target's token until there is none."""
    node, accepted = 0, []
    while True:
        children = [i for i in range(1, tree.num_nodes) if tree.parents[i] == node and tokens[i] == argmax[node]]
        if not children:
            return node, accepted, argmax[node]
        node = children[0]
        accepted.append(node)


def canonical_json(text):
    """Parse, so that two documents can be compared by value."""
    return json.loads(text)


def mask_from_consumer(document):
    """Rebuild the mask from the packed words of a tree file, bit by bit."""
    rows = []
    for words in document["packed_mask"]:
        bits = [(int(words[j // 64], 16) >> (j % 64)) & 1 for j in range(document["num_nodes"])]
        rows.append(bits)
    return np.array(rows, dtype=bool)


def replayed(tree, ranks, documents):
    """Steps, tokens, accepted lengths and visited positions of greedy decoding, one step after the other."""
    steps, tokens, lengths, visited = [], [], [], []
    for start, end in itertools.pairwise(documents):
        position, count = start, 0
        while position < end - 1:
            visited.append(position)
            path = ()
            while (*path, ranks[position][len(path)] if len(path) < len(ranks[position]) else -1) in tree.paths:
                path = (*path, ranks[position][len(path)])
            emitted = min(len(path) + 1, end - 1 - position)
            lengths.append(emitted - 1)
            position += len(path) + 1
            count += 1
        steps.append(count)
        tokens.append(max(0, end - start - 1))
    return steps, tokens, lengths, visited
