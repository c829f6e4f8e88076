"""Networks of several stages: the same network in NumPy, and the interfaces of timm and transformers."""

import numpy as np
import numpy_sanet as oracle
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.layers import set_scriptable
from timm.models import group_parameters
from timm.utils import reparameterize_model
from tiny_runs import tiny_config
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names
from transformers import AutoBackbone, AutoModelForImageClassification
from typer.testing import CliRunner

from sa_zoo.analysis.head_figures import head_maps
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.cli import app
from sa_zoo.folders.cost import cost_of, training_macs
from sa_zoo.folders.metrics import read_metrics
from sa_zoo.kernels.choose import choose
from sa_zoo.models.attention import Attention
from sa_zoo.models.configuration_sa import SAConfig
from sa_zoo.models.content import Absolute, Content
from sa_zoo.models.modeling_sa import SABackbone, SAForImageClassification
from sa_zoo.models.network import Merge, SANet, attention_in
from sa_zoo.models.stages import Layout, Level, Stage, layout_of
from sa_zoo.models.terms import Learned, Quadratic, QuadraticKernel
from sa_zoo.models.timm_network import TimmSANet
from sa_zoo.training.run_folder import record_maps
from sa_zoo.verbs.fit import fit

SIZES = {"embed_dim": (7, 5, 11), "depth": (2, 1, 3), "num_heads": 2, "hidden_dim": (13, 3, 17)}
IMAGE = (24, 40)  # 12 x 20, 6 x 10 and 3 x 5 tokens
GRIDS = [(12, 20), (12, 20), (6, 10), (3, 5), (3, 5), (3, 5)]
WIDTHS = [7, 7, 5, 11, 11, 11]
KINDS = {"pyramid": QuadraticKernel, "learned": Learned, "content": Content, "absolute": Absolute}
every_kind = pytest.mark.parametrize("kind", KINDS)


def pyramid(kind="pyramid", **changes) -> TimmSANet:
    """With feed-forward layers, or with batch normalization and overlapping patches as registered."""
    torch.manual_seed(0)
    sizes = SIZES | ({"hidden_dim": 0} if kind == "pyramid" else {})
    arguments = sizes | {"img_size": IMAGE, "num_classes": 11} | changes
    network = timm.create_model(f"sa_{kind}_cifar", **arguments).eval()
    for norm in network.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            for values in (norm.weight, norm.bias, norm.running_mean):
                torch.nn.init.normal_(values)
            torch.nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return network


def images(batch=2, size=IMAGE) -> torch.Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1))


def in_transformers(network: TimmSANet, kind: str, cls=SAForImageClassification, **changes):
    keys = {
        "hidden_size": [7, 5, 11],
        "num_hidden_layers": [2, 1, 3],
        "num_attention_heads": 2,
        "intermediate_size": [13, 3, 17],
        "image_size": list(IMAGE),
        "num_labels": 11,
    }
    if kind == "pyramid":
        keys |= {"intermediate_size": 0, "patch_overlap": 1}
    model = cls(SAConfig(attention_type=kind, **keys | changes)).eval()
    weights = network.state_dict()
    model.load_state_dict({key: weights[key] for key in model.state_dict()})
    return model


@pytest.mark.parametrize(
    ("term", "reference"), [(Quadratic, oracle.quadratic), (Content, oracle.content)]
)
def test_a_pyramid_is_that_of_the_numpy_loop(term, reference):
    torch.manual_seed(3)
    model = SANet(
        ((term,),),
        img_size=(20, 12),
        in_chans=2,
        num_classes=13,
        embed_dim=(5, 7),
        depth=(1, 2),
        num_heads=(3, 2),
        hidden_dim=(11, 3),
        dtype=torch.float64,
    )
    x = torch.randn(2, 2, 20, 12, dtype=torch.float64)
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    expected = oracle.network(arrays, x.numpy(), reference, patch=2, depth=3)
    assert np.abs(model(x).detach().numpy() - expected).max() < 1e-10


