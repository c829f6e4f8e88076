"""gpu_day.py: time is shared, work continues where it was, and the plan of a run follows from what was measured."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.metadata import distribution, distributions
from pathlib import Path

import gpu_measure
import gpu_train
import pytest
import torch
from gpu_bundle import installed, main
from gpu_day import Clock, Step, run_steps, steps_of
from gpu_plan import REHEARSAL, SCALE, Day, Record
from gpu_train import MARGIN, Timing, compile_mode, rates, recipe, train_model
from tiny_runs import noise_images, parquet_folder

from sa_zoo.folders.write import write_json
from sa_zoo.training.device import open_accelerator
from sa_zoo.training.optimization import learning_rate_factor

ROOT = Path(__file__).parents[1]


@pytest.fixture
def day(tmp_path):
    return Day(tmp_path, "digits", "", torch.device("cpu"), replace(SCALE, images=None))


def test_a_day_that_is_killed_ten_times_continues_and_ends(tmp_path):
    """At random moments of computing time, with the same seed on every machine."""
    command = [sys.executable, "tests/killed_day.py", str(tmp_path), "1"]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    *killed, last = json.loads((tmp_path / "states.json").read_text())
    assert len(killed) == 10 and all(state["code"] < 0 for state in killed)
    assert last["code"] == 0
    for before, after in zip(killed, [*killed[1:], last], strict=True):
        assert set(before["finished"]) <= set(after["finished"])
        assert before["epochs"] in (None, after["epochs"]), "the plan of a run is kept"
    assert last["finished"] == [
        "benchmark",
        "check",
        "profile",
        "rates",
        "report",
        "thresholds",
        "train-sa_quadratic_tiny_cifar",
    ]
    out = tmp_path / "day"
    for name in last["finished"]:
        assert "error" not in Record(out, name).found
    run = out / "runs" / "sa_quadratic_tiny_cifar"
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, last["epochs"] + 1))
    plan = Record(out, "train-sa_quadratic_tiny_cifar").found
    last_step = 1 - 1 / (2 * last["epochs"])  # 18 images to train on are two steps of 8
    factor = learning_rate_factor(last_step, 0, 1, 0.1)
    assert lines[-1]["lr"] == pytest.approx(plan["rate"] * factor), "the cosine ends with the run"
    entry = out / "model_cards" / "sa_quadratic_tiny_cifar"
    assert (entry / "check.json").is_file() and (entry / "README.md").is_file()
    text = (out / "report.md").read_text()
    for part in (
        "rehearsal",
        "one layer of sa_quadratic_tiny_cifar, 7x7 tokens",
        f"{plan['rate']:g}",
    ):
        assert part in text
    assert "## Errors\n\nNone." in text


class Time:
    """A clock that only steps move."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_share_the_time_that_is_left(day):
    now, left = Time(), {}

    def run(day, record):
        left[record.name] = record.left()
        now.now += {"a": 100.0, "b": 1500.0, "c": 0.0}[record.name]

    steps = [Step("a", 1, run), Step("b", 2, run), Step("c", 2, run)]
    assert run_steps(day, steps, Clock(day.out / "clock.json", 1000.0, now))
    # a fifth; half of the 900 seconds that are left; nothing
    assert left == {"a": 200.0, "b": 450.0, "c": 0.0}


def test_a_failed_step_is_recorded_and_the_others_follow_in_the_next_process(day):
    ran = []

    def run(day, record):
        ran.append(record.name)
        record.add(found=len(ran))
        if record.name == "a":
            raise RuntimeError("out of memory")

    steps = [Step(name, 1, run) for name in ("a", "b")]
    clock = Clock(day.out / "clock.json", 60.0)
    assert not run_steps(day, steps, clock)
    assert ran == ["a"]
    assert run_steps(day, steps, clock)
    assert run_steps(day, steps, clock)
    assert ran == ["a", "b"]
    expected = {"found": 1, "error": "RuntimeError: out of memory", "finished": True}
    assert Record(day.out, "a").found == expected


