"""treeopt check, the JSON Schema, and the page for authors of decoders."""

import copy
import json
import re
from importlib import resources
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import ancestors, greedy_walk
from tests.strategies import rates, trees
from treeopt import DraftTree, RankTrace, best_tree, chain, read_tree, write_tree
from treeopt.bundled import calibration_path
from treeopt.checking import check_file
from treeopt.document import MAX_BYTES, from_json, to_bytes
from treeopt.errors import DocumentError, TreeoptError
from treeopt.optimize.from_trace import Aim, tree_from_trace
from treeopt.optimize.limits import Limits
from treeopt.optimize.priced import unpriced

TREES = Path(__file__).parents[1] / "trees"
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf8")
PAGE = README.split("## Writing a decoder")[1].split("\n## ")[0]
SCHEMA = json.loads(resources.files("treeopt").joinpath("tree.schema.json").read_text(encoding="utf8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@pytest.fixture
def document():
    return json.loads(to_bytes(best_tree([[0.6, 0.2], [0.5, 0.1]], num_nodes=5, max_rank=1, provenance={"a": "b"})))


def defects(tmp_path, data):
    path = tmp_path / "file.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return list(check_file(path).defects)


def written(tree):
    """The document of a tree without known probabilities."""
    return json.loads(to_bytes(unpriced(tree)))


@pytest.mark.parametrize("path", sorted(TREES.glob("*.json")), ids=lambda path: path.stem)
def test_the_bundled_trees_are_sound_and_obey_the_schema(path):
    assert check_file(path).defects == ()
    VALIDATOR.validate(json.loads(path.read_text()))


LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "max_depth": st.integers(0, 3), "max_rank": st.integers(0, 2), "rank_caps": st.lists(st.integers(0, 2), max_size=3),
        "max_children": st.integers(0, 3), "dense_siblings": st.booleans(), "max_leaves": st.integers(1, 5),
    },
)  # fmt: skip


@given(rates(), st.integers(1, 30), LIMITS)
def test_what_is_written_is_sound_and_obeys_the_schema(tmp_path_factory, rows, num_nodes, limits):
    data = to_bytes(best_tree(rows, num_nodes, **limits)).decode()
    assert defects(tmp_path_factory.mktemp("written"), data) == []
    VALIDATOR.validate(json.loads(data))


@given(trees())
def test_an_imported_tree_is_sound_and_obeys_the_schema(tmp_path_factory, tree):
    data = to_bytes(unpriced(tree)).decode()
    assert defects(tmp_path_factory.mktemp("imported"), data) == []
    VALIDATOR.validate(json.loads(data))


@pytest.mark.parametrize("objective", ["robust", "typical", "mixture"])
def test_certificates_of_every_objective_are_sound_and_obey_the_schema(tmp_path, objective):
    weights = {"coding": 1.0, "math": 2.0} if objective == "mixture" else None
    trace = RankTrace.read(calibration_path("traces/demo.safetensors"))
    write_tree(tree_from_trace(trace, Limits(8), Aim(objective=objective, weights=weights)), tmp_path / "tree.json")
    assert check_file(tmp_path / "tree.json").defects == ()
    VALIDATOR.validate(json.loads((tmp_path / "tree.json").read_text()))


def test_a_large_tree_without_a_dense_mask_is_sound_and_obeys_the_schema(tmp_path):
    write_tree(best_tree(np.full((4, 8), 1 / 8), num_nodes=600), tmp_path / "tree.json")
    assert check_file(tmp_path / "tree.json").defects == ()
    VALIDATOR.validate(json.loads((tmp_path / "tree.json").read_text()))


def at(document, *keys):
    for key in keys:
        document = document[key]
    return document


def put(*keys, value):
    return lambda document: at(document, *keys[:-1]).__setitem__(keys[-1], value)


SCHEMA_BREAKERS = {
    "schema": put("schema", value="treeopt.tree/2"),
    "unknown key": put("surprise", value=1),
    "missing key": lambda document: document.pop("parents"),
    "no root path": put("paths", 0, value=[0]),
    "second root": put("paths", 1, value=[]),
    "negative rank": put("paths", 1, value=[-1]),
    "rank that is no number": put("paths", 1, value=["0"]),
    "parent of the root": put("parents", 0, value=0),
    "negative parent": put("parents", 1, value=-1),
    "mask entry": put("attention_mask", 1, 0, value=2),
    "mask word": put("packed_mask", 1, 0, value="0x03"),
    "filler": put("retrieve", 0, 1, value=-2),
    "negative probability": put("path_probabilities", 1, value=-0.1),
    "probability above 1": put("path_probabilities", 1, value=1.5),
    "probability of the root": put("path_probabilities", 0, value=0.5),
    "repeated node": put("added", 2, value=1),
    "constraint": put("constraints", "max_depth", value=-1),
    "unknown constraint": put("constraints", "min_depth", value=1),
    "missing claim": lambda document: document["certificate"].pop("nested"),
    "objective": put("certificate", "objective", value="speed"),
    "interval": put("certificate", "expected_accepted_interval", value=[0.1]),
    "provenance": put("provenance", "a", value=1),
}


