"""treeopt export, import and build --for."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from treeopt import RankTrace, best_tree, dense_tree, read_tree, write_tree
from treeopt.bundled import calibration_path
from treeopt.engines import broken, engine_named, engines, fit
from treeopt.optimize import Limits, best_tree_under
from treeopt.optimize.priced import states_probabilities

DATA = Path(__file__).parent / "data"
NAMES = sorted(engines())
PUBLISHED = {
    f"{source} {name}": paths
    for source, found in json.loads((DATA / "published_static_trees.json").read_text()).items()
    if isinstance(found, dict)
    for name, paths in found["trees"].items()
}


@pytest.fixture
def folder(run, table, tmp_path):
    """A folder with a tree, a list of choices and a trace, under the names that the help texts use."""
    (tmp_path / "choices.json").write_text("[[0], [1], [0, 0]]")
    ranks = np.random.default_rng(0).integers(0, 3, (40, 2))
    RankTrace(ranks, [0, 20, 40]).write(tmp_path / "trace.safetensors")
    assert run("build", table, "--nodes", 5, "-o", "tree.json").exit_code == 0
    return tmp_path


def test_the_list_names_versions_limits_and_whether_the_root_counts(run):
    text = run("export", "--list").stdout
    assert [line.partition(":")[0] for line in text.splitlines() if not line.startswith(" ")] == NAMES
    block = dict(zip(NAMES, re.split(r"(?m)^(?=\S)", text)[1:]))
    assert "versions  0.10.1 to 0.20; removed by PR #42121, May 2026" in block["vllm"]
    assert (
        "limits    a node beside the root; equally many children, ranks 0, 1, …, of all nodes of a level"
        in block["vllm"]
    )
    assert "root      not counted" in block["vllm"]
    assert "root      counted" in block["sequoia"]
    assert "import    no: the engine grows its own trees" in block["sglang"]
    assert "import    yes: the chain of that length" in block["chain"]
    assert "import    yes: siblings ranked in their order" in block["flashinfer"]


def test_the_list_as_json_says_the_same(run):
    rows = {row["engine"]: row for row in json.loads(run("export", "--list", "--json").stdout)}
    assert sorted(rows) == NAMES
    assert rows["medusa"] == {
        "engine": "medusa", "reader": "Medusa, medusa_choices", "form": "a JSON list of paths", "versions": "all",
        "limits": ["a node beside the root", "ranks to 9", "depth to heads, if given"], "counts_root": False, "holds": "tree", "imports": True,
        "settings": {"heads": "heads that the model has"}, "required": [],
    }  # fmt: skip
    assert rows["flashinfer"]["required"] == ["prefix_len"]
    assert {name for name, row in rows.items() if not row["imports"]} == {
        "eagle2",
        "openvino",
        "sglang",
        "trtllm-dynamic",
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("published", sorted(PUBLISHED))
def test_published_lists_import_and_export_everywhere_or_are_refused_with_the_price_of_the_mend(
    run, tmp_path, published, name
):
    """As Medusa's own list, priced by accuracies under which it is the best tree, so that every mend has its price."""
    (tmp_path / "choices.json").write_text(json.dumps(PUBLISHED[published]))
    rates = [[0.5 * 0.6**rank for rank in range(10)]] * 5
    (tmp_path / "table.json").write_text(json.dumps([[rate / 2 for rate in row] for row in rates]))
    imported = run("import", "choices.json", "--from", "medusa", "--table", "table.json", "-o", "tree.json")
    assert imported.exit_code == 0, imported.output
    built = read_tree("tree.json")
    assert sorted(built.tree.paths[1:]) == sorted(map(tuple, PUBLISHED[published]))
    needed = ["--set", "prefix_len=7"] if name == "flashinfer" else []
    result = run("export", "tree.json", "--to", name, "-o", "file", *needed)
    engine = engine_named(name)
    settings = engine.settings_of(dict([needed[1].split("=")]) if needed else {})
    if result.exit_code == 0:
        assert engine.summarises or broken(engine, built.tree, settings) is None
        assert f"E[L] {built.expected_accepted:.4f}" in result.stdout
    else:
        (line,) = result.stderr.splitlines()
        assert re.search(
            rf"^Error: `{name}` cannot take the tree: .*`\([\d,]+\)`.*; build with --for {name}, or --repair, which .*"
            rf"nodes \(root included\) become \d+; E\[L\] {built.expected_accepted:.4f} becomes (at least )?\d\.\d{{4}}$",
            line,
        ), line
        assert not Path("file").exists()
        result = run("export", "tree.json", "--to", name, "--repair", "-o", "file", *needed)
        assert result.exit_code == 0, result.output
        assert line.partition("--repair, which ")[2] in result.stdout
    if engine.read is not None:
        back = run("import", "file", "--from", name, "-o", "back.json")
        assert back.exit_code == 0, back.output
        assert broken(engine, read_tree("back.json").tree, settings) is None


