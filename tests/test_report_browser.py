"""The report in a real browser. Run with `pytest -m browser`; TREEOPT_BROWSER names one that is not on the path."""

import re

import numpy as np
import pytest

from tests.browser import browser_page, find_browser
from treeopt import RankTrace
from treeopt.bundled import DEMO_TRACE, calibration_path

pytestmark = pytest.mark.browser

DEMO = str(calibration_path(DEMO_TRACE))


@pytest.fixture(scope="module")
def page():
    executable = find_browser()
    assert executable, "no Chromium is found: install chromium, or name one with TREEOPT_BROWSER"
    with browser_page(executable) as found:
        yield found


@pytest.fixture
def report(run, tmp_path):
    (tmp_path / "flat.csv").write_text("nodes,seconds\n1,0.010\n2,0.011\n32,0.0110001\n64,0.5\n")
    run("build", DEMO, "--nodes", 64)
    result = run("report", DEMO, "tree.json", "dense:3,2", "--latency", "flat.csv", "--reference", DEMO)
    assert result.exit_code == 0, result.output
    return tmp_path / "report.html"


@pytest.fixture
def crowded(run, tmp_path):
    """Return a report of twenty domains with long names, eight heads and a dozen trees, one of them large."""
    rng = np.random.default_rng(0)
    ranks = np.minimum(rng.geometric(0.15, size=(40 * 60, 8)) - 1, 200)
    for document in range(40):
        for head in range(8):
            ranks[60 * document + 59 - head : 60 * document + 60, head] = -1
    domains = [f"domain{i % 20}withanameofmanywordsandnohyphen" for i in range(40)]
    metadata = {"target": "/models/" + "of-some-organisation-or-other/" * 4 + "model", "remark": "x" * 300}
    RankTrace(ranks, np.arange(41) * 60, domains, metadata).write("a-trace-whose-name-is-long-as-well.safetensors")
    run("build", "a-trace-whose-name-is-long-as-well.safetensors", "--nodes", 512, "-o", "a-tree-of-many-nodes.json")
    names = [f"chain:{k}" for k in range(1, 8)] + ["dense:4,3", "dense:20,10,5"]
    result = run("report", "a-trace-whose-name-is-long-as-well.safetensors", "a-tree-of-many-nodes.json", *names)
    assert result.exit_code == 0, result.output
    return tmp_path / "report.html"


