"""Calibration in several processes: the same bytes, whoever is killed."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from treeopt.calibrate import processes as module
from treeopt.calibrate.processes import Processes, SharedProgress, joined
from treeopt.calibrate.store import DocumentStore
from treeopt.errors import OtherProcessError, TraceError

# A process that is slow enough to be killed between two documents, with groups of three or so in the second phase. How
# long it waits for the others is short once documents are being finished: starting takes long on a busy machine.
GROUP_TOKENS = 130
SLOW = f"""
import sys, time
from treeopt.calibrate import processes, run, store
from treeopt.cli import main
wait = float(sys.argv.pop(1))
run.OBSERVED_TOKENS = {GROUP_TOKENS}
append, start, started = store.DocumentStore.append, processes._Several.start, []
def slow(self, document, value):
    for one in started:
        one._timeout = wait
    time.sleep(0.04)
    append(self, document, value)
def noting(self):
    start(self)
    started.append(self)
store.DocumentStore.append = slow
processes._Several.start = noting
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def arguments(tiny_directory, tiny_heads_directory, tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "prompts.jsonl"
    texts = [" ".join(str((i * j + j) % 13) for j in range(3 + i % 9)) for i in range(24)]
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt": text}) + "\n" for i, text in enumerate(texts)))
    models = ["--target", tiny_directory, "--heads", tiny_heads_directory, "--prompts", path]
    settings = ["--max-new-tokens", 40, "--batch-size", 3, "--candidates", 3]
    return ["calibrate", *map(str, models), *map(str, settings)]


@pytest.fixture
def whole(run, arguments, monkeypatch, tmp_path):
    """Return the bytes that one undisturbed process writes."""
    monkeypatch.setattr("treeopt.calibrate.run.OBSERVED_TOKENS", GROUP_TOKENS)
    result = run(*arguments, "-o", tmp_path / "whole.safetensors")
    assert result.exit_code == 0, result.output
    return (tmp_path / "whole.safetensors").read_bytes()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(arguments, output, size, wait=60):
    """Start processes as torchrun does, each to be killed by itself."""
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, "-c", SLOW, str(wait), *arguments, "--timeout", "120", "-o", str(output)]
    return [
        subprocess.Popen(
            command,
            env=os.environ | {key: str(value) for key, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def ended(process):
    """Wait for a process; return its exit status, standard output and error lines."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, [line for line in err.splitlines() if line.startswith("Error")]


def ids(path):
    lines = path.read_text().splitlines(keepends=True)[1:] if path.exists() else []
    return {json.loads(line)["id"] for line in lines if line.endswith("\n")}


def test_two_processes_of_torchrun_write_the_bytes_of_one(arguments, whole, tmp_path):
    driver, output = tmp_path / "driver.py", tmp_path / "two.safetensors"
    driver.write_text(SLOW)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(driver), "60", *arguments]
    result = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert output.read_bytes() == whole
    assert result.stdout.count("24 documents, 960 positions, 4 heads") == 1
    assert result.stderr.count("written to") == 1
    assert "24/24" in result.stderr  # the bar counts what both have finished
    assert not (tmp_path / "two.safetensors.partial").exists()


@pytest.mark.parametrize("phase", ["continuations", "ranks"])
def test_a_killed_process_loses_its_unfinished_documents_alone(arguments, whole, tmp_path, monkeypatch, run, phase):
    output, work = tmp_path / "t.safetensors", tmp_path / "t.safetensors.partial"
    first, second = start(arguments, output, 2, wait=4)
    stores = [work / f"{phase}.jsonl", work / f"{phase}.1.jsonl"]
    deadline = time.monotonic() + 180
    while len(ids(stores[1])) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    status, _, errors = ended(first)
    assert status == 1
    assert len(errors) == 1
    assert "run the same command again to go on" in errors[0]
    assert not output.exists()
    kept = [ids(store) for store in stores]
    assert len(kept[1]) >= 4
    assert kept[0].isdisjoint(kept[1])
    assert 24 - 3 <= len(kept[0] | kept[1]) < 24  # the first process goes on alone; the other's group is lost
    shutil.copytree(work, tmp_path / "one.safetensors.partial")

    again = start(arguments, output, 2)
    assert [ended(process)[::2] for process in again] == [(0, []), (0, [])]
    assert output.read_bytes() == whole

    redone, append = [], DocumentStore.append

    def counting(store, document, value):
        redone.extend([document] * (phase in store.path.name))
        append(store, document, value)

    monkeypatch.setattr(DocumentStore, "append", counting)
    assert run(*arguments, "-o", tmp_path / "one.safetensors").exit_code == 0
    assert (tmp_path / "one.safetensors").read_bytes() == whole
    assert set(redone) == {f"p{i}" for i in range(24)} - kept[0] - kept[1]


def test_the_loss_of_the_first_process_ends_the_others_too(arguments, tmp_path):
    first, second = start(arguments, tmp_path / "t.safetensors", 2, wait=4)
    store = tmp_path / "t.safetensors.partial" / "continuations.jsonl"
    deadline = time.monotonic() + 180
    while len(ids(store)) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    status, _, errors = ended(second)
    assert status == 1
    assert len(errors) == 1


def test_an_error_in_one_process_ends_all_with_its_one_line(arguments, tmp_path):
    store = tmp_path / "t.safetensors.partial" / "continuations.1.jsonl"
    store.parent.mkdir()
    with store.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as by another run
        processes = start(arguments, tmp_path / "t.safetensors", 2)
        found = [ended(process) for process in processes]
    assert [status for status, _, _ in found] == [1, 1]
    assert [out for _, out, _ in found] == ["", ""]
    (line,) = [line for _, _, errors in found for line in errors]
    assert "continuations.1.jsonl` is being written by another run" in line


def test_an_error_that_all_have_is_said_once(arguments, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    processes = start([*arguments, "--prompts", str(broken)], tmp_path / "t.safetensors", 3)
    found = [ended(process) for process in processes]
    assert [status for status, _, _ in found] == [1, 1, 1]
    assert len([line for _, _, errors in found for line in errors]) == 1


def test_a_process_that_nobody_joins_does_not_wait_for_ever(monkeypatch):
    for key, value in {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(key, str(value))
    with pytest.raises(TraceError, match=r"did not find each other .* again to go on"), joined("cpu", timeout=0.5):
        pass


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined("cpu") as alone:
        assert (alone.rank, alone.size, alone.device) == (0, 1, "cpu")
        assert list(alone.share("units", 3)) == [0, 1, 2]
        assert alone.least(7) == 7
        assert (alone.count("a", 2), alone.count("a", 3)) == (2, 5)
        alone.meet()
        assert alone.count("a", 0) == 0


def test_nccl_serves_where_every_process_has_a_device_of_its_own(monkeypatch):
    assert module._backend(4, 4) == "nccl"
    assert module._backend(3, 4) == "gloo"
    monkeypatch.setattr(module, "_num_cuda", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert module._own_device("auto") == "cuda:1"
    assert module._own_device("cuda") == "cuda:1"
    assert module._own_device("cuda:0") == "cuda:0"
    assert module._own_device("cpu") == "cpu"
    for per_node, own in (("2", True), ("3", False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", per_node)
        assert module._Several("auto", 1.0)._has_device is own
        assert module._Several("cuda:0", 1.0)._has_device is False


def test_the_bar_shows_what_all_have_finished(capsys):
    processes = Processes()
    with SharedProgress(processes, "things", total=9, done=2) as progress:
        progress.add(documents=1, tokens=5)
        processes.count("documents", 4)  # by others
        progress.refresh()
    assert "7/9" in capsys.readouterr().err


def test_other_processes_errors_are_no_second_line(run, monkeypatch):
    monkeypatch.setattr(module, "joined", lambda *_: (_ for _ in ()).throw(OtherProcessError("said elsewhere")))
    result = run("calibrate")
    assert (result.exit_code, result.output) == (1, "")