def test_a_network_without_feed_forward_layers_is_that_of_the_numpy_loop():
    model = pyramid(img_size=(16, 24), dtype=torch.float64)
    x = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    expected = oracle.network(arrays, x.numpy(), oracle.quadratic, patch=2, depth=6)
    assert np.abs(model(x).detach().numpy() - expected).max() < 1e-10
    simpler = reparameterize_model(model)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in simpler.modules())
    assert np.abs(simpler(x).detach().numpy() - expected).max() < 1e-10


def test_a_network_without_feed_forward_layers_trains_as_one_of_convolutions():
    """Heads at the pixels of a kernel, sharp: its blocks are a ResNet's, with GELU and replicate padding."""

    def convolved(layer: Attention, x: torch.Tensor) -> torch.Tensor:
        layer.terms[0].spread.data.fill_(30.0)
        kernel = layer.W_val.weight.unflatten(1, [3, 3, -1]).permute(0, 3, 1, 2)
        y = F.conv2d(F.pad(x, [1] * 4, mode="replicate"), kernel, layer.W_val.bias)
        bn = layer.W_out.bn
        return F.batch_norm(y, None, None, bn.weight, bn.bias, training=True)

    network = pyramid(num_heads=9).train()
    x = images(5)
    expected = network.embed(x).permute(0, 3, 1, 2)
    for block in network.blocks:
        expected = block.merge(expected.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        inner = F.gelu(convolved(block.first.attn, expected))
        expected = F.gelu(expected + convolved(block.attn, inner))
    assert torch.allclose(network.forward_features(x).permute(0, 3, 1, 2), expected, atol=1e-5)


@pytest.mark.parametrize("overlap", [-1, 1.0, "1"])
def test_an_overlap_is_a_whole_number(overlap):
    with pytest.raises(ValueError, match=r"patch_overlap: got .*, expected 0 or a positive whole"):
        pyramid(patch_overlap=overlap)


def test_merging_is_a_convolution_whose_stride_is_its_kernel():
    merge, X = Merge(5, 3), torch.randn(2, 14, 22, 5)
    weight = merge.linear.weight.unflatten(1, [2, 2, 5]).permute(0, 3, 1, 2)
    expected = F.conv2d(X.permute(0, 3, 1, 2), weight, merge.linear.bias, stride=2)
    assert torch.allclose(merge(X), expected.permute(0, 2, 3, 1), atol=1e-6)


def test_a_number_alone_is_that_of_all_stages():
    stages = [Stage(7, 2, 3, 5), Stage(7, 4, 3, 11)]
    assert layout_of(3, 7, [2, 4], 3, (5, 11)) == Layout(3, stages)
    assert Layout(3, stages).levels == [Level(2, 7, 3), Level(6, 7, 6)]
    assert Layout(3, stages[:1]).levels == [Level(1, 7, 3), Level(2, 7, 3)]


@pytest.mark.parametrize(
    "changes",
    [
        {"embed_dim": (7, 5)},
        {"depth": 3},
        {"depth": ()},
        {"depth": [1] * 9, "embed_dim": 7, "hidden_dim": 5},
        {"depth": (2, 0, 3)},
        {"hidden_dim": (13, 3.0, 17)},
        {"num_heads": "many"},
    ],
)
def test_sizes_that_do_not_fit_the_stages_are_refused(changes):
    with pytest.raises(ValueError, match=r"hidden_dim: got .* per stage"):
        SANet(((Quadratic,),), **SIZES | changes)


@pytest.mark.parametrize("size", [(20, 40), (24, 36)])
def test_images_that_the_last_stage_does_not_tile_are_refused(size):
    network = pyramid()
    with pytest.raises(
        AssertionError, match=r"image (height|width): .* multiple of model\.reduction"
    ):
        network(images(size=size))
    with pytest.raises(ValueError, match=r"got .*, expected positive multiples of 8"):
        in_transformers(network, "pyramid")(images(size=size))
    with pytest.raises(ValueError, match=r"got .*, expected positive multiples of 8"):
        pyramid(img_size=size)


def test_each_stage_has_its_width_and_its_grid():
    network = pyramid("learned")
    assert [P.shape[-1] for P in network.attention_maps(images())] == [h * w for h, w in GRIDS]
    assert [block.norm1.normalized_shape[0] for block in network.blocks] == WIDTHS
    rows = [len(block.attn.terms[0].row) for block in network.blocks]
    assert rows == [2 * width - 1 for _, width in GRIDS]
    rates = [block.drop_path.p for block in pyramid(drop_path_rate=0.5).blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_the_maps_of_each_stage_are_the_probabilities_used():
    network, x = pyramid("content"), images()
    tokens = network.embed(x)
    for block, P in zip(network.blocks, network.attention_maps(x), strict=True):
        tokens = block.merge(tokens)
        assert torch.allclose(
            block.attn(tokens), block.attn.W_out(block.attn.values(P, tokens)), atol=1e-6
        )
        tokens = block.after_attention(tokens, block.attn(tokens))
    assert torch.allclose(network.forward_head(tokens), network(x), atol=1e-6)


@every_kind
def test_features_are_those_of_the_stages(kind):
    network, x = pyramid(kind), images()
    final, features = network.forward_intermediates(x)
    assert torch.equal(final, network.forward_features(x))
    assert [tuple(f.shape) for f in features] == [(2, 7, 12, 20), (2, 5, 6, 10), (2, 11, 3, 5)]
    early, last = network.forward_intermediates(x, indices=[1], stop_early=True)
    assert torch.equal(early.permute(0, 3, 1, 2), last[0])
    assert torch.equal(last[0], features[1])
    extractor = pyramid(kind, features_only=True, out_indices=(0, 1))
    assert extractor.feature_info.channels() == [7, 5]
    assert extractor.feature_info.reduction() == [2, 4]
    assert len(extractor.model.blocks) == 3
    assert all(torch.equal(*pair) for pair in zip(extractor(x), features[:2], strict=True))
    everything = pyramid(kind, features_only=True).feature_info
    assert everything.reduction() == [2, 4, 8]
    assert everything.module_name() == ["blocks.1", "blocks.2", "blocks.5"]


@every_kind
def test_torch_fx_sees_each_block_as_one_node(kind):
    network, x = pyramid(kind), images()
    assert torch.equal(torch.fx.symbolic_trace(network)(x), network(x))
    _, names = get_graph_node_names(network)
    assert [name for name in names if "blocks." in name] == [f"blocks.{i}" for i in range(6)]
    extracted = create_feature_extractor(network, {"blocks.2": "map"})(x)["map"]
    assert torch.equal(extracted.permute(0, 3, 1, 2), network.forward_intermediates(x)[1][1])


@pytest.mark.parametrize("kind", ["pyramid", "content"])  # one of each kind of block
def test_compiles_and_exports_as_one_graph(kind):
    network, x = pyramid(kind), images()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), network(x), atol=1e-6)
    program = torch.export.export(
        network, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=97)},)
    )
    assert torch.allclose(program.module()(images(5)), network(images(5)), atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@every_kind
def test_scripts(kind):
    with set_scriptable(True):
        network = pyramid(kind)
    assert torch.allclose(torch.jit.script(network)(images()), network(images()), atol=1e-6)


def test_checkpointed_gradients_are_the_same():
    network, x = pyramid("content").train(), images()
    parameters = list(network.parameters())
    expected = torch.autograd.grad(network(x).square().mean(), parameters)
    network.set_grad_checkpointing()
    got = torch.autograd.grad(network(x).square().mean(), parameters)
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(got, expected, strict=True))


