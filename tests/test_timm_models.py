"""timm's contract, name by name (timm's own model tests pass on these names too: see the README)."""

import pytest
import timm
import torch
from small_networks import NETWORKS, images, small
from timm.layers import set_scriptable
from timm.models import group_parameters
from timm.optim import param_groups_weight_decay
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from sa_zoo.models import timm_models
from sa_zoo.models.timm_network import TimmNetwork
from sa_zoo.models.variants import VARIANTS

PARAMETERS = {
    "sa_quadratic_cifar": 12_086_844,
    "sa_quadratic_h16_cifar": 18_806_970,
    "sa_quadratic_gen_cifar": 12_087_006,
    "sa_learned_cifar": 12_278_682,
    "sa_content_cifar": 29_484_282,
    "sa_eq8_cifar": 38_124_282,
    "sa_absolute_cifar": 30_024_282,
    "resnet18_cifar": 11_173_962,
    "sa_quadratic_tiny_cifar": 785_164,
    "sa_learned_tiny_cifar": 812_650,
    "sa_content_tiny_cifar": 1_799_338,
    "sa_plain_cifar": 12_261_284,
    "sa_plain_tiny_cifar": 1_974_116,
    "resnet_tiny_cifar": 783_802,
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def same(tensors, expected, atol=0.0) -> bool:
    return all(torch.allclose(*pair, atol=atol) for pair in zip(tensors, expected, strict=True))


def test_the_names_are_all_there_and_no_others():
    assert set(timm.list_models(module="timm_models")) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_and_the_default_configuration_are_exact(name):
    with torch.device("meta"):
        model = timm.create_model(name)
        cfg = model.pretrained_cfg
        features = model.forward_features(torch.empty(1, *cfg["input_size"]))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert cfg["input_size"] == (3, 32, 32) and cfg["num_classes"] == model.num_classes == 10
    # fastai and others pool features (B, D, H, W) if there is a size
    channels_last = isinstance(model, TimmNetwork)
    assert cfg["pool_size"] == (None if channels_last else tuple(features.shape[2:]))
    for key in ("first_conv", "classifier"):
        assert cfg[key] + ".weight" in model.state_dict()
    assert model.get_classifier() is model.get_submodule(cfg["classifier"])


@every_network
def test_checkpointing_changes_no_gradient_of_any_parameter(name):
    model, x = small(name).train(), images(name)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        gradients.append(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))
    assert same(*gradients, atol=1e-6)


@every_network
def test_the_head_can_be_replaced_removed_and_unpooled(name):
    model, x = small(name), images(name)
    assert model(x).shape == (2, 11)
    features = model.forward_features(x)
    assert torch.equal(model.forward_head(features), model(x))
    pooled = model.forward_head(features, pre_logits=True)
    model.reset_classifier(13)
    assert model(x).shape == (2, 13) and model.num_classes == 13
    model.reset_classifier(0)
    assert torch.equal(model(x), pooled)
    model.reset_classifier(0, "")
    assert torch.equal(model(x), features)


LEVELS = [(7, 4, "blocks.0"), (7, 4, "blocks.1"), (7, 4, "blocks.2")]
OF_PLAIN = [(7, 2, "blocks.1"), (5, 4, "blocks.2"), (11, 8, "blocks.5")]


