"""How each engine reads its file, restated plainly: what the exporters are compared with.

A reading is a dict from each path as the engine sees it (the guesses it takes on the way from the root) to its position
and the set of paths it attends to.
"""

from __future__ import annotations

import ast
import itertools
import json
import re

GUESSES = 10  # of a head, in Medusa's and EAGLE-1's tables


def sorted_choices(choices):
    return sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))


def seen_by_path(paths):
    """Every node at the position of its depth, attending to its prefixes."""
    return {path: (len(path), {path[:length] for length in range(len(path) + 1)}) for path in [(), *paths]}


def seen_by_parents(parents, guesses):
    """Nodes named by the guesses on their way, with positions and attention from parent pointers."""
    paths = [()]
    for node in range(1, len(parents)):
        assert parents[node] < node
        paths.append((*paths[parents[node]], guesses[node]))
    assert len(set(paths)) == len(paths)
    return seen_by_path(paths[1:])


def seen_by_mask(mask, positions, guesses):
    """Nodes named by the guesses of all that they attend to, by position."""
    paths = []
    for row in mask:
        seen = sorted((node for node, bit in enumerate(row) if bit), key=lambda node: positions[node])
        paths.append(tuple(guesses[node] for node in seen if positions[node] > 0))
    assert len(set(paths)) == len(paths)
    return {
        path: (position, {paths[node] for node, bit in enumerate(row) if bit})
        for path, position, row in zip(paths, positions, mask)
    }


def medusa_tree_indices(choices):
    """Where in the flat table, ten guesses a head behind the root's token, each node finds its token."""
    return [0, *(path[-1] + GUESSES * (len(path) - 1) + 1 for path in sorted_choices(choices))]


def medusa(text, settings):
    choices = sorted_choices(json.loads(text))
    drafted = [divmod(index - 1, GUESSES) for index in medusa_tree_indices(choices)[1:]]
    assert [head for head, _ in drafted] == [len(path) - 1 for path in choices]
    parents = [
        -1,
        *((0, *range(1, len(choices) + 1))[0 if len(p) == 1 else 1 + choices.index(p[:-1])] for p in choices),
    ]
    return seen_by_parents(parents, [None, *(rank for _, rank in drafted)])


def medusa_retrieve(choices):
    """Rows from the root to each leaf, as Medusa lists them: the last leaf first, padded with -1."""
    choices = sorted_choices(choices)
    rows, covered = [], set()
    for path in reversed(choices):
        if path not in covered:
            prefixes = [path[:length] for length in range(1, len(path) + 1)]
            rows.append([0, *(1 + choices.index(prefix) for prefix in prefixes)])
            covered.update(prefixes)
    longest = max(map(len, rows))
    return [row + [-1] * (longest - len(row)) for row in rows]


def eagle1_tree_indices(choices):
    """Ten guesses a node with children, in the order of the nodes."""
    indices, groups = [0], []
    for path in sorted_choices(choices):
        if path[:-1] not in groups:
            groups.append(path[:-1])
        indices.append(path[-1] + GUESSES * groups.index(path[:-1]) + 1)
    return indices


def eagle1(text, settings):
    choices = sorted_choices(json.loads(text))
    assert max(map(len, choices)) >= 2  # the drafter's lists are made of the levels below the first
    expanded = [(), *(path for path in choices if any(other[:-1] == path for other in choices))]
    read = []
    for path, index in zip(choices, eagle1_tree_indices(choices)[1:]):
        group, rank = divmod(index - 1, GUESSES)
        assert expanded[group] == path[:-1]
        read.append((*path[:-1], rank))
    return seen_by_path(read)