@pytest.mark.parametrize("breaker", SCHEMA_BREAKERS.values(), ids=SCHEMA_BREAKERS)
def test_broken_documents_break_the_schema_and_the_check(tmp_path, document, breaker):
    VALIDATOR.validate(document)
    breaker(document)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(document)
    assert defects(tmp_path, document)


def test_the_schema_is_valid_and_names_the_keys_in_the_files_order(document):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert list(SCHEMA["properties"]) == SCHEMA["required"] == list(document)
    for name in ("constraints", "certificate"):
        part = SCHEMA["properties"][name]
        assert list(part["properties"]) == part["required"] == list(document[name])


DEFECTS = {
    "schema": (put("schema", value="treeopt.tree/2"), r"`schema` is 'treeopt\.tree/2', not 'treeopt\.tree/1'"),
    "unknown key": (put("surprise", value=1), r"`surprise` is not a key of treeopt\.tree/1; delete it"),
    "missing key": (lambda document: document.pop("curve"), r"`curve` is missing"),
    "nodes": (put("num_nodes", value=6), r"`num_nodes` is 6, but `paths` make it 5"),
    "depth": (put("max_depth", value=1.0), r"`max_depth` is 1\.0, but `paths` make it 2"),
    "paths": (put("paths", value=7), r"`paths` is 7; give a list"),
    "entry": (put("paths", 1, value=3), r"`paths\[1\]` is 3; give a list of ranks"),
    "rank": (put("paths", 2, value=[True]), r"`paths\[2\]` holds True; ranks are whole numbers"),
    "parent": (put("parents", 3, value=2), r"`parents\[3\]`, of node `\(0,0\)`, is 2, but its path makes it 1"),
    "late parent": (put("parents", 1, value=3), r"`parents\[1\]`, of node `\(0\)`, is 3: a parent comes before its children"),
    "parents": (put("parents", value=[-1]), r"`parents` must hold 5 whole numbers"),
    "depths": (put("depths", 4, value=1), r"`depths\[4\]`, of node `\(1,0\)`, is 1, but its path makes it 2"),
    "ranks": (put("ranks", 2, value="1"), r"`ranks\[2\]`, of node `\(1\)`, is '1'; give a whole number"),
    "position": (put("position_ids", 2, value=2), r"`position_ids\[2\]`, of node `\(1\)`, is 2, but its path makes it 1"),
    "mask shows": (put("attention_mask", 3, 2, value=1), r"`attention_mask\[3\]`, of node `\(0,0\)`, shows 2, against its path"),
    "mask hides": (put("attention_mask", 3, 1, value=0), r"`attention_mask\[3\]`, of node `\(0,0\)`, hides 1, against its path"),
    "mask entry": (put("attention_mask", 3, 1, value=True), r"`attention_mask\[3\]` must hold 5 numbers, each 0 or 1"),
    "mask rows": (put("attention_mask", value=[]), r"`attention_mask` must have 5 rows"),
    "no mask": (put("attention_mask", value=None), r"`attention_mask` is null, which is for more than 512 nodes"),
    "word": (put("packed_mask", 3, 0, value="000000000000000f"), r"`packed_mask\[3\]`, of node `\(0,0\)`, shows 2, against its path"),
    "beyond": (put("packed_mask", 3, 0, value="800000000000000b"), r"`packed_mask\[3\]`, of node `\(0,0\)`, shows 63, against its path"),
    "digits": (put("packed_mask", 3, 0, value="B"), r"`packed_mask\[3\]` must hold 1 words of 16 lower-case hex digits"),
    "row": (put("retrieve", 0, 1, value=2), r"`retrieve\[0\]` is \[0, 2, 3\], but the path to that leaf makes it \[0, 1, 3\]"),
    "valid": (put("retrieve_valid", 1, value=[1, 1, 0]), r"`retrieve_valid\[1\]` is \[1, 1, 0\]"),
    "leaves": (put("retrieve", value=[]), r"`retrieve` must have 2 rows, one a leaf"),
    "negative": (put("path_probabilities", 3, value=-0.5), r"`path_probabilities\[3\]`, of node `\(0,0\)`, is -0\.5; probabilities lie in"),
    "over one": (put("path_probabilities", 1, value=1.5), r"`path_probabilities\[1\]`, of node `\(0\)`, is 1\.5; probabilities lie in"),
    "text": (put("path_probabilities", 1, value="high"), r"is 'high'; give a number"),
    "huge": (put("path_probabilities", 1, value=10**400), r"`path_probabilities\[1\]`, of node `\(0\)`, is 1000+; give a number"),
    "root": (put("path_probabilities", 0, value=0.5), r"`path_probabilities\[0\]`, of node `\(\)`, is 0\.5; the root's is 1"),
    "rising": (put("path_probabilities", 3, value=0.7), r"is 0\.7, likelier than its parent with 0\.6; probabilities fall along a path"),
    "few": (put("path_probabilities", value=[1.0]), r"`path_probabilities` must hold 5 numbers"),
    "order": (put("added", value=[0, 2, 1, 3, 4]), r"`added` must name each node once, the root first, then by falling probability"),
    "curve": (put("curve", 2, value=0.1), r"`curve` does not follow"),
    "value": (put("expected_accepted", value=2.0), r"`expected_accepted` is 2\.0, but `path_probabilities` make it 1\.2"),
    "rate": (put("tokens_per_step", value=1.0), r"`tokens_per_step` is 1\.0, but `path_probabilities` make it 2\.2"),
    "limit": (put("constraints", "max_depth", value=1), r"in `constraints`, `max_depth` is 1, but the tree has depth 2"),
    "huge limit": (put("constraints", "num_nodes", value=10**400), r"in `constraints`, `num_nodes` is 1000+; give a whole number"),
    "nested node": (put("constraints", "must_include", value=[[[0]]]), r"must_include names \[\[0\]\], which is no node of the tree"),
    "huge rank": (put("paths", 4, value=[0, 10**400]), r"a node at depth `2` has a rank of 1329 bits; ranks end at"),
    "no limit": (put("constraints", "max_rank", value="1"), r"in `constraints`, `max_rank` is '1'; give a whole number"),
    "no node": (put("constraints", "must_include", value=[[5]]), r"must_include names \[5\], which is no node of the tree"),
    "no paths": (put("constraints", "must_include", value=5), r"must_include is 5; give a list of paths"),
    "unknown limit": (put("constraints", "min_depth", value=1), r"`constraints\.min_depth` is not a key"),
    "claims": (put("certificate", value=[]), r"`certificate` is \[\]; give an object"),
    "claim": (lambda document: document["certificate"].pop("nested"), r"`certificate\.nested` is missing"),
    "objective": (put("certificate", "objective", value="speed"), r"`certificate\.objective` is 'speed'; give one of"),
    "flag": (put("certificate", "optimal", value=1), r"`certificate\.optimal` is 1; give true or false"),
    "bound": (put("certificate", "upper_bound", value=0.5), r"`certificate\.upper_bound` is 0\.5, below the value 1\.2"),
    "optimal": (put("certificate", "upper_bound", value=2.0), r"`certificate\.optimal` is true, but the bound 2\.0 is above"),
    "sum": (put("certificate", "value", value=1.0), r"`certificate\.value` is 1\.0, but `expected_accepted` is 1\.2"),
    "last": (put("certificate", "last_included", value=0.5), r"`certificate\.last_included` is 0\.5, but the smallest probability is 0\.1"),
    "cost": (put("certificate", "constraint_costs", "max_rank", value="no"), r"`certificate\.constraint_costs\.max_rank` is 'no'"),
    "interval": (put("certificate", "expected_accepted_interval", value=[2, 1]), r"expected_accepted_interval` is \[2, 1\]; give null or two"),
    "noise": (put("certificate", "nodes_within_noise", value=1), r"`certificate\.nodes_within_noise` stands without"),
    "provenance": (put("provenance", "a", value=1), r"`provenance\.a` is 1; give text"),
    "no provenance": (put("provenance", value=1), r"`provenance` is 1; give an object"),
}  # fmt: skip