def test_layers_are_grouped_by_block_with_the_map_that_leads_to_it():
    network = pyramid("learned")
    groups = list(group_parameters(network, network.group_matcher()).values())
    assert len(groups) == 8
    for index in range(6):
        assert all(name.startswith(f"blocks.{index}.") for name in groups[1 + index])
        assert ("blocks.2.merge.linear.weight" in groups[1 + index]) == (index == 2)
    spared = pyramid().no_weight_decay()
    assert spared == {
        f"blocks.{i}.{layer}.terms.0.{name}"
        for i in range(6)
        for layer in ("first.attn", "attn")
        for name in ("Delta", "spread")
    }


@pytest.mark.parametrize("kind", ["learned", "content", "absolute"])
def test_encodings_of_every_stage_are_interpolated_for_another_size(kind, tmp_path, caplog):
    network = pyramid(kind)
    arguments = SIZES | {"img_size": IMAGE}
    timm.models.save_for_hf(network, tmp_path, model_args=arguments, safe_serialization=True)
    larger = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=(32, 56)).eval()
    assert caplog.text.count("interpolated from") >= 6
    model = in_transformers(network, kind)
    network.set_input_size((32, 56))
    model.set_input_size((32, 56))
    assert [P.shape[-1] for P in network.attention_maps(images(size=(32, 56)))][-1] == 4 * 7
    x = images(size=(32, 56))
    assert torch.allclose(larger(x), network(x), atol=1e-6)
    assert torch.allclose(model(x).logits, network(x), atol=1e-6)