def test_time_between_two_calls_does_not_count(tmp_path):
    now = Time()
    write_json(tmp_path / "clock.json", {"seconds": 30.0})
    clock = Clock(tmp_path / "clock.json", 100.0, now)
    now.now += 7.0
    assert (clock.used(), clock.left()) == (37.0, 63.0)


def test_models_that_timm_does_not_know_are_left_out(day):
    scale = replace(day.scale, trained={"sa_quadratic_cifar": 8, "sa_unknown_cifar": 4})
    names = [step.name for step in steps_of(replace(day, scale=scale))]
    assert names[:2] == ["check", "benchmark"] and names[-1] == "report"
    assert [name for name in names if name.startswith("train-")] == ["train-sa_quadratic_cifar"]


@pytest.mark.parametrize("seconds", [480.0, 97.0])
def test_a_run_has_as_many_epochs_as_fit(seconds):
    measured = Timing(epoch=3.7, rest=41.0, steps=79)
    epochs = measured.epochs_in(seconds)
    assert 41.0 + 3.7 * epochs <= MARGIN * seconds < 41.0 + 3.7 * (epochs + 1)


def test_a_run_has_at_least_one_epoch():
    assert Timing(epoch=3.7, rest=41.0, steps=79).epochs_in(5.0) == 1


def test_the_recipe_is_that_of_the_small_models(day):
    short = recipe(day, "sa_quadratic_cifar", 0.006, 23)
    assert (short.optim.name, short.optim.lr, short.train.precision) == ("muon", 0.006, "bf16")
    assert short.train.batch_size == SCALE.batch
    assert (short.augment.small_epochs, short.augment.mixup) == (14, 0.0)
    long = recipe(day, "sa_quadratic_cifar", 0.006, 144)
    assert (long.augment.small_epochs, long.augment.mixup, long.augment.cutmix) == (88, 0.8, 1.0)
    # images of one size only
    assert recipe(day, "sa_learned_cifar", 0.006, 23).augment.small_epochs == 0


def test_the_first_model_is_timed_again_where_another_rate_was_chosen(day, tmp_path):
    images = {"train": noise_images(20, (32, 32)), "test": noise_images(7, (32, 32))}
    data = parquet_folder(tmp_path / "data", images, classes=10)
    model = "sa_quadratic_tiny_cifar"
    small = replace(REHEARSAL, trained={model: 8}, batch=8, images=None)
    day = replace(day, data=str(data), scale=small)
    rates(day, Record(day.out, "rates", left=lambda: 1.0))
    chosen = day.scale.rates[1]
    Record(day.out, "rates").add(rate=chosen)
    record = Record(day.out, f"train-{model}", left=lambda: 1.0)
    train_model(day, record)
    assert record.found["rate"] == chosen and record.found["seconds_per_epoch"] > 0.0
    assert (day.out / "runs" / model / "metrics.json").is_file()


@pytest.mark.parametrize(("speed", "mode"), [(1.5, "reduce-overhead"), (1.05, "")])
def test_a_network_is_compiled_if_that_was_measured_to_pay(day, speed, mode):
    row = {"model": "m", "phase": "training, bfloat16", "subject": "as built", "speed": 1.0}
    compiled = {**row, "subject": "compiled", "speed": speed}
    write_json(day.out / "speed.json", {"runs": [{"rows": [row, compiled]}]})
    assert compile_mode(day, "m") == mode
    assert compile_mode(day, "another") == ""


def test_compiling_is_left_to_accelerate(monkeypatch):
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)
    with gpu_train.compiled("reduce-overhead"):
        assert open_accelerator().state.dynamo_plugin.mode == "reduce-overhead"
    with gpu_train.compiled(""):
        assert open_accelerator().state.dynamo_plugin.backend.value == "NO"
    assert "ACCELERATE_DYNAMO_BACKEND" not in os.environ


def test_the_check_reports_differences_that_are_too_large(day, monkeypatch):
    found = gpu_measure.compared("sa_quadratic_tiny_cifar", day.device)
    assert found["float32"] == {"differences": [0.0, 0.0], "within": True}
    logits, gradients = found["bfloat16"]["differences"]
    assert 1e-4 < logits < 0.05 and 1e-4 < gradients < 0.3 and found["bfloat16"]["within"]
    limits = {"float32": (0.0, 0.0), "bfloat16": (1.0, 1e-4)}
    monkeypatch.setattr(gpu_measure, "LIMITS", limits)
    found = gpu_measure.compared("sa_quadratic_tiny_cifar", day.device)
    assert found["float32"]["within"] and not found["bfloat16"]["within"]


