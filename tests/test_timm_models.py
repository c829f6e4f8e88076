"""timm's contract, name by name (timm's own model tests pass on these names too: see the README)."""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import set_scriptable
from timm.models import group_parameters
from timm.optim import param_groups_weight_decay
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.models import timm_models
from sa_zoo.models.timm_models import CifarResNet, TimmSANet
from sa_zoo.models.variants import VARIANTS

PARAMETERS = {
    "sa_quadratic_cifar": 12_086_844,
    "sa_quadratic_h16_cifar": 18_806_970,
    "sa_quadratic_gen_cifar": 12_087_006,
    "sa_quadratic_kernel_cifar": 12_086_844,
    "sa_learned_cifar": 12_278_682,
    "sa_content_cifar": 29_484_282,
    "sa_content_kernel_cifar": 29_484_282,
    "sa_eq8_cifar": 38_124_282,
    "sa_absolute_cifar": 30_024_282,
    "sa_mixed_cifar": 20_785_563,
    "resnet18_cifar": 11_173_962,
    "sa_quadratic_tiny_cifar": 785_164,
    "sa_learned_tiny_cifar": 812_650,
    "sa_content_tiny_cifar": 1_799_338,
    "sa_content_kernel_tiny_cifar": 1_799_338,
    "sa_quadratic_gen_tiny_cifar": 785_326,
    "sa_quadratic_kernel_tiny_cifar": 785_164,
    "sa_eq8_tiny_cifar": 2_297_002,
    "sa_absolute_tiny_cifar": 1_827_562,
    "sa_mixed_tiny_cifar": 1_292_251,
    "sa_pyramid_cifar": 11_973_874,
    "sa_pyramid_h5_cifar": 11_841_426,
    "sa_pyramid_tiny_cifar": 785_778,
    "sa_pyramid_h5_tiny_cifar": 785_728,
    "resnet_tiny_cifar": 783_802,
}
# The tiny ones have other sizes, which `small` replaces.
SELF_ATTENTION = [name for name in PARAMETERS if name.startswith("sa_") and "_tiny_" not in name]
SMALL = {"embed_dim": 7, "depth": 3, "num_heads": 2, "hidden_dim": 13, "patch_size": 4}
every_name = pytest.mark.parametrize("name", PARAMETERS)
every_attention = pytest.mark.parametrize("name", SELF_ATTENTION)


def small(name: str, **kwargs) -> TimmSANet:
    """The variant in a size that tests can afford; the grid is 3 x 5 tokens."""
    torch.manual_seed(0)
    return timm.create_model(
        name, **(SMALL | {"img_size": (12, 20), "num_classes": 11} | kwargs)
    ).eval()


def images(batch: int = 2, chans: int = 3) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, chans, 12, 20)


def test_the_names_are_all_there_and_no_others():
    assert set(timm.list_models(module="timm_models")) == set(PARAMETERS)
    assert [variant.name for variant in VARIANTS] == [
        name for name in timm_models.__all__ if timm.is_model(name)
    ]
    for variant in VARIANTS:
        entry = getattr(timm_models, variant.name)
        assert entry is timm.models.model_entrypoint(variant.name)
        assert pickle.loads(pickle.dumps(entry)) is entry
        assert entry.__doc__ == variant.sentence


