"""The report as text: what stands in it, that it is sound HTML, and that it loads nothing. The browser's part is apart."""

import re
import shlex
from html import unescape
from html.parser import HTMLParser
from importlib import util
from pathlib import Path

import numpy as np
import pytest

from treeopt import DraftTree, RankTrace, best_tree, chain, read_tree, replay
from treeopt.bundled import DEMO_TRACE, calibration_path
from treeopt.cli import main
from treeopt.report.chart import Axis, Line, line_chart
from treeopt.report.markup import Markup, element, estimate, number
from treeopt.report.tree_picture import node_facts
from treeopt.show import describe_tree, head_rows

DEMO = str(calibration_path(DEMO_TRACE))
ALONE = {"meta"}  # HTML elements without an end tag; SVG's are written with a slash


class Outline(HTMLParser):
    """Elements as they open and close, with their attributes and words."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.words.append(data)


def rendered(text):
    return " ".join(" ".join(Outline(text).words).replace("\u00a0", " ").split())


@pytest.fixture(scope="module")
def demo():
    return RankTrace.read(DEMO)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a report with every section."""
    found = tmp_path_factory.mktemp("report")
    (found / "flat.csv").write_text("nodes,seconds\n1,0.010\n2,0.011\n32,0.0110001\n64,0.5\n")
    (found / "paths.json").write_text("[[0], [1], [0, 0]]")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(found)
        names = [DEMO, "tree.json", "paths.json", "chain:2"]
        for arguments in (["build", DEMO], ["report", *names, "--latency", "flat.csv", "--reference", DEMO]):
            main(arguments, standalone_mode=False)
    return found


@pytest.fixture(scope="module")
def full(folder):
    return (folder / "report.html").read_text(encoding="utf8")


def test_the_page_is_balanced_and_its_ids_are_its_own(full):
    outline = Outline(full)
    assert outline.open == []
    assert full.startswith('<!DOCTYPE html>\n<html lang="en">')
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) == 64 + 4 + 3
    parents = [attributes["data-parent"] for _, attributes in outline.elements if "data-parent" in attributes]
    assert set(parents) <= set(ids)


def test_the_page_loads_nothing(full):
    assert not re.search(r"https?://|//[a-z]|@import|url\(", full, re.I)
    for tag, attributes in Outline(full).elements:
        assert not {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "style"} & set(attributes), tag
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "font"}
        assert not [name for name in attributes if name.startswith("on")]


def test_the_page_says_what_was_calibrated_and_how_the_heads_do(full, demo):
    text = rendered(full)
    for key in ("target_hash", "heads_hash", "prompts_hash"):
        assert demo.metadata[key] in text
    assert "documents 96 positions 9,859" in text
    for row in head_rows(demo):
        cells = ["{:.3f} ({:.3f} … {:.3f})".format(*row[f"top_{top}"]) for top in (1, 3, 5, 10)]
        assert f"{row['head']} {row['head'] + 2} {row['positions']:,} {' '.join(cells)}" in text


def test_the_comparison_is_the_exact_replay_of_each_tree(full, folder, demo):
    text = rendered(full).split("Beside other trees")[1]
    best = {f"best tree, {n} nodes": best_tree(demo.table(), n).tree for n in (16, 32, 64, 128, 256)}
    given = {
        "tree.json": read_tree(folder / "tree.json").tree,
        "paths.json": DraftTree.from_paths([(0,), (1,), (0, 0)]),
    }
    for name, tree in ({"chain of 5 first guesses": chain(5), "chain:2": chain(2)} | best | given).items():
        found = replay(tree, demo)
        low, high = found.interval()
        assert f"{name} {tree.num_nodes} {tree.max_depth} {found.tokens_per_step:.3f} ({low:.3f} … {high:.3f})" in text
        domains = [f"{part.tokens_per_step:.2f}" for _, part in sorted(found.by_domain().items())]
        assert f"{name} {' '.join(domains)}" in text
    assert "best dense tree, 21 × 2 64 2 1.810" in text
    assert "not measured" in text  # 128 nodes on a curve that ends at 64


def test_what_a_tree_file_certifies_is_told(full, folder):
    text = rendered(full)
    for line in describe_tree(read_tree(folder / "tree.json"), draw=False).splitlines():
        assert line in text
    assert "proven optimal" in text


