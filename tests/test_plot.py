"""Pictures: what they say, that it can be read, and that equal input gives equal files."""

import itertools
import json
import re
from importlib import util
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from treeopt import AcceptanceTable, RankTrace, best_tree, dense_tree
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.cli.plot import _about
from treeopt.curves import describe_source, node_curve, rank_curves
from treeopt.latency import LatencyCurve, LatencyTable

DATA = Path(__file__).parent / "data"
A800 = DATA / "caddtree_verify_cost_A800.json"
DEMO = str(calibration_path(DEMO_TRACE))
LEAST_FONT = 9.0  # points


@pytest.fixture(scope="module")
def demo():
    return RankTrace.read(DEMO)


@pytest.fixture(scope="module")
def figures(demo):
    """Return every kind of picture, small and large."""
    from treeopt.auto import auto_budget
    from treeopt.plot.latency import draw_steps
    from treeopt.plot.trace import draw_accuracies, draw_nodes
    from treeopt.plot.tree import draw_tree

    vicuna = AcceptanceTable.read(calibration_path("tables/vicuna-7b-v0.json"))
    made = {
        f"{name} tree of {n}": draw_tree((built := best_tree(table, n)).tree, built.path_probabilities)
        for name, table in (("demo", demo.table()), ("vicuna", vicuna))
        for n in (1, 2, 16, 64, 128, 512)
    }
    long = RankTrace(demo.ranks, demo.documents, metadata={"target": "some-organisation/Some-Model-70B-Instruct-v0.3"})
    about = describe_source(long).replace("96", "96,000").replace("9,859", "12,009,859")
    made["accuracies"] = draw_accuracies(rank_curves(demo, 10), rank_curves(demo, 10, together=True), about)
    deep = RankTrace(np.tile(demo.ranks, 2)[:, :9], demo.documents)
    made["accuracies of nine"] = draw_accuracies(rank_curves(deep, 10), rank_curves(deep, 10, together=True), about)
    for largest, chosen in ((2, 2), (16, 1), (64, 64), (512, 8), (512, 64), (512, 300)):
        made[f"nodes {chosen} of {largest}"] = draw_nodes(
            node_curve(demo, largest), chosen, about, why=", most tokens/s"
        )
    contexts = LatencyTable.read(A800, model="Qwen3-8B").curves
    made["contexts"] = draw_steps(contexts, "Qwen3-8B")
    stairs = LatencyCurve.of([1, 8, 64], [0.01, 0.02, 0.05], between="step", batch=4, quartiles=[[0.01, 0.02]] * 3)
    named = _about({"target": "x" * 60, "device": "y" * 60})
    for name, curve in (("flat", contexts[0]), ("stairs", stairs)):
        choice = auto_budget(lambda n: best_tree(demo.table(), n), curve, demo)
        made[f"speed, {name}"] = draw_steps([curve], named, choice)
        made[f"times, {name}"] = draw_steps([curve], named)
    return made


NAMES = [
    *(f"{name} tree of {n}" for name in ("demo", "vicuna") for n in (1, 2, 16, 64, 128, 512)),
    "accuracies",
    "accuracies of nine",
    *(f"nodes {chosen} of {largest}" for largest, chosen in ((2, 2), (16, 1), (64, 64), (512, 8), (512, 64), (512, 300))),
    "contexts", "speed, flat", "speed, stairs", "times, flat", "times, stairs",
]  # fmt: skip


def texts(figure):
    """Return every text that shows, with its box in points."""
    from matplotlib.text import Text

    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    ticks = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in axis.get_majorticklabels()}
    drawn = {
        label
        for axes in figure.axes
        if axes.axison
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis._update_ticks()
        for label in (tick.label1, tick.label2)
        if label.get_visible()
    }
    hidden = ticks - drawn
    return [(text, text.get_window_extent(renderer)) for text in shown if text not in hidden]


def test_the_list_of_pictures_is_complete(figures):
    assert set(figures) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_words_are_large_enough_on_the_page_and_do_not_overlap(figures, name):
    figure = figures[name]
    width, height = figure.get_size_inches() * figure.dpi
    found = texts(figure)
    assert len(found) >= 4
    for text, box in found:
        assert text.get_fontsize() >= LEAST_FONT, text
        assert box.x0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y0 >= -1, text
        assert box.y1 <= height + 1, text
    for (one, a), (other, b) in itertools.combinations(found, 2):
        across, up = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across < 0.5 or up < 2.5, (one.get_text(), other.get_text())


def grey(colour):
    from matplotlib.colors import to_rgb

    return float(
        np.dot(
            [0.2126, 0.7152, 0.0722],
            [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)],
        )
    )


def test_colours_are_steps_of_grey_and_markers_tell_lines_apart():
    from treeopt.plot.paper import MARKERS, ORDERED, SHADES

    lightness = [116 * grey(colour) ** (1 / 3) - 16 for colour in ORDERED]
    assert (np.diff(lightness) >= 4).all(), lightness
    assert len(set(MARKERS)) == len(MARKERS) == len(ORDERED) + 1
    shades = [116 * grey(SHADES(share)) ** (1 / 3) - 16 for share in np.linspace(0, 1, 9)]
    assert (np.diff(shades) < -4).all(), shades


