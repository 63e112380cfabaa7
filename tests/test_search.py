import random
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference_search import best_value, coverage, probabilities, total, universe, value_of, violates, worst
from treeopt import RankTrace, best_tree
from treeopt.acceptance import AcceptanceTable
from treeopt.errors import AcceptanceError, ConstraintError
from treeopt.optimize import best_tree_under, program, regular
from treeopt.optimize import search as searching
from treeopt.optimize.limits import Limits
from treeopt.optimize.mixture import MixtureModel
from treeopt.optimize.models import HeadModel, JointModel, SiblingModel
from treeopt.optimize.objectives import Coverage, Worst
from treeopt.optimize.passing import PassingModel
from treeopt.optimize.search import search, search_objective

# Ranks at each depth; the first are tiny, the last has 17,576 sets.
TINY = [(1,), (2,), (3,), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (1, 1, 2)]
SMALL = [*TINY, (3, 2), (2, 3), (3, 3), (4, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2), (2, 1, 1, 2), (4, 3), (3, 2, 2)]


class PathTable:
    """A model given by a rate for every path."""

    def __init__(self, rates, num_levels):
        self.rates, self.num_levels = rates, num_levels

    def children(self, path):
        below = [(rate, child[-1]) for child, rate in self.rates.items() if child[:-1] == path and rate > 0]
        return sorted(below, key=lambda pair: (-pair[0], pair[1]))


def eighths(rng, num_ranks):
    """Rates that are multiples of 1/8 and sum to at most 1: ties, zeros, ones, rising ranks."""
    left, row = 8, []
    for _ in range(num_ranks):
        row.append(rng.choice([0, rng.randint(0, left), rng.randint(0, left)]))
        left -= row[-1]
    rng.shuffle(row)
    return [value / 8 for value in row]


def head_model(rng, num_ranks):
    while True:
        rows = [eighths(rng, count) for count in num_ranks]
        try:
            return HeadModel(AcceptanceTable.from_rates(rows))
        except AcceptanceError:  # rows that all rise are taken for cumulative ones
            continue


def path_model(rng, num_ranks):
    """A joint model, its rates eighths or any number."""
    paths = universe(num_ranks)[0]
    rates = {}
    for parent in [(), *(path for path in paths if len(path) < len(num_ranks))]:
        row = eighths(rng, num_ranks[len(parent)])
        if rng.random() < 0.5:
            row = [rate * rng.choice([1.0, rng.random()]) for rate in row]
        rates.update({(*parent, rank): rate for rank, rate in enumerate(row)})
    return PathTable(rates, len(num_ranks))


def joint_model(rng, num_ranks):
    rows, offsets = [], [0]
    for _ in range(rng.randint(2, 4)):
        length = rng.randint(len(num_ranks), 8)
        for i in range(length):
            seen = length - 1 - i
            rows.append([rng.randint(0, count - 1) if head < seen else -1 for head, count in enumerate(num_ranks)])
        rows[-length] = [rng.randint(0, count - 1) for count in num_ranks]
        offsets.append(len(rows))
    return JointModel.fit(RankTrace(rows, offsets), num_ranks=max(num_ranks))


def random_limits(rng, num_ranks):
    """Any combination of up to four limits beside the budget."""
    depth, paths = len(num_ranks), universe(num_ranks)[0]
    possible = {
        "max_depth": rng.randint(0, depth + 1),
        "max_rank": rng.randint(0, max(num_ranks)),
        "rank_caps": tuple(rng.randint(0, max(num_ranks)) for _ in range(rng.randint(1, depth + 1))),
        "max_children": rng.randint(0, max(num_ranks)),
        "level_caps": tuple(rng.randint(0, 5) for _ in range(rng.randint(1, depth + 1))),
        "dense_siblings": True,
        "level_regular": True,
        "must_include": tuple(rng.choice(paths) for _ in range(rng.randint(1, 3))),
        "max_leaves": rng.randint(1, 5),
    }
    names = rng.sample([*possible], rng.randint(0, 4))
    return {"num_nodes": rng.randint(1, len(paths) + 2), **{name: possible[name] for name in names}}


