"""What other trainers leave becomes a folder that both libraries load and that can be published."""

import pickle
from argparse import Namespace
from pathlib import Path

import pytest
import timm
import torch
from model_folders import make_run
from timm.models import save_for_hf
from timm.utils import CheckpointSaver, ModelEmaV3
from tiny_runs import image_folder
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments
from typer.testing import CliRunner

from sa_zoo.cli import app
from sa_zoo.folders.opened import open_folder
from sa_zoo.interchange.transformers_export import transformers_files
from sa_zoo.publishing.hub import publish
from sa_zoo.verbs.finish import finish_copy

SMALL = {"embed_dim": 7, "depth": 2, "hidden_dim": 11, "num_heads": 3}
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def logits_of(folder, images=IMAGES):
    """By timm and by transformers, which must agree."""
    with torch.no_grad():
        by_timm = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(images)
        by_transformers = AutoModelForImageClassification.from_pretrained(folder)(images).logits
    assert torch.allclose(by_timm, by_transformers, rtol=0, atol=1e-5)
    return by_timm


def check_published(folder, capsys):
    """The folder passes what publishing checks, and nothing in it is a pickle."""
    assert publish(open_folder(folder), "you/x", dry_run=True) is None
    assert "the local checks pass" in capsys.readouterr().out
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".tar")]
    assert {"README.md", "metrics.json", "sha256.json"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["sa_quadratic_tiny_cifar", "resnet_tiny_cifar"])
def test_the_best_checkpoint_of_transformers_trainer_becomes_complete(tmp_path, name, capsys):
    start = make_run(tmp_path / "start", name, **(SMALL if name.startswith("sa_") else {}))
    opened = open_folder(start)
    opened.with_files(transformers_files(opened))
    model = AutoModelForImageClassification.from_pretrained(start)
    examples = [{"pixel_values": image, "labels": i % 10} for i, image in enumerate(IMAGES)]
    accuracies = iter([0.5, 0.9, 0.1])
    left = tmp_path / "left"
    arguments = TrainingArguments(
        output_dir=str(left),
        max_steps=3,
        learning_rate=0.05,
        report_to=[],
        use_cpu=True,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=examples,
        eval_dataset=examples,
        compute_metrics=lambda _: {"accuracy": next(accuracies)},
    )
    trainer.train()
    trainer.save_model()
    assert (left / "training_args.bin").is_file()
    finish_copy(left, tmp_path / "out")
    logits = logits_of(tmp_path / "out")
    assert torch.equal(logits, logits_of(left / "checkpoint-2")), "the best"
    for other in (start, left / "checkpoint-1", left / "checkpoint-3"):
        assert not torch.allclose(logits, logits_of(other), rtol=0, atol=1e-3)
    check_published(tmp_path / "out", capsys)


def timm_checkpoint(folder: Path, args: Namespace | None, ema: bool = False):
    """model_best.pth.tar as timm's train.py writes it, and the network whose weights count."""
    torch.manual_seed(0)
    network = timm.create_model("sa_quadratic_tiny_cifar", num_classes=7, **SMALL)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    averaged = ModelEmaV3(network, decay=0.5) if ema else None
    network(IMAGES).square().sum().backward()
    optimizer.step()
    if averaged:
        averaged.update(network)
    saver = CheckpointSaver(
        network, optimizer, args, averaged, checkpoint_dir=str(folder), decreasing=False
    )
    saver.save_checkpoint(1, metric=70.1)
    return folder / "model_best.pth.tar", (averaged.module if averaged else network).eval()


ARGS = Namespace(
    model="sa_quadratic_tiny_cifar",
    num_classes=7,
    model_kwargs=dict(SMALL),
    in_chans=None,
    gp=None,
    mean=[0.1, 0.2, 0.3],
    opt_betas=None,
    device="cpu",
)