@pytest.fixture(params=["report", "crowded"])
def either(request):
    """Return a usual report, and one whose names and numbers hardly fit."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_loads_nothing_and_complains_of_nothing(page, report, scheme):
    page.open(report, scheme=scheme)
    page.point_at("#t0n5")
    page.key("Tab")
    assert page.requests == [report.resolve().as_uri()]
    assert page.complaints == []


def test_a_request_and_a_complaint_would_be_seen(page, tmp_path):
    (tmp_path / "bad.html").write_text('<img src="other.png"><script>console.error("x"); nothing();</script>')
    page.open(tmp_path / "bad.html")
    assert any(url.endswith("other.png") for url in page.requests)
    assert any("nothing" in one for one in page.complaints)


def test_pointing_at_a_node_tells_it_and_lights_its_path(page, report):
    page.open(report)
    page.point_at("#t0n40")
    title = page.value("document.querySelector('#t0n40 title').textContent")
    assert page.value("document.querySelector('.detail').textContent") == " · ".join(title.split("\n"))
    lit = page.value("[...document.querySelectorAll('.lit')].map(one => one.id)")
    parent = page.value("document.querySelector('#t0n40').dataset.parent")
    assert sorted(lit) == sorted({"t0n40", parent, "t0n0"})


def test_nodes_are_reached_with_the_keyboard(page, report):
    page.open(report)
    focused = "document.activeElement.id"
    for _ in range(30):
        page.key("Tab")
        if page.value(focused):
            break
    assert page.value(focused) == "t0n0"
    steps = [
        ("ArrowDown", "t0n1"),
        ("ArrowRight", "t0n2"),
        ("ArrowLeft", "t0n1"),
        ("ArrowUp", "t0n0"),
        ("ArrowUp", "t0n0"),
    ]
    for key, expected in steps:
        page.key(key)
        assert page.value(focused) == expected
    page.key("ArrowDown")
    assert "path (0)" in page.value("document.querySelector('.detail').textContent")
    page.key("Tab")  # one stop a tree: next comes its table
    assert page.value("document.activeElement.tagName") == "SUMMARY"


def test_light_and_dark_have_readable_text(page, report):
    def luminance(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        return float(
            np.dot(
                [0.2126, 0.7152, 0.0722], [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
            )
        )

    papers = set()
    for scheme in ("light", "dark"):
        page.open(report, scheme=scheme)
        paper = luminance(page.value("getComputedStyle(document.body).backgroundColor"))
        papers.add(round(paper, 2))
        pairs = {
            "p": "color",
            ".note": "color",
            "figcaption": "color",
            "td": "color",
            "svg text": "fill",
            ".level": "fill",
        }
        pairs |= {".name": "fill", "summary": "color"}
        for selector, kind in pairs.items():
            ink = luminance(page.value(f"getComputedStyle(document.querySelector({selector!r})).{kind}"))
            assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5, (scheme, selector)
        labels = page.value(
            "[...document.querySelectorAll('.node')].filter(one => one.querySelector('text')).map(one => "
            "[getComputedStyle(one.querySelector('text')).fill, getComputedStyle(one.querySelector('circle')).fill])"
        )
        for text, circle in {tuple(pair) for pair in labels}:
            ink, ground = luminance(text), luminance(circle)
            assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 4.0, (scheme, text, circle)
    assert len(papers) == 2


@pytest.mark.parametrize("width", [400, 800, 1100])
def test_the_page_is_never_wider_than_the_window(page, either, width):
    page.open(either, width=width)
    assert page.value("document.documentElement.scrollWidth") <= width


def test_it_prints_on_a4_with_nothing_cut(page, either):
    page.open(either)
    # A4 less two margins of 14 mm, in CSS pixels; what is wider than its own box would be cut on paper.
    width = round((210 - 28) / 25.4 * 96)
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
    page.call("Emulation.setEmulatedMedia", media="print")
    wide = page.value(
        "[...document.querySelectorAll('main *:not(svg *)')].filter(one => one.getClientRects().length &&"
        f" one.getBoundingClientRect().right > {width} + 1).map(one => one.outerHTML.slice(0, 80))"
    )
    cut = page.value(
        "[...document.querySelectorAll('main *:not(svg *)')].filter(one => one.scrollWidth > one.clientWidth + 1 &&"
        " getComputedStyle(one).display !== 'inline').map(one => one.outerHTML.slice(0, 80))"
    )
    drawn = page.value(
        "[...document.querySelectorAll('svg')].flatMap(svg => { const box = svg.viewBox.baseVal; return"
        " [...svg.querySelectorAll('text, circle, rect, path')].map(one => [one, one.getBBox()])"
        ".filter(([one, b]) => !one.getAttribute('transform') && (b.x < -1 || b.y < -1 || b.x + b.width > box.width + 1"
        " || b.y + b.height > box.height + 1)).map(([one]) => one.outerHTML.slice(0, 80)); })"
    )
    page.call("Emulation.setEmulatedMedia", media="")
    assert (wide, cut, drawn) == ([], [], [])
    pdf = page.pdf()
    sizes = {tuple(map(float, box.split())) for box in re.findall(rb"/MediaBox\s*\[([^\]]*)\]", pdf)}
    assert pdf.startswith(b"%PDF")
    assert {(round(box[2]), round(box[3])) for box in sizes} <= {(595, 842), (596, 842), (594, 841), (595, 841)}, sizes
    assert sizes