def mixture_model(rng, num_ranks):
    """A weighted mixture of independent heads and path tables, one of them perhaps without weight."""
    models = {str(i): rng.choice([head_model, path_model])(rng, num_ranks) for i in range(rng.randint(1, 3))}
    weights = {name: rng.choice([0, 1, 2, rng.random()]) for name in models}
    return MixtureModel(models, weights if any(weights.values()) else dict.fromkeys(models, 1))


def check(model, given_limits, num_ranks):
    """Compare the search with the best of all trees; return whether there is any."""
    try:
        limits = Limits(**given_limits)
    except ConstraintError:
        unchecked = copy(Limits(1))
        for name, value in given_limits.items():
            object.__setattr__(unchecked, name, value)
        assert best_value(total(model), unchecked, num_ranks) is None, given_limits
        return False
    solution = search(model, limits)
    assert solution.paths == sorted(solution.paths, key=lambda path: (len(path), path))
    assert not violates(solution.paths, limits, len(num_ranks)), (limits, solution)
    by_path = dict(zip(solution.paths, solution.probabilities))
    for path, probability in by_path.items():
        rates = {rank: rate for rate, rank in model.children(path[:-1])}
        assert probability == by_path.get(path[:-1], 1.0) * rates.get(path[-1], 0.0)
    if not limits.level_regular:
        for path in (path for path in by_path if by_path[path] == 0.0):
            assert violates([other for other in by_path if other != path], limits, len(num_ranks)), (limits, solution)
    best = best_value(total(model), limits, num_ranks)
    assert solution.optimal
    assert solution.bound == solution.value
    assert abs(solution.value - best) <= 1e-9, (limits, solution, best)
    return True


MODELS = {"heads": head_model, "paths": path_model, "trace": joint_model, "mixture": mixture_model}


def robust_objective(rng, num_ranks):
    models = [MODELS[rng.choice([*MODELS])](rng, num_ranks) for _ in range(rng.randint(1, 3))]
    return lambda limits: Worst.of(models, limits), worst(models)


def typical_objective(rng, num_ranks):
    share = rng.choice([0.2, 0.5, 0.8])
    passes = np.zeros((rng.randint(1, 9), len(num_ranks), max(num_ranks)), dtype=bool)
    for head, count in enumerate(num_ranks):
        passes[:, head, :count] = [[rng.random() < share for _ in range(count)] for _ in passes]
    return lambda limits: Coverage.of(PassingModel(passes), limits), coverage(passes)


OBJECTIVES = {"robust": robust_objective, "typical": typical_objective}


def check_objective(kind, rng, num_ranks):
    """Compare the search for another objective with the best of all trees; return whether there is any."""
    objective, value = OBJECTIVES[kind](rng, num_ranks)
    given_limits = random_limits(rng, num_ranks)
    given_limits.pop("level_regular", None)
    try:
        limits = Limits(**given_limits)
    except ConstraintError:
        return False
    solution = search_objective(objective(limits), limits)
    assert not violates(solution.paths, limits, len(num_ranks)), (limits, solution)
    best = best_value(value, limits, num_ranks)
    assert solution.optimal
    assert solution.bound == solution.value
    assert abs(solution.value - value_of(value, solution.paths)) <= 1e-12
    assert abs(solution.value - best) <= 1e-9, (limits, solution, best)
    return True


def few_candidates(monkeypatch):
    """Let the integer program begin with so few candidates that nodes outside matter."""
    monkeypatch.setattr(program, "CANDIDATES_PER_NODE", 1)


@pytest.mark.parametrize("few", [False, True], ids=["all", "few"])
@pytest.mark.parametrize("kind", MODELS)
def test_no_tree_under_the_limits_has_a_larger_sum(kind, few, monkeypatch):
    if few:
        few_candidates(monkeypatch)

    @settings(max_examples=200, deadline=None)
    @given(rng=st.randoms(use_true_random=False))
    def holds(rng):
        num_ranks = rng.choice(SMALL)
        check(MODELS[kind](rng, num_ranks), random_limits(rng, num_ranks), num_ranks)

    holds()


@pytest.mark.parametrize("few", [False, True], ids=["all", "few"])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_no_tree_under_the_limits_is_worth_more_to_the_objective(kind, few, monkeypatch):
    if few:
        few_candidates(monkeypatch)

    @settings(max_examples=100, deadline=None)
    @given(rng=st.randoms(use_true_random=False))
    def holds(rng):
        check_objective(kind, rng, rng.choice(SMALL))

    holds()