@pytest.mark.parametrize(("breaker", "message"), DEFECTS.values(), ids=DEFECTS)
def test_each_defect_has_its_line(tmp_path, document, breaker, message):
    breaker(document)
    found = defects(tmp_path, document)
    assert any(re.search(message, line) for line in found), found
    with pytest.raises(TreeoptError):
        read_tree(tmp_path / "file.json")


def test_every_defect_of_a_file_is_named_not_only_the_first(tmp_path, document):
    independent = [
        "parent",
        "depths",
        "position",
        "mask shows",
        "word",
        "row",
        "negative",
        "limit",
        "objective",
        "provenance",
        "unknown key",
    ]
    for name in independent:
        DEFECTS[name][0](document)
    text = json.dumps(document).replace('"num_nodes": 5', '"num_nodes": 5, "num_nodes": 5', 1)
    found = defects(tmp_path, text.replace("0.2", "NaN", 1))
    for name in independent:
        assert sum(bool(re.search(DEFECTS[name][1], line)) for line in found) == 1, (name, found)
    assert "`num_nodes` is given twice; delete one of the two" in found
    assert [line for line in found if "NaN" in line] == [
        "`path_probabilities[2]` is NaN, no JSON number; every value is finite"
    ]


@pytest.mark.parametrize(
    ("paths", "lines"),
    [
        ([(0,), (1, 0)], ["node `(1,0)` has no parent; add `(1)` or delete the node"]),
        ([(0,), (0, 0, 0)], ["node `(0,0,0)` has no parent; add `(0,0)` or delete the node"]),
        ([(0,), (0,), (1, 1), (2, 2)], [
            "node `(0)` is given twice; delete one of the two",
            "node `(1,1)` has no parent; add `(1)` or delete the node",
            "node `(2,2)` has no parent; add `(2)` or delete the node",
        ]),
        ([(0, 0), (0,), (-1,)], ["node `(-1)` has a negative rank; ranks start at 0"]),
    ],
)  # fmt: skip
def test_case_4_holes_duplicates_and_negative_ranks_in_lists_and_tree_files(tmp_path, document, paths, lines):
    assert defects(tmp_path, [list(path) for path in paths]) == lines
    document["paths"] = [[], *map(list, paths)]
    found = defects(tmp_path, document)
    assert set(lines) <= set(found)
    if paths[0] == (0, 0):
        assert "node `(0)` stands behind `(0,0)`; sort nodes by depth, then path" in found