def hydra(text, settings):
    """Count each node's children, and how many of its first children have children; grow the tree from the counts."""
    choices = sorted_choices(json.loads(text))
    level, read = [()], []
    for depth in range(1, len(choices[-1]) + 1):
        below = [path for path in choices if len(path) == depth]
        parents = sorted({path[:-1] for path in below})
        counts = [sum(path[:-1] == parent for path in below) for parent in parents]
        grandparents = {path[:-1] for path in choices if len(path) == depth + 1}
        following = []
        for node, count in zip(level, counts):
            children = [(*node, rank) for rank in range(count)]
            read += children
            expand = sum(child in grandparents for child in children)
            following += children[:expand]
        level = following
    return seen_by_path(read)


def trtllm_list(choices):
    """A node whose parent is missing hangs below the root; every level has as many guesses as its largest rank asks for."""
    choices = sorted_choices(choices)
    assert len(choices[-1]) <= 8
    assert max(map(max, choices)) <= 15
    first = [path for path in choices if len(path) == 1]
    assert first == [(rank,) for rank in range(len(first))]
    parents = [-1, *(1 + choices.index(path[:-1]) if path[:-1] in choices else 0 for path in choices)]
    return seen_by_parents(parents, [None, *(path[-1] for path in choices)])


def trtllm(text, settings):
    if settings.get("form") == "yaml":
        (text,) = re.findall(r"_choices: (.*)", text)
    return trtllm_list(json.loads(text))


def trtllm_triton(text, settings):
    values = dict(re.findall(r'key: "(\w+)" value: \{ string_value: "([^"]*)" \}', text))
    (choices,) = (value for key, value in values.items() if key == f"{values['decoding_mode']}_choices")
    assert "[" not in choices
    return trtllm_list([list(map(int, group.split(","))) for group in re.findall(r"\{([^}]*)\}", choices)])