def test_where_no_tree_pays_plain_decoding_is_shown(run, tmp_path):
    (tmp_path / "steep.csv").write_text("nodes,seconds\n1,0.01\n64,0.64\n")
    assert run("report", DEMO, "--latency", "steep.csv").exit_code == 0
    text = rendered(Path("report.html").read_text(encoding="utf8"))
    assert "Do not speculate here" in text
    assert "Checking 1 node at once" in text
    assert "1 nodes" not in text
    assert "1 node, 1.000 tokens per step expected" in text


def test_the_machine_and_the_drift_are_there_when_they_are_given(full, run):
    text = rendered(full)
    chosen = int(re.search(r"(\d+) nodes give the most tokens per second", text)[1])
    assert 24 < chosen <= 32
    assert f"Checking {chosen} nodes at once" in text
    assert "No head differs beyond chance." in text
    assert run("report", DEMO).exit_code == 0
    plain = rendered(Path("report.html").read_text(encoding="utf8"))
    assert "On this machine" not in plain
    assert "Drift" not in plain
    assert "Tree: best tree, 64 nodes" in plain


def test_every_node_tells_its_path_probability_gain_and_children(demo):
    built = best_tree(demo.table(), 40)
    facts = node_facts(built.tree, built.path_probabilities)
    for node, path in enumerate(built.tree.paths):
        if not node:
            assert "decided" in facts[node].lines[0]
            continue
        place = built.added.tolist().index(node)
        assert facts[node].place == place
        before, after = 1 + built.curve[place - 1], 1 + built.curve[place]
        lines = facts[node].lines
        assert (
            lines[0]
            == f"path ({','.join(map(str, path))}): guess {path[-1]} of head {len(path) - 1} for token {len(path) + 1}"
        )
        assert lines[1] == f"the whole path is right with probability {built.path_probabilities[node]:.4g}"
        assert lines[2].endswith(f"as node {place + 1} in order of probability: {before:.4f} → {after:.4f}")
        ranks = [other[-1] for other in built.tree.paths if other[:-1] == path and other]
        assert lines[3].startswith(f"{len(ranks)} child" if ranks else "no children")
        assert ", ".join(map(str, ranks[:8])) in lines[3] or not ranks


def test_without_scripts_nodes_have_tooltips_tab_stops_and_a_table(full):
    static = re.sub(r"<script>.*?</script>", "", full, flags=re.S)
    nodes = re.findall(r'<g id="t0n\d+".*?</g>', static, re.S)
    assert len(nodes) == 64
    assert all('tabindex="0"' in node and "<title>" in node and "aria-label=" in node for node in nodes)
    assert static.count("<summary>All nodes as a table</summary>") == 3
    table = static.split("<details>")[1].split("</details>")[0]
    assert table.count("<tr>") == 64
    assert ">(0,0)</th>" in table


def test_names_cannot_become_markup(run, tmp_path):
    evil = '<script>alert("x")</script>'
    metadata = {"target": evil, "note </style>": "& <img src=x onerror=y>"}
    trace = RankTrace([[0, 1], [1, -1], [-1, -1]] * 4, [0, 3, 6, 9, 12], [evil, "</td>", evil, "&amp;"], metadata)
    trace.write("odd & <b>.safetensors")
    (tmp_path / "<i>.json").write_text("[[0], [0, 0]]")
    assert run("report", "odd & <b>.safetensors", "<i>.json").exit_code == 0
    text = Path("report.html").read_text(encoding="utf8")
    outline = Outline(text)
    assert outline.open == []
    assert len(re.findall("<script", text)) == 1
    assert {tag for tag, _ in outline.elements}.isdisjoint({"img", "b", "i"})
    words = rendered(text)
    assert words.count(evil) >= 3
    for name in ("odd & <b>.safetensors", "<i>.json", "& <img src=x onerror=y>", "&amp;", "</td>"):
        assert name in words


def test_a_name_that_is_no_text_does_not_stop_the_report(run):
    trace = RankTrace([[0], [1], [-1]] * 2, [0, 3, 6], ["\ud800", "數學"], {"target": "模型\n\x01"})
    trace.write("odd.safetensors")
    assert run("report", "odd.safetensors").exit_code == 0
    assert "數學 1, ? 1" in rendered(Path("report.html").read_text(encoding="utf8"))


def test_equal_input_gives_equal_bytes_whatever_the_output_is_called(run):
    run("build", DEMO, "--nodes", 16)
    for name in ("a.html", "b.html"):
        assert run("report", DEMO, "tree.json", "-o", name).exit_code == 0
    assert Path("a.html").read_bytes() == Path("b.html").read_bytes()
    result = run("report", DEMO, "tree.json", "-o", "-")
    assert result.stdout.encode() == Path("a.html").read_bytes()


