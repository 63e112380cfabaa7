"""What other decoders read is the tree that was exported: goldens, restated readers, every limit with its text."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.readings import READERS, eagle1_tree_indices, medusa_retrieve, medusa_tree_indices, seen_by_path
from tests.strategies import trees
from treeopt import DraftTree, chain, dense_tree
from treeopt.engines import Versions, broken, engine_named, engines, fit, read_engine_file, write_engine_file
from treeopt.errors import EngineError, TreeError

FORMATS = Path(__file__).parent / "data" / "formats"
SAMPLE = DraftTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
NAMES = sorted(engines())
TREE_FORMS = sorted(READERS)
SHAPES = sorted(set(NAMES) - set(TREE_FORMS))
NEEDED = {"flashinfer": {"prefix_len": "3"}}
FORMS = [(name, NEEDED.get(name, {})) for name in TREE_FORMS] + [
    ("chain", {"server": "tgi"}),
    ("flashinfer", {"prefix_len": "0"}),
    ("sam", {"form": "choices"}),
    ("trtllm", {"form": "yaml"}),
    ("trtllm", {"form": "yaml", "decoding": "eagle3"}),
    ("trtllm-triton", {"decoding": "eagle"}),
]
RANDOM_TREES = 300  # for each of some twenty forms


def sample(name):
    return (FORMATS / name).read_text(encoding="utf8")


def exported(name, tree, **settings):
    engine = engine_named(name)
    values = engine.settings_of({key: str(value) for key, value in settings.items()})
    return engine.write(fit(engine, tree, values).tree, values)


def fitted_or_reason(engine, tree, settings, **options):
    try:
        return fit(engine, tree, settings, **options).tree, ""
    except EngineError as error:
        return None, str(error)


def random_tree(rng, max_nodes=40):
    """Grow below nodes that exist: narrow or wide, shallow or deep, with gaps between siblings or without."""
    paths, held = [()], {()}
    most, gaps, deep = int(rng.integers(1, 14)), rng.random() < 0.5, int(rng.integers(1, 10))
    for _ in range(int(rng.integers(0, max_nodes))):
        parent = paths[int(rng.integers(len(paths)))]
        if len(parent) == deep:
            continue
        rank = int(rng.integers(most)) if gaps else sum(path[:-1] == parent for path in paths if path)
        path = (*parent, rank)
        if path not in held and rank < most:
            paths.append(path)
            held.add(path)
    return DraftTree.from_paths(paths[1:])


def plain(tree):
    """Parents, positions and visible ancestors of a tree, by path."""
    return seen_by_path(tree.paths[1:])


def without_gaps(tree):
    """The tree with siblings ranked in their order: what a form without ranks can tell."""
    ranks = [-1]
    parents = tree.parents.tolist()
    for node in range(1, tree.num_nodes):
        ranks.append(parents[1:node].count(parents[node]))
    return DraftTree.from_parents(parents, ranks)


def test_every_engine_is_listed():
    assert NAMES == [
        "chain", "eagle1", "eagle2", "flashinfer", "genie", "hydra", "medusa", "modelopt", "nxdi-medusa", "nxdi-token-tree",
        "openvino", "sam", "sequoia", "sglang", "trtllm", "trtllm-buffers", "trtllm-dynamic", "trtllm-triton", "umbrella",
        "vllm", "xformers",
    ]  # fmt: skip
    assert SHAPES == ["eagle2", "openvino", "sglang", "trtllm-dynamic"]


def test_a_new_engine_is_one_new_file(tmp_path, monkeypatch):
    import treeopt.engines as package

    (tmp_path / "abacus.py").write_text(
        "from treeopt.engines._engine import Engine\n"
        "from treeopt.engines._texts import read_paths, write_paths\n"
        "ENGINES = (Engine('abacus', 'Abacus', 'a list', 'tree', False, write_paths, read_paths),)\n"
    )
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    engines.cache_clear()
    try:
        assert sorted(engines()) == sorted([*NAMES, "abacus"])
        assert engine_named("abacus").read(engine_named("abacus").write(SAMPLE, {})) == SAMPLE
    finally:
        engines.cache_clear()


@pytest.mark.parametrize(("name", "given"), FORMS, ids=[f"{name} {'-'.join(given.values())}" for name, given in FORMS])
def test_the_engine_reads_the_tree_that_was_exported_and_so_does_the_importer(name, given):
    engine = engine_named(name)
    settings = engine.settings_of(given)
    rng = np.random.default_rng(sum(map(ord, name)))
    exported_trees = as_it_was = 0
    for _ in range(RANDOM_TREES):
        tree = random_tree(rng)
        fitted, reason = fitted_or_reason(engine, tree, settings, repair=True)
        if fitted is None:
            assert tree.num_nodes == 1 or ((0,) not in tree.paths and "no mend leaves a node to draft" in reason)
            continue
        exported_trees += 1
        as_it_was += fitted == tree
        text = engine.write(fitted, settings)
        expected = without_gaps(fitted) if engine.holds == "structure" else fitted
        assert READERS[name](text, settings) == plain(expected), fitted.paths
        assert engine.read(text) == expected
    assert exported_trees > RANDOM_TREES / 2
    assert as_it_was > RANDOM_TREES / 100


@pytest.mark.parametrize(
    "name", ["genie", "hydra", "medusa", "nxdi-medusa", "nxdi-token-tree", "sam", "sequoia", "vllm"]
)
def test_a_tree_that_is_refused_would_be_read_as_another_or_not_at_all(name):
    engine = engine_named(name)
    settings = engine.settings_of({})
    rng = np.random.default_rng(7)
    refused = 0
    while refused < 50:
        tree = random_tree(rng)
        if tree.num_nodes == 1 or broken(engine, tree, settings) is None:
            continue
        refused += 1
        try:
            read = READERS[name](engine.write(tree, settings), settings)
        except (AssertionError, IndexError):
            continue
        assert read != plain(tree), tree.paths


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("medusa", "medusa_choices.json"),
        ("hydra", "hydra_choices.json"),
        ("eagle1", "eagle1_tree_choices.json"),
        ("modelopt", "modelopt_tree_paths.json"),
        ("nxdi-medusa", "nxdi_medusa_tree.json"),
        ("nxdi-token-tree", "nxdi_token_tree.json"),
        ("sam", "samd_token_recycle.json"),
        ("sequoia", "sequoia_growmap_umbrella.json"),
        ("umbrella", "sequoia_growmap_umbrella.json"),
        ("trtllm", "medusa_choices.json"),
        ("trtllm-buffers", "trtllm_cpp_buffers.json"),
    ],
)
def test_the_samples_tree_exported_is_the_sample(name, file):
    assert exported(name, SAMPLE) == sample(file)
    assert engine_named(name).read(sample(file)) == SAMPLE


def test_the_samples_with_settings_are_met():
    assert exported("sam", SAMPLE, form="choices") == sample("samd_eagle.json")
    yaml = re.sub(r" +#.*", "", sample("trtllm_llmapi_eagle_legacy.yaml"))
    assert exported("trtllm", SAMPLE, form="yaml", decoding="eagle", draft="/path/to/draft") == yaml
    assert engine_named("trtllm").read(sample("trtllm_llmapi_eagle_legacy.yaml")) == SAMPLE
    triton = sample("trtllm_triton_config.pbtxt")
    assert exported("trtllm-triton", SAMPLE) == re.sub(r"(?m)^#.*\n", "", triton)
    assert engine_named("trtllm-triton").read(triton) == SAMPLE
    vllm = sample("vllm_speculative_config_removed.json")
    tree = engine_named("vllm").read(vllm)
    assert tree == dense_tree([1, 2, 1])
    assert exported("vllm", tree, model=json.loads(vllm)["model"]) == vllm
    genie = sample("genie_ssd_q1.json")
    assert engine_named("genie").read(genie) == dense_tree([2, 1])
    assert exported("genie", dense_tree([2, 1]), forecast_token_count=4, forecast_prefix=16) == genie
    assert exported("genie", SAMPLE, form="eaglet") == sample("genie_eaglet.json")
    masks = {key.partition("(")[0]: value for key, value in json.loads(sample("flashinfer_custom_mask.json")).items()}
    assert json.loads(exported("flashinfer", SAMPLE, prefix_len=2)) == masks
    assert engine_named("flashinfer").read(json.dumps(masks)) == SAMPLE


def test_the_shapes_are_those_of_the_sample():
    shapes = json.loads(sample("shape_parameters_only.json"))
    assert exported("sglang", SAMPLE).strip() == shapes["sglang"]
    assert json.loads(exported("eagle2", SAMPLE)) == shapes["EAGLE-2/3"]
    assert json.loads(exported("trtllm-dynamic", SAMPLE)) == shapes["TensorRT-LLM (current)"]
    assert json.loads(exported("openvino", SAMPLE)) == shapes["openvino.genai"]
    assert json.loads(exported("chain", chain(4))) == shapes["vllm medusa"]
    assert exported("chain", chain(3), server="tgi").strip() == shapes["TGI"]


def test_the_restated_buffers_are_those_of_the_samples():
    choices = SAMPLE.paths[1:]
    medusa = json.loads(sample("medusa_buffers.json"))
    assert medusa_tree_indices(choices) == medusa["tree_indices(TOPK=10)"]
    assert medusa_retrieve(choices) == medusa["retrieve_indices(-1=pad)"]
    eagle = json.loads(sample("eagle1_verify_buffers.json"))
    assert eagle1_tree_indices(choices) == eagle["tree_indices"]
    assert medusa_tree_indices(choices) != eagle["tree_indices"]  # one list, two tables


def test_masks_of_more_than_a_word_are_signed_words_and_read_back():
    tree = dense_tree([8, 4])
    data = json.loads(exported("trtllm-buffers", tree))
    assert {len(row) for row in data["packedMask"]} == {2}
    assert data["packedMask"][31][0] == 1 + 2**6 - 2**31  # the root, its parent, node 6, and itself at the sign bit
    assert engine_named("trtllm-buffers").read(json.dumps(data)) == tree


LIMITS = [
    ("medusa", [(10,)], {}, r"node `\(10\)` has rank 10, and ranks end at 9: drop it", []),
    ("medusa", [(0,), (10,)], {}, r"node `\(10\)` has rank 10, and ranks end at 9: drop it", [(0,)]),
    ("medusa", [(0,), (0, 0)], {"heads": "1"}, r"node `\(0,0\)` has depth 2, and depth ends at 1, the number of heads", [(0,)]),
    ("hydra", [(0,), (10,)], {}, r"rank 10, and ranks end at 9", [(0,)]),
    ("hydra", [(0,), (0, 0)], {"heads": "1"}, r"depth ends at 1, the number of heads", [(0,)]),
    ("hydra", [(0,), (2,)], {}, r"node `\(2\)` lacks its left sibling: add `\(1\)`", [(0,), (1,), (2,)]),
    ("hydra", [(0,), (1,), (1, 0)], {}, r"node `\(0\)` has no children but comes before `\(1\)`, which has", [(0,), (1,)]),
    ("eagle1", [(0,), (1,)], {}, r"the deepest node, `\(1\)`, has depth 1, and depth starts at 2", [(0,), (1,), (0, 0)]),
    ("eagle1", [(0,), (0, 10)], {}, r"node `\(0,10\)` has rank 10, and ranks end at 9", [(0,), (0, 0)]),
    ("trtllm", [(rank,) for rank in range(17)], {}, r"node `\(16\)` has rank 16, and ranks end at 15", [(r,) for r in range(16)]),
    ("trtllm", [(0,) * n for n in range(1, 10)], {}, r"has depth 9, and depth ends at 8", [(0,) * n for n in range(1, 9)]),
    ("trtllm", [(0,), (2,), (0, 0)], {}, r"node `\(2\)` lacks its left sibling: add `\(1\)`", [(0,), (1,), (2,), (0, 0)]),
    ("trtllm", [(0,), (1,), (0, 0)], {"max_draft_len": "2"}, r"number 3 of 3, and max_draft_len is 2: drop nodes", [(0,), (1,)]),
    ("trtllm-triton", [(0,), (2,)], {}, r"node `\(2\)` lacks its left sibling", [(0,), (1,), (2,)]),
    ("trtllm-buffers", [(1,)], {}, r"node `\(1\)` lacks its left sibling: add `\(0\)`", [(0,), (1,)]),
    ("vllm", [(0,), (1,), (0, 0)], {}, r"level 1 is uneven, node `\(0\)` having 1 children and `\(1\)` 0", [(0,), (1,)]),
    ("vllm", [(0,), (2,)], {}, r"node `\(2\)` lacks its left sibling", [(0,)]),
    ("genie", [(0,), (1,), (0, 0), (1, 1)], {}, r"node `\(1,1\)` lacks its left sibling", [(0,), (1,)]),
    ("genie", [(0,), (1,), (1, 0)], {}, r"level 1 is uneven", [(0,), (1,)]),
    ("nxdi-medusa", [(0,), (12,)], {}, r"ranks end at 9", [(0,)]),
    ("nxdi-medusa", [(0,), (0, 0)], {"heads": "1"}, r"depth ends at 1, the number of heads", [(0,)]),
    ("nxdi-token-tree", [(0,), (2,)], {}, r"lacks its left sibling: add `\(1\)`", [(0,), (1,), (2,)]),
    (
        "nxdi-token-tree", [(0,), (1,), (0, 0), (1, 0), (1, 0, 0)], {},
        r"node `\(0,0\)` has no children but comes before `\(1,0\)`, which has", [(0,), (1,), (0, 0), (1, 0)],
    ),
    ("sequoia", [(1,)], {}, r"node `\(1\)` lacks its left sibling: add `\(0\)`", [(0,), (1,)]),
    ("umbrella", [(0,), (0, 1)], {}, r"node `\(0,1\)` lacks its left sibling: add `\(0,0\)`", [(0,), (0, 0), (0, 1)]),
    ("sam", [(0,), (8,)], {}, r"node `\(8\)` has rank 8, and ranks end at 7", [(0,)]),
    ("sam", [(1,)], {}, r"lacks its left sibling", [(0,), (1,)]),
    ("sam", [(0,)], {"form": "choices"}, r"depth starts at 2", [(0,), (0, 0)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "paths", "given", "message", "repaired"), LIMITS)
def test_each_limit_is_refused_with_node_and_remedy_and_repaired_on_demand(name, paths, given, message, repaired):
    engine, tree = engine_named(name), DraftTree.from_paths(paths)
    settings = engine.settings_of(given)
    with pytest.raises(EngineError, match=rf"^`{name}` cannot take the tree: .*{message}"):
        fit(engine, tree, settings)
    if not repaired:
        with pytest.raises(EngineError, match=r"no mend leaves a node to draft"):
            fit(engine, tree, settings, repair=True)
        return
    fitted = fit(engine, tree, settings, repair=True)
    assert set(fitted.tree.paths[1:]) == set(repaired)
    assert set(fitted.added) == set(repaired) - set(paths)
    assert set(fitted.dropped) == set(paths) - set(repaired)
    assert broken(engine, fitted.tree, settings) is None


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("flashinfer", "sam", "sequoia", "trtllm-buffers", "umbrella")]
)
def test_a_root_alone_is_refused_where_a_list_of_nodes_would_be_empty(name):
    engine = engine_named(name)
    with pytest.raises(EngineError, match=r"the root, so nothing is drafted: switch speculation off there"):
        fit(engine, chain(0), engine.settings_of({}), repair=True)


def test_the_price_of_a_mend_comes_from_the_trees_own_probabilities():
    tree = DraftTree.from_paths([(0,), (1,), (0, 0)])
    probabilities = {(): 1.0, (0,): 0.5, (1,): 0.25, (0, 0): 0.375}
    engine = engine_named("vllm")
    # (0), (0,0) is worth more than (0), (1): the mend keeps what is likelier.
    fitted = fit(engine, tree, {"method": "eagle"}, repair=True, probabilities=probabilities)
    assert fitted.tree == chain(2)
    assert (fitted.expected_before, fitted.expected_after) == (1.125, 0.875)
    assert fitted.cost == "drops 1 node, (1); 4 nodes (root included) become 3; E[L] 1.1250 becomes 0.8750"
    with pytest.raises(EngineError, match=r"--repair, which drops 1 node, \(1\); .* E\[L\] 1\.1250 becomes 0\.8750"):
        fit(engine, tree, {"method": "eagle"}, probabilities=probabilities)


def test_added_nodes_make_the_value_a_lower_bound():
    tree = DraftTree.from_paths([(0,), (2,)])
    fitted = fit(engine_named("trtllm"), tree, {}, repair=True, probabilities={(): 1.0, (0,): 0.5, (2,): 0.125})
    assert fitted.cost == "adds 1 node, (1); 3 nodes (root included) become 4; E[L] 0.6250 becomes at least 0.6250"


def test_the_mend_of_a_regular_form_is_the_best_of_all_trees_of_widths_inside():
    rng = np.random.default_rng(3)
    engine = engine_named("genie")
    for _ in range(200):
        tree = random_tree(rng, 14)
        probabilities = {path: float(rng.random()) * 0.5 ** len(path) for path in tree.paths}
        widths = [(a, b, c) for a in range(4) for b in range(4) for c in range(4)]
        inside = [dense_tree(list(shape[: (*shape, 0).index(0)])) for shape in widths]
        inside = [one for one in inside if set(one.paths) <= set(tree.paths)]
        if max(tree.ranks.max() + 1, 0) > 3 or tree.max_depth > 3 or max(one.num_nodes for one in inside) == 1:
            continue
        best = max(sum(probabilities[path] for path in one.paths[1:]) for one in inside)
        fitted = fit(engine, tree, engine.settings_of({}), repair=True, probabilities=probabilities)
        assert fitted.expected_after == pytest.approx(best, abs=1e-12)


def test_nodes_over_max_draft_len_go_by_probability_and_never_a_needed_sibling():
    rng = np.random.default_rng(5)
    engine = engine_named("trtllm")
    for most in (1, 3, 6):
        settings = engine.settings_of({"max_draft_len": str(most)})
        for _ in range(100):
            tree = random_tree(rng)
            if tree.num_nodes == 1:
                continue
            fitted = fit(engine, tree, settings, repair=True)
            assert fitted.tree.num_nodes - 1 <= most
            assert broken(engine, fitted.tree, settings) is None


def test_nodes_over_max_draft_len_are_the_least_likely():
    tree = DraftTree.from_paths([(0,), (1,), (0, 0), (1, 1), (1, 1, 0)])
    probabilities = {(): 1.0, (0,): 0.5, (1,): 0.4, (0, 0): 0.1, (1, 1): 0.3, (1, 1, 0): 0.2}
    settings = engine_named("trtllm").settings_of({"max_draft_len": "4"})
    fitted = fit(engine_named("trtllm"), tree, settings, repair=True, probabilities=probabilities)
    assert fitted.dropped == ((0, 0),)


@pytest.mark.parametrize(
    ("name", "paths", "dropped"),
    [
        ("hydra", [(0,), (1,), (2,), (0, 0), (2, 0), (2, 0, 0)], {(2, 0), (2, 0, 0)}),
        ("nxdi-token-tree", [(0,), (1,), (2,), (0, 0), (2, 0), (2, 0, 0)], {(2, 0), (2, 0, 0)}),
        ("nxdi-token-tree", [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)], {(1, 0, 0)}),
    ],
)
def test_what_stands_before_a_childless_node_keeps_its_children(name, paths, dropped):
    fitted = fit(engine_named(name), DraftTree.from_paths(paths), {}, repair=True)
    assert set(fitted.dropped) == dropped


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle1", "modelopt", "nxdi-medusa"])
def test_lists_of_tuples_as_in_the_engines_sources_are_read_too(name):
    assert engine_named(name).read("[(0,), (1,), (0, 0), (0, 1), (1, 0)]") == SAMPLE


def test_case_7_leaves_alone_are_enough_for_tensorrt_llm():
    assert engine_named("trtllm").read("[[0, 0, 0, 0]]") == chain(4)
    assert engine_named("trtllm-triton").read("{0, 0, 0, 0}") == chain(4)
    with pytest.raises(TreeError, match=r"node `\(0,0,0,0\)` has no parent"):
        engine_named("medusa").read("[[0, 0, 0, 0]]")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "tree", [dense_tree([4]), chain(4), chain(1), chain(0)], ids=["level", "chain", "node", "none"]
)
def test_case_5_small_trees_export_or_are_refused_with_a_reason(name, tree, tmp_path):
    engine = engine_named(name)
    settings = engine.settings_of(NEEDED.get(name, {}))
    fitted, reason = fitted_or_reason(engine, tree, settings)
    if fitted is None:
        assert re.search(r"nothing is drafted|depth starts at 2", reason), reason
        return
    write_engine_file(engine, fitted, settings, tmp_path / "file")
    if engine.read is not None:
        assert read_engine_file(engine, tmp_path / "file") == fitted
    if tree == dense_tree([4]) and engine.holds == "tree":
        assert READERS[name]((tmp_path / "file").read_text(), settings) == {
            (): (0, {()}), **{(rank,): (1, {(), (rank,)}) for rank in range(4)}
        }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("medusa", "{}", r"holds dict, not a list of paths"),
        ("medusa", "[[0], [0]]", r"node `\(0\)` is given twice"),
        ("medusa", "[[0], 1]", r"`path 1` is 1; give a list of whole numbers"),
        ("medusa", "[[true]]", r"`path 0` is \[True\]"),
        ("medusa", "[[0.5]]", r"give a list of whole numbers"),
        ("medusa", "[[-1]]", r"negative rank"),
        ("medusa", "[[]]", r"`\(\)` is the root"),
        ("medusa", "[[NaN]]", r"`NaN` is no JSON number"),
        ("medusa", "", r"not JSON"),
        ("medusa", "[[0], (0, 0)]", r"`path 1` is a tuple where path 0 is a list, and the two cannot be sorted; write all as lists"),
        ("hydra", "[(0,), [1]]", r"`path 1` is a list where path 0 is a tuple"),
        ("trtllm", "[[-1, 0]]", r"negative rank"),
        ("trtllm", "[[]]", r"is the root"),
        ("trtllm", "options: 1", r"0 lines of medusa_choices or eagle_choices"),
        ("trtllm-triton", "[[0]]", r"JSON is not read there; write \{0\}, \{0, 0\}"),
        ("trtllm-triton", "{0}, {}", r"is the root"),
        ("trtllm-buffers", "{}", r"exactly the keys topKs"),
        ("trtllm-buffers", '{"topKs":[1],"positionOffsets":[0,1],"treeIds":[0],"paths":[[0,1]],"packedMask":[[1],[1]]}', r"`packedMask`|sees"),
        ("trtllm-buffers", '{"topKs":[1],"positionOffsets":[0,2],"treeIds":[0],"paths":[[0,1]],"packedMask":[[1],[3]]}', r"position offset 2, but `topKs` has 1"),
        ("trtllm-buffers", '{"topKs":[2],"positionOffsets":[0,1],"treeIds":[0],"paths":[[0,1]],"packedMask":[[1],[3]]}', r"`topKs` contradicts"),
        ("trtllm-buffers", '{"topKs":[1],"positionOffsets":[0,1],"treeIds":[0,1],"paths":[[0,1]],"packedMask":[[1],[3]]}', r"`treeIds` has 2 numbers for 2 nodes"),
        ("vllm", "(0,", r"no Python list of tuples"),
        ("vllm", "__import__('os')", r"no Python list of tuples"),
        ("vllm", "{}", r"`speculative_token_tree` is missing"),
        ("nxdi-token-tree", "[]", r"holds list, not an object"),
        ("nxdi-token-tree", '{"0": ["2"], "2": ["1"]}', r"node `0` has the child 2, and level by level 1 is next"),
        ("nxdi-token-tree", '{"0": ["1"], "7": ["2"]}', r"node `7` is the last, but fewer have a parent"),
        ("nxdi-token-tree", '{"0": [1]}', r"node `1` is no node number"),
        ("nxdi-token-tree", '{"0": "1"}', r"has the children '1'"),
        ("sequoia", "{}", r"exactly the keys roots"),
        ("umbrella", '{"roots":[[0]],"branches":[[0]],"Successors":[[]],"mask":[[0]],"depth":[0],"size":1}', r"`mask` contradicts `Successors`"),
        ("sequoia", '{"roots":[[0]],"branches":[[0]],"Successors":1,"mask":[[0]],"depth":[0],"size":1}', r"`Successors` is 1"),
        ("sam", "{}", r"the key tree_adj or tree_choices"),
        ("sam", '{"tree_adj": {"0": [1]}}', r"node `1` is a child without an entry of its own"),
        ("sam", '{"tree_adj": {"0": [1], "2": []}}', r"must have every node as a key"),
        ("genie", '{"dialog": {"type": "eaglet"}}', r"`ssd-q1` is missing; only a dialog of type ssd-q1 determines a tree"),
        ("genie", '{"dialog": {"ssd-q1": {"branches": [999, 999, 999]}}}', r"more than 65536 nodes"),
        ("genie", '{"dialog": {"ssd-q1": {"branches": [2, 0]}}}', r"has width 0"),
        ("flashinfer", "{}", r"exactly the keys qo_len"),
        ("flashinfer", '{"qo_len":2,"kv_len":2,"prefix_len":0,"custom_mask":[1,0,0,1],"packed_custom_mask":[9]}', r"no tree's|roots"),
        ("flashinfer", '{"qo_len":1,"kv_len":2,"prefix_len":1,"custom_mask":[0,1],"packed_custom_mask":[2]}', r"hides a part of the prefix"),
        ("flashinfer", '{"qo_len":1,"kv_len":1,"prefix_len":0,"custom_mask":[1],"packed_custom_mask":[3]}', r"contradicts `custom_mask`"),
        ("flashinfer", '{"qo_len":2,"kv_len":1,"prefix_len":0,"custom_mask":[1],"packed_custom_mask":[1]}', r"make them agree"),
        ("xformers", "[[0], 3]", r"`path 1` is 3"),
        ("chain", "--speculate 0", r"`0` guessed tokens are no chain"),
        ("chain", "{}", r"`num_speculative_tokens` is missing"),
        ("chain", "true", r"`num_speculative_tokens` is missing"),
    ],
)  # fmt: skip
def test_broken_files_are_refused_in_one_line(name, text, message, tmp_path):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises((EngineError, TreeError), match=message) as caught:
        read_engine_file(engine_named(name), path)
    assert str(caught.value).startswith(f"`{path}`: ")
    assert "\n" not in str(caught.value)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.just(10**400), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3), st.lists(st.integers(-2, 5), max_size=4), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in TREE_FORMS if name not in ("trtllm-triton", "xformers")])
@given(trees(max_nodes=8, max_rank=2), st.data())
def test_damaged_json_is_read_as_a_tree_or_refused_on_purpose(name, tree, data):
    engine = engine_named(name)
    settings = engine.settings_of(NEEDED.get(name, {}))
    fitted, _ = fitted_or_reason(engine, tree, settings, repair=True)
    document = {"it": json.loads(engine.write(fitted or chain(2), settings))}
    spot, key = document, "it"
    while isinstance(spot[key], (dict, list)) and len(spot[key]) and data.draw(st.booleans()):
        spot = spot[key]
        key = data.draw(st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot))))
    spot[key] = data.draw(JUNK)
    read_or_refused(engine, json.dumps(document["it"]))


@pytest.mark.parametrize("name", TREE_FORMS)
@given(trees(max_nodes=6, max_rank=2), st.integers(0, 10**6), st.text('[](){},:0129-" \n_é', max_size=4))
def test_damaged_text_is_read_as_a_tree_or_refused_on_purpose(name, tree, place, inserted):
    engine = engine_named(name)
    settings = engine.settings_of(NEEDED.get(name, {}))
    fitted, _ = fitted_or_reason(engine, tree, settings, repair=True)
    text = engine.write(fitted or chain(2), settings)
    place %= len(text)
    read_or_refused(engine, text[:place] + inserted + text[place + len(inserted) :])


def read_or_refused(engine, text):
    try:
        assert engine.read(text).num_nodes >= 1
    except (EngineError, TreeError) as error:
        refused = str(error)
        assert "\n" not in refused.strip()


def test_files_that_cannot_be_read_and_forms_that_hold_no_tree_are_refused(tmp_path):
    with pytest.raises(EngineError, match=r"none` cannot be read: No such file .*; give a file of Medusa"):
        read_engine_file(engine_named("medusa"), tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe[")
    with pytest.raises(EngineError, match=r"is not UTF-8 text"):
        read_engine_file(engine_named("medusa"), tmp_path / "bytes")
    with (tmp_path / "large").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(EngineError, match=r"at most 67108864 are read"):
        read_engine_file(engine_named("medusa"), tmp_path / "large")
    with pytest.raises(EngineError, match=r"`sglang` files hold command line options, which determines no tree"):
        read_engine_file(engine_named("sglang"), tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("flashinfer", {}, r"`flashinfer` needs prefix_len: tokens before the tree; give --set prefix_len=VALUE"),
        ("flashinfer", {"prefix_len": "-1"}, r"`prefix_len` is '-1'; give a whole number from 0 on"),
        ("medusa", {"heads": "0"}, r"`heads` is '0'; give a whole number from 1 on"),
        ("medusa", {"tails": "1"}, r"`tails` is no setting of medusa; it has heads"),
        ("sglang", {"heads": "1"}, r"`heads` is no setting of sglang; it has none"),
        ("trtllm", {"form": "xml"}, r"`form` is 'xml'; give one of list, yaml"),
    ],
)
def test_settings_are_checked(name, given, message):
    with pytest.raises(EngineError, match=message):
        engine_named(name).settings_of(given)


def test_an_unknown_engine_is_answered_with_those_there_are():
    with pytest.raises(EngineError, match=r"`medsua` is no engine; give one of chain, eagle1, .*xformers"):
        engine_named("medsua")


def test_versions_take_in_their_last_number_and_nothing_after():
    versions = Versions("0.10.1 to 0.20", (0, 10, 1), (0, 20))
    for inside in ("0.10.1", "0.11", "0.20", "0.20.3", "v0.15.0rc1"):
        versions.check("vllm", inside)
    for outside in ("0.10", "0.9.2", "0.21", "1.0"):
        with pytest.raises(EngineError, match=rf"`vllm` {outside} reads no such file; versions: 0.10.1 to 0.20"):
            versions.check("vllm", outside)
    with pytest.raises(EngineError, match=r"`new` is no version of vllm"):
        versions.check("vllm", "new")
    Versions().check("medusa", "1.0")


def test_a_heap_drops_what_looking_at_every_free_node_again_would_drop():
    rng = np.random.default_rng(11)
    engine = engine_named("trtllm")
    for _ in range(100):
        tree = random_tree(rng)
        probabilities = {path: float(rng.integers(5)) / 4 for path in tree.paths}
        dense = fit(engine, tree, {}, repair=True, probabilities=probabilities).tree if tree.num_nodes > 1 else chain(1)
        most = int(rng.integers(1, dense.num_nodes))
        held = set(dense.paths[1:])
        while len(held) > most:
            free = [
                path
                for path in held
                if not any(other[:-1] == path for other in held) and not (len(path) == 1 and (path[0] + 1,) in held)
            ]
            held.remove(min(free, key=lambda p: (probabilities.get(p, 0.0), -len(p), [-rank for rank in p])))
        fitted = fit(engine, dense, {"max_draft_len": most}, repair=True, probabilities=probabilities)
        assert set(fitted.tree.paths[1:]) == held


@pytest.mark.parametrize("name", ["sequoia", "nxdi-token-tree"])
def test_a_rank_of_a_billion_is_refused_without_adding_a_billion_siblings(name):
    tree = DraftTree.from_paths([(0,), (10**9,)])
    for repair in (False, True):
        with pytest.raises(EngineError, match=r"node `\(1000000000\)` lacks its left sibling"):
            fit(engine_named(name), tree, {}, repair=repair)


def test_trees_of_thousands_of_nodes_are_mended_in_a_moment():
    rng = np.random.default_rng(0)
    held = {()}
    for path in dense_tree([8, 8, 8, 8]).paths[1:]:
        if path[:-1] in held and rng.random() < 0.95:
            held.add(path)
    tree = DraftTree.from_paths(held - {()})
    assert tree.num_nodes > 3000
    for name in NAMES:
        given = {"prefix_len": "1"} if name == "flashinfer" else {}
        given |= {"max_draft_len": "63"} if name.startswith("trtllm") and name != "trtllm-dynamic" else {}
        engine = engine_named(name)
        settings = engine.settings_of(given)
        start = time.perf_counter()
        fitted = fit(engine, tree, settings, repair=True)
        assert broken(engine, fitted.tree, settings) is None
        assert time.perf_counter() - start < 5.0, name


def test_a_shape_never_promises_more_nodes_than_its_beam_has():
    tree = dense_tree([2, 2, 2, 2])  # 30 nodes; two guesses of two nodes a level are 2 + 3 · 4
    assert json.loads(exported("eagle2", tree)) == {"total_token": 15, "depth": 3, "top_k": 2}
    assert json.loads(exported("openvino", tree))["num_assistant_tokens"] == 14
    assert "--speculative-num-draft-tokens 15" in exported("sglang", tree)
    trtllm = json.loads(exported("trtllm-dynamic", tree))
    assert trtllm["max_total_draft_tokens"] == 30
    assert trtllm["max_draft_len"] * trtllm["dynamic_tree_max_topK"] >= 30
    (first, second) = engine_named("eagle2").notes(tree, {})
    assert "E[L] is not that of its trees" in first
    assert second.startswith("16 nodes more than")


def test_importing_the_engines_imports_no_torch():
    from tests.test_imports import imported

    assert imported("from treeopt.engines import engines; engines()") == "[]"