@every_name
def test_parameter_counts_are_exact(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@every_name
def test_the_default_configuration_describes_the_model(name):
    with torch.device("meta"):
        model = timm.create_model(name)
        cfg = model.pretrained_cfg
        features = model.forward_features(torch.empty(1, *cfg["input_size"]))
    assert cfg["input_size"] == (3, 32, 32) and cfg["num_classes"] == model.num_classes == 10
    # fastai and others pool features (B, D, H, W) if there is a size
    channels_last = isinstance(model, TimmSANet)
    assert cfg["pool_size"] == (None if channels_last else tuple(features.shape[2:]))
    for key in ("first_conv", "classifier"):
        assert cfg[key] + ".weight" in model.state_dict()
    assert model.get_classifier() is model.get_submodule(cfg["classifier"])
    assert cfg["license"] == "apache-2.0" and cfg["crop_pct"] == 1.0


@every_attention
def test_every_parameter_gets_a_gradient(name):
    model = small(name).train()
    model(images()).mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@every_attention
def test_the_head_can_be_replaced_removed_and_unpooled(name):
    model, x = small(name), images()
    assert model(x).shape == (2, 11)
    features = model.forward_features(x)
    assert features.shape == (2, 3, 5, 7)
    assert torch.equal(model.forward_head(features), model(x))
    pooled = model.forward_head(features, pre_logits=True)
    model.reset_classifier(13)
    assert model(x).shape == (2, 13) and model.num_classes == 13
    model.reset_classifier(0)
    assert torch.equal(model(x), pooled)
    model.reset_classifier(0, "")
    assert torch.equal(model(x), features)


@every_attention
def test_intermediates_are_the_features_on_the_way(name):
    model, x = small(name), images()
    final, nchw = model.forward_intermediates(x)
    assert torch.equal(final, model.forward_features(x))
    assert [tuple(f.shape) for f in nchw] == [(2, 7, 3, 5)] * 3
    nhwc = model.forward_intermediates(
        x, indices=[0, 2], output_fmt="NHWC", intermediates_only=True
    )
    assert torch.equal(nhwc[1], final) and torch.equal(nhwc[0].permute(0, 3, 1, 2), nchw[0])
    early, last = model.forward_intermediates(x, indices=[0], stop_early=True)
    assert torch.equal(early.permute(0, 3, 1, 2), last[0]) and torch.equal(last[0], nchw[0])
    with pytest.raises(ValueError, match="output_fmt: got 'NLC'"):
        model.forward_intermediates(x, output_fmt="NLC")


@every_attention
def test_pruned_models_keep_the_features_they_are_asked_for(name):
    model, x = small(name), images()
    expected = model.forward_intermediates(x, indices=[0, 1], intermediates_only=True)
    assert model.prune_intermediate_layers([0, 1]) == [0, 1]
    assert len(model.blocks) == 2
    for got, want in zip(
        model.forward_intermediates(x, indices=[0, 1], intermediates_only=True),
        expected,
        strict=True,
    ):
        assert torch.equal(got, want)


@every_attention
def test_features_only_gives_the_chosen_blocks(name):
    model = small(name, features_only=True, out_indices=(0, 2))
    assert model.feature_info.channels() == [7, 7] and model.feature_info.reduction() == [4, 4]
    assert [tuple(f.shape) for f in model(images())] == [(2, 7, 3, 5)] * 2


@every_attention
def test_checkpointed_gradients_are_the_same(name):
    model, x = small(name).train(), images()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().mean(), parameters)
    model.set_grad_checkpointing()
    for got, want in zip(
        torch.autograd.grad(model(x).square().mean(), parameters), expected, strict=True
    ):
        assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@every_attention
def test_scripts(name):
    with set_scriptable(True):
        model = small(name)
    x = images()
    assert torch.allclose(torch.jit.script(model)(x), model(x), atol=1e-6)


@every_attention
def test_compiles_as_one_graph(name):
    model, x = small(name), images()
    assert torch.allclose(
        torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x), atol=1e-6
    )


@every_attention
def test_exports_with_a_dynamic_batch(name):
    model = small(name)
    batch = {0: torch.export.Dim("batch", min=2, max=97)}
    program = torch.export.export(model, (images(),), dynamic_shapes=(batch,))
    x = images(5)
    assert torch.allclose(program.module()(x), model(x), atol=1e-6)


@every_attention
def test_torch_fx_sees_each_block_as_one_node(name):
    model, x = small(name), images()
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))
    _, names = get_graph_node_names(model)
    assert [name for name in names if name.startswith("blocks.")] == [
        f"blocks.{i}" for i in range(3)
    ]
    extractor = create_feature_extractor(model, {"blocks.1": "map"})
    expected = model.forward_intermediates(x, [1], output_fmt="NHWC", intermediates_only=True)
    assert torch.equal(extractor(x)["map"], expected[0])


@every_attention
def test_device_and_dtype_arrive_at_every_tensor(name):
    model = small(name, dtype=torch.bfloat16, device="cpu")
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    assert model(images().bfloat16()).dtype == torch.bfloat16
    assert {tensor.device.type for tensor in small(name, device="meta").state_dict().values()} == {
        "meta"
    }


