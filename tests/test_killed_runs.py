"""A run that is killed at any moment resumes to the same bits, and no disk failure costs what was there."""

import os
import re
import shutil
import signal

import pytest
from damage import DAMAGES, tmpfs
from killed_runs import (
    EVERYTHING,
    Kill,
    beside,
    differences,
    finish,
    resumed,
    said,
    start,
    state_of,
)
from tiny_runs import tiny_config

from sa_zoo.training.config import dump_config

SAVING = r"open .*\.epoch-00001-step-0000001\.incomplete/[^/]+/\.state\.safetensors"
SAVED = r"rename .*/\.epoch-00001-step-0000000\.incomplete/[^/]+$"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Config, and folder, state and changes of an undisturbed run, by number of processes."""
    folder = tmp_path_factory.mktemp("killed")
    config = folder / "run.toml"
    config.write_text(dump_config(tiny_config(**EVERYTHING)))
    undisturbed = {}
    for processes in (1, 2):
        out = folder / f"whole{processes}"
        resumed(config, out, processes)
        changes = beside(out, "-changes.log").read_text().splitlines()
        undisturbed[processes] = out, state_of(out), changes
    return config, undisturbed


def change(changes: list[str], pattern: str) -> int:
    """Number of the first change that matches."""
    return next(number for number, line in enumerate(changes, start=1) if re.search(pattern, line))


@pytest.mark.parametrize(
    ("number", "pattern", "after", "processes"),
    [
        (signal.SIGKILL, SAVING, 0.001, 1),
        (signal.SIGKILL, SAVED, 0.0, 2),
        (signal.SIGKILL, r"rmtree .*/epoch-00000-step-0000002", 0.0, 1),
        (signal.SIGKILL, r"rename .*/\.model\.safetensors", 0.0, 2),
        (signal.SIGKILL, r"rename .*/\.metrics\.json", 0.002, 1),
        (signal.SIGKILL, r"open .*/\.README\.md", 0.0, 1),
        (signal.SIGTERM, SAVING, 0.0, 2),
        (signal.SIGTERM, r"open .*/\.config\.json", 0.0, 1),
        (signal.SIGINT, SAVED, 0.0, 1),
        (signal.SIGINT, r"rmdir .*/checkpoints$", 0.0, 2),
    ],
)
def test_a_run_killed_anywhere_resumes_to_the_same_bits(
    whole, tmp_path, number, pattern, after, processes
):
    """While it saves a checkpoint, writes the model folder or finishes; weights, optimizer, average, history, files."""
    config, undisturbed = whole
    _, expected, changes = undisturbed[processes]
    out = tmp_path / "run"
    codes = finish(
        start(config, out, Kill(number, change(changes, pattern), after), processes), grace=20
    )
    assert any(codes) and 70 not in codes, (codes, said(out))
    assert (codes[0] == -signal.SIGKILL) == (number == signal.SIGKILL)
    resumed(config, out, processes)
    assert differences(out, expected) == []


def test_the_other_process_says_why_it_stops(whole, tmp_path):
    config, undisturbed = whole
    started = start(
        config, tmp_path / "run", Kill(signal.SIGKILL, change(undisturbed[2][2], SAVING)), 2
    )
    assert finish(started, grace=20) == [-signal.SIGKILL, 1]
    assert (
        "error: another process of the run has ended: its output or the system's log says why"
        in said(tmp_path / "run")
    )


@pytest.fixture(scope="module")
def stopped(whole, tmp_path_factory):
    """The folder of a run that was killed in its second epoch."""
    config, undisturbed = whole
    out = tmp_path_factory.mktemp("stopped") / "run"
    pattern = r"rename .*/\.epoch-00001-step-0000001\.incomplete/[^/]+$"
    finish(start(config, out, Kill(signal.SIGKILL, 1 + change(undisturbed[1][2], pattern))))
    return out


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", ["history.jsonl", "heads.safetensors", "train.toml"])
def test_a_stopped_run_survives_damage_or_names_the_file(whole, stopped, tmp_path, name, how):
    config, undisturbed = whole
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    DAMAGES[how](out / name)
    codes = finish(start(config, out, resume=True))
    if name == "train.toml" and codes == [1]:
        assert re.search(r"^error: .*train\.toml", said(out), re.MULTILINE), said(out)
    else:
        assert codes == [0] and differences(out, undisturbed[1][1]) == [], said(out)


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_to_a_finished_run_is_reported_and_nothing_is_written(whole, tmp_path, how):
    config, undisturbed = whole
    out = tmp_path / "run"
    shutil.copytree(undisturbed[1][0], out)
    DAMAGES[how](out / "model.safetensors")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert finish(start(config, out, resume=True)) == [1]
    assert re.search(
        r"^error: .*model\.safetensors.*sha256|^error: .*model\.safetensors is not there",
        said(out),
        re.M,
    )
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_finished_run_without_its_metrics_is_not_trained_again(whole, tmp_path):
    config, undisturbed = whole
    shutil.copytree(undisturbed[1][0], tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    assert finish(start(config, tmp_path / "run", resume=True)) == [1]
    assert "got a finished run" in said(tmp_path / "run") and "without metrics.json" in said(
        tmp_path / "run"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk of its own")
@pytest.mark.parametrize("state", ["full", "read-only"])
def test_a_full_or_read_only_disk_is_a_clear_error_and_costs_nothing(
    whole, stopped, tmp_path, state
):
    config, undisturbed = whole
    disk = tmp_path / "disk"
    size = (
        sum(path.stat().st_size for path in stopped.rglob("*")) // 1024 + 60
    )  # too little for one checkpoint more
    with tmpfs(disk, f"size={size}k" if state == "full" else "size=64m") as remount:
        out = disk / "run"
        shutil.copytree(stopped, out)
        if state == "read-only":
            remount("ro")
        assert finish(start(config, out, resume=True)) == [1]
        reason = {"full": "No space left on device", "read-only": "Read-only file system"}[state]
        assert re.search(rf"^error: .*{reason}: '{out}/", said(out), re.MULTILINE), said(out)
        assert all(path.stat().st_size for path in out.rglob("*"))
        remount("rw,size=64m")
        resumed(config, out)
        assert differences(out, undisturbed[1][1]) == []