def run_seed(seed, count, sizes):
    """Check `count` instances, every fifth of another objective; return how many have a tree at all."""
    rng, solved = random.Random(seed), 0
    for i in range(count):
        num_ranks = rng.choice(sizes[i % len(sizes)])
        if i % 5 == 0:
            solved += check_objective(rng.choice([*OBJECTIVES]), rng, num_ranks)
            continue
        solved += check(MODELS[rng.choice([*MODELS])](rng, num_ranks), random_limits(rng, num_ranks), num_ranks)
    return solved


@pytest.mark.parametrize("few", [False, True], ids=["all", "few"])
def test_no_tree_under_the_limits_has_a_larger_sum_in_1500_instances(few, monkeypatch):
    if few:
        few_candidates(monkeypatch)
    assert run_seed(100 + few, 750, [SMALL]) > 500


def run_heavy_seed(seed):
    """Check 5,000 instances in a process of their own, every other seed with few candidates."""
    if seed % 2:
        program.CANDIDATES_PER_NODE = 1
    return run_seed(seed, 5000, [TINY, TINY, TINY, SMALL])


@pytest.mark.heavy
def test_no_tree_under_the_limits_has_a_larger_sum_in_100000_instances():
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        assert min(pool.map(run_heavy_seed, range(20))) > 3000


def test_an_unproven_tree_obeys_the_limits_and_its_bound_holds(monkeypatch):
    monkeypatch.setattr(program, "CANDIDATES_PER_NODE", 1)
    monkeypatch.setattr(program, "MAX_CANDIDATES", 2)
    monkeypatch.setattr(regular, "MAX_INNER_PATHS", 2)
    rng, unproven = random.Random(0), {False: 0, True: 0}
    for _ in range(300):
        num_ranks = rng.choice(SMALL)
        model = MODELS[rng.choice(["paths", "trace"])](rng, num_ranks)
        try:
            limits = Limits(**random_limits(rng, num_ranks))
        except ConstraintError:
            continue
        solution = search(model, limits)
        best = best_value(total(model), limits, num_ranks)
        assert not violates(solution.paths, limits, len(num_ranks))
        assert solution.value <= best + 1e-12
        assert solution.bound >= best - 1e-9
        assert not solution.optimal or solution.value == pytest.approx(best, abs=1e-9)
        unproven[limits.level_regular] += not solution.optimal
    assert min(unproven.values()) >= 5


def test_a_program_that_is_stopped_is_not_called_optimal(monkeypatch):
    monkeypatch.setattr(program, "PROGRAM_SECONDS", 0.0)
    ties = HeadModel(AcceptanceTable.from_rates([[0.125] * 8] * 5))
    limits = Limits(num_nodes=40, max_leaves=6, must_include=((7, 7),))
    solution = search(ties, limits)
    assert not solution.optimal
    assert not violates(solution.paths, limits, 5)
    assert solution.bound > solution.value


def test_a_program_that_hits_its_limit_with_a_tree_is_not_called_optimal(monkeypatch):
    def stopping(*arguments, **keywords):
        result = milp(*arguments, **keywords)
        result.status, result.mip_dual_bound = 1, -1e9
        return result

    milp = scipy.optimize.milp
    monkeypatch.setattr(scipy.optimize, "milp", stopping)
    solution = search(TABLE, Limits(num_nodes=3, must_include=((2, 1),)))
    assert (solution.paths, solution.optimal, solution.bound) == ([(2,), (2, 1)], False, 0.75)


def test_an_unproven_tree_is_the_best_of_the_candidates(monkeypatch):
    rng, num_ranks = random.Random(0), (3, 2, 2)
    monkeypatch.setattr(program, "MAX_CANDIDATES", 6)
    for _ in range(100):
        model = path_model(rng, num_ranks)
        limits = Limits(num_nodes=rng.randint(3, 12), max_children=rng.randint(1, 2), level_caps=(2, 3))
        candidates = search(model, Limits(num_nodes=7)).paths
        inside = PathTable({path: rate for path, rate in model.rates.items() if path in candidates}, 3)
        best = best_value(total(inside), limits, num_ranks)
        assert search(model, limits).value >= best - 1e-9