def test_a_pyramid_of_positional_heads_takes_any_size():
    network = pyramid()
    model = in_transformers(network, "pyramid")
    for size in ((8, 24), (56, 40)):
        assert torch.allclose(
            model(images(size=size)).logits, network(images(size=size)), atol=1e-5
        )


@every_kind
def test_transformers_has_the_same_keys_logits_hidden_states_and_maps(kind):
    network, x = pyramid(kind), images()
    model = in_transformers(network, kind)
    assert list(model.state_dict()) == list(network.state_dict())
    with torch.no_grad():
        outputs = model(x, output_hidden_states=True, output_attentions=True)
        assert torch.equal(model(x).logits, network(x))
        maps = network.attention_maps(x)
    shapes = [tuple(state.shape) for state in outputs.hidden_states]
    assert shapes == [
        (2, 240, 7),
        *((2, h * w, dim) for (h, w), dim in zip(GRIDS, WIDTHS, strict=True)),
    ]
    for ours, theirs in zip(outputs.attentions, maps, strict=True):
        assert torch.allclose(ours, theirs.expand(ours.shape), atol=1e-6)


def test_a_backbone_of_transformers_has_the_stages():
    network, x = pyramid(), images()
    backbone = in_transformers(network, "pyramid", SABackbone, out_indices=[0, 1, 2, 3])
    assert backbone.config.stage_names == ["stem", "stage1", "stage2", "stage3"]
    assert backbone.channels == [7, 7, 5, 11]
    with torch.no_grad():
        stem, *maps = backbone(x).feature_maps
        expected = network.forward_intermediates(x, intermediates_only=True)
        assert torch.allclose(stem, network.embed(x).permute(0, 3, 1, 2), atol=1e-6)
    assert all(torch.equal(*pair) for pair in zip(maps, expected, strict=True))
    last = AutoBackbone.from_config(
        backbone.config.__class__.from_dict(
            backbone.config.to_dict() | {"out_features": ["stage2"], "out_indices": None}
        )
    )
    assert [tuple(f.shape) for f in last(x).feature_maps] == [(2, 5, 6, 10)]


def test_transformers_recomputes_the_stages_with_the_same_gradients():
    model = in_transformers(pyramid("content"), "content").train()
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    gradients = []
    for switch in ("disable", "enable"):
        getattr(model, f"{kind}_checkpointing_{switch}")()
        model.zero_grad()
        model(images(), labels=torch.tensor([3, 7])).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.allclose(*pair, atol=1e-7) for pair in zip(*gradients, strict=True))


def test_a_saved_pyramid_is_loaded_by_both_libraries(tmp_path):
    network, x = pyramid(), images()
    in_transformers(network, "pyramid").save_pretrained(tmp_path)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    ours = AutoModelForImageClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(theirs(x), network(x))
        assert torch.equal(ours(x).logits, network(x))