def trtllm_buffers(text, settings):
    data = json.loads(text)
    positions = data["positionOffsets"]
    starts = [0, *itertools.accumulate(data["topKs"])]
    mask = [[(row[j // 32] >> (j % 32)) & 1 for j in range(len(positions))] for row in data["packedMask"]]
    guesses = [None]
    for place, depth in zip(data["treeIds"], positions[1:]):
        assert starts[depth - 1] <= place < starts[depth]
        guesses.append(place - starts[depth - 1])
    reading = seen_by_mask(mask, positions, guesses)
    leaves = [node for node in range(len(mask)) if sum(row[node] for row in mask) == 1]
    assert [[node for node in path if node >= 0] for path in data["paths"]] == [
        [node for node, bit in enumerate(mask[leaf]) if bit] for leaf in leaves
    ]
    return reading


def vllm(text, settings):
    """Nodes are counted by level, and every node of a level gets an equal share of the next as its best guesses."""
    config = json.loads(text)
    choices = ast.literal_eval(config["speculative_token_tree"])
    assert choices == sorted_choices(choices)
    assert config["num_speculative_tokens"] == len(choices)
    sizes = [sum(len(path) == depth for path in choices) for depth in range(1, len(choices[-1]) + 1)]
    return seen_by_path(grown([below // above for above, below in itertools.pairwise([1, *sizes])]))


def grown(widths):
    level, read = [()], []
    for width in widths:
        level = [(*node, rank) for node in level for rank in range(width)]
        read += level
    return read


def genie(text, settings):
    return seen_by_path(grown(json.loads(text)["dialog"]["ssd-q1"]["branches"]))


def nxdi_token_tree(text, settings):
    """The n-th node of a level that has children in the file is taken for the n-th node of that level."""
    children = {int(node): list(map(int, found)) for node, found in json.loads(text).items()}
    assert sorted(itertools.chain(*children.values())) == list(range(1, 1 + sum(map(len, children.values()))))
    numbers, level, read = [0], [()], []
    while level:
        groups = [children[node] for node in numbers if node in children]
        below = []
        for parent, group in zip(level, groups):
            below += [(*parent, rank) for rank in range(len(group))]
        numbers = list(itertools.chain(*groups))
        read += below
        level = below
    return seen_by_path(read)


def growmap(text, settings):
    """Tokens come from branches, level by level; parents from Successors; attention and position from mask and depth."""
    data = json.loads(text)
    level, order = [()], [()]
    for nodes, branches in zip(data["roots"], data["branches"]):
        assert nodes == list(range(len(order) - len(level), len(order)))
        level = [(*node, rank) for node, branch in zip(level, branches) for rank in range(branch)]
        order += level
    assert len(order) == data["size"]
    for node, children in enumerate(data["Successors"]):
        assert all(order[child][:-1] == order[node] for child in children)
    return {
        path: (depth, {order[j] for j, bit in enumerate(row) if bit})
        for path, depth, row in zip(order, data["depth"], data["mask"])
    }


def sam(text, settings):
    data = json.loads(text)
    if settings["form"] == "choices":
        return eagle1(json.dumps(data["tree_choices"]), settings)
    nodes = [data["tree_adj"][str(node)] for node in range(len(data["tree_adj"]))]
    paths = {0: ()}
    for node, children in enumerate(nodes):
        followers = list(range(8))
        for place, child in enumerate(children):
            paths[child] = (*paths[node], followers[place])
    return seen_by_path([paths[node] for node in range(1, len(nodes))])


def modelopt(text, settings):
    """Every prefix of a path must be listed; True in its mask means masked."""
    choices = sorted_choices(json.loads(text))
    nodes = [(), *choices]
    masked = [[other not in {path[:length] for length in range(len(path) + 1)} for other in nodes] for path in nodes]
    for path in choices:
        assert all(path[:length] in choices for length in range(1, len(path)))
    return seen_by_mask(
        [[not bit for bit in row] for row in masked], list(map(len, nodes)), [None, *(p[-1] for p in choices)]
    )


def xformers(text, settings):
    """Draft tokens are numbered through: a level's begin behind the largest number of the level above."""
    choices = sorted_choices(ast.literal_eval(text))
    offset = largest = depth = 0
    read = []
    for path in choices:
        if len(path) > depth:
            depth, offset = len(path), largest
        number = path[-1] + offset + 1
        largest = max(largest, number)
        read.append((*path[:-1], number - offset - 1))
    return seen_by_path(read)


def flashinfer(text, settings):
    """Bit i of the flat mask is bit i % 8 of byte i // 8; there are no ranks, so the n-th sibling counts as rank n."""
    data = json.loads(text)
    queries, keys, prefix = data["qo_len"], data["kv_len"], data["prefix_len"]
    packed = data["packed_custom_mask"]
    bits = [packed[place // 8] >> (place % 8) & 1 for place in range(queries * keys)]
    assert bits == data["custom_mask"]
    rows = [bits[row * keys : (row + 1) * keys] for row in range(queries)]
    assert all(all(row[:prefix]) for row in rows)
    mask = [row[prefix:] for row in rows]
    parents, ranks = [-1], [None]
    for node in range(1, queries):
        parents.append(max((j for j in range(queries) if mask[node][j] and j != node), key=lambda j: sum(mask[j])))
        ranks.append(parents[:-1].count(parents[-1]))
    return seen_by_mask(mask, [sum(row) - 1 for row in mask], ranks)


def chain(text, settings):
    number = (
        re.search(r"speculate (\d+)", text)[1]
        if settings["server"] == "tgi"
        else json.loads(text)["num_speculative_tokens"]
    )
    return seen_by_path(grown([1] * int(number)))


READERS = {
    "chain": chain,
    "eagle1": eagle1,
    "flashinfer": flashinfer,
    "genie": genie,
    "hydra": hydra,
    "medusa": medusa,
    "modelopt": modelopt,
    "nxdi-medusa": medusa,
    "nxdi-token-tree": nxdi_token_tree,
    "sam": sam,
    "sequoia": growmap,
    "trtllm": trtllm,
    "trtllm-buffers": trtllm_buffers,
    "trtllm-triton": trtllm_triton,
    "umbrella": growmap,
    "vllm": vllm,
    "xformers": xformers,
}