TABLE = HeadModel(AcceptanceTable.from_rates([[0.5, 0.25, 0.125], [0.4, 0.3, 0.1], [0.5, 0.0, 0.25]]))


def test_limits_on_single_paths_give_what_best_first_search_gives():
    for keywords in ({}, {"max_depth": 2}, {"max_rank": 1}, {"max_depth": 1, "max_rank": 0}):
        built = best_tree(TABLE.table, 9, **keywords)
        solution = search(TABLE, Limits(num_nodes=9, **keywords))
        assert solution.paths == list(built.tree.paths[1:])
        assert solution.probabilities == built.path_probabilities[1:].tolist()


@pytest.mark.parametrize(
    "keywords",
    [
        {"max_children": 2},
        {"level_caps": (2, 2)},
        {"dense_siblings": True},
        {"level_regular": True},
        {"max_leaves": 2},
        {"must_include": ((1,),)},
    ],
    ids=str,
)
def test_among_equal_siblings_of_independent_heads_the_smallest_ranks_are_taken(keywords):
    model = HeadModel(AcceptanceTable.from_rates([[0.25] * 4, [0.125] * 4]))
    paths = search(model, Limits(num_nodes=6, **keywords)).paths
    for path in paths:
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths


def test_nodes_of_probability_0_are_taken_only_where_a_limit_needs_them():
    rates = {(0,): 0.5, (2,): 0.5, (0, 0): 0.25}
    model = PathTable(rates, 2)
    assert search(model, Limits(num_nodes=9, max_children=2)).paths == [(0,), (2,), (0, 0)]
    assert search(model, Limits(num_nodes=9, dense_siblings=True)).paths == [(0,), (1,), (2,), (0, 0)]
    regular = search(model, Limits(num_nodes=9, level_regular=True))
    assert regular.paths == [(0,), (2,), (0, 0), (2, 0)]
    assert regular.probabilities == [0.5, 0.5, 0.125, 0.0]
    held = search(model, Limits(num_nodes=3, must_include=((7, 7),)))
    assert (held.paths, held.probabilities, held.optimal) == ([(7,), (7, 7)], [0.0, 0.0], True)


def test_what_an_integer_program_adds_without_need_is_dropped():
    chosen = {(0,): 0.5, (1,): 0.0, (2,): 0.25, (3,): 0.0, (3, 0): 0.0, (4,): 0.0, (4, 1): 0.0}
    chosen = {path: (probability,) for path, probability in chosen.items()}
    held = Limits(9, must_include=((4,),))
    assert set(program._needed(chosen, held)) == {(0,), (2,), (4,)}
    dense = Limits(9, dense_siblings=True)
    assert set(program._needed(chosen, dense)) == {(0,), (1,), (2,)}


def test_a_level_regular_tree_takes_the_child_with_the_better_subtree():
    model = PathTable({(0,): 0.5, (1,): 0.4, (1, 0): 1.0, (1, 0, 0): 1.0}, 3)
    solution = search(model, Limits(num_nodes=4, level_regular=True))
    assert solution.paths == [(1,), (1, 0), (1, 0, 0)]


def test_what_is_required_below_one_node_does_not_count_below_its_siblings():
    model = HeadModel(AcceptanceTable.from_rates([[0.25, 0.4], [0.5, 0.0, 0.45]]))
    solution = search(model, Limits(num_nodes=5, level_regular=True, must_include=((1, 1),)))
    assert solution.paths == [(1,), (1, 0), (1, 1), (1, 2)]  # 0.78; (0), (1), (0,0), (1,1) has 0.775


def test_few_leaves_are_spent_on_the_likeliest_ends():
    model = HeadModel(AcceptanceTable.from_rates([[0.5, 0.25], [0.5, 0.25]]))
    for max_leaves, best in ((1, 0.75), (2, 1.125), (3, 1.25)):
        solution = search(model, Limits(num_nodes=9, max_leaves=max_leaves))
        assert solution.value == best
        assert not violates(solution.paths, Limits(num_nodes=9, max_leaves=max_leaves), 2)


