"""What other trainers leave becomes a folder that both libraries load and that can be published."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import timm
import torch
from hostile import change_config
from model_folders import make_run
from safetensors.torch import save_file
from timm.models import save_for_hf
from timm.utils import CheckpointSaver, ModelEmaV3
from tiny_runs import image_folder
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
)
from typer.testing import CliRunner

import sa_zoo
from sa_zoo.cli import app
from sa_zoo.publishing.transformers_export import transformers_files

pytestmark = pytest.mark.usefixtures("without_figures")
SMALL = {"embed_dim": 7, "depth": 2, "hidden_dim": 11, "num_heads": 3}
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def logits_of(folder, images=IMAGES):
    """By timm and by transformers, which must agree."""
    with torch.no_grad():
        by_timm = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(images)
        by_transformers = AutoModelForImageClassification.from_pretrained(folder)(images).logits
    assert torch.allclose(by_timm, by_transformers, rtol=0, atol=1e-5)
    return by_timm


def finished_as(network, out, source, *more):
    """`finish` of what is left at `source` gives the logits of the network."""
    finished = sa_zoo.finish(source, out, *more)
    with torch.no_grad():
        assert torch.equal(logits_of(out), network(IMAGES))
    return finished


def ready(folder, name):
    """A run of the named network with the files of transformers."""
    make_run(folder, name, **(SMALL if name.startswith("sa_") else {}))
    if name.startswith("resnet"):  # timm alone has this crop
        change_config(pretrained_cfg__crop_mode="squash")(folder)
    opened = sa_zoo.open(folder)
    opened.with_files(transformers_files(opened))
    return folder


def check_published(folder):
    """The folder passes what publishing checks, and nothing in it is a pickle."""
    assert sa_zoo.publish(folder, "you/x", dry_run=True) is None
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".tar")]
    assert {"README.md", "metrics.json", "sha256.json"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["sa_quadratic_tiny_cifar", "resnet_tiny_cifar"])
def test_the_best_checkpoint_of_hf_trainer_becomes_complete(tmp_path, name):
    start = ready(tmp_path / "start", name)
    examples = [{"pixel_values": image, "labels": i % 10} for i, image in enumerate(IMAGES)]
    accuracies = iter([0.5, 0.9, 0.1])
    left = tmp_path / "left"
    arguments = TrainingArguments(
        str(left),
        max_steps=3,
        learning_rate=0.05,
        report_to=[],
        use_cpu=True,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
    )
    trainer = Trainer(
        AutoModelForImageClassification.from_pretrained(start),
        arguments,
        train_dataset=examples,
        eval_dataset=examples,
        compute_metrics=lambda _: {"accuracy": next(accuracies)},
    )
    trainer.train()
    trainer.save_model()
    assert (left / "training_args.bin").is_file()
    sa_zoo.finish(left, tmp_path / "out")
    logits = logits_of(tmp_path / "out")
    assert torch.equal(logits, logits_of(left / "checkpoint-2")), "the best"
    assert not torch.allclose(logits, logits_of(left / "checkpoint-3"), rtol=0, atol=1e-3)
    check_published(tmp_path / "out")


def timm_checkpoint(folder: Path, args: Namespace | None, ema: bool = False):
    """model_best.pth.tar as timm's train.py writes it, and the network whose weights count."""
    torch.manual_seed(0)
    network = timm.create_model("sa_quadratic_tiny_cifar", num_classes=7, **SMALL)
    averaged = ModelEmaV3(network, decay=0.5) if ema else None
    if averaged:
        torch.nn.init.ones_(network.head.bias)
        averaged.update(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    saver = CheckpointSaver(network, optimizer, args, averaged, checkpoint_dir=str(folder))
    saver.save_checkpoint(1, metric=70.1)
    return folder / "model_best.pth.tar", (averaged.module if averaged else network).eval()


ARGS = Namespace(
    model="sa_quadratic_tiny_cifar",
    num_classes=7,
    model_kwargs=dict(SMALL),
    in_chans=None,
    mean=[0.1, 0.2, 0.3],
    device="cpu",
)


@pytest.mark.parametrize("ema", [False, True])
def test_a_checkpoint_of_timms_trainer_becomes_complete(tmp_path, ema, caplog):
    path, network = timm_checkpoint(tmp_path, ARGS, ema)
    command = ["finish", str(path), "--out", str(tmp_path / "out")]
    names = [f"LABEL_{number}" for number in range(7)]
    if ema:
        names = [str(number) for number in range(5, 12)]
        command += ["--classes", str(image_folder(tmp_path / "data", dict.fromkeys(names, 1)))]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert ("the model has no names for its 7 classes" in caplog.text) != ema
    with torch.no_grad():
        assert torch.equal(logits_of(tmp_path / "out"), network(IMAGES))
    config = sa_zoo.open(tmp_path / "out").config
    assert config["label_names"] == names
    assert config["pretrained_cfg"]["mean"] == [0.1, 0.2, 0.3] and config["num_classes"] == 7
    assert f"sa-zoo evaluate {tmp_path / 'out'} --data NAME" in result.stdout
    check_published(tmp_path / "out")


def test_a_checkpoint_without_a_name_needs_one(tmp_path):
    network = timm.create_model("resnet_tiny_cifar", num_classes=7).eval()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    CheckpointSaver(network, optimizer, checkpoint_dir=str(tmp_path)).save_checkpoint(1, 0.5)
    path = tmp_path / "model_best.pth.tar"
    with pytest.raises(ValueError, match=r"got cifarresnet, expected the timm name .*as --model"):
        sa_zoo.finish(path, tmp_path / "out")
    names = tmp_path / "names.txt"
    names.write_text("ant\nbee\n")
    with pytest.raises(ValueError, match="--classes: got 2 names, expected 7"):
        sa_zoo.finish(path, tmp_path / "out", "resnet_tiny_cifar", str(names))
    finished_as(network, tmp_path / "out", path, "resnet_tiny_cifar")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_bare_state_dict_becomes_complete(tmp_path, suffix):
    """As timm's avg_checkpoints.py and clean_checkpoint.py write it."""
    network = timm.create_model("test_resnet", num_classes=7).eval()
    write = torch.save if suffix == ".pth" else save_file
    write({**network.state_dict()}, tmp_path / f"averaged{suffix}")
    finished_as(network, tmp_path / "out", tmp_path / f"averaged{suffix}", "test_resnet")
    # timm's weights of this name have one
    assert "license: unknown" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("safe", [False, "both"])
def test_a_folder_of_timms_save_for_hf_becomes_complete(tmp_path, safe):
    torch.manual_seed(0)
    network = timm.create_model("sa_learned_tiny_cifar", num_classes=3, **SMALL).eval()
    names = {"label_names": ["crane", "bee", "crane"]}  # two, as in ImageNet
    save_for_hf(network, str(tmp_path / "left"), names, safe_serialization=safe)
    finished_as(network, tmp_path / "out", tmp_path / "left")
    assert "crane, bee, crane" in (tmp_path / "out" / "README.md").read_text()
    check_published(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "kind", "labels"),
    [
        ("sa_quadratic_tiny_cifar", "multi_label_classification", 3),
        ("resnet_tiny_cifar", "regression", 1),
    ],
)
def test_what_transformers_config_says_is_kept(tmp_path, name, kind, labels):
    """A new head, in two files of weights."""
    settings = {"hidden_dropout_prob": 0.2} if name.startswith("sa_") else {}
    model = AutoModelForImageClassification.from_pretrained(
        ready(tmp_path / "start", name),
        ignore_mismatched_sizes=True,
        num_labels=labels,
        problem_type=kind,
        **settings,
    ).eval()
    size = sum(value.nbytes for value in model.state_dict().values())
    model.save_pretrained(tmp_path / "left", max_shard_size=size * 2 // 3)
    assert len(list((tmp_path / "left").glob("*.safetensors"))) == 2
    network = sa_zoo.finish(tmp_path / "left", tmp_path / "out").network
    with torch.no_grad():
        expected = model(pixel_values=IMAGES).logits
    assert torch.allclose(logits_of(tmp_path / "out"), expected, rtol=0, atol=1e-6)
    names = network.pretrained_cfg.get("label_names") or ()
    assert len(names) in (0, labels), "not those of the old head"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.items() >= {"problem_type": kind, **settings}.items()


def test_code_in_a_folder_does_not_run(tmp_path):
    start = make_run(tmp_path / "start", "resnet_tiny_cifar")
    change_config(model_type="bert", auto_map={"AutoImageProcessor": "proc.Proc"})(start)
    (start / "preprocessor_config.json").write_text("{}")
    (start / "proc.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'x')")
    result = CliRunner().invoke(app, ["card", str(start)], input="y\n")
    assert result.exit_code == 1 and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("image_mean", [0.1, 0.9, 0.5]), ("do_center_crop", False)]
)
def test_an_image_processor_unlike_timms_transform_is_refused(tmp_path, key, value):
    start = ready(tmp_path / "start", "sa_quadratic_tiny_cifar")
    processor = AutoImageProcessor.from_pretrained(start)
    setattr(processor, key, value)
    processor.save_pretrained(start)
    with pytest.raises(ValueError, match=f"preprocessor_config.json: got {key} "):
        sa_zoo.finish(start, tmp_path / "out")