def test_the_published_lists_are_these():
    # What the accuracies of the test above are for: four of Medusa's, two of Hydra's, one of EAGLE-1's.
    assert sorted(PUBLISHED) == [
        "eagle1 mc_sim_7b_63", "hydra mc_sim_7b_63", "hydra single", "medusa mc_sim_7b_63", "medusa vicuna_7b_stage1",
        "medusa vicuna_7b_stage2", "medusa zephyr_stage2",
    ]  # fmt: skip


def test_case_7_an_uneven_level_is_refused_by_vllm_and_a_gap_by_tensorrt_llm(run, tmp_path):
    (tmp_path / "uneven.json").write_text("[[0], [1], [0, 0]]")
    (tmp_path / "gap.json").write_text("[[0], [2], [0, 0]]")
    result = run("export", "uneven.json", "--to", "vllm", "-o", "out")
    assert result.exit_code == 1
    assert re.search(
        r"^Error: `vllm` cannot take the tree: level 1 is uneven, node `\(0\)` having 1 children and `\(1\)` 0",
        result.stderr,
    )
    result = run("export", "gap.json", "--to", "trtllm", "-o", "out")
    assert result.exit_code == 1
    assert "node `(2)` lacks its left sibling: add `(1)`" in result.stderr
    result = run("export", "gap.json", "--to", "trtllm", "--repair", "-o", "out")
    assert result.exit_code == 0
    assert "repaired: adds 1 node, (1); 4 nodes (root included) become 5" in result.stdout
    assert json.loads(Path("out").read_text()) == [[0], [1], [2], [0, 0]]
    (tmp_path / "leaf.json").write_text("[[0, 0, 0, 0]]")
    assert run("import", "leaf.json", "--from", "trtllm", "-o", "leaf-tree.json").exit_code == 0
    assert read_tree("leaf-tree.json").tree.num_nodes == 4 + 1


def test_an_imported_tree_without_accuracies_calls_its_probabilities_unknown(run, folder):
    result = run("import", "choices.json", "--from", "medusa", "-o", "imported.json")
    assert "path probabilities and E[L] unknown" in result.stdout
    assert "E[L] 0" not in result.stdout
    built = read_tree("imported.json")
    assert not states_probabilities(built)
    assert built.provenance["engine"] == "medusa"
    assert (built.expected_accepted, built.certificate.bound, built.certificate.optimal) == (0.0, 3.0, False)
    assert "path probabilities and E[L] unknown" in run("show", "imported.json").stdout
    refused = run("export", "imported.json", "--to", "vllm", "-o", "out")
    assert "what that costs in E[L] is unknown, for the tree states no probabilities" in refused.stderr
    (folder / "latency.csv").write_text("nodes,seconds\n1,1.0\n64,2.0\n")
    assert run("explain", "imported.json", "--latency", "latency.csv").exit_code == 2


def test_a_trace_or_a_table_prices_an_imported_tree(run, folder, table):
    result = run("import", "choices.json", "--from", "medusa", "--table", "table.json", "-o", "imported.json")
    assert "expected_accepted E[L] 0.9000" in result.stdout  # .5 + .2 + .5 · .4
    best = best_tree([[0.5, 0.2, 0.1], [0.4, 0.1, 0.05]], 4)
    built = read_tree("imported.json")
    assert built.certificate.bound == pytest.approx(best.expected_accepted, abs=1e-12)
    assert built.certificate.optimal
    result = run("import", "choices.json", "--from", "medusa", "--trace", "trace.safetensors", "-o", "imported.json")
    assert result.exit_code == 0
    traced = RankTrace.read("trace.safetensors").table().rates
    built = read_tree("imported.json")
    expected = traced[0, 0] + traced[0, 1] + traced[0, 0] * traced[1, 0]
    assert built.expected_accepted == pytest.approx(expected, abs=1e-12)
    assert built.certificate.noise is not None
    assert built.provenance["priced_by"] == "trace"
    deep = run("import", "choices.json", "--from", "medusa", "--trace", "trace.safetensors", "--table", "table.json")
    assert deep.exit_code == 2