def test_thresholds_are_the_largest_size_at_which_the_definition_is_faster(day):
    speeds = {8: 0.5, 11: 1.1, 12: 0.9, 16: 1.2}
    rows = [
        {
            "model": f"one layer of sa_quadratic_tiny_cifar, {side}x{side} tokens",
            "phase": f"{phase}, bfloat16",
            "subject": subject,
            "speed": speed if subject == "by axes" and phase == "training" else 1.0,
        }
        for phase in ("inference", "training")
        for side, speed in speeds.items()
        for subject in ("by axes", "definition")
    ]
    record = Record(day.out, "thresholds")
    record.add(rows=rows)
    scale = replace(REHEARSAL, sides=tuple(speeds))
    gpu_measure.thresholds(replace(day, scale=scale), record)
    assert record.found["above"] == {"inference, bfloat16": 0, "training, bfloat16": 144}
    assert record.found["rows"] == rows, "nothing was measured again"


def wheel_of(name: str, folder: Path, requires: str = "") -> None:
    """Pack a package of this environment as a wheel again, with one more requirement if there is one."""
    package = distribution(name)
    stem = f"{name.replace('-', '_')}-{package.version}"
    metadata = package.read_text("METADATA")
    if requires:
        metadata = metadata.replace("\nName:", f"\nRequires-Dist: {requires}\nName:", 1)
    files = {f"{stem}.dist-info/METADATA": metadata.encode()}
    files[f"{stem}.dist-info/WHEEL"] = package.read_text("WHEEL").encode()
    for path in package.files:
        if path.suffix == ".py" and ".." not in path.parts:
            files[str(path)] = path.read_binary()
    record = []
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            record.append(f"{path},sha256={digest.decode()},{len(content)}")
        wheel.writestr(f"{stem}.dist-info/RECORD", "\n".join(record))


def test_a_bundle_has_what_a_machine_lacks_and_runs_there(tmp_path, monkeypatch):
    """tomli-w is missing there, and annotated-doc with it, which it is made to require."""
    index = tmp_path / "index"
    index.mkdir()
    wheel_of("tomli-w", index, requires="annotated-doc")
    wheel_of("annotated-doc", index)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    there = {package.name: package.version for package in distributions()}
    lines = [f"{name}=={version}" for name, version in there.items()]
    lacking = [line for line in lines if not line.lower().startswith(("tomli", "annotated-doc"))]
    (tmp_path / "have.txt").write_text("\n".join(lacking))
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar" / "train.parquet").write_bytes(b"images")
    bundle = tmp_path / "bundle"
    python = ".".join(map(str, sys.version_info[:2]))
    main(bundle, tmp_path / "have.txt", tmp_path / "cifar", python)
    wheels = sorted(path.name.partition("-")[0] for path in (bundle / "wheels").iterdir())
    assert wheels == ["annotated_doc", "tomli_w"]
    assert (bundle / "data" / "train.parquet").read_bytes() == b"images"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    metrics = (bundle / "sources" / "sa_zoo" / "folders" / "metrics.py").read_text()
    assert f'ARCHIVED = "{commit.stdout.strip()}"' in metrics
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    for _ in range(2):  # the second call installs nothing
        done = subprocess.run(
            ["sh", str(bundle / "run.sh"), "--help"],
            cwd=tmp_path,
            env={"PATH": path, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert "--minutes" in done.stdout, done.stderr
    assert {"tomli_w", "annotated_doc"} <= {each.name for each in (bundle / "site").iterdir()}


def test_versions_are_read_from_a_list_of_packages():
    found = installed("torch==2.11.0+cu130\nTyping_Extensions==4.16\n-e git+https://example.org\n")
    assert {name: version.public for name, version in found.items()} == {
        "torch": "2.11.0",
        "typing-extensions": "4.16",
    }
