from dataclasses import replace

import pytest

from treeopt import best_tree
from treeopt.errors import LatencyError, TraceError
from treeopt.latency import LatencyTable
from treeopt.profiling import ProfileSettings, profile
from treeopt.show import describe_latency

LARGEST = best_tree([[0.4, 0.2, 0.1]] * 4, 16)
SETTINGS = ProfileSettings(nodes=(1, 2, 4, 16), batches=(1, 2), contexts=(8, 20), repeats=3)


def test_every_pair_gives_a_curve_of_positive_times(tiny_loaded, tiny_heads, tmp_path):
    table = profile(tiny_loaded, tiny_heads, LARGEST, SETTINGS, tmp_path / "work")
    assert [(curve.batch, curve.context) for curve in table.curves] == [(1, 8), (1, 20), (2, 8), (2, 20)]
    for curve in table.curves:
        assert curve.nodes.tolist() == [1, 2, 4, 16]
        assert (curve.seconds > 0).all()
        assert len(curve.draft_seconds) == LARGEST.tree.max_depth
        assert all(low <= high for low, high in curve.quartiles)
    assert table.metadata["target"] == tiny_loaded.name
    assert table.metadata["dtype"] == "float32"
    table.write(tmp_path / "latency.json")
    assert LatencyTable.read(tmp_path / "latency.json").curve(2, 20).context == 20
    text = describe_latency(table)
    assert "batch 2, context 20: ms a step" in text
    assert "drafting 1, 2, … levels" in text


def test_finished_curves_are_kept_by_an_interrupted_run(tiny_loaded, tiny_heads, tmp_path, monkeypatch):
    from treeopt import profiling

    measure, taken = profiling._Timer.measure, []

    def stopping(self, repeats):
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append((self.batch, self.context))
        return measure(self, repeats)

    with monkeypatch.context() as patch:
        patch.setattr(profiling._Timer, "measure", stopping)
        with pytest.raises(KeyboardInterrupt):
            profile(tiny_loaded, tiny_heads, LARGEST, SETTINGS, tmp_path / "work")
    resumed = []
    monkeypatch.setattr(profiling._Timer, "measure", lambda self, r: resumed.append(self.context) or measure(self, r))
    assert len(profile(tiny_loaded, tiny_heads, LARGEST, SETTINGS, tmp_path / "work").curves) == 4
    assert resumed == [8, 20]
    with pytest.raises(TraceError, match=r"another repeats"):
        profile(tiny_loaded, tiny_heads, LARGEST, replace(SETTINGS, repeats=5), tmp_path / "work")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ProfileSettings(nodes=(2, 4)), r"`nodes` lacks 1, plain decoding; add it"),
        (ProfileSettings(nodes=(1, 16), contexts=(250,)), r"reach 266 tokens, but the target ends at 256; give less"),
    ],
)
def test_what_cannot_be_measured_is_refused(tiny_loaded, tiny_heads, tmp_path, settings, message):
    with pytest.raises(LatencyError, match=message):
        profile(tiny_loaded, tiny_heads, LARGEST, settings, tmp_path / "work")
