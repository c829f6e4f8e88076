"""Quadratic scores in timm's vision transformers: against explicit scores, and through every door of both libraries."""

import copy
import warnings

import numpy as np
import onnxruntime
import pytest
import small_vits
import timm
import torch
from small_vits import NAME, H, W, by_hand, images, noisy
from timm.models import load_checkpoint
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import TimmWrapperForImageClassification

import sa_zoo
from sa_zoo.analysis.figures import gaussian_layers
from sa_zoo.folders.opened import open_folder
from sa_zoo.folders.write import write_timm_files
from sa_zoo.training.config import parse_config
from sa_zoo.verbs.train import train_and_finish
from sa_zoo.vit.layers import kernel_pixels

TOKENS = [
    ({"class_token": False, "global_pool": "avg"}, 0),
    ({"reg_tokens": 3, "qk_norm": True}, 4),
]
SIZES = small_vits.SIZES | {"embed_dim": 33, "num_heads": 3}


def vit(name=NAME, **arguments):
    return noisy(small_vits.vit(name, **SIZES | arguments))


def drawn(network, alpha=0.7):
    return sa_zoo.add_positions(network, alpha, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("arguments", "prefix"), TOKENS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_scores_are_those_of_the_definition(arguments, prefix, dtype, error):
    network = drawn(vit(**arguments)).to(dtype)
    layer = network.blocks[1].attn
    with torch.no_grad():
        layer.alpha.copy_(torch.tensor([0.0, 0.3, 2.0]))
        layer.Delta.mul_(1 / 3)  # in numbers of this type
        x = torch.randn(2, prefix + H * W, 33, dtype=dtype)
        P, v = by_hand(layer, x, prefix)
        heads = (P @ v).transpose(1, 2).flatten(2).to(dtype)
        expected = layer.proj(heads)
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                assert torch.allclose(layer(x), expected, rtol=0, atol=error)
        layer.fused_attn = False
        assert torch.allclose(layer(x), expected, rtol=0, atol=error)


@pytest.mark.parametrize("fused", [True, False])
def test_masks_and_dropout_are_those_of_timm(fused):
    network = vit(embed_dim=48, attn_drop_rate=0.5).train()
    attention, x = network.blocks[1].attn, torch.randn(2, 1 + H * W, 48)
    mask = torch.rand(1 + H * W, 1 + H * W) > 0.3
    layer = drawn(network, alpha=0.0).blocks[1].attn
    found = []
    for module in (attention, layer):
        module.fused_attn = fused
        torch.manual_seed(3)
        found.append(module(x, attn_mask=mask))
    assert torch.allclose(*found, atol=1e-5)


def test_the_grid_follows_the_input_size():
    network = copy.deepcopy(drawn(vit()))
    network.set_input_size((28, 20))
    twin = drawn(vit(img_size=(28, 20)))
    twin.load_state_dict(network.state_dict())
    assert torch.equal(network(images().mT), twin(images().mT))


@pytest.mark.parametrize("side", [16, 37])
def test_bfloat16_rounds_neither_positions_nor_displacements(side):
    network = vit(img_size=4 * side, depth=1, class_token=False, global_pool="avg", embed_dim=21)
    layer = drawn(network, alpha=1.0).blocks[0].attn
    with torch.no_grad():
        layer.qkv.weight[:42] = 0  # scores of content, which are rounded as ever
        layer.qkv.bias[:42] = 0
        layer.Delta.copy_(torch.tensor([0.4, -1.3, 2.6, 0.1, 0.0, 5.2]))
        low = copy.deepcopy(layer)
        for module in (low.qkv, low.proj):
            module.bfloat16()
        rows = slice(0, None, 5)
        # alpha / scale is rounded first, by at most one part in 256
        rounded = (layer.alpha * 7**0.5).bfloat16().float() / 7**0.5
        assert torch.allclose(rounded, layer.alpha, rtol=2**-8)
        at = torch.cartesian_prod(*2 * [torch.arange(side, dtype=torch.float64)])
        delta = at[None] - at[rows, None]
        away = delta - layer.Delta.double().view(3, 1, 1, 2)
        expected = (-rounded.double()[:, None, None] * away.square().sum(-1)).softmax(-1)
        # through the values, which bfloat16 rounds once, of every way to evaluate a layer
        x = torch.randn(1, side**2, 21, generator=torch.Generator().manual_seed(2)).bfloat16()
        v = low.positioned(x)[2].double()
        low.proj = nn.Identity()
        found = {}
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                found[backend] = low(x)
        low.fused_attn = False
        found["scores"] = low(x)
        for heads in found.values():
            got = heads.double().unflatten(-1, [3, 7]).transpose(1, 2)[:, :, rows]
            assert (got - expected @ v).abs().max() < 0.01 * v.abs().max()


def test_autocast_keeps_the_second_parts():
    network = vit(img_size=4 * 16, embed_dim=21, depth=1, qk_norm=True)
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    layer = drawn(network, alpha=1.0).blocks[0].attn
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        q, k, _ = layer.positioned(torch.randn(2, 1 + 256, 21))
        assert q.shape[-1] == k.shape[-1] == 15
        assert torch.equal(q[..., 7:], q[..., 7:].bfloat16().to(q))
        low = network(x)
    with torch.no_grad():
        assert (network(x) - low).abs().max() < 0.1 * low.abs().max()


@pytest.mark.parametrize(("arguments", "prefix"), TOKENS)
def test_alpha_zero_leaves_a_network_as_it_is(arguments, prefix):
    network, x = vit(embed_dim=48, **arguments), images()
    with torch.no_grad():
        expected = network(x)
        changed = sa_zoo.add_positions(copy.deepcopy(network), alpha=0.0)
        assert torch.equal(changed(x), expected)
        for fused in (True, False):
            odd = vit(**arguments)
            for block in odd.blocks:
                block.attn.fused_attn = fused
            expected = odd(x)
            found = sa_zoo.add_positions(odd, alpha=0.0)(x)
            assert torch.allclose(found, expected, atol=1e-4)
            assert fused or torch.equal(found, expected)
    changed(x).square().sum().backward()
    # the class token alone is read after the last block, where it has no position
    learning = changed.blocks[:1] if prefix else changed.blocks
    assert all(block.attn.alpha.grad.abs().min() > 0 for block in learning)


def test_positions_are_learned_and_not_decayed():
    network = sa_zoo.add_positions(vit(), alpha=0.5)
    expected = kernel_pixels((H, W), 3)
    for block in network.blocks:
        assert torch.equal(block.attn.Delta.detach().view(3, 2), expected)
    network(images()).logsumexp(1).sum().backward()
    learned = {name for name, _ in network.named_parameters() if "Delta" in name or "alpha" in name}
    assert len(learned) == 4 and all(p.grad is not None for p in network.parameters())
    decayed, kept = (set(map(id, group["params"])) for group in
                     sorted(param_groups_weight_decay(network, 0.1), key=lambda g: -g["weight_decay"]))  # fmt: skip
    assert {id(network.get_parameter(name)) for name in learned} <= kept and decayed


@pytest.mark.parametrize("given", [{}, {"name": "local_vit", "start": "quadratic", "blocks": [0]}])
def test_both_libraries_load_it_by_name(tmp_path, given):
    network = drawn(vit(**given))
    with torch.no_grad():
        network.blocks[0].attn.alpha.copy_(torch.tensor([0.1, 0.2, 0.3]))
        expected = network(images())
    write_timm_files(tmp_path, network, {"label_names": list("abcdefghijk")})
    for loaded in (
        open_folder(tmp_path).network,
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval(),
    ):
        assert torch.equal(loaded(images()), expected)
        assert not hasattr(loaded.blocks[0].attn, "gate")
    wrapper = TimmWrapperForImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(wrapper(images()).logits, expected)


def test_its_name_takes_starts_blocks_features_and_other_vits(tmp_path):
    network = timm.create_model(
        "local_vit", vit="deit_tiny_distilled_patch16_224", alpha=0.7, blocks=[1], **SIZES
    )
    kinds = [type(block.attn).__name__ for block in network.blocks]
    assert kinds == ["Attention", "PositionAttention"] and network.num_prefix_tokens == 2
    sizes = SIZES | {"class_token": False, "global_pool": "avg"}
    started = timm.create_model("local_vit", start="quadratic", num_classes=11, **sizes)
    # a checkpoint as timm's train.py writes it loads by the plain name
    torch.save({"arch": "local_vit", "state_dict": started.state_dict()}, tmp_path / "last.pth.tar")
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=11, **sizes).eval()
    load_checkpoint(plain, str(tmp_path / "last.pth.tar"))
    assert torch.equal(plain(images()), started.eval()(images()))
    weights = []
    for start in ("", "quadratic"):
        torch.manual_seed(0)
        network = timm.create_model("local_vit", start=start, blocks=[1], **SIZES)
        weights.append([block.attn.qkv.weight for block in network.blocks])
    assert [torch.equal(*both) for both in zip(*weights, strict=True)] == [True, False]
    features = timm.create_model("local_vit", alpha=1.0, features_only=True, out_indices=2, **SIZES)
    assert [tuple(each.shape) for each in features(images())] == [(2, 33, H, W)] * 2
    with pytest.raises(RuntimeError):
        timm.create_model("local_vit", pretrained=True)
    with pytest.raises(ValueError, match="vit: got vit_small, expected the name of a VisionTr"):
        timm.create_model("local_vit", vit="vit_small")