def test_limits_beyond_any_tree_bind_nothing():
    huge = 10**30
    limits = Limits(huge, huge, huge, (huge,), huge, (huge,), False, False, ((huge,),), huge)
    solution = search(TABLE, limits)
    assert len(solution.paths) == 3 + 3 * 3 + 9 * 2 + 1
    assert solution.optimal


def test_a_path_that_must_be_held_takes_the_place_of_better_ones():
    solution = search(TABLE, Limits(num_nodes=3, must_include=((2, 1),)))
    assert solution.paths == [(2,), (2, 1)]
    assert solution.value == 0.125 + 0.125 * 0.3


def test_the_table_and_the_integer_program_agree_at_sizes_no_brute_force_reaches(monkeypatch):
    rng = random.Random(0)
    for _ in range(6):
        rates = [[0.7 * share / 3 for share in rng.choices([0, 0.2, 0.5, 1, 2], k=6)] for _ in range(4)]
        model = HeadModel(AcceptanceTable.from_rates([[rate / max(1, sum(row)) for rate in row] for row in rates]))
        limits = Limits(num_nodes=30, dense_siblings=True, max_children=4, max_leaves=rng.choice([None, 6, 10]))
        table = search(model, limits)
        with monkeypatch.context() as patch:
            patch.setattr(searching, "MAX_TABLE_STEPS", 0)
            solved = search(model, limits)
        assert table.optimal
        assert solved.optimal
        assert table.value == pytest.approx(solved.value, abs=1e-9)


def test_limits_without_an_integer_program_do_not_wait_for_scipy():
    code = (
        "import sys\nfrom treeopt.optimize.limits import Limits\nfrom treeopt.optimize.search import search\nfrom treeopt.optimize.models import SiblingModel\n"
        "model = SiblingModel([0.5, 0.1, 0.2], 3)\n"
        "for limits in ({}, {'max_children': 2}, {'level_caps': (2,)}, {'dense_siblings': True}, {'max_leaves': 2}, "
        "{'level_regular': True}):\n    search(model, Limits(9, **limits))\nprint('scipy' in sys.modules)\n"
        "search(model, Limits(9, must_include=((0,),)))\nprint('scipy' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "True"]


CONTRADICTIONS = [
    ({"max_depth": 1, "must_include": ((0, 0),)}, r"`must_include` holds \(0,0\), deeper than `max_depth` 1"),
    ({"max_rank": 2, "must_include": ((0, 3),)}, r"`must_include` holds \(0,3\), whose rank 3 is over `max_rank` 2"),
    (
        {"rank_caps": (9, 1), "must_include": ((2, 2),)},
        r"`must_include` .* rank 2 at depth 2 is over `rank_caps` \(9, 1\)",
    ),
    (
        {"num_nodes": 3, "must_include": ((0, 0, 0),)},
        "`must_include` needs 4 nodes, root included, but `num_nodes` is 3",
    ),
    (
        {"num_nodes": 4, "must_include": ((0, 0), (1, 0))},
        "`must_include` needs 5 nodes, root included, but `num_nodes` is 4",
    ),
    (
        {"num_nodes": 4, "dense_siblings": True, "must_include": ((3,),)},
        "`must_include` with `dense_siblings` needs 5 nodes, root included, but `num_nodes` is 4",
    ),
    (
        {"num_nodes": 9, "dense_siblings": True, "must_include": ((10**12,),)},
        "`must_include` with `dense_siblings` needs 1000000000002 nodes",
    ),
    (
        {"num_nodes": 6, "level_regular": True, "must_include": ((0,), (1, 0), (1, 1))},
        "`must_include` with `level_regular` needs 7 nodes, root included, but `num_nodes` is 6",
    ),
    (
        {"max_children": 1, "must_include": ((0,), (1,))},
        "`must_include` needs 2 children of one node, but `max_children` is 1",
    ),
    (
        {"max_children": 2, "dense_siblings": True, "must_include": ((2,),)},
        "`must_include` with `dense_siblings` needs 3 children of one node, but `max_children` is 2",
    ),
    (
        {"level_caps": (4, 1), "must_include": ((0, 0), (1, 0))},
        r"needs 2 nodes at depth 2, but `level_caps` is \(4, 1\)",
    ),
    ({"max_leaves": 1, "must_include": ((0,), (1,))}, "`must_include` needs 2 leaves, but `max_leaves` is 1"),
    (
        {"max_leaves": 2, "level_regular": True, "must_include": ((0,), (1, 0), (1, 1))},
        "`must_include` with `level_regular` needs 4 leaves, but `max_leaves` is 2",
    ),
]


@pytest.mark.parametrize(("keywords", "message"), CONTRADICTIONS, ids=str)
def test_limits_that_contradict_each_other_are_both_named(keywords, message):
    with pytest.raises(ConstraintError, match=message):
        Limits(**{"num_nodes": 64, **keywords})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_nodes": 0}, "`num_nodes` is 0; give a whole number from 1 on"),
        ({"num_nodes": None}, "`num_nodes` is None; give a whole number from 1 on"),
        ({"num_nodes": 2.5}, "`num_nodes` is 2.5"),
        ({"num_nodes": True}, "`num_nodes` is True"),
        ({"max_depth": -1}, "`max_depth` is -1; give a whole number from 0 on"),
        ({"max_rank": "3"}, "`max_rank` is '3'"),
        ({"max_children": -2}, "`max_children` is -2"),
        ({"max_leaves": 0}, "`max_leaves` is 0; give a whole number from 1 on"),
        ({"rank_caps": 3}, "`rank_caps` is 3; give one whole number a depth"),
        ({"rank_caps": (3, -1)}, r"`rank_caps\[1\]` is -1; give a whole number from 0 on"),
        ({"level_caps": "12"}, "`level_caps` is '12'; give one whole number a depth"),
        ({"level_caps": (1.5,)}, r"`level_caps\[0\]` is 1.5"),
        ({"dense_siblings": 1}, "`dense_siblings` is 1; give True or False"),
        ({"level_regular": None}, "`level_regular` is None; give True or False"),
        ({"must_include": 5}, "`must_include` is 5; give a list of paths"),
        ({"must_include": (5,)}, r"`must_include\[0\]` is 5; give a path such as \(0,\) or \(0, 1\)"),
        ({"must_include": ((0,), ())}, r"`must_include\[1\]` is the root"),
        ({"must_include": ((0, -1),)}, r"`must_include\[0\]\[1\]` is -1; give a whole number from 0 on"),
    ],
    ids=str,
)
def test_values_that_are_no_limits_are_refused(keywords, message):
    with pytest.raises(ConstraintError, match=message):
        Limits(**{"num_nodes": 64, **keywords})