def test_a_tree_deeper_than_the_accuracies_cannot_be_priced(run, folder, table):
    (folder / "deep.json").write_text("[[0], [0, 0], [0, 0, 0]]")
    result = run("import", "deep.json", "--from", "medusa", "--table", "table.json")
    assert result.exit_code == 1
    assert "the tree has depth 3 but there are 2 heads" in result.stderr


def test_a_worse_tree_is_priced_below_the_best_of_its_size(run, folder, table):
    (folder / "worse.json").write_text("[[2], [2, 2]]")
    run("import", "worse.json", "--from", "medusa", "--table", "table.json", "-o", "worse-tree.json")
    certificate = read_tree("worse-tree.json").certificate
    assert not certificate.optimal
    assert certificate.value == pytest.approx(0.1 + 0.1 * 0.05)
    assert certificate.bound == pytest.approx(0.7)
    assert certificate.first_excluded == 0.5


def test_a_dash_writes_the_file_to_stdout_and_the_talk_to_stderr(run, folder):
    result = run("export", "tree.json", "--to", "medusa", "-o", "-")
    assert json.loads(result.stdout) == [list(path) for path in read_tree("tree.json").tree.paths[1:]]
    assert "medusa: 4 nodes (root not counted)" in result.stderr
    result = run("import", "choices.json", "--from", "medusa", "-o", "-")
    assert json.loads(result.stdout)["num_nodes"] == 4


def test_a_chain_server_gets_the_chain_and_its_own_value(run, folder):
    result = run("export", "tree.json", "--to", "chain", "-o", "out")
    assert result.exit_code == 0
    assert json.loads(Path("out").read_text()) == {"method": "medusa", "num_speculative_tokens": 2}
    assert "chain: 2 nodes (root not counted), depth 2, E[L] 0.7000" in result.stdout  # .5 + .5 · .4
    assert "E[L] 1.0000 becomes 0.7000" in result.stdout


def test_the_old_file_stays_when_a_tree_is_refused(run, folder):
    Path("out").write_text("old")
    assert run("export", "tree.json", "--to", "vllm", "-o", "out").exit_code == 1
    assert Path("out").read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("export tree.json --to nothing -o out", 2, "`nothing` is no engine; give one of chain, eagle1"),
        ("export tree.json -o out", 2, "a tree, --to ENGINE and -o FILE are needed"),
        ("export tree.json --to medusa -o out --json", 2, "--json is that of --list"),
        ("export tree.json --to medusa --set heads -o out", 2, "--set heads is not of the form NAME=VALUE"),
        ("export tree.json --to medusa --set heads=1 --set heads=2 -o out", 2, "--set heads is given twice"),
        ("export tree.json --to medusa --set tails=1 -o out", 1, "`tails` is no setting of medusa"),
        ("export tree.json --to flashinfer -o out", 1, "`flashinfer` needs prefix_len"),
        ("export none.json --to medusa -o out", 1, "`none.json` cannot be read"),
        ("export trace.safetensors --to medusa -o out", 1, "neither a tree file nor a list of paths"),
        ("export chain:x --to medusa -o out", 1, "`chain:x` is no shape"),
        (
            "export chain:2 --to trtllm --engine-version 2.0 -o out",
            1,
            "`trtllm` 2.0 reads no such file; versions: to 1.x",
        ),
        ("export chain:2 --to vllm --engine-version 0.22 -o out", 1, "removed by PR #42121"),
        ("import none.json --from medusa", 1, "`none.json` cannot be read"),
        ("import choices.json --from sglang", 1, "which determines no tree"),
        ("import choices.json --from sequoia", 1, "`choices.json`: the file must be an object"),
        ("import choices.json --from nothing", 2, "is no engine"),
        ("import choices.json", 2, "Missing option '--from'"),
        ("build table.json --set heads=3", 2, "--set is that of --for"),
        ("build table.json --for nothing", 2, "is no engine"),
    ],
)
def test_errors_are_one_line(run, folder, arguments, code, message):
    result = run(*arguments.split())
    assert result.exit_code == code, result.output
    assert message in result.stderr.splitlines()[-1]
    assert result.stdout == ""
    assert not Path("out").exists()


