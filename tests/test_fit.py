"""fit() leaves what `sa-zoo train` leaves, from a checkout and from an installation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_folders import make_run
from test_paper_checkpoint import reference_state
from tiny_runs import tiny_config
from typer.testing import CliRunner

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.cli import app
from sa_zoo.folders.metrics import read_metrics
from sa_zoo.folders.opened import open_folder, open_model
from sa_zoo.training.config import DataConfig, dump_config
from sa_zoo.training.evaluate import evaluate_opened
from sa_zoo.verbs.convert import convert_model
from sa_zoo.verbs.finish import finish_copy
from sa_zoo.verbs.fit import fit

ROOT = Path(__file__).parents[1]
SMALL = {"embed_dim": 7, "depth": 2, "hidden_dim": 11, "num_heads": 3}
TIMES = re.compile(rb'("?(?:train\.)?(?:seconds|images_per_second)"?(?:: | \| ))[\d.e+-]+')


def without_times(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, with its measured seconds and rates masked; the learning curve does not show them."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    card = re.sub(
        rb"\| train\.(seconds|cpu_seconds|images_per_second) \| [\d.]+ \|", b"", files["README.md"]
    )
    del files["sha256.json"]  # has the sum of history.jsonl, which holds times
    return {name: TIMES.sub(rb"\1*", content) for name, content in files.items()} | {
        "README.md": card
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = tiny_config(
        model={"name": "sa_quadratic_tiny_cifar", "args": SMALL}, data={"image_size": 16}
    )
    out = tmp_path_factory.mktemp("runs") / "run"
    fit(config, out)
    return config, out


def test_a_run_from_python_leaves_the_folder_of_the_command_byte_for_byte(run, tmp_path):
    config, out = run
    (tmp_path / "run.toml").write_text(dump_config(config))
    result = CliRunner().invoke(
        app, ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]
    )
    assert result.exit_code == 0, result.output
    ours, theirs = without_times(out), without_times(tmp_path / "run")
    assert ours == theirs
    assert {
        *(
            f"figures/{name}.png"
            for name in (
                "learning_curve",
                "head_positions",
                "head_paths",
                "head_maps",
                "head_depth",
            )
        ),
        *(
            "README.md",
            "config.json",
            "figures/confusion_matrix.png",
            "figures/reliability.png",
            "history.jsonl",
        ),
        *(
            "metrics.json",
            "model.safetensors",
            "modeling_sa.py",
            "preprocessor_config.json",
            "train.toml",
        ),
        "explorer.html",
    } <= set(ours)


def files(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("data", ["", "digits"])
def test_a_conversion_from_python_leaves_the_folder_of_the_command_byte_for_byte(tmp_path, data):
    cnn = make_run(tmp_path / "cnn", "resnet_tiny_cifar", channels=(3, 3, 5, 5))
    (cnn / "train.toml").unlink()
    python, command = tmp_path / "python" / "out", tmp_path / "command" / "out"
    converted, report = convert_model(str(cnn), python, alpha=7.0, data=data)
    result = CliRunner().invoke(
        app, ["convert", str(cnn), "--out", str(command), "--alpha", "7", "--data", data]
    )
    assert result.exit_code == 0, result.output
    assert files(python) == files(command)
    assert {"README.md", "explorer.html", "report.md", "sha256.json"} <= files(python).keys()
    assert result.stdout.startswith(report.table())
    assert result.stdout.splitlines()[-1].startswith("test accuracy 0.") == bool(data)
    assert converted.folder == python and bool(converted.metrics.test) == bool(data)
    if data:
        before = evaluate_opened(open_folder(cnn), DataConfig(name=data)).test
        after = evaluate_opened(open_folder(python), DataConfig(name=data)).test
        assert before.loss != after.loss
        assert (converted.metrics.baseline.test, converted.metrics.test) == (before, after)
    assert open_folder(python).metrics == converted.metrics


def test_a_checkpoint_of_the_paper_becomes_a_complete_folder_from_python_too(tmp_path):
    path = tmp_path / "final.checkpoint"
    torch.save({"model_state_dict": reference_state("isotropic")}, path)
    model = "sa_quadratic_cifar"
    python, command = tmp_path / "python" / "out", tmp_path / "command" / "out"
    converted = finish_copy(path, python, model)
    result = CliRunner().invoke(app, ["finish", str(path), "--model", model, "--out", str(command)])
    assert result.exit_code == 0, result.output
    assert files(python) == files(command) and converted.folder == python
    assert {"README.md", "explorer.html", "modeling_sa.py", "sha256.json"} <= files(python).keys()


@pytest.mark.parametrize(
    "kind", ["quadratic_gen", "quadratic_kernel", "learned", "content", "absolute", "eq8", "mixed"]
)
def test_a_run_of_each_kind_of_attention_is_finished(tmp_path, kind):
    model = {"name": f"sa_{kind}_tiny_cifar", "args": SMALL}
    fit(tiny_config(model=model, data={"image_size": 16}, train={"epochs": 1}), tmp_path / "run")
    left = {path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*")}
    assert {
        "README.md",
        "explorer.html",
        "figures/head_maps.png",
        "modeling_sa.py",
        "sha256.json",
    } <= left


def test_a_finished_run_is_left_alone(run):
    config, out = run
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    fit(config, out, resume=True)
    for verb in (["card", str(out)], ["publish", str(out), "--repo-id", "you/tiny", "--dry-run"]):
        result = CliRunner().invoke(app, verb)
        assert result.exit_code == 0, result.output
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_run_is_evaluated_as_it_was_trained_with_and_without_its_config(run):
    config, out = run
    reported = read_metrics(out).test
    for data in (config.data, DataConfig(name="digits")):
        assert evaluate_opened(open_model(str(out)), data, detail=True).test == reported


def test_an_installation_without_a_checkout_trains_by_the_name_of_a_recipe(tmp_path):
    """`pip install`, then `accelerate launch` from a folder in which there is nothing."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-compile",
    ]
    source = tmp_path / "source"
    source.mkdir()
    for name in (
        "sa_zoo",
        "configs",
        "model_cards",
        "results",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
    ):
        (source / name).symlink_to(ROOT / name)  # so that the build leaves nothing in the checkout
    subprocess.run([*pip, f"--target={tmp_path / 'site'}", str(source)], check=True)
    assert {path.name for path in (tmp_path / "site" / "sa_zoo" / "recipes").iterdir()} == {
        path.name for path in (ROOT / "configs").glob("*.toml")
    }
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    arguments = ["train", "quickstart", "--out", "run", "--set", "train.epochs=1"]
    arguments += [
        "--set",
        "model.args={ depth = 1, embed_dim = 7, hidden_dim = 11, num_heads = 2 }",
    ]
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes=1",
        "--num_machines=1",
    ]
    launch += ["--cpu", "--mixed_precision=no", "--dynamo_backend=no"]
    done = subprocess.run(
        [*launch, "-m", "sa_zoo", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "sa_quadratic_tiny_cifar on digits: test accuracy" in done.stdout
    assert (tmp_path / "run" / "README.md").is_file()
    assert (tmp_path / "run" / "explorer.html").is_file(), (
        "its scripts and styles are installed too"
    )