def test_case_4_parents_after_children_are_named_where_paths_are_of_no_use(tmp_path, document):
    document["parents"] = [-1, 2, 1, 1, 2]
    assert any(
        "`parents[1]`, of node `(0)`, is 2: a parent comes before" in line for line in defects(tmp_path, document)
    )
    document["paths"] = [[], [0], [0], [0, 0], [1, 0]]
    found = defects(tmp_path, document)
    assert "`parents[1]` is 2: a parent comes before its children; sort nodes by depth, then path" in found
    assert "node `(0)` is given twice; delete one of the two" in found


def test_case_4_accuracies_that_are_none(tmp_path):
    found = defects(tmp_path, "[[0.5, NaN, -0.1], [1.5, Infinity, 0.1]]")
    assert found == [
        "head `0` has NaN at rank 1; every value is finite",
        "head `0` has rate -0.1 at rank 2; accuracies lie in [0, 1]",
        "head `1` has rate 1.5 at rank 0; accuracies lie in [0, 1]",
        "head `1` has Infinity at rank 1; every value is finite",
    ]
    assert defects(tmp_path, '{"schema": "treeopt.acceptance/1", "rates": [["a", 0.5]]}') == [
        "head `0` has 'a' at rank 0; give a number"
    ]
    (cumulative,) = defects(tmp_path, "[[0.6, 0.7, 0.75]]")
    assert "cumulative top-k" in cumulative


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"schema": ', "the file is not JSON: Expecting value at line 1, column 12; mend it or make it again"),
        ("[" * 100_000, "the file is nested too deeply; mend it or make it again"),
        ('{"a": %s}' % ("9" * 5000), "Exceeds the limit"),
        ('{"schema": "other"}', "`schema` is 'other'; an acceptance table has schema"),
        ('{"schema": "treeopt.tree/1"}', "`num_nodes` is missing"),
    ],
)  # fmt: skip
def test_careless_json_is_a_defect(tmp_path, text, line):
    assert any(line in found for found in defects(tmp_path, text))


