"""One config.json for two libraries: the keys of timm are derived from those of transformers."""

import json

import pytest
import timm

from sa_zoo.models.configuration_sa import SAConfig
from sa_zoo.models.variants import TYPES

SIZES = {"hidden_size": 23, "num_hidden_layers": 3, "num_attention_heads": 5}
SIZES |= {"intermediate_size": 29, "image_size": 21, "patch_size": 3}


def written(config, folder):
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("attention_type", TYPES)
def test_timm_builds_the_network_that_was_configured(attention_type, tmp_path):
    sizes = SIZES | {"image_size": [24, 36]}
    config = SAConfig(attention_type=attention_type, num_labels=11, num_channels=1, **sizes)
    keys = written(config, tmp_path)
    assert keys["pretrained_cfg"]["input_size"] == [1, 24, 36]
    assert "num_classes" not in keys["model_args"], "timm would pass it twice"
    network = timm.create_model(f"local-dir:{tmp_path}")
    assert network.layout == config.layout
    assert network.blocks[0].attn.num_heads == 5
    assert network.patch_embed.weight.shape[1] == 1
    assert (len(network.blocks), network.head.out_features, network.img_size) == (3, 11, (24, 36))
    again = SAConfig.from_pretrained(tmp_path)
    assert again.height_and_width == (24, 36)
    assert written(again, tmp_path) == keys
    assert keys["pretrained_cfg"]["fixed_input_size"] == network.pretrained_cfg["fixed_input_size"]


def test_another_number_of_labels_reaches_every_key_of_timm(tmp_path):
    labels = {"2": "eel", "0": "cat", "1": "dog"}
    mean = [0.1, 0.2, 0.3]
    first = written(SAConfig(id2label=labels, pretrained_cfg={"mean": mean}, **SIZES), tmp_path)
    assert first["label_names"] == ["cat", "dog", "eel"]
    again = written(SAConfig.from_pretrained(tmp_path, num_labels=7), tmp_path)
    of_timm = again["pretrained_cfg"]
    assert again["num_classes"] == of_timm["num_classes"] == len(again["label_names"]) == 7
    assert of_timm["mean"] == mean


def test_derived_keys_are_not_kept(tmp_path):
    keys = written(SAConfig(**SIZES), tmp_path)
    described = {**keys, "label_descriptions": {"LABEL_0": "a cat"}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = SAConfig.from_pretrained(tmp_path)
    derived = {"num_classes", "num_features", "label_names", "model_args", "label_descriptions"}
    assert not derived & vars(config).keys()
    assert written(config, tmp_path) == keys