@pytest.mark.filterwarnings("ignore")  # of the exporter, about its own dependencies
def test_it_compiles_and_exports(tmp_path):
    network = drawn(vit(reg_tokens=2))
    with torch.no_grad():
        expected = network(images())
        compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(images()), expected, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(network, (images(),), dynamo=True, verbose=False)
    program.save(tmp_path / "model.onnx")
    runtime = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (got,) = runtime.run(None, {runtime.get_inputs()[0].name: images().numpy()})
    assert np.abs(got - expected.numpy()).max() < 1e-4


def test_a_run_with_positions_becomes_a_complete_folder(tmp_path):
    args = TOKENS[0][0] | {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 33,
        "num_heads": 3,
        "depth": 2,
    }
    table = {
        "model": {"name": "local_vit", "args": args | {"start": "quadratic", "alpha": 0.01}},
        "data": {"name": "digits", "image_size": 16},
        "optim": {"lr": 0.2},
        "train": {"epochs": 2},
    }
    train_and_finish(parse_config(table), tmp_path)
    opened = open_folder(tmp_path)
    layers = gaussian_layers(opened.tensors("heads.safetensors"))
    assert [tuple(layer["Delta"].shape) for layer in layers] == [(3, 3, 2)] * 2
    for layer, block in zip(layers, opened.network.blocks, strict=True):
        assert torch.equal(layer["Delta"][0], kernel_pixels((4, 4), 3).double())
        assert torch.equal(layer["Delta"][-1].flatten().float(), block.attn.Delta.detach())
        alpha = block.attn.alpha.detach().clamp(min=0)
        assert torch.allclose(layer["spread"][-1].square().float(), 2 * alpha, atol=1e-6)
        assert not torch.equal(layer["spread"][0], layer["spread"][-1])
    figures = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert {"head_positions", "head_paths", "learning_curve"} <= figures


@pytest.mark.parametrize(
    ("network", "arguments", "said"),
    [
        (lambda: vit(patch_drop_rate=0.5), {}, "vit: got patch_drop_rate > 0, expected 0"),
        (lambda: vit(dynamic_img_size=True), {}, "vit: got dynamic_img_size=True"),
        (lambda: vit(), {"blocks": [2]}, r"blocks: got \[2\], expected numbers from 0 to 1"),
        (lambda: vit(), {"alpha": -0.5}, "alpha: got -0.5, expected a number from 0"),
        (lambda: vit(), {"alpha": float("nan")}, "alpha: got nan, expected a number from 0"),
        (lambda: drawn(vit()), {}, "vit: got PositionAttention in block 0"),
    ],
)
def test_networks_that_do_not_fit_are_refused(network, arguments, said):
    network = network()
    kinds = [type(block.attn) for block in network.blocks]
    with pytest.raises(ValueError, match=said):
        sa_zoo.add_positions(network, **arguments)
    assert [type(block.attn) for block in network.blocks] == kinds