def svg_texts(path):
    return [
        " ".join("".join(one.itertext()).split())
        for one in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_a_trees_picture_names_its_levels_and_every_rank(run, demo):
    run("build", DEMO, "--nodes", 32)
    assert run("plot", "tree.json", "-o", "tree.svg").exit_code == 0
    found = svg_texts("tree.svg")
    built = best_tree(demo.table(), 32)
    assert f"Draft tree of 32 nodes: {built.tokens_per_step:.3f} tokens per step expected" in found
    assert sorted(text for text in found if text.isdecimal()) == sorted(map(str, built.tree.ranks[1:].tolist()))
    for depth, count in enumerate(built.tree.level_widths, 1):
        gain = built.path_probabilities[built.tree.depths == depth].sum()
        assert f"head {depth - 1}: token {depth + 1}" in found
        assert any(f"{count} node" in text for text in found)
        assert any(f"add {gain:.3f} tokens" in text for text in found)


def test_a_traces_pictures_are_chosen_by_an_option(run, demo):
    assert run("plot", DEMO, "-o", "a.svg").exit_code == 0
    assert "How often the heads guess the right token" in svg_texts("a.svg")
    assert run("plot", DEMO, "--picture", "nodes", "-o", "b.svg").exit_code == 0
    curve = node_curve(demo, 512)
    text = " ".join(svg_texts("b.svg"))
    assert f"64 nodes {curve.replayed[63]:.3f} replayed {curve.predicted[63]:.3f} predicted" in text
    assert run("plot", DEMO, "--picture", "nodes", "--nodes", 600, "-o", "b.svg").exit_code == 0
    assert "600 nodes" in " ".join(svg_texts("b.svg"))


def test_a_latency_file_gives_times_and_with_a_trace_the_budget(run, tmp_path):
    (tmp_path / "flat.csv").write_text("nodes,seconds\n1,0.010\n2,0.011\n32,0.0110001\n64,0.5\n")
    assert run("plot", "flat.csv", "-o", "a.svg").exit_code == 0
    assert "Time of one verification pass" in svg_texts("a.svg")
    assert run("plot", "flat.csv", "--trace", DEMO, "-o", "b.svg").exit_code == 0
    run("build", DEMO, "--nodes", "auto", "--latency", "flat.csv")
    from treeopt import read_tree

    chosen = read_tree("tree.json").tree.num_nodes
    assert f"{chosen} nodes give the most tokens per second here" in svg_texts("b.svg")
    marked = run("plot", DEMO, "--picture", "nodes", "--latency", "flat.csv", "-o", "c.svg")
    assert marked.exit_code == 0
    assert f"{chosen} nodes, most tokens/s" in " ".join(svg_texts("c.svg"))
    (tmp_path / "steep.csv").write_text("nodes,seconds\n1,0.01\n64,0.64\n")
    assert run("plot", "steep.csv", "--trace", DEMO, "-o", "d.svg").exit_code == 0
    assert "Do not speculate here: plain decoding gives the most tokens per second" in svg_texts("d.svg")


def test_contexts_of_a_published_curve_are_named_and_one_can_be_chosen(run):
    many = ["plot", A800, "--latency-model", "Qwen3-8B", "-o", "a.svg"]
    assert run(*many).exit_code == 0
    assert next(text for text in svg_texts("a.svg") if text.startswith("after")) == "after 1 token"
    assert len([text for text in svg_texts("a.svg") if text.startswith("after")]) == 9
    assert run(*many, "--context", 7900).exit_code == 0
    assert [text for text in svg_texts("a.svg") if text.startswith("after")] == ["after 8,000 tokens"]


def test_a_list_of_paths_is_drawn_with_the_accuracies_of_a_trace(run, demo, tmp_path):
    (tmp_path / "paths.json").write_text("[[0], [1], [0, 0]]")
    assert run("plot", "paths.json", "--trace", DEMO, "-o", "a.svg").exit_code == 0
    first, second = demo.table().rates[:2]
    expected = 1 + first[0] + first[1] + first[0] * second[0]
    assert f"Draft tree of 4 nodes: {expected:.3f} tokens per step expected" in svg_texts("a.svg")


def test_levels_of_a_huge_tree_are_counted_whole_although_its_likeliest_nodes_are_drawn(run, tmp_path):
    (tmp_path / "huge.json").write_text(json.dumps([list(path) for path in dense_tree([20, 10, 5]).paths[1:]]))
    assert run("plot", "huge.json", "--trace", DEMO, "-o", "a.svg").exit_code == 0
    text = " ".join(svg_texts("a.svg"))
    assert "Draft tree of 1,221 nodes (its 512 likeliest are drawn)" in text
    assert "1,000 nodes" in text


def test_equal_input_gives_equal_files_without_dates_and_with_text_as_text(run):
    run("build", DEMO, "--nodes", 16)
    for source, rest in ((("tree.json"), []), (DEMO, []), (DEMO, ["--picture", "nodes"])):
        for name in ("a.svg", "b.svg", "a.png", "b.png"):
            assert run("plot", source, *rest, "-o", name).exit_code == 0
        assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes()
        assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
        text = Path("a.svg").read_text()
        assert "<dc:date>" not in text
        assert "atplotlib v" not in text
        assert len(svg_texts("a.svg")) > 10


def test_a_name_with_signs_of_formulas_and_markup_is_written_as_it_is(run, tmp_path):
    trace = RankTrace([[0], [1], [-1]] * 2, [0, 3, 6], metadata={"target": "$x^2$ <b>\n\x01& _y 模"})
    trace.write("odd.safetensors")
    assert run("plot", "odd.safetensors", "-o", "a.svg").exit_code == 0
    assert run("plot", "odd.safetensors", "-o", "a.png").exit_code == 0
    assert any(text.startswith("Target $x^2$ <b> & _y 模, 2 documents") for text in svg_texts("a.svg"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tree.json", "-o", "a.jpg"], "`a.jpg` ends in '.jpg'; end the name in .svg or .png"),
        (["tree.json", "-o", "a"], "`a` ends in 'nothing'; end the name in .svg or .png"),
        (["none.json", "-o", "a.svg"], "`none.json` cannot be read"),
        (["table.json", "-o", "a.svg"], "`table.json` is no tree, trace or latency file"),
        (["paths.json", "-o", "a.svg"], "`paths.json` is a list of paths without probabilities; give --trace"),
        (["bare.json", "-o", "a.svg"], "`path_probabilities` is missing"),
        (["one.safetensors", "-o", "a.svg"], "`documents` holds 1 with tokens to guess"),
        (["one.safetensors", "--picture", "nodes", "-o", "a.svg"], "`documents` holds 1 with tokens to guess"),
        (["broken.safetensors", "-o", "a.svg"], "`broken.safetensors` is no safetensors file or is cut off"),
        (["flat.csv", "--batch", "3", "-o", "a.svg"], "`batch` 3 was not measured"),
        (["deep.json", "--trace", "one.safetensors", "-o", "a.svg"], "the tree has depth 3 but there are 1 heads"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_one_line(run, table, tmp_path, arguments, message):
    run("build", table, "--nodes", 5)
    text = Path("tree.json").read_text()
    (tmp_path / "bare.json").write_text(re.sub(r'  "path_probabilities".*\n', "", text))
    (tmp_path / "paths.json").write_text("[[0], [1]]")
    (tmp_path / "deep.json").write_text("[[0], [0, 0], [0, 0, 0]]")
    (tmp_path / "flat.csv").write_text("nodes,seconds\n1,0.01\n8,0.01\n")
    (tmp_path / "broken.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    RankTrace([[0], [-1]], [0, 2]).write("one.safetensors")
    result = run("plot", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("a*"))
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tree.json"], "Missing option '-o'"),
        (["tree.json", "--picture", "nodes", "-o", "a.svg"], "--picture goes with a trace, and tree.json is a tree"),
        (["tree.json", "--nodes", "4", "-o", "a.svg"], "--nodes goes with a trace"),
        (["tree.json", "--trace", DEMO, "-o", "a.svg"], "tree.json has its own probabilities"),
        ([DEMO, "--trace", DEMO, "-o", "a.svg"], "is a trace itself"),
        ([DEMO, "--nodes", "4", "-o", "a.svg"], "mark a budget of --picture nodes"),
        ([DEMO, "--picture", "nodes", "--nodes", "4", "--latency", "flat.csv", "-o", "a.svg"], "give one of the two"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_the_file_are_usage_errors(run, table, tmp_path, arguments, message):
    run("build", table, "--nodes", 5)
    (tmp_path / "flat.csv").write_text("nodes,seconds\n1,0.01\n8,0.01\n")
    result = run("plot", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_without_matplotlib_one_line_says_what_to_install(run, table, monkeypatch):
    run("build", table)
    find_spec = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest))
    result = run("plot", "tree.json", "-o", "a.svg")
    assert result.exit_code == 1
    assert (
        result.stderr
        == "Error: `treeopt plot` needs `matplotlib`, which is not installed: pip install 'treeopt[plot]'\n"
    )


def test_a_picture_that_fails_leaves_the_old_one_whole(run, table, monkeypatch):
    from matplotlib.figure import Figure

    run("build", table)
    Path("a.svg").write_text("old")

    def failing(self, path, **options):
        Path(path).write_text("half")
        raise OSError("no space left")

    monkeypatch.setattr(Figure, "savefig", failing)
    assert run("plot", "tree.json", "-o", "a.svg").exit_code == 1
    assert Path("a.svg").read_text() == "old"
    assert sorted(path.name for path in Path().iterdir()) == ["a.svg", "table.json", "tree.json"]
