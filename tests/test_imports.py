"""What a process imports, and how long that takes."""

import resource
import subprocess
import sys

import pytest

import treeopt

HEAVY = ("torch", "transformers", "scipy", "networkx", "matplotlib", "tqdm")
PROBE = "import sys\n{}\nprint([name for name in {!r} if name in sys.modules])"


def imported(code):
    probe = PROBE.format(code, HEAVY)
    return subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    ).stdout.splitlines()[-1]


BUILD = (
    "import json, pathlib, tempfile\nfrom treeopt.cli import main\nfolder = pathlib.Path(tempfile.mkdtemp())\n"
    "(folder / 'table.json').write_text(json.dumps([[0.5, 0.2], [0.4, 0.1]]))\n"
    "main(['build', str(folder / 'table.json'), '-o', str(folder / 'tree.json')], standalone_mode=False)"
)


@pytest.mark.parametrize("code", ["import treeopt", BUILD], ids=["import", "build"])
def test_trees_are_built_without_torch(code):
    assert imported(code) == "[]"


@pytest.mark.parametrize("module", ["torch", "scipy"])
def test_the_check_sees_a_module_that_is_imported(module):
    assert module in imported(f"import treeopt, {module}")


def test_the_exported_names_exist_and_are_sorted():
    names = [name for name in treeopt.__all__ if name != "__version__"]
    assert names == [
        "AcceptanceTable", "BuiltTree", "DraftTree", "RankTrace", "TreeBuffers", "TreeoptError", "best_tree", "chain",
        "decode", "dense_tree", "read_tree", "replay", "write_tree",
    ]  # fmt: skip
    assert all(hasattr(treeopt, name) for name in treeopt.__all__)
    assert all(getattr(treeopt, name).__doc__ for name in names)


def cpu_seconds():
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def test_building_costs_little_more_than_its_imports(tmp_path):
    """Side by side, alternating, in the processes' own time: at most 3 times numpy and click alone (2.0 on a quiet machine)."""
    trace = tmp_path / "trace.safetensors"
    treeopt.RankTrace([[i % 7, i % 5] for i in range(2000)], [0, 2000]).write(trace)
    commands = {
        "build": [sys.executable, "-m", "treeopt", "build", str(trace), "-o", str(tmp_path / "tree.json")],
        "base": [sys.executable, "-c", "import numpy, click"],
    }
    taken = {name: [] for name in commands}
    for _ in range(7):
        for name, command in commands.items():
            before = cpu_seconds()
            subprocess.run(command, check=True, capture_output=True)
            taken[name].append(cpu_seconds() - before)
    assert min(taken["build"]) / min(taken["base"]) <= 3, taken
