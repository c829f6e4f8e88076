"""One config.json for two libraries: what timm reads is derived from what transformers holds."""

import json

import pytest
import timm

from sa_zoo.models.configuration_sa import SAConfig
from sa_zoo.models.variants import TERMS

SIZES = {
    "hidden_size": 23,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 29,
    "image_size": 21,
    "patch_size": 3,
}


def written(config, folder):
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("attention_type", TERMS)
def test_timm_builds_the_network_that_a_written_configuration_describes(attention_type, tmp_path):
    written(
        SAConfig(attention_type=attention_type, num_labels=11, num_channels=1, **SIZES), tmp_path
    )
    network = timm.create_model(f"local-dir:{tmp_path}")
    assert network.patch_embed.weight.shape == (23, 1, 3, 3)
    assert (len(network.blocks), network.head.out_features, network.img_size) == (3, 11, (21, 21))
    assert network.blocks[0].attn.W_val.in_features == 5 * 23
    assert network.blocks[0].fc1.out_features == 29


def test_a_non_square_image_size_survives(tmp_path):
    config = SAConfig(attention_type="learned", **SIZES | {"image_size": [21, 33]})
    keys = written(config, tmp_path)
    assert keys["pretrained_cfg"]["input_size"] == [3, 21, 33]
    assert timm.create_model(f"local-dir:{tmp_path}").img_size == (21, 33)
    assert SAConfig.from_pretrained(tmp_path).height_and_width == (21, 33)


def test_another_number_of_labels_reaches_every_key_of_timm(tmp_path):
    first = SAConfig(
        id2label={0: "cat", 1: "dog", 2: "eel"}, pretrained_cfg={"mean": [0.1, 0.2, 0.3]}, **SIZES
    )
    keys = written(first, tmp_path)
    assert keys["label_names"] == ["cat", "dog", "eel"]
    again = written(SAConfig.from_pretrained(tmp_path, num_labels=7), tmp_path)
    assert (
        again["num_classes"]
        == again["pretrained_cfg"]["num_classes"]
        == len(again["label_names"])
        == 7
    )
    assert again["pretrained_cfg"]["mean"] == [0.1, 0.2, 0.3]


def test_labels_go_to_timm_in_the_order_of_their_numbers():
    config = SAConfig(**SIZES)
    config.id2label = {
        str(index): f"class {index}" for index in reversed(range(11))
    }  # as a JSON file has them
    assert config.to_dict()["label_names"] == [f"class {index}" for index in range(11)]


def test_attention_types_are_the_middle_of_timm_names():
    assert set(TERMS) == {
        "quadratic", "quadratic_gen", "quadratic_kernel", "learned", "content", "content_kernel", "eq8",
        "absolute", "mixed", "pyramid",
    }  # fmt: skip
    for attention_type in TERMS:
        config = SAConfig(attention_type=attention_type)
        fixed = config.to_dict()["pretrained_cfg"]["fixed_input_size"]
        name = f"sa_{attention_type}_cifar"
        assert config.architecture == name
        assert timm.get_pretrained_cfg(name).fixed_input_size == fixed


def test_what_timm_would_pass_twice_stays_out_of_model_args():
    assert "num_classes" not in SAConfig(**SIZES).to_dict()["model_args"]


def test_reading_and_writing_again_changes_nothing(tmp_path):
    first = written(SAConfig(attention_type="content", num_labels=11, **SIZES), tmp_path)
    assert written(SAConfig.from_pretrained(tmp_path), tmp_path) == first


def test_what_is_derived_is_not_kept(tmp_path):
    keys = written(SAConfig(num_labels=11, **SIZES), tmp_path)
    described = json.dumps({**keys, "label_descriptions": {"LABEL_3": "a cat"}})
    (tmp_path / "config.json").write_text(described)
    config = SAConfig.from_pretrained(tmp_path)
    assert not {
        "num_classes",
        "num_features",
        "label_names",
        "model_args",
        "label_descriptions",
    } & set(vars(config))
    assert "label_descriptions" not in config.to_dict()


def test_fewer_layers_have_fewer_stages():
    config = SAConfig(**SIZES)
    config.num_hidden_layers = 2
    assert config.stage_names == ["stem", "stage1", "stage2"]


def test_an_unknown_attention_type_is_named():
    with pytest.raises(
        ValueError, match="attention_type: got 'linear', expected one of quadratic, "
    ):
        SAConfig(attention_type="linear")
