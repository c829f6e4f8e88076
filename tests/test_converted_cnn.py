"""converted_folder.py: a trained CNN in, a folder of its backbone out."""

import json

import pytest
import timm
import torch
from model_folders import load_model, make_run
from safetensors.torch import save_file
from timm.models._hub import save_config_for_hf
from transformers import TimmWrapperConfig

from sa_zoo.folders.opened import open_folder
from sa_zoo.interchange.converted_cnn import write_converted


@pytest.fixture
def run(tmp_path):
    """A folder of a CNN, as a training run leaves it, and its network."""

    def make(name, **arguments):
        torch.manual_seed(0)
        network = timm.create_model(name, **arguments).eval()
        folder = tmp_path / name
        folder.mkdir()
        weights = {
            key: torch.rand_like(value) if value.ndim == 1 else value
            for key, value in network.state_dict().items()
        }
        network.load_state_dict(weights)
        save_file(
            {key: value.contiguous() for key, value in weights.items()},
            folder / "model.safetensors",
        )
        save_config_for_hf(network, str(folder / "config.json"))
        return network, folder

    return make


def write(source, folder, **arguments):
    folder.mkdir()
    return write_converted(open_folder(source), folder, **arguments)


@pytest.mark.parametrize(
    ("name", "backbone"),
    [("resnet_tiny_cifar", "mhsa_resnet_tiny_cifar"), ("test_resnet", "mhsa_network")],
)
@pytest.mark.parametrize("arguments", [{}, {"alpha": 4.0, "layers": "layer4.*", "content": True}])
def test_the_folder_loads_as_the_same_function(name, backbone, arguments, run, tmp_path):
    network, source = run(name, num_classes=7)
    report = write(source, tmp_path / "converted", **arguments)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'converted'}", pretrained=True).eval()
    x = torch.randn(2, *network.pretrained_cfg["input_size"])
    difference = (loaded(x) - network(x)).abs().max() / network(x).abs().max()
    assert difference <= (0.3 if arguments else 0)
    written = {path.name: path for path in (tmp_path / "converted").iterdir()}
    assert set(written) == {
        "model.safetensors",
        "config.json",
        "report.md",
        "metrics.json",
    }
    config = json.loads(written["config.json"].read_text())
    assert config["architecture"] == backbone and "num_classes" not in config["model_args"]
    assert config["model_args"]["alpha"] == arguments.get("alpha", 46.0)
    assert written["report.md"].read_text() == report.table()
    metrics = json.loads(written["metrics.json"].read_text())
    assert metrics["model"] == backbone and metrics["conversion"]["logits"] == report.logits
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_cnn_of_the_hub_is_the_base_model(run, tmp_path):
    _, source = run("resnet_tiny_cifar")
    config = json.loads((source / "config.json").read_text())
    for name, revision in (None, ""), ("somebody/cnn", "@v1"):
        config["pretrained_cfg"]["hf_hub_id"] = name and name + revision
        (source / "config.json").write_text(json.dumps(config))
        write(source, tmp_path / f"of-{name is None}")
        assert json.loads((tmp_path / f"of-{name is None}" / "metrics.json").read_text())[
            "base_model"
        ] == (name or "")


def test_classes_keep_their_names_in_both_libraries(run, tmp_path):
    network, source = run("resnet_tiny_cifar")
    names = list("abcdefghij")
    save_config_for_hf(network, str(source / "config.json"), {"label_names": names})
    write(source, tmp_path / "converted")
    assert list(load_model(str(tmp_path / "converted")).pretrained_cfg["label_names"]) == names
    config = TimmWrapperConfig.from_pretrained(tmp_path / "converted")
    assert [config.id2label[index] for index in range(10)] == names


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"alpha": float("inf")}, "alpha: got inf"), ({"layers": "nothing"}, "layers: got 'nothing'")],
)
def test_a_conversion_that_cannot_be_written_is_refused_before_anything_is(
    run, tmp_path, arguments, said
):
    _, source = run("resnet_tiny_cifar")
    with pytest.raises(ValueError, match=said):
        write(source, tmp_path / "converted", **arguments)
    assert list((tmp_path / "converted").iterdir()) == []


def test_a_network_of_attention_is_not_converted(tmp_path):
    attention = make_run(tmp_path / "attention", "sa_quadratic_tiny_cifar", depth=1)
    with pytest.raises(ValueError, match="which is a network of attention, expected a CNN"):
        write(attention, tmp_path / "converted")