def test_an_oversize_file_is_a_defect_that_costs_no_reading(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.write(b"{")
        file.truncate(MAX_BYTES + 1)
    assert check_file(tmp_path / "large").defects == (
        f"the file has {MAX_BYTES + 1} bytes; a reader takes at most {MAX_BYTES}: build fewer nodes",
    )


def test_traces_are_checked_by_their_reader(tmp_path):
    RankTrace([[0, 1], [0, -1]], [0, 2]).write(tmp_path / "trace")
    assert check_file(tmp_path / "trace").summary == "a trace of 1 documents, 2 positions, 2 heads"
    (tmp_path / "trace").write_bytes(b"\x00" * 9)
    (line,) = check_file(tmp_path / "trace").defects
    assert "trace" in line
    with pytest.raises(DocumentError, match="cannot be read"):
        check_file(tmp_path / "none")


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.just(10**400), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3), st.lists(st.integers(-2, 5), max_size=5), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=600)
@given(trees(max_nodes=8), st.data())
def test_a_file_has_defects_exactly_when_a_reader_refuses_it(tmp_path_factory, tree, data):
    document = written(tree)
    for _ in range(data.draw(st.integers(1, 3))):
        spot, key = document, data.draw(st.sampled_from(sorted(document)))
        while isinstance(spot[key], (dict, list)) and len(spot[key]) and data.draw(st.booleans()):
            spot = spot[key]
            key = data.draw(st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot))))
        spot[key] = data.draw(st.one_of(JUNK, st.just(copy.deepcopy(spot[key]))))
    found = defects(tmp_path_factory.mktemp("junk"), document)
    try:
        from_json(json.loads(json.dumps(document)))
    except (TreeoptError, OverflowError):
        assert found
    else:
        assert found == []


def test_the_command_prints_a_line_a_defect_and_exits_with_1(run, table):
    run("build", table, "--nodes", 5)
    result = run("check", "tree.json")
    assert (result.exit_code, result.stdout) == (
        0,
        "tree.json is sound: a tree of 5 nodes (root included), depth 2, E[L] 1.0000\n",
    )
    document = json.loads(Path("tree.json").read_text())
    document["depths"][1] = 7
    document["provenance"]["a"] = 1
    Path("tree.json").write_text(json.dumps(document))
    result = run("check", "tree.json")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "`depths[1]`, of node `(0)`, is 7, but its path makes it 1; write the file again",
        "`provenance.a` is 1; give text",
    ]
    result = run("check", "none.json")
    assert result.exit_code == 1
    assert (
        result.stderr
        == "Error: `none.json` cannot be read: No such file or directory; give a tree, a table or a trace\n"
    )


def consumer():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names = {}
    exec(code, names)
    return names, code


def test_the_consumer_of_the_page_is_twenty_lines_of_numpy():
    _, code = consumer()
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith("import")]
    assert len(lines) <= 20
    assert set(re.findall(r"^import (\w+)", code, re.M)) == {"json", "numpy"}


@given(trees(), st.integers(0, 2**32 - 1))
def test_the_consumer_of_the_page_reads_and_accepts_as_the_references_do(tmp_path_factory, tree, seed):
    names, _ = consumer()
    path = tmp_path_factory.mktemp("consumer") / "tree.json"
    write_tree(unpriced(tree), path)
    read = names["read"](path)
    assert [set(np.flatnonzero(row)) for row in read["mask"]] == [set(row) for row in ancestors(tree.paths)]
    rng = np.random.default_rng(seed)
    guesses = np.argsort(rng.random((tree.max_depth, 7)), axis=1)  # each head's guesses differ
    tokens = names["tokens_of"](read, 3, guesses)
    assert tokens.tolist() == [3, *(guesses[len(path) - 1][path[-1]] for path in tree.paths[1:])]
    said = rng.integers(0, 7, tree.num_nodes)
    _, accepted, following = greedy_walk(tree, tokens, said)
    rows, emitted = names["accept"](read, tokens, said)
    assert rows.tolist() == [0, *accepted]
    assert emitted == [*(int(tokens[one]) for one in accepted), int(following)]


def test_the_consumer_of_the_page_refuses_another_schema_and_takes_a_root_alone(tmp_path):
    names, _ = consumer()
    write_tree(unpriced(chain(0)), tmp_path / "tree.json")
    read = names["read"](tmp_path / "tree.json")
    tokens = names["tokens_of"](read, 5, np.zeros((0, 0), dtype=int))
    rows, emitted = names["accept"](read, tokens, np.array([8]))
    assert (rows.tolist(), emitted) == ([0], [8])
    (tmp_path / "tree.json").write_text('{"schema": "treeopt.tree/2"}')
    with pytest.raises(ValueError, match="another schema"):
        names["read"](tmp_path / "tree.json")


def test_any_first_nodes_of_added_are_a_tree_as_the_page_says():
    built = best_tree([[0.4, 0.3, 0.3], [0.5, 0.25, 0.25]], 13)
    for count in range(1, 14):
        assert DraftTree.from_paths([built.tree.paths[node] for node in built.added[1:count]]).num_nodes == count