@pytest.mark.parametrize("version", ["1.2.0", "0.17"])
def test_the_range_of_versions_is_printed_whatever_is_given(run, folder, version):
    result = run("export", "chain:2", "--to", "trtllm", "--engine-version", version, "-o", "out")
    assert result.exit_code == 0
    assert "versions: to 1.x; medusa_choices went with the TensorRT backend (PR #15918)" in result.stdout


RATES = [[0.35, 0.3, 0.02, 0.2], [0.3, 0.05, 0.3], [0.5, 0.3]]  # ranks that are not monotone


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nodes", [2, 3, 6, 11, 20])
def test_build_for_gives_a_tree_that_exports_as_it_is(run, tmp_path, name, nodes):
    (tmp_path / "table.json").write_text(json.dumps(RATES))
    result = run("build", "table.json", "--nodes", nodes, "--for", name, "-o", "tree.json")
    needed = ["--set", "prefix_len=1"] if name == "flashinfer" else []
    if result.exit_code:
        assert (nodes, result.exit_code) == (2, 1)
        assert f"`num_nodes` is 2, root included, but `--for {name}` takes at least 3" in result.stderr
        assert name == "eagle1"
        return
    assert f"within what {name} takes" in result.stdout
    assert run("export", "tree.json", "--to", name, "-o", "out", *needed).exit_code == 0


@pytest.mark.parametrize("nodes", range(2, 12))
def test_build_for_tensorrt_llm_is_the_best_of_all_trees_without_a_gap_at_depth_1(run, tmp_path, nodes):
    (tmp_path / "table.json").write_text(json.dumps(RATES))
    run("build", "table.json", "--nodes", nodes, "--for", "trtllm", "-o", "tree.json")
    best = max(
        best_tree_under(
            Limits(nodes, rank_caps=(rank,), must_include=tuple((left,) for left in range(rank + 1))), RATES
        ).expected_accepted
        for rank in range(min(4, nodes - 1))
    )
    assert read_tree("tree.json").expected_accepted == pytest.approx(best, abs=1e-12)
    # Asking for dense siblings everywhere would lose more.
    assert best >= best_tree(RATES, nodes, dense_siblings=True).expected_accepted - 1e-12


def test_what_no_limit_can_express_is_mended_and_the_certificate_keeps_a_true_bound(run, tmp_path):
    (tmp_path / "table.json").write_text(json.dumps(RATES))
    mended = 0
    for nodes in range(4, 40):
        text = run("build", "table.json", "--nodes", nodes, "--for", "hydra", "-o", "tree.json").stdout
        built = read_tree("tree.json")
        free = best_tree(RATES, nodes, max_rank=9, dense_siblings=True)
        if "no search can follow" in text:
            mended += 1
            assert re.search(
                r"not the best tree of \d+ nodes: hydra asks .*, and E\[L\] \d\.\d{4} becomes \d\.\d{4}", text
            )
            assert not built.certificate.optimal
            assert built.certificate.bound == pytest.approx(free.expected_accepted, abs=1e-12)
            assert built.expected_accepted < free.expected_accepted
        else:
            assert built.certificate.optimal
            assert built.expected_accepted == pytest.approx(free.expected_accepted, abs=1e-12)
    assert mended


