"""Search times side by side in one process: python tests/benchmarks/optimizer.py [OUTPUT.json]

Ours against a plain version of the published way, which scans every neighbour of the tree anew for each node it adds,
and against a plain heap. Medians and spread of several runs; ratios are what counts, the machine's speed is not.
"""

from __future__ import annotations

import heapq
import json
import platform
import statistics
import sys
import time
from itertools import pairwise
from math import log

import numpy as np

from treeopt import AcceptanceTable, best_tree

RESCAN_NODES = (64, 128, 256, 512)  # root included: 63, 127, 255 and 511 choices
HEAP_NODES = (10**3, 10**4, 10**5, 10**6)
GROWTH_NODES = (10**2, 10**3, 10**4, 10**5, 10**6)


def accuracies(num_heads, num_ranks, seed=0):
    """Rates that fall with the rank, as measured ones do."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.dirichlet(np.full(num_ranks, 0.15), size=num_heads), axis=1)[:, ::-1].copy()


def rescan(rates, num_nodes):
    """Add the best neighbour of the whole tree, found by looking at every node again."""
    tree = []

    def probability(path):
        product = 1.0
        for head, rank in enumerate(path):
            product *= rates[head][rank]
        return product

    while len(tree) < num_nodes - 1:
        neighbours = [[0]] if [0] not in tree else []
        for path in tree:
            if len(path) < len(rates) and [*path, 0] not in tree:
                neighbours.append([*path, 0])
            if path[-1] + 1 < len(rates[0]) and [*path[:-1], path[-1] + 1] not in tree:
                neighbours.append([*path[:-1], path[-1] + 1])
        tree.append(max(neighbours, key=probability))
    return sum(map(probability, tree))


def plain_heap(rates, num_nodes):
    """Best-first search with heapq, one push for the next sibling and one for the first child."""
    heap, total = [(-rates[0][0], (0,))], 0.0
    for _ in range(num_nodes - 1):
        negative, path = heapq.heappop(heap)
        total -= negative
        depth, rank = len(path), path[-1]
        if rank + 1 < len(rates[0]) and rates[depth - 1][rank] > 0:
            sibling = negative / rates[depth - 1][rank] * rates[depth - 1][rank + 1]
            heapq.heappush(heap, (sibling, (*path[:-1], rank + 1)))
        if depth < len(rates):
            heapq.heappush(heap, (negative * rates[depth][0], (*path, 0)))
    return total


def timed(functions, repeats, least_s=0.05):
    """Call functions in turn; return their last results and, for each, median and quartiles of its wall times in s.

    In each turn a function is called until `least_s` have passed, so that a short one is not timed with the caches that
    a long one left.
    """
    times = [[] for _ in functions]
    results = [None] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            turn = time.perf_counter()
            while True:
                start = time.perf_counter()
                results[i] = function()
                times[i].append(time.perf_counter() - start)
                if time.perf_counter() - turn > least_s:
                    break
    return results, [spread(one) for one in times]


def spread(times):
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return {"median_s": middle, "quartiles_s": [low, high]}


def compare(name, other, rates, num_nodes, repeats):
    """Time ours and the other in turn for one budget."""
    table = AcceptanceTable.from_rates(rates)
    rows = rates.tolist()
    (built, total), (ours, theirs) = timed(
        [lambda: best_tree(table, num_nodes), lambda: other(rows, num_nodes)], repeats
    )
    if abs(total - built.expected_accepted) > 1e-9 * total:
        raise SystemExit(f"{name} at {num_nodes} nodes found {total}, ours {built.expected_accepted}")
    ratio = theirs["median_s"] / ours["median_s"]
    return {"other": name, "num_nodes": num_nodes, "ours": ours, "theirs": theirs, "ratio": ratio}


def growth(table):
    """Return, for each budget and the next, how much more time it takes, over how much N log N grows: at most 1."""
    _, times = timed([lambda n=n: best_tree(table, n) for n in GROWTH_NODES], 5)
    rows = []
    for (small, before), (large, after) in pairwise(zip(GROWTH_NODES, times)):
        factor = after["median_s"] / before["median_s"]
        rows.append(
            {
                "from": small,
                "to": large,
                "factor": factor,
                "over_n_log_n": factor / (large * log(large) / (small * log(small))),
            }
        )
    return rows


def main(output=None):
    """Run every comparison and print a line for each."""
    small, large = accuracies(5, 10), accuracies(8, 64)
    table = AcceptanceTable.from_rates(small)
    _, (usual,) = timed([lambda: best_tree(table, 64)], 20)
    rows = [compare("all-neighbours rescan", rescan, small, n, 5 if n <= 256 else 3) for n in RESCAN_NODES]
    rows += [compare("plain heap", plain_heap, large, n, 5 if n <= 10**5 else 3) for n in HEAP_NODES]
    grown = growth(AcceptanceTable.from_rates(large))
    for row in rows:
        print(f"{row['num_nodes']:>8} nodes: {row['ratio']:>9.1f} times faster than the {row['other']}")
    print(f"64 nodes, 5 heads, 10 ranks: median {usual['median_s'] * 1e3:.3f} ms")
    for row in grown:
        print(
            f"{row['from']:>8} to {row['to']} nodes: {row['factor']:.1f} times the time, {row['over_n_log_n']:.2f} of N log N"
        )
    result = {
        "comparisons": rows,
        "nodes_64": usual,
        "growth": grown,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "processor": platform.processor() or platform.machine(),
    }
    if output:
        with open(output, "w", encoding="utf8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
