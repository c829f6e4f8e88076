"""transformers' face: equal to timm's in weights, logits and maps, and a good citizen of transformers."""

import pytest
import timm
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForImageClassification

from sa_zoo.models.configuration_sa import SAConfig
from sa_zoo.models.modeling_sa import TYPES, SABackbone, SAForImageClassification, SAModel

SIZES = {
    "hidden_size": 23,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 29,
    "image_size": 14,
    "patch_size": 2,
}
LABELS = 11
B = 3


PLAIN = {"hidden_size": [7, 5, 11], "num_hidden_layers": [2, 1, 3], "patch_size": 1}


def make(attention_type="quadratic", **changes):
    torch.manual_seed(0)
    sizes = SIZES | (PLAIN if attention_type == "plain" else {}) | changes
    config = SAConfig(attention_type=attention_type, num_labels=LABELS, **sizes)
    return SAForImageClassification(config).eval()


def fresh(model, **rates):
    """timm's network of the same sizes, with weights of its own."""
    config = model.config
    arguments = config.to_dict()["model_args"] | rates | {"num_classes": LABELS}
    return timm.create_model(config.architecture, **arguments).eval()


def in_timm(model, **rates):
    network = fresh(model, **rates)
    network.load_state_dict(model.state_dict())
    return network


def images(side=14, batch=B):
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention_type", TYPES)
def test_both_faces_have_the_same_keys_logits_features_and_maps(attention_type):
    """At a size at which attention is evaluated by axes, where it can be; maps are explicit."""
    model = make(attention_type, image_size=40)
    network, x = in_timm(model), images(40)
    assert list(model.state_dict()) == list(network.state_dict())
    seen = []
    for block in network.blocks:
        block.register_forward_hook(lambda block, given, made: seen.append(made))
    with torch.no_grad():
        outputs = model(x, output_attentions=True, output_hidden_states=True)
        alone = model(x)
        assert alone.attentions is None and torch.equal(alone.logits, network(x))
        assert torch.allclose(outputs.logits, network(x), atol=1e-5)
        tokens = [network.embed(x), *seen[: len(network.blocks)]]
        for ours, theirs in zip(outputs.hidden_states, tokens, strict=True):
            assert torch.allclose(ours, theirs.flatten(1, 2), atol=1e-5)
        for ours, theirs in zip(outputs.attentions, network.attention_maps(x), strict=True):
            assert ours.ndim == 4 and torch.allclose(ours, theirs.expand(ours.shape), atol=1e-6)


def test_everything_dropped_in_training_is_dropped_by_timm_too():
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2}
    model = make(classifier_dropout=0.3, **rates).train()
    network = in_timm(model, proj_drop_rate=0.1, attn_drop_rate=0.2, drop_rate=0.3).train()
    torch.manual_seed(2)
    logits = model(images(batch=17)).logits
    torch.manual_seed(2)
    assert torch.equal(logits, network(images(batch=17)))


@pytest.mark.parametrize("attention_type", ["content", "plain"])
def test_the_base_model_and_backbone_have_timms_features(attention_type):
    model = make(attention_type, image_size=[24, 40])
    network, x = in_timm(model), torch.randn(B, 3, 24, 40)
    model.config.out_indices = [0, 1, 3]
    base, backbone = SAModel(model.config).eval(), SABackbone(model.config).eval()
    weights = {key: value for key, value in model.state_dict().items() if "head." not in key}
    for other in (base, backbone):
        other.load_state_dict(weights)
    with torch.no_grad():
        tokens = network.forward_features(x)
        assert torch.equal(base(x).last_hidden_state, tokens.flatten(1, 2))
        assert torch.equal(base(x).pooler_output, network.forward_head(tokens, pre_logits=True))
        maps = backbone(x)
        # index 0 is the embedding: stage N is timm's level N - 1
        expected = network.forward_intermediates(x, indices=[0, 2], intermediates_only=True)
        expected.insert(0, network.embed(x).permute(0, 3, 1, 2))
        assert maps.hidden_states is None
        assert backbone.channels == [found.shape[1] for found in expected]
        assert all(map(torch.equal, maps.feature_maps, expected))
        backbone.config.reshape_hidden_states = False
        for ours, level in zip(backbone(x).feature_maps, expected, strict=True):
            assert torch.allclose(ours[:, 0], level.mean(dim=(2, 3)), atol=1e-6)
            assert torch.equal(ours[:, 1:], level.flatten(2).mT)


@pytest.mark.parametrize("attention_type", [kind for kind in TYPES if kind != "plain"])
def test_from_config_draws_each_tensor_as_timm_does(attention_type):
    sizes = {"hidden_size": 101, "num_attention_heads": 97, "intermediate_size": 103}
    model = make(attention_type, num_hidden_layers=1, **sizes)
    drawn = AutoModelForImageClassification.from_config(model.config).state_dict()
    for name, theirs in fresh(model).state_dict().items():
        ours, chance = drawn[name], 5 / theirs.numel() ** 0.5 * theirs.std()
        assert abs(ours.std() - theirs.std()) <= chance, name
        assert abs(ours.mean() - theirs.mean()) <= 2 * chance, name


def test_the_loss_is_cross_entropy_and_outputs_may_be_a_tuple():
    model, labels = make(), torch.tensor([2, 7, 5])
    outputs = model(images(), labels=labels)
    assert torch.equal(outputs.loss, cross_entropy(outputs.logits, labels))
    model.config.return_dict = False
    loss, logits, hidden_states = model(images(), labels=labels, output_hidden_states=True)
    assert torch.equal(loss, outputs.loss) and torch.equal(logits, outputs.logits)
    assert len(hidden_states) == 4


def test_gradient_checkpointing_changes_no_gradient():
    model = make("content", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1).train()
    gradients = []
    # what transformers 5.23 calls activation checkpointing was gradient checkpointing before
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    for switch in ("disable", "enable"):
        getattr(model, f"{kind}_checkpointing_{switch}")()
        torch.manual_seed(2)
        loss = model(images(), labels=torch.tensor([2, 7, 5])).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert getattr(model, f"is_{kind}_checkpointing")
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-7)


def test_the_model_compiles_as_one_graph():
    model, x = make("eq8"), images()
    changes = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        expected = model(x, **changes)
        outputs = torch.compile(model, fullgraph=True, backend="eager")(x, **changes)
    assert torch.allclose(outputs.logits, expected.logits, atol=1e-6)
    assert outputs.keys() == expected.keys()


def test_bfloat16_weights_take_float32_images(tmp_path):
    model = make("eq8")
    model.save_pretrained(tmp_path)
    half = SAForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        logits, expected = half(images()).logits, model(images()).logits
    assert {logits.dtype, *(each.dtype for each in half.parameters())} == {torch.bfloat16}
    assert torch.allclose(logits.float(), expected, atol=0.05)


def test_classifier_and_base_model_load_from_each_other(tmp_path):
    model = make()
    model.save_pretrained(tmp_path / "classifier")
    base, report = AutoModel.from_pretrained(tmp_path / "classifier", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    base.save_pretrained(tmp_path / "base")
    _, report = SAForImageClassification.from_pretrained(
        tmp_path / "base", output_loading_info=True
    )
    assert set(report["missing_keys"]) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("attention_type", ["learned", "absolute", "quadratic"])
def test_another_image_size_gives_what_timm_gives(attention_type):
    model = make(attention_type)
    network = in_timm(model)
    model.set_input_size((10, 22))
    network.set_input_size((10, 22))
    assert model.config.image_size == [10, 22]
    x = torch.randn(B, 3, 10, 22)
    assert torch.equal(model(x).logits, network(x))