def test_room_that_a_mend_leaves_is_spent_again(run):
    table = calibration_path("tables/vicuna-7b-v0.json")
    run("build", table, "--nodes", 64, "--dense-siblings", "-o", "free.json")
    free = read_tree("free.json")
    weights = dict(zip(free.tree.paths, free.path_probabilities.tolist()))
    engine = engine_named("nxdi-token-tree")
    mended = fit(engine, free.tree, {}, repair=True, probabilities=weights)
    assert mended.tree.num_nodes == 59
    run("build", table, "--nodes", 64, "--for", "nxdi-token-tree", "-o", "tree.json")
    built = read_tree("tree.json")
    assert built.tree.num_nodes == 64
    assert mended.expected_after < built.expected_accepted < free.expected_accepted == built.certificate.bound


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--for medusa --max-rank 12", "`max_rank` is 12, but `--for medusa` takes at most 9"),
        ("--for medusa --rank-caps 3,11", "`rank_caps` allows rank 11 at depth 2, but `--for medusa` takes at most 9"),
        ("--for medusa --must-include 10", "`must_include` names (10), but `--for medusa` takes ranks to 9"),
        ("--for medusa --set heads=1 --must-include 0,0", "`must_include` names (0,0), but `--for medusa` takes depth to 1"),
        ("--for medusa --nodes 1", "`num_nodes` is 1, root included, but `--for medusa` takes at least 2"),
        ("--for trtllm --max-depth 9", "`max_depth` is 9, but `--for trtllm` takes at most 8"),
        ("--for trtllm --set max_draft_len=7 --nodes 9", "`num_nodes` is 9, but `--for trtllm` takes at most 8"),
        ("--for eagle1 --max-depth 1", "`max_depth` is 1, but `--for eagle1` takes at least 2"),
        ("--for hydra --nodes 3 --must-include 2", "`--for hydra` asks for max_rank 9, dense_siblings True, and then `must_include` with"),
    ],
)  # fmt: skip
def test_limits_that_contradict_the_engine_are_refused_naming_both(run, table, arguments, message):
    result = run("build", table, *arguments.split())
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert message in line


def test_limits_that_are_only_defaults_give_way(run, table):
    result = run("build", table, "--for", "trtllm", "--set", "max_draft_len=3", "-o", "tree.json")
    assert result.exit_code == 0
    assert read_tree("tree.json").tree.num_nodes == 4


def test_an_objective_that_only_a_search_can_value_is_not_mended_by_guess(run, tmp_path):
    # The worst domain wants a late sibling with children: no certificate for the mended tree could be right.
    ranks = np.array([[1, 0, 0], [1, 0, 0], [0, 5, 5], [2, 5, 5]] * 20)
    RankTrace(ranks, [0, 40, 80], ["a", "b"]).write(tmp_path / "trace.safetensors")
    result = run("build", "trace.safetensors", "--for", "hydra", "--nodes", 5, "--objective", "robust")
    assert result.exit_code == 1
    assert (
        "must leave nodes out of the best tree, and what that costs under the objective robust is unknown"
        in result.stderr
    )
    assert "`(0)` has no children but comes before `(1)`" in result.stderr


def test_nodes_by_speed_stay_within_the_engine(run, table, tmp_path):
    (tmp_path / "latency.csv").write_text("nodes,seconds\n1,1.0\n2,1.0\n8,1.0\n16,1.0\n")
    result = run("build", table, "--nodes", "auto", "--latency", "latency.csv", "--for", "vllm", "-o", "tree.json")
    assert result.exit_code == 0, result.output
    assert broken(engine_named("vllm"), read_tree("tree.json").tree, {"method": "eagle"}) is None


def test_writing_and_reading_every_engine_leaves_large_trees_whole(tmp_path):
    tree = dense_tree([9, 6, 4])
    write_tree(best_tree([[0.1] * 9, [0.1] * 6, [0.2] * 4], tree.num_nodes), tmp_path / "tree.json")
    for name in NAMES:
        engine = engine_named(name)
        settings = engine.settings_of({"prefix_len": "5"} if name == "flashinfer" else {})
        if engine.read is not None and broken(engine, tree, settings) is None:
            assert engine.read(engine.write(tree, settings)) == tree


def test_verify_predicts_nothing_for_a_tree_without_probabilities(
    run, folder, tiny_directory, tiny_heads_directory, tiny_prompts
):
    run("import", "choices.json", "--from", "medusa", "-o", "imported.json")
    models = ["--target", tiny_directory, "--heads", tiny_heads_directory, "--prompts", tiny_prompts]
    arguments = ["verify", "imported.json", *models, "--max-new-tokens", 8, "--limit", 1]
    assert "predicted tokens_per_step unknown, measured " in run(*arguments).stdout
    assert json.loads(run(*arguments, "--json").stdout)["predicted_tokens_per_step"] is None