def test_a_required_path_deeper_than_the_model_is_refused():
    limits = Limits(num_nodes=9, must_include=((0,), (0, 0, 0, 0)))
    with pytest.raises(
        ConstraintError, match=r"`must_include` holds \(0,0,0,0\) of depth 4, but the model has 3 levels"
    ):
        search(TABLE, limits)


def test_limits_take_lists_and_numpy_numbers_and_compare_by_value():
    given_limits = Limits(
        np.int64(8), rank_caps=[np.int32(2)], level_caps=np.array([3, 2]), must_include=[[0, np.int64(1)]]
    )
    assert given_limits == Limits(8, rank_caps=(2,), level_caps=(3, 2), must_include=((0, 1),))
    assert hash(given_limits) == hash(Limits(8, rank_caps=(2,), level_caps=(3, 2), must_include=((0, 1),)))


def allowed(limits, path):
    """Whether depth and rank limits alone allow a path."""
    caps = [(limits.rank_cap(depth), rank) for depth, rank in enumerate(path, 1)]
    deep = limits.max_depth is not None and len(path) > limits.max_depth
    return not deep and all(cap is None or rank <= cap for cap, rank in caps)


@pytest.mark.parametrize("kind", MODELS)
def test_the_certificate_holds_what_brute_force_finds(kind):
    rng = random.Random(kind)
    seen = {"nested": 0, "costs": 0, "excluded": 0}
    for _ in range(150):
        num_ranks = rng.choice([(2,), (3,), (2, 2), (3, 1), (3, 2), (2, 2, 1)])
        model = MODELS[kind](rng, num_ranks)
        try:
            limits = Limits(**random_limits(rng, num_ranks))
        except ConstraintError:
            continue
        built = best_tree_under(limits, model)
        proven, paths = built.certificate, universe(num_ranks)[0]
        limits.check(built.tree)
        best = best_value(total(model), limits, num_ranks)
        assert proven.value == built.expected_accepted == pytest.approx(best, abs=1e-9)
        assert set(proven.constraint_costs) == set(limits.active)
        for name, cost in proven.constraint_costs.items():
            without = best_value(total(model), limits.without(name), num_ranks)
            assert cost == pytest.approx(without - best, abs=1e-9)
            seen["costs"] += cost > 0
        free = best_value(total(model), Limits(limits.num_nodes), num_ranks)
        assert proven.unconstrained == pytest.approx(free, abs=1e-9)
        outside = [
            p
            for p, path in zip(probabilities(model, paths), paths)
            if allowed(limits, path) and path not in built.tree.paths
        ]
        assert proven.first_excluded == pytest.approx(max(outside, default=0.0), abs=1e-12)
        seen["excluded"] += proven.first_excluded > 0
        if proven.nested:
            for n in range(1, built.tree.num_nodes):
                first = best_value(total(model), replace(limits, num_nodes=n), num_ranks)
                assert built.curve[n - 1] == pytest.approx(first, abs=1e-9)
                seen["nested"] += 1
    assert min(seen.values()) > 20, seen


