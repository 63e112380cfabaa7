"""The committed pictures and report follow from the measured inputs, by the commands that calibration/README.md prints."""

import re
import shlex
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from treeopt.cli import main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "calibration/README.md").read_text(encoding="utf8")
COMMANDS = {words[-1]: words for words in map(shlex.split, re.findall(r"^treeopt ((?:plot|report) .*)$", TEXT, re.M))}
LARGEST = 200_000  # bytes


def drawn(path):
    """Return what an SVG shows, without what another version of matplotlib names or rounds otherwise."""
    elements = list(ElementTree.parse(path).iter())
    kinds = Counter(one.tag.rpartition("}")[2] for one in elements)
    texts = ["".join(one.itertext()).strip() for one in elements if one.tag.endswith("}text")]
    shapes = sorted(
        [float(value) for value in re.findall(r"-?\d+\.?\d*", one.get("d"))] for one in elements if "d" in one.attrib
    )
    return kinds, texts, [len(shape) for shape in shapes], np.concatenate(shapes)


def test_every_committed_picture_has_its_command():
    committed = {
        str(path.relative_to(ROOT)) for kind in ("svg", "png", "html") for path in ROOT.glob(f"trees/*.{kind}")
    }
    assert committed == set(COMMANDS)
    assert len(committed) == 4


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_committed_picture_is_made_again(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    output = tmp_path / Path(name).name
    result = CliRunner().invoke(main, [*COMMANDS[name][:-1], str(output)])
    assert result.exit_code == 0, result.output
    assert Path(name).stat().st_size < LARGEST
    if output.suffix == ".html":
        assert output.read_bytes() == Path(name).read_bytes()
        return
    *found, places = drawn(output)
    *committed, expected = drawn(name)
    assert found == committed
    assert np.abs(places - expected).max() < 1.0  # points
