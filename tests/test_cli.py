import json
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from model_folders import make_run
from safetensors.torch import save_file
from tiny_runs import image_folder, noise_images, parquet_folder, signalled_by, tiny_config
from typer.testing import CliRunner

from sa_zoo.cli import app
from sa_zoo.publishing.folder import read_manifest
from sa_zoo.training.config import dump_config
from sa_zoo.training.splits import StreamedSplit

ROOT = Path(__file__).parents[1]


def sa_zoo(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "tiny.toml"
    path.write_text(dump_config(tiny_config()))
    return path


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run folder, and what training it said."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    result = sa_zoo("train", config, "--out", out, "--set", "train.epochs=1")
    assert result.exit_code == 0, result.output
    return out, result.stdout


def test_help_names_every_command():
    result = sa_zoo("--help")
    assert result.exit_code == 0
    for command in ("train", "evaluate", "run", "convert", "finish", "card", "publish"):
        assert re.search(rf"\b{command}\b", result.stdout)


def test_without_arguments_it_says_what_to_type_first():
    result = sa_zoo()
    assert result.exit_code == 0
    typed = re.findall(r"^  sa-zoo (\S+)(.*?)  ", result.stdout, re.MULTILINE)
    assert len(typed) == 5
    for verb, _ in typed[:-1]:
        assert sa_zoo(verb, "--help").exit_code == 0


def test_the_trained_models_are_listed_with_their_results():
    result = sa_zoo("models")
    rows = [line.split() for line in result.stdout.splitlines()]
    listed = {row[0]: row[1:3] for row in rows if len(row) > 3}
    for folder in (ROOT / "model_cards").iterdir():
        path = folder / "metrics.json"
        metrics = json.loads(path.read_text()) if path.is_file() else {}
        assert (folder.name in listed) == ("test" in metrics)
        if "test" in metrics:
            expected = [f"{metrics['parameters']:,}", f"{metrics['test']['top1']:.2%}"]
            assert listed[folder.name] == expected


def test_the_version_is_that_of_the_package():
    result = sa_zoo("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, version("sa_zoo"))


@pytest.mark.parametrize("verb", [[], ["train"], ["publish"]])
def test_help_appears_within_a_second_of_cpu_time(verb):
    code = """
import resource, sys
from sa_zoo.cli import app
app(standalone_mode=False)
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, {"torch", "timm", "transformers"} & sys.modules.keys())
"""
    command = [sys.executable, "-c", code, *verb, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    seconds, heavy = done.stdout.splitlines()[-1].split()
    assert float(seconds) < 1 and heavy == "set()"


def test_training_says_where_the_run_is_and_what_to_do_next(run):
    out, said = run
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["train"]["epochs"] == 1
    assert f"test_vit on digits: test accuracy {metrics['test']['top1']:.4f} ± 0.0" in said
    assert f"the run is in {out}; next: sa-zoo evaluate {out} --detail" in said


def test_the_data_of_a_run_have_an_option_and_ctrl_c_while_they_are_decoded_a_word(
    config, tmp_path, monkeypatch
):
    def interrupted(split: StreamedSplit, row: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StreamedSplit, "read", interrupted)
    folder = image_folder(tmp_path / "my pictures", {"cat": 23, "owl": 17})
    result = sa_zoo("train", config, "--data", folder, "--out", tmp_path / "run")
    assert result.exit_code == 130 and "stopped by Ctrl-C" in result.stderr
    assert "my pictures, 40 images" in result.stderr and not (tmp_path / "run").exists()


def test_a_run_goes_to_the_folder_of_its_config_by_default(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sa_zoo("train", config, "--set", "train.epochs=1").exit_code == 0
    assert (tmp_path / "runs" / "tiny" / "metrics.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "train.epohcs=3"], "error: train.epohcs: got an unknown key"),
        (["--set", "data.name=./nowhere"], "error: data.name: got ./nowhere"),
        (["--set", "model.name=test_vti"], "error: model.name: got test_vti"),
        (["--resume"], "error: run folder: got"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(config, tmp_path, arguments, said):
    result = sa_zoo("train", config, "--out", tmp_path / "run", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(said)
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_an_unknown_config_names_the_recipes():
    result = sa_zoo("train", "quikstart")
    assert result.exit_code == 1
    assert "got quikstart, expected a TOML file or one of the recipes" in result.stderr
    assert all(path.stem in result.stderr for path in (ROOT / "configs").glob("*.toml"))
    assert "(did you mean quickstart?)" in result.stderr


def test_another_model_of_a_recipe_goes_to_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = "{ img_size = 8, patch_size = 2, num_heads = 1, embed_dim = 16, depth = 1 }"
    changes = ["model.name=test_vit", f"model.args={args}"]
    changes += [
        "data.name=digits",
        "train.epochs=1",
        "train.precision=no",
        "augment.small_epochs=0",
    ]
    result = sa_zoo("train", "tiny", *(part for change in changes for part in ("--set", change)))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "runs" / "tiny-test_vit" / "metrics.json").exists()


def test_an_interrupted_run_says_how_to_resume_and_that_works(config, tmp_path):
    out = tmp_path / "a run"
    arguments = [
        "train",
        config,
        "--out",
        out,
        "--set",
        "train.epochs=12",
        "--set",
        "data.title=ten digits",
    ]
    with signalled_by(signal.SIGINT, out, "history.jsonl"):
        result = sa_zoo(*arguments)
    assert result.exit_code == 130
    stopped, resume = result.stderr.splitlines()
    assert stopped.startswith("stopped in epoch")
    program, *again = shlex.split(resume.removeprefix("resume with: "))
    assert program == "sa-zoo"
    assert again == [*map(str, arguments), "--resume"]
    assert sa_zoo(*again).exit_code == 0
    assert json.loads((out / "metrics.json").read_text())["train"]["epochs"] == 12


def test_evaluating_a_run_gives_its_reported_result(run, tmp_path):
    out, _ = run
    result = sa_zoo("evaluate", out, "--detail", "--json", tmp_path / "result.json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "result.json").read_text())
    assert set(found) == {"model", "data", "test"} and found["model"] == str(out)
    assert found["test"] == json.loads((out / "metrics.json").read_text())["test"]


def test_evaluating_into_the_metrics_of_a_run_changes_the_test_result_only(run, tmp_path):
    out = shutil.copytree(run[0], tmp_path / "copy")
    before = json.loads((out / "metrics.json").read_text())
    result = sa_zoo("evaluate", out, "--json", out / "metrics.json")
    assert result.exit_code == 0, result.output
    after = json.loads((out / "metrics.json").read_text())
    assert (
        after.pop("test") == json.loads(result.stdout)["test"] != before.pop("test")
    )  # without details
    assert after == before and {"train", "validation", "environment"} <= after.keys()
    (out / "metrics.json").unlink()
    assert sa_zoo("evaluate", out, "--json", out / "metrics.json").exit_code == 0
    result = sa_zoo("train", out / "train.toml", "--out", out, "--resume")
    assert result.exit_code == 0 and "test accuracy" in result.stdout, result.output


def test_a_result_that_cannot_be_written_is_printed(run):
    result = sa_zoo("evaluate", run[0], "--json", "no/such/result.json")
    assert result.exit_code == 1 and "no/such/result.json" in result.stderr
    assert json.loads(result.stdout)["test"]["n"] == 354


def test_evaluating_in_detail_on_named_data(run):
    found = json.loads(sa_zoo("evaluate", run[0], "--data", "digits", "--detail").stdout)["test"]
    assert len(found["per_class"]) == len(found["confusion_matrix"]) == 10
    assert 0 <= found["calibration_error"] <= 1


def test_a_label_column_counts_for_the_data_of_the_run_too(run, tmp_path):
    images = parquet_folder(
        tmp_path / "images", {split: noise_images(10) for split in ("train", "test")}, classes=10
    )
    for name in ("config.json", "model.safetensors", "train.toml"):
        text = (
            (run[0] / name).read_bytes().replace(b'name = "digits"', f'name = "{images}"'.encode())
        )
        (tmp_path / name).write_bytes(text)
    result = sa_zoo("evaluate", tmp_path, "--label-column", "nonsense")
    assert (
        result.exit_code == 1
        and "data.label_column: got nonsense, expected one of" in result.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["test_vit"],
            "error: --data: got nothing, expected a data set, as test_vit is not a run folder",
        ),
        (["no_such", "--data", "digits"], "error: model.name: got no_such"),
        (["local-dir:nowhere", "--data", "digits"], "error: model: got nowhere, which is not"),
        (["runs/typo"], "error: model: got runs/typo, which is not there; expected a model folder"),
    ],
)
def test_a_mistaken_evaluation_is_reported(arguments, said):
    result = sa_zoo("evaluate", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(said)


def test_what_nobody_foresaw_is_one_line_and_its_traceback_is_not_lost(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    save_file({"Delta": torch.tensor(1.0)}, folder / "heads.safetensors")  # without epochs
    result = sa_zoo("explore", folder, "--out", tmp_path / "page.html")
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: TypeError in _tensor.py, line ")
    shown = shlex.split(result.stderr[result.stderr.index("python -X dev") :])
    assert shown[:6] == ["python", "-X", "dev", "-m", "sa_zoo", "explore"]
    done = subprocess.run([sys.executable, *shown[1:9]], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.rstrip().splitlines()[-1].startswith("TypeError")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "model.args={ depth = 0 }",
            r"patch_size, .*depth, .*hidden_dim: got \(.*, 0, .*\), expected positive",
        ),
        (
            "model.args={ num_heads = 0.5 }",
            r"patch_size, .*num_heads, .*: got \(.*, 0\.5, .*\), expected positive whole numbers",
        ),
        (
            "model.args={ nosuch = 1 }",
            "model.args: got arguments that .* cannot be built with: TypeError: .*nosuch",
        ),
        ("model.args={ source = 'x' }", "model.args.source: got 'x', expected nothing"),
    ],
)
def test_arguments_that_a_network_cannot_be_built_with(change, said, tmp_path):
    result = sa_zoo("train", "quickstart", "--out", tmp_path / "run", "--set", change)
    assert result.exit_code == 1 and re.match(f"error: {said}", result.stderr), result.stderr
    assert not (tmp_path / "run").exists()


def test_an_error_of_a_script_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("raise ValueError('its own')")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = sa_zoo("run", tmp_path / "script.py")
    assert isinstance(result.exception, ValueError) and "error:" not in result.stderr


def test_a_script_runs_with_our_names_and_its_own_arguments(tmp_path, monkeypatch):
    (tmp_path / "neighbor.py").write_text("name = 'sa_quadratic_tiny_cifar'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, timm, neighbor\n"
        "if __name__ == '__main__':\n"
        "    print(timm.is_model(neighbor.name), sys.argv)\n"
        "    sys.exit(7)\n"
    )
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = sa_zoo("run", script, "--help", "-x", "--model", "a b")
    assert result.exit_code == 7
    assert result.stdout.strip() == f"True {[str(script), '--help', '-x', '--model', 'a b']}"


def test_a_missing_script_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = sa_zoo("run", "none.py")
    assert result.exit_code == 2
    assert re.search(r"none\.py\W+ does not exist", result.stderr)


def test_finishing_a_missing_checkpoint_is_reported(tmp_path):
    arguments = [
        "finish",
        tmp_path / "none.pth",
        "--model",
        "sa_quadratic_cifar",
        "--out",
        tmp_path / "out",
    ]
    result = sa_zoo(*arguments)
    assert result.exit_code == 1
    assert "none.pth" in result.stderr
    assert not (tmp_path / "out").exists()


def test_finishing_a_file_that_is_no_checkpoint_is_reported(tmp_path):
    (tmp_path / "notes.txt").write_text("hello world")  # torch raises a KeyError for it
    options = ["--model", "sa_quadratic_cifar", "--out", tmp_path / "out"]
    result = sa_zoo("finish", tmp_path / "notes.txt", *options)
    assert result.exit_code == 1
    assert re.fullmatch(
        r"error: checkpoint: got .*notes.txt, expected a complete file .*\n", result.stderr
    )
    assert not (tmp_path / "out").exists()


def test_a_converted_run_is_measured_on_the_data_as_the_run_calls_it(tmp_path):
    images = {"train": noise_images(5, (32, 32)), "test": noise_images(7, (32, 32))}
    data = parquet_folder(tmp_path / "data", images, classes=10)
    source = make_run(tmp_path / "run", "resnet_tiny_cifar")
    with (source / "train.toml").open("a") as recipe:
        recipe.write(
            f'[data]\nname = "{data}"\ntitle = "noise"\nrevision = "v5"\n[train]\nepochs = 1\n'
        )
    result = sa_zoo("convert", source, "--out", tmp_path / "out", "--data", data)
    assert result.exit_code == 0, result.output
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["data"], metrics["data_revision"], metrics["test"]["n"]) == ("noise", "v5", 7)
    assert metrics["parameters"] == 783_802 and metrics["baseline"]["model"] == "resnet_tiny_cifar"
    assert "local-dir:out" in (tmp_path / "out" / "explorer.html").read_text()
    assert (
        "`report.md` has the certificate of each layer"
        in (tmp_path / "out" / "README.md").read_text()
    )
    assert "report.md" in read_manifest(tmp_path / "out")


@pytest.mark.parametrize(
    ("data", "said"), [("./nowhere", "got ./nowhere"), ("digits", "got 10 classes, expected 7")]
)
def test_a_conversion_that_cannot_be_measured_is_kept(tmp_path, data, said):
    source = make_run(tmp_path / "run", "resnet_tiny_cifar", num_classes=7)
    (source / "train.toml").unlink()
    result = sa_zoo("convert", source, "--out", tmp_path / "out", "--data", data)
    assert result.exit_code == 1 and said in result.stderr, result.output
    assert f"the conversion is in {tmp_path / 'out'}" in result.stderr
    assert sa_zoo("publish", tmp_path / "out", "--repo-id", "you/x", "--dry-run").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_converting_an_unknown_model_is_reported(tmp_path):
    result = sa_zoo("convert", "resnet18_cifra", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "error: model.name: got resnet18_cifra, expected a model folder or a timm name"
    )
    assert "did you mean resnet18_cifar?" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_scripts_for_accelerate_are_the_same_commands(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(run[0])])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "scripts" / "evaluate.py"), run_name="__main__")
    assert left.value.code in (0, None)
    assert json.loads(capsys.readouterr().out)["test"]["n"] == 354


def test_a_run_folder_has_its_card_and_passes_the_checks_of_publishing(run):
    out, _ = run
    card = (out / "README.md").read_text()
    metrics = json.loads((out / "metrics.json").read_text())
    assert f"{100 * metrics['test']['top1']:.2f} %" in card
    assert (out / "figures" / "learning_curve.png").is_file()
    result = sa_zoo("publish", out, "--repo-id", "you/tiny", "--dry-run")
    assert result.exit_code == 0, result.output
    assert (
        "model.safetensors" in result.stdout
        and "the local checks pass; nothing was sent" in result.stdout
    )


def test_a_card_can_be_rendered_again_and_gives_the_same_bytes(run):
    out, _ = run
    assert sa_zoo("card", out).exit_code == 0
    first = (out / "README.md").read_bytes()
    (out / "figures" / ".x.incomplete").mkdir()
    result = sa_zoo("card", out)
    (out / "figures" / ".x.incomplete").rmdir()
    assert result.exit_code == 0, result.output
    assert (out / "README.md").read_bytes() == first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["card", "nowhere"], "model: got nowhere, which is not there; expected a model folder"),
        (["publish", "nowhere", "--repo-id", "you/x"], "model: got nowhere, which is not there"),
        (["finish", "nowhere", "--out", "OUT"], "model: got nowhere, which is not there"),
    ],
)
def test_a_folder_that_is_not_there_is_reported(arguments, said, tmp_path):
    result = sa_zoo(*(str(tmp_path / "out") if each == "OUT" else each for each in arguments))
    assert result.exit_code == 1
    assert f"error: {said}" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_network_of_this_package_is_left_as_a_folder_of_transformers_too(tmp_path):
    small = [
        "model.args={ depth = 1, embed_dim = 7, hidden_dim = 11, num_heads = 2 }",
        "train.epochs=1",
    ]
    result = sa_zoo(
        "train", "quickstart", "--out", tmp_path / "run", "--set", small[0], "--set", small[1]
    )
    assert result.exit_code == 0, result.output
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(
        tmp_path / "run", trust_remote_code=False
    )
    assert model.config.num_labels == 10 and model.config.hidden_size == 7