@every_attention
def test_a_meta_model_can_be_initialised(name):
    with torch.device("meta"):
        model = small(name)
    model.to_empty(device="cpu").init_weights()
    assert torch.isfinite(model(images())).all()


@pytest.mark.parametrize("name", ["sa_quadratic_tiny_cifar", "sa_quadratic_gen_cifar"])
def test_centres_and_spreads_are_not_decayed(name):
    model = small(name)
    decayed, spared = param_groups_weight_decay(
        model, 0.1, no_weight_decay_list=model.no_weight_decay()
    )[::-1]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and spared["weight_decay"] == 0.0
    spared_names = {names[id(parameter)] for parameter in spared["params"]}
    assert {name.rsplit(".", 1)[1] for name in spared_names} == {
        "Delta",
        "spread",
        "bias",
        "weight",
    }
    assert all("norm" in name for name in spared_names if name.endswith(".weight"))
    assert not any(
        names[id(parameter)].endswith((".Delta", ".spread")) for parameter in decayed["params"]
    )


def test_layers_are_grouped_from_stem_to_head():
    model = small("sa_learned_tiny_cifar")
    groups = list(group_parameters(model, model.group_matcher()).values())
    assert [
        len([name for name in group if name.startswith("patch_embed")]) for group in groups
    ] == [2, 0, 0, 0, 0]
    for index in range(3):
        assert all(name.startswith(f"blocks.{index}.") for name in groups[1 + index])
    assert sorted(groups[-1]) == ["head.bias", "head.weight"]


@every_name
def test_a_local_folder_gives_back_the_same_logits(name, tmp_path):
    small_sizes = {"channels": (7, 11, 13, 17)} if name.startswith("resnet") else SMALL
    model = timm.create_model(name, num_classes=11, **small_sizes).eval()
    timm.models.save_for_hf(model, tmp_path, model_args=small_sizes, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(x), model(x))
    other = timm.create_model(
        f"local-dir:{tmp_path}", pretrained=True, num_classes=13, in_chans=1
    ).eval()
    assert other(x[:, :1]).shape == (2, 13)


@pytest.mark.parametrize(
    "name", ["sa_learned_tiny_cifar", "sa_content_tiny_cifar", "sa_eq8_cifar", "sa_absolute_cifar"]
)
def test_a_checkpoint_for_another_size_is_interpolated_and_says_so(name, tmp_path, caplog):
    model = timm.create_model(name, **SMALL).eval()
    timm.models.save_for_hf(model, tmp_path, model_args=SMALL, safe_serialization=True)
    larger = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=(48, 40)).eval()
    assert "interpolated from" in caplog.text
    model.set_input_size((48, 40))
    x = torch.randn(2, 3, 48, 40)
    assert torch.allclose(larger(x), model(x), atol=1e-6)


@pytest.mark.parametrize(
    "name", ["sa_learned_tiny_cifar", "sa_absolute_cifar", "sa_quadratic_tiny_cifar"]
)
def test_another_size_is_saved_with_the_model(name, tmp_path, caplog):
    model = timm.create_model(name, **SMALL).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.set_input_size((48, 40))
    model.set_input_size()  # as in timm: stays as it is
    assert not any(parameter.requires_grad for parameter in model.parameters())
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    caplog.clear()
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 48, 40)
    assert again.img_size == (48, 40) and torch.allclose(again(x), model(x), atol=1e-6)
    assert "interpolated" not in caplog.text


def test_a_checkpoint_of_another_width_is_refused(tmp_path):
    model = timm.create_model("sa_learned_tiny_cifar", **SMALL)
    timm.models.save_for_hf(model, tmp_path, model_args=SMALL, safe_serialization=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True, embed_dim=14)


def test_models_can_be_copied():
    model, x = small("sa_content_tiny_cifar"), images()
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_the_baseline_keeps_the_resolution_of_small_images():
    model = timm.create_model("resnet18_cifar", features_only=True)
    assert model.feature_info.reduction() == [1, 1, 2, 4, 8]
    assert [f.shape[-1] for f in model(torch.randn(1, 3, 32, 32))] == [32, 32, 16, 8, 4]
    assert issubclass(CifarResNet, timm.models.ResNet)
