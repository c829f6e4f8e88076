import json
import logging
import re
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tiny_runs import image_folder, signalled_by, tiny_config
from typer.testing import CliRunner

from sa_zoo.cli import app
from sa_zoo.data.progress import say
from sa_zoo.training.config import dump_config

ROOT = Path(__file__).parents[1]


def sa_zoo(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def read(path: Path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "tiny.toml"
    path.write_text(dump_config(tiny_config()))
    return path


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run in the folder that the command chooses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        result = sa_zoo("train", config, "--set", "train.epochs=1")
        assert result.exit_code == 0, result.output
        assert "next: sa-zoo evaluate runs/tiny --detail" in result.stdout
        return Path("runs/tiny").resolve()


def test_help_needs_neither_torch_nor_transformers():
    assert sa_zoo("--version").stdout.strip() == version("sa_zoo")
    code = """
import sys
from sa_zoo.cli import app
app(standalone_mode=False)
assert not {"torch", "timm", "transformers"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code, "train", "--help"], cwd=ROOT, check=True)


ARGS = "train quickstart --out OUT --set model.args="
MISTAKES = {
    "train CONFIG --out OUT --set train.epohcs=3": "train.epohcs: got an unknown key",
    "train CONFIG --set model=3": "model: got 3, expected",
    "train CONFIG --out OUT --data no/🦉": "data.name: got no/🦉, ",
    "train quikstart --out OUT": r"config: got quikstart, .*\(did you mean quickstart\?\)",
    f"{ARGS}{{depth=0}}": "depth: got 0, expected",
    f"{ARGS}{{nosuch=1}}": "model.args: got sa_quadratic_tiny_cifar, which cannot be built: TypeError",
    "evaluate test_vit": "--data: got nothing, expected a data set",
    "convert resnet18_cifra --out OUT": r"model.name: got .*did you mean resnet18_cifar\?",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_and_no_traceback(config, tmp_path, command):
    names = {"CONFIG": config, "OUT": tmp_path / "out"}
    result = sa_zoo(*(names.get(word, word) for word in command.split()))
    assert result.exit_code == 1
    assert re.fullmatch(f"error: {MISTAKES[command]}.*\n", result.stderr), result.stderr
    assert not (tmp_path / "out").exists()


def test_the_terminal_does_not_obey_names(tmp_path, capsys):
    folder = image_folder(tmp_path / "data", {"cat\x1b]0;owned\x07": 3, "dog": 5})
    result = sa_zoo("data", folder)
    assert result.exit_code == 0 and "cat]0;owned" in result.stdout
    assert not {"\x1b", "\x07"} & {*result.stdout, *result.stderr}
    say("cat\x1b[2J")
    assert capsys.readouterr().err == "cat[2J\n"
    record = logging.makeLogRecord({"msg": "cat\x1b[2J"})
    assert logging.lastResort.format(record) == "cat[2J"


def test_an_interrupted_run_says_how_to_resume(config, tmp_path):
    out = tmp_path / "a run"
    arguments = ["train", config, "--out", out, "--set", "train.epochs=12"]
    arguments += ["--set", "data.title=ten digits"]
    with signalled_by(signal.SIGINT, out, "history.jsonl"):
        result = sa_zoo(*arguments)
    assert result.exit_code == 130
    *_, stopped, resume = result.stderr.splitlines()
    assert stopped.startswith("stopped in epoch")
    again = shlex.split(resume.removeprefix("resume with: sa-zoo "))
    assert again == [*map(str, arguments), "--resume"]
    assert sa_zoo(*again).exit_code == 0
    assert read(out / "metrics.json")["train"]["epochs"] == 12


@pytest.mark.parametrize("title", ["digits", "ten"])
def test_evaluating_into_the_metrics_keeps_results_of_the_same_data(run, tmp_path, title):
    out = shutil.copytree(run, tmp_path / "copy")
    before = read(out / "metrics.json")
    change = f"data.title={title}"
    result = sa_zoo("evaluate", out, "--set", change, "--json", out / "metrics.json")
    assert result.exit_code == 0, result.output
    printed, after = json.loads(result.stdout), read(out / "metrics.json")
    assert printed["data"] == title
    assert after["test"] == printed["test"] != before["test"]
    if title != before["data"]:
        del before["validation"]
    assert after == before | {"data": title, "test": after["test"]}


def test_a_script_runs_with_our_names_and_its_own_arguments(tmp_path, monkeypatch):
    (tmp_path / "neighbor.py").write_text("name = 'sa_quadratic_tiny_cifar'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, timm, neighbor\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(f'{timm.is_model(neighbor.name)} {sys.argv[1:]}')\n"
    )
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = sa_zoo("run", script, "--help", "-x", "--model", "a b")
    assert result.output.strip() == f"True {['--help', '-x', '--model', 'a b']}"
    script.write_text("raise ValueError('its own')")
    result = sa_zoo("run", script)
    assert isinstance(result.exception, ValueError)
    assert "error:" not in result.stderr