def test_of_few_children_those_that_pass_elsewhere_are_taken_even_if_they_pass_less_often():
    passes = np.zeros((4, 1, 3), dtype=bool)
    for rank, positions in enumerate(([0, 1, 2], [0, 1], [3])):
        passes[positions, 0, rank] = True
    for keywords in ({"num_nodes": 3}, {"num_nodes": 9, "max_children": 2}, {"num_nodes": 9, "level_caps": (2,)}):
        limits = Limits(**keywords)
        solution = search_objective(Coverage.of(PassingModel(passes), limits), limits)
        assert (solution.paths, solution.value) == ([(0,), (2,)], 1.0)


def test_the_worst_domain_gets_the_child_that_the_other_needs_less():
    models = [SiblingModel(rates, 1) for rates in ([0.6, 0.3, 0.05], [0.4, 0.1, 0.45])]
    limits = Limits(num_nodes=9, max_children=2)
    solution = search_objective(Worst.of(models, limits), limits)
    assert solution.paths == [(0,), (2,)]  # .65 and .85; (0), (1) have .9 and .5
    assert solution.value == pytest.approx(0.65)


def test_level_regular_trees_are_refused_for_other_objectives_naming_both():
    limits = Limits(num_nodes=9, level_regular=True)
    with pytest.raises(ConstraintError, match=r"`level_regular` is exact for .* another `objective`; drop one"):
        search_objective(Worst.of([TABLE], limits), limits)


def test_a_compromise_that_no_domain_ranks_first_is_found(monkeypatch):
    few_candidates(monkeypatch)
    models = [SiblingModel(rates, 1) for rates in ([0.4, 0.3, 0.25, 0.0, 0.0], [0.0, 0.0, 0.25, 0.4, 0.3])]
    limits = Limits(num_nodes=2)
    solution = search_objective(Worst.of(models, limits), limits)
    assert (solution.paths, solution.value, solution.optimal) == ([(2,)], 0.25, True)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_an_unproven_tree_of_another_objective_has_a_bound_that_holds(kind, monkeypatch):
    monkeypatch.setattr(program, "CANDIDATES_PER_NODE", 1)
    monkeypatch.setattr(program, "MAX_CANDIDATES", 2)
    rng, unproven = random.Random(0), 0
    for _ in range(200):
        num_ranks = rng.choice(SMALL)
        objective, value = OBJECTIVES[kind](rng, num_ranks)
        limits = Limits(num_nodes=rng.randint(3, 9), max_children=rng.choice([None, 1, 2]))
        solution = search_objective(objective(limits), limits)
        best = best_value(value, limits, num_ranks)
        assert solution.value <= best + 1e-12
        assert solution.bound >= best - 1e-9
        assert not solution.optimal or solution.value == pytest.approx(best, abs=1e-9)
        unproven += not solution.optimal
    assert unproven >= 5