@every_network
def test_features_are_those_on_the_way_from_a_pruned_network_too(name):
    model, x, levels = small(name), images(name), OF_PLAIN if name == "plain" else LEVELS
    final, maps = model.forward_intermediates(x)
    assert torch.equal(final, model.forward_features(x))
    height, width = (size - (name == "plain") for size in NETWORKS[name]["img_size"])
    assert [f.shape for f in maps] == [(2, D, height // R, width // R) for D, R, _ in levels]
    nhwc = model.forward_intermediates(x, [0, 2], output_fmt="NHWC", intermediates_only=True)
    assert same([f.permute(0, 3, 1, 2) for f in nhwc], [maps[0], maps[2]])
    early, _ = model.forward_intermediates(x, indices=[0], stop_early=True)
    assert torch.equal(early.permute(0, 3, 1, 2), maps[0])
    chosen = small(name, features_only=True, out_indices=(0, 2))
    assert same(chosen(x), [maps[0], maps[2]])
    info = small(name, features_only=True).feature_info
    found = zip(info.channels(), info.reduction(), info.module_name(), strict=True)
    assert list(found) == levels
    assert model.prune_intermediate_layers([0, 1]) == [0, 1]
    assert f"blocks.{len(model.blocks) - 1}" == levels[1][2]
    assert same(model.forward_intermediates(x, [0, 1], intermediates_only=True), maps[:2])


def exported(model, name):
    batch = {0: torch.export.Dim("batch", min=2, max=97)}
    return torch.export.export(model, (images(name),), dynamic_shapes=(batch,)).module()


def traced(model, name):
    blocks = [f"blocks.{number}" for number in range(len(model.blocks))]
    assert [node for node in get_graph_node_names(model)[1] if "blocks." in node] == blocks
    x = images(name)
    last = create_feature_extractor(model, {blocks[-1]: "map"})(x)["map"]
    assert torch.equal(last, model.forward_features(x))
    return torch.fx.symbolic_trace(model)


GRAPHS = {
    "script": lambda model, name: torch.jit.script(model),
    # Sizes are constants. The compiler makes them symbols once it has seen others, which takes half a minute.
    "compile": lambda model, name: torch.compile(
        model, fullgraph=True, backend="aot_eager", dynamic=False
    ),
    "export": exported,
    "fx, one node per block": traced,
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
@every_network
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_of_a_network_give_its_logits(name, graph):
    depth = (1, 1, 1) if name == "plain" else 2
    with set_scriptable(True):
        model = small(name, depth=depth)
    x = images(name, 5)
    assert torch.allclose(GRAPHS[graph](model, name)(x), model(x), atol=1e-6)


@every_network
def test_device_and_type_arrive_and_meta_can_be_initialised(name):
    model = small(name, dtype=torch.bfloat16, device="cpu")
    numbers = [t for t in model.state_dict().values() if t.is_floating_point()]
    assert {tensor.dtype for tensor in numbers} == {torch.bfloat16}
    assert model(images(name).bfloat16()).dtype == torch.bfloat16
    with torch.device("meta"):
        model = small(name)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.to_empty(device="cpu").init_weights()
    assert torch.isfinite(model.eval()(images(name))).all()


@every_network
def test_groups_of_parameters_are_those_of_timm(name):
    """Centers and spreads are not decayed, and layers go from the stem to the head."""
    model = small(name)
    listed = model.no_weight_decay()
    spared, decayed = param_groups_weight_decay(model, 0.1, no_weight_decay_list=listed)
    assert decayed["weight_decay"] == 0.1 and spared["weight_decay"] == 0.0
    names = {id(parameter): path for path, parameter in model.named_parameters()}
    assert listed == {path for path in names.values() if path.endswith((".Delta", ".spread"))}
    assert listed <= {names[id(parameter)] for parameter in spared["params"]}
    stem, *blocks, head = group_parameters(model, model.group_matcher()).values()
    assert stem == ["patch_embed.weight", "patch_embed.bias"]
    assert sorted(head) == ["head.bias", "head.weight"]
    for index, block in enumerate(blocks):
        assert all(path.startswith(f"blocks.{index}.") for path in block)


@pytest.mark.parametrize("name", ["learned", "eq8", "absolute"])
def test_encodings_are_interpolated_for_a_new_size_and_saved(name, tmp_path):
    model, folder = small(name), f"local-dir:{tmp_path}"
    args = NETWORKS[name]
    timm.models.save_for_hf(model, tmp_path, model_args=args, safe_serialization=True)
    larger = timm.create_model(folder, pretrained=True, img_size=(32, 56)).eval()
    model.requires_grad_(False)
    model.set_input_size((32, 56))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    x = torch.randn(2, 3, 32, 56)
    assert torch.allclose(larger(x), model(x), atol=1e-6)
    args = {key: size for key, size in args.items() if key != "img_size"}
    timm.models.save_for_hf(model, tmp_path, model_args=args, safe_serialization=True)
    again = timm.create_model(folder, pretrained=True).eval()
    assert again.img_size == (32, 56) and torch.allclose(again(x), model(x), atol=1e-6)
    other = timm.create_model(folder, pretrained=True, num_classes=13, in_chans=1).eval()
    assert other(x[:, :1]).shape == (2, 13)


def test_a_tag_names_another_set_of_weights(tmp_path, monkeypatch):
    names = ["sa_quadratic_cifar.taps", "sa_quadratic_h16_cifar"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    monkeypatch.setattr(timm_models, "WEIGHTS", tmp_path)
    monkeypatch.setattr(timm_models, "TRAINED", names)
    (variant,) = (row for row in VARIANTS if row.name == "sa_quadratic_cifar")
    found = timm_models.configurations(variant)
    assert {tag: cfg.file for tag, cfg in found.cfgs.items()} == {
        "": None,
        "taps": str(tmp_path / names[0] / "model.safetensors"),
    }