def test_the_commands_on_the_page_are_understood_and_build_the_tree_again(run):
    run("build", DEMO, "--nodes", 24)
    before = Path("tree.json").read_bytes()
    run("report", DEMO, "tree.json", "--seed", 3)
    code = unescape(re.search(r"<code>(.*?)</code>", Path("report.html").read_text(encoding="utf8"), re.S)[1])
    lines = [shlex.split(line) for line in code.splitlines()]
    assert [words[1] for words in lines] == ["calibrate", "build", "report"]
    for words in lines:
        main.commands[words[1]].make_context(words[1], words[2:], resilient_parsing=False)
    assert lines[0][2:] == [
        "--target", "demo", "--dtype", "float32", "--continuations", "generated", "--max-new-tokens", "128",
        "--candidates", "10", "--temperature", "0.7", "-o", DEMO,
    ]  # fmt: skip
    Path("tree.json").unlink()
    assert run(*lines[1][1:]).exit_code == 0
    assert Path("tree.json").read_bytes() == before
    page = Path("report.html").read_bytes()
    assert run(*lines[2][1:]).exit_code == 0
    assert Path("report.html").read_bytes() == page


def test_a_tree_built_with_limits_has_no_command_that_would_make_another(run):
    run("build", DEMO, "--nodes", 24, "--max-depth", 1)
    run("report", DEMO, "tree.json")
    code = re.search(r"<code>(.*?)</code>", Path("report.html").read_text(encoding="utf8"), re.S)[1]
    assert "treeopt build" not in code


def test_a_report_needs_no_matplotlib(run, monkeypatch):
    find_spec = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest))
    assert run("report", DEMO).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.safetensors"], "`none.safetensors` cannot be read"),
        (["tree.json"], "`tree.json` is no safetensors file"),
        (["one.safetensors"], "`documents` holds 1 with tokens to guess"),
        ([DEMO, "none.json"], "`none.json` cannot be read"),
        ([DEMO, "table.json"], "`table.json`"),
        ([DEMO, "chain:9"], "the tree has depth 9 but there are 5 heads"),
        ([DEMO, "--reference", "one.safetensors"], "the reference has 1 heads and the trace 5"),
        ([DEMO, "--latency", "none.csv"], "`none.csv` cannot be read"),
    ],
)
def test_what_cannot_be_reported_is_one_line_and_leaves_the_old_page(run, table, tmp_path, arguments, message):
    run("build", table, "--nodes", 5)
    RankTrace([[0], [-1]], [0, 2]).write("one.safetensors")
    Path("report.html").write_text("old")
    result = run("report", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert Path("report.html").read_text() == "old"
    assert not list(tmp_path.glob(".*.part"))


def test_text_is_escaped_unless_it_is_markup():
    assert element("p", "<&>", Markup("<b>"), title='"&') == '<p title="&quot;&amp;">&lt;&amp;&gt;<b></p>'
    assert element("line", x1=1.0, stroke_width=0.456, x2=None) == '<line x1="1" stroke-width="0.46"/>'
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert [number(value) for value in (-0.001, 2.0, 10.0, 0.126)] == ["0", "2", "10", "0.13"]
    assert estimate(0.1, -0.25, 1, "+") == "+0.100 (-0.250\u00a0…\u00a0+1.000)"


def test_a_chart_places_points_by_its_scales_and_keeps_its_names_apart():
    axes = Axis("nodes", 1.0, 16.0, True, (1.0, 4.0, 16.0)), Axis("ms", 0.0, 8.0)
    x = np.array([1.0, 4.0, 16.0])
    text = line_chart(
        "Title", *axes, [Line(x, np.array([0.0, 4.0, 8.0]), "one"), Line(x, np.array([0.0, 4.0, 7.9]), "other", 1)]
    )
    first = [tuple(map(float, point.split(","))) for point in re.search(r'<polyline points="(.*?)"', text)[1].split()]
    assert first[1][0] == pytest.approx((first[0][0] + first[2][0]) / 2, abs=0.02)
    assert first[1][1] == pytest.approx((first[0][1] + first[2][1]) / 2, abs=0.02)
    names = [float(y) for y in re.findall(r'<tspan x="[\d.]+" y="([\d.]+)">o', text)]
    assert abs(names[0] - names[1]) >= 14
    ticks = re.findall(r'class="end">(.*?)<', text)
    assert ticks == ["0", "2", "4", "6", "8"]