def macs(grids, widths, by_axes) -> int:
    """Multiply-adds for one image, written out by hand."""
    total = 12 * 20 * 3 * 16 * 7 + 3 * 5 * 4 * 5 * 11 + 6 * 10 * 4 * 7 * 5 + 11 * 11
    for (height, width), D in zip(grids, widths, strict=True):
        T = height * width
        keys = height + width if by_axes and T > 128 else T
        total += 2 * (2 * T * D * keys + T * 2 * D * D)
    return total


def test_work_is_that_of_each_stages_grid_and_width():
    network = pyramid()
    assert cost_of(network, (3, *IMAGE)).macs == macs(GRIDS, WIDTHS, by_axes=False)
    assert training_macs(network, (3, *IMAGE)) == macs(GRIDS, WIDTHS, by_axes=True)


def test_training_on_a_cpu_takes_the_cheaper_form_of_each_stage():
    network = timm.create_model("sa_pyramid_tiny_cifar").train()
    x = network.embed(images(1, (32, 32)))
    routes = []
    for block in network.blocks:
        routes += [choose(layer, block.merge(x))[0] for layer in attention_in(block).values()]
        x = block(x)
    assert routes == ["by axes"] * 2 + ["definition"] * 6


def test_maps_of_the_pixel_in_the_middle_are_recorded_on_each_grid(tmp_path):
    network, x = pyramid("content"), images(7)
    record_maps(tmp_path, network, x)
    recorded = load_file(tmp_path / "attention.safetensors")
    for index, P in enumerate(network.attention_maps(x)):
        height, width = GRIDS[index]
        expected = P.mean(0).unflatten(1, (height, width))[:, height // 2, width // 2]
        got = recorded[f"blocks.{index}.attn"]
        assert torch.allclose(got, expected.unflatten(-1, (height, width)), atol=1e-6)


def test_the_figure_of_maps_marks_the_middle_of_each_grid():
    layers = attention_layers(pyramid(), images())
    grids = [grid for grid in GRIDS for _ in range(2)]  # two layers per block
    assert [tuple(layer.grid) for layer in layers] == grids
    middles = [layer.at([size // 2 for size in layer.grid]) for layer in layers]
    figure = head_maps(middles)
    for row, (height, width) in enumerate(grids):
        axes = figure.axes[2 * row]
        assert axes.get_images()[0].get_array().shape == (height, width)
        assert axes.patches[0].get_xy() == (width // 2 - 0.5, height // 2 - 0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    arguments = {key: list(size) for key, size in SIZES.items() if key != "num_heads"}
    model = {"name": "sa_pyramid_tiny_cifar", "args": arguments | {"num_heads": 2}}
    out = tmp_path_factory.mktemp("runs") / "run"
    fit(tiny_config(model=model, data={"image_size": 24}, train={"epochs": 1}), out)
    return out


def test_a_run_leaves_figures_explorer_and_a_folder_for_both_libraries(run):
    figures = {path.stem for path in run.glob("figures/*.png")}
    assert {"head_maps", "head_depth", "head_positions", "head_paths"} <= figures
    page = (run / "explorer.html").read_text()
    assert [page.count(f'"grid":[{side},{side}]') for side in (12, 6, 3)] == [2, 1, 3]
    ours = AutoModelForImageClassification.from_pretrained(run)
    assert ours.config.hidden_size == [7, 5, 11]
    assert ours.config.attention_type == "pyramid"
    theirs = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(ours(images(size=(24, 24))).logits, theirs(images(size=(24, 24))))


def test_heads_studies_every_stage(run):
    result = CliRunner().invoke(app, ["heads", str(run), "--convolve", "3"])
    assert result.exit_code == 0, result.output
    rows = [line.split("|")[1].strip() for line in result.output.splitlines() if "|" in line]
    assert rows[2:] == [*(f"blocks.{i}.attn" for i in range(6)), "all"]
    assert read_metrics(run).test.n == 354
