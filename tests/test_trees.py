"""The exported trees follow from the measured inputs, byte for byte."""

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.reference import all_paths
from treeopt import AcceptanceTable, read_tree
from treeopt.bundled import calibration_path
from treeopt.cli import main

TREES = Path(__file__).parents[1] / "trees"
BUILT = {f"demo-{nodes}": ("traces/demo.safetensors", nodes) for nodes in (16, 32, 64, 128)} | {
    f"vicuna-{size}-v0-64": (f"tables/vicuna-{size}-v0.json", 64) for size in ("7b", "13b", "33b")
}


def test_every_exported_tree_is_rebuilt_here():
    assert {path.stem for path in TREES.glob("*.json")} == set(BUILT)


@pytest.mark.parametrize("name", sorted(BUILT))
def test_a_tree_is_rebuilt_byte_for_byte(name, tmp_path):
    source, nodes = BUILT[name]
    output = tmp_path / "tree.json"
    arguments = ["build", str(calibration_path(source)), "--nodes", str(nodes), "-o", str(output)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert output.read_bytes() == (TREES / f"{name}.json").read_bytes()


@pytest.mark.parametrize("size", ["7b", "13b", "33b"])
def test_the_published_accuracies_give_the_sum_of_the_63_likeliest_paths(size):
    rates = AcceptanceTable.read(calibration_path(f"tables/vicuna-{size}-v0.json")).rates.tolist()
    likeliest = sorted(all_paths(rates).values(), reverse=True)[:63]
    tree = read_tree(TREES / f"vicuna-{size}-v0-64.json")
    assert tree.tokens_per_step == pytest.approx(1 + sum(likeliest), abs=1e-12)


def test_the_demo_trees_nest():
    node_sets = [set(read_tree(TREES / f"demo-{nodes}.json").tree.paths) for nodes in (16, 32, 64, 128)]
    assert all(small < large for small, large in itertools.pairwise(node_sets))


def test_every_demo_tree_names_the_bundled_heads():
    hashes = {json.loads((TREES / f"demo-{n}.json").read_text())["provenance"]["heads_hash"] for n in (16, 64)}
    assert len(hashes) == 1