@pytest.mark.parametrize("ema", [False, True])
def test_a_checkpoint_of_timms_trainer_becomes_a_complete_folder(tmp_path, ema, capsys, caplog):
    path, network = timm_checkpoint(tmp_path, ARGS, ema)
    command = ["finish", str(path), "--out", str(tmp_path / "out")]
    names = [f"LABEL_{number}" for number in range(7)]
    if ema:
        names = [str(number) for number in range(5, 12)]
        command += ["--classes", str(image_folder(tmp_path / "data", dict.fromkeys(names, 1)))]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert open_folder(tmp_path / "out").config.get("label_names") == names
    assert ("the model has no names for its 7 classes" in caplog.text) != ema
    with torch.no_grad():
        assert torch.equal(logits_of(tmp_path / "out"), network(IMAGES))
    config = open_folder(tmp_path / "out").config
    assert config["pretrained_cfg"]["mean"] == [0.1, 0.2, 0.3] and config["num_classes"] == 7
    assert f"sa-zoo evaluate {tmp_path / 'out'} --data NAME" in result.stdout
    check_published(tmp_path / "out", capsys)


def test_a_checkpoint_without_arguments_needs_the_name_of_its_model(tmp_path):
    torch.manual_seed(0)
    network = timm.create_model("resnet_tiny_cifar", num_classes=7).eval()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    CheckpointSaver(network, optimizer, checkpoint_dir=str(tmp_path)).save_checkpoint(1, 0.5)
    path = tmp_path / "model_best.pth.tar"
    with pytest.raises(ValueError, match=r"got cifarresnet, expected the timm name .*as --model"):
        finish_copy(path, tmp_path / "out")
    names = tmp_path / "names.txt"
    names.write_text("ant\nbee\n")
    with pytest.raises(ValueError, match="--classes: got 2 names, expected 7"):
        finish_copy(path, tmp_path / "out", "resnet_tiny_cifar", str(names))
    finish_copy(path, tmp_path / "out", "resnet_tiny_cifar")
    with torch.no_grad():
        assert torch.equal(logits_of(tmp_path / "out"), network(IMAGES))


@pytest.mark.parametrize("safe", [False, "both"])
def test_a_folder_of_timms_save_for_hf_becomes_complete(tmp_path, safe, capsys):
    torch.manual_seed(0)
    network = timm.create_model("sa_learned_tiny_cifar", num_classes=3, **SMALL).eval()
    names = {"label_names": ["ant", "bee", "cat"]}
    save_for_hf(network, str(tmp_path / "left"), names, safe_serialization=safe)
    finish_copy(tmp_path / "left", tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(logits_of(tmp_path / "out"), network(IMAGES))
    assert "ant, bee, cat" in (tmp_path / "out" / "README.md").read_text()
    check_published(tmp_path / "out", capsys)


class Bomb:
    def __reduce__(self):
        return print, ("code from a checkpoint ran",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"state_dict": Bomb()}, "expected a complete file that torch"),
        ({"arch": "resnet_tiny_cifar", "state_dict": {"fc.weight": torch.ones(3, 5)}}, "Missing"),
        (
            {
                "arch": "resnet_tiny_cifar",
                "args": Namespace(num_classes=7, model_kwargs={"checkpoint_path": "/etc/passwd"}),
                "state_dict": {},
            },
            "checkpoint_path",
        ),
        (
            {
                "arch": "sa_quadratic_cifar",
                "args": Namespace(num_classes=7, model_kwargs={"embed_dim": 9000}),
                "state_dict": {},
            },
            "more than",
        ),
    ],
    ids=["a program", "others", "path", "size"],
)
def test_a_hostile_or_foreign_checkpoint_is_refused(tmp_path, content, said, capsys):
    path = tmp_path / "model_best.pth.tar"
    torch.save(content, path, pickle_module=pickle)
    with pytest.raises(ValueError, match=f"(?s){said}"):
        finish_copy(path, tmp_path / "out")
    assert "code from a checkpoint ran" not in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == ["model_best.pth.tar"]


def test_a_folder_that_is_no_model_of_timm_is_refused(tmp_path):
    run = make_run(tmp_path / "run", "resnet_tiny_cifar")
    (run / "config.json").write_text('{"model_type": "vit", "architectures": ["ViTModel"]}')
    with pytest.raises(ValueError, match=r"architecture: got .*Field required"):
        finish_copy(run, tmp_path / "out")
    with pytest.raises(FileExistsError, match="expected the name of a new or an empty folder"):
        finish_copy(run, run)
