"""Quadratic scores in timm's vision transformers: against explicit scores, and in every use of both libraries."""

import copy

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.optim import param_groups_weight_decay
from timm.utils.onnx import onnx_export
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import TimmWrapperForImageClassification

import sa_zoo
from sa_zoo.analysis.figures import gaussian_layers
from sa_zoo.folders.write import write_timm_files
from sa_zoo.opened import open_model
from sa_zoo.training.run_folder import record_heads
from sa_zoo.vit.layers import kernel_pixels

H, W = 5, 7  # patches of 4 x 4 pixels
NAME = "vit_tiny_patch16_224"
SIZES = {"img_size": (20, 28), "patch_size": 4, "depth": 2, "embed_dim": 33, "num_heads": 3}
NO_TOKENS = {"class_token": False, "global_pool": "avg"}
TOKENS = [(NO_TOKENS, 0), ({"reg_tokens": 3, "qk_norm": True}, 4)]


def vit(name=NAME, **arguments):
    """A network for images of 20 x 28 pixels whose weights are so large that content decides its attention."""
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=11, **SIZES | arguments).eval()
    for parameter in network.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return network


def images(count=2):
    return torch.randn(count, 3, 20, 28, generator=torch.Generator().manual_seed(1))


def probabilities_and_values(layer, X, prefix):
    """From the weights, in float64: (B, N_h, N, N) and (B, N_h, N, d)"""
    layer = copy.deepcopy(layer).double().requires_grad_(False)
    qkv = layer.qkv(X.double()).unflatten(-1, [3, layer.num_heads, -1])
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    scores = layer.q_norm(q) @ layer.k_norm(k).mT / layer.head_dim**0.5
    pixels = [torch.tensor((y, x)) for y in range(H) for x in range(W)]
    for i, query in enumerate(pixels):
        for j, key in enumerate(pixels):
            delta = key - query - layer.Delta.view(-1, 2)
            scores[:, :, prefix + i, prefix + j] -= layer.alpha * delta.square().sum(1)
    return scores.softmax(-1), v


def with_positions(network, alpha=0.7):
    """With centers anywhere, as after training."""
    random = torch.Generator().manual_seed(0)
    for block in sa_zoo.add_positions(network, alpha).blocks:
        block.attn.Delta.data.copy_(2 * torch.randn(block.attn.Delta.shape, generator=random))
    return network


def by_every_kernel(layer, x, **more):
    """The outputs by the formula, by the fast kernel, and by explicit scores."""
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            yield layer(x, **more)
    layer.fused_attn = False
    yield layer(x, **more)


@pytest.mark.parametrize(("arguments", "prefix"), TOKENS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_scores_are_those_of_the_definition(arguments, prefix, dtype, error):
    layer = with_positions(vit(**arguments)).to(dtype).blocks[1].attn
    with torch.no_grad():
        layer.alpha.copy_(torch.tensor([0.0, 0.3, 2.0]))
        layer.Delta.mul_(1 / 3)  # in numbers of this type
        x = torch.randn(2, prefix + H * W, 33, dtype=dtype)
        P, v = probabilities_and_values(layer, x, prefix)
        expected = layer.proj((P @ v).transpose(1, 2).flatten(2).to(dtype))
        for found in by_every_kernel(layer, x):
            assert torch.allclose(found, expected, rtol=0, atol=error)


@pytest.mark.parametrize("kind", ["", "_mixed"])
def test_rotary_embeddings_add_to_positions(kind):
    sizes = {"embed_dim": 36, "init_values": 1.0, "num_reg_tokens": 2}
    network = vit(f"vit_small_patch16_rope{kind}_224", **sizes)
    same, positioned = (copy.deepcopy(network) for _ in range(2))
    assert torch.allclose(sa_zoo.add_positions(same, 0.0)(images()), network(images()), atol=1e-5)
    layer = with_positions(positioned).blocks[1].attn
    x, rope = torch.randn(2, 3 + H * W, 36), network.rope.get_embed()
    more = {"rope": rope[1] if kind else rope}
    expected = network.blocks[1].attn(x, attn_mask=layer.position_scores(), **more)
    for found in by_every_kernel(layer, x, **more):
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_masks_and_dropout_are_those_of_timm(fused):
    network = vit(embed_dim=48, attn_drop_rate=0.5).train()
    attention, x = network.blocks[1].attn, torch.randn(2, 1 + H * W, 48)
    mask = torch.rand(1 + H * W, 1 + H * W) > 0.3
    found = []
    for module in (attention, with_positions(network, alpha=0.0).blocks[1].attn):
        module.fused_attn = fused
        torch.manual_seed(3)
        found.append(module(x, attn_mask=mask))
    assert torch.allclose(*found, atol=1e-5)


def test_the_grid_follows_the_input_size():
    network = copy.deepcopy(with_positions(vit()))
    network.set_input_size((28, 20))
    twin = with_positions(vit(img_size=(28, 20)))
    twin.load_state_dict(network.state_dict())
    assert torch.equal(network(images().mT), twin(images().mT))


def test_bfloat16_rounds_neither_positions_nor_displacements():
    side = 37
    network = vit(img_size=4 * side, depth=1, embed_dim=21, **NO_TOKENS)
    layer = with_positions(network, alpha=1.0).blocks[0].attn
    with torch.no_grad():
        layer.qkv.weight[:42] = 0  # scores of content, rounded as in timm
        layer.qkv.bias[:42] = 0
        layer.Delta.copy_(torch.tensor([0.4, -1.3, 2.6, 0.1, 0.0, 5.2]))
        layer.qkv.bfloat16()
        layer.proj = nn.Identity()
        rows = slice(0, None, 5)
        # alpha / scale is rounded first, by at most one part in 256
        rounded = (layer.alpha * 7**0.5).bfloat16().double() / 7**0.5
        at = torch.cartesian_prod(*2 * [torch.arange(side, dtype=torch.float64)])
        away = at[None] - at[rows, None] - layer.Delta.double().view(3, 1, 1, 2)
        P = (-rounded[:, None, None] * away.square().sum(-1)).softmax(-1)
        # every evaluation, compared by outputs; bfloat16 rounds the values once
        x = torch.randn(1, side**2, 21, generator=torch.Generator().manual_seed(2)).bfloat16()
        v = layer.positioned(x)[2].double()
        for heads in by_every_kernel(layer, x):
            got = heads.double().unflatten(-1, [3, 7]).transpose(1, 2)[:, :, rows]
            assert (got - P @ v).abs().max() < 0.01 * v.abs().max()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("arguments", "prefix"), TOKENS)
def test_alpha_zero_keeps_the_function_and_its_gradient_is_alive(arguments, prefix, fused):
    network, x = vit(**arguments), images()
    for block in network.blocks:
        block.attn.fused_attn = fused
    expected = network(x)
    found = sa_zoo.add_positions(network, alpha=0.0)(x)
    assert torch.allclose(found, expected, atol=1e-4)
    found.square().sum().backward()
    # the class token alone is read after the last block, where it has no position
    learning = network.blocks[:1] if prefix else network.blocks
    assert all(block.attn.alpha.grad.abs().min() > 0 for block in learning)
    assert torch.equal(network.blocks[0].attn.Delta.detach().view(3, 2), kernel_pixels((H, W), 3))
    not_decayed = param_groups_weight_decay(network, 0.1)[0]["params"]
    for block in network.blocks:
        assert {id(block.attn.Delta), id(block.attn.alpha)} <= set(map(id, not_decayed))


def test_both_libraries_load_it_by_name(tmp_path):
    network = with_positions(vit())
    write_timm_files(tmp_path, network, {"label_names": list("abcdefghijk")})
    expected = network(images())
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    wrapper = TimmWrapperForImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(open_model(tmp_path).network(images()), expected)
    assert torch.equal(loaded(images()), expected)
    assert torch.equal(wrapper(images()).logits, expected)


def test_its_name_takes_other_vits_blocks_and_features():
    network = timm.create_model(
        "local_vit", vit="deit_tiny_distilled_patch16_224", alpha=0.7, blocks=[1], **SIZES
    )
    kinds = [type(block.attn).__name__ for block in network.blocks]
    assert kinds == ["Attention", "PositionAttention"] and network.num_prefix_tokens == 2
    features = timm.create_model("local_vit", alpha=1.0, features_only=True, out_indices=2, **SIZES)
    assert [tuple(each.shape) for each in features(images())] == [(2, 33, H, W)] * 2
    with pytest.raises(RuntimeError):
        timm.create_model("local_vit", pretrained=True)
    with pytest.raises(ValueError, match="vit: got vit_small, expected the name of a VisionTr"):
        timm.create_model("local_vit", vit="vit_small")


@pytest.mark.filterwarnings("ignore")  # of the exporter, about its own dependencies
def test_it_compiles_and_exports(tmp_path):
    network = with_positions(vit(reg_tokens=2))
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(images()), network(images()), atol=1e-5)
    path = str(tmp_path / "model.onnx")
    onnx_export(network, path, input_size=(3, 20, 28), use_dynamo=True, check_forward=True)


def test_recorded_positions_are_drawn(tmp_path):
    network = with_positions(vit())
    attention = network.blocks[1].attn
    start = attention.Delta.detach().clone()
    record_heads(tmp_path, network, 0)
    with torch.no_grad():
        attention.Delta.add_(1)
        attention.alpha.fill_(-0.1)  # attends away from Delta
    record_heads(tmp_path, network, 1)
    _, layer = gaussian_layers(load_file(tmp_path / "heads.safetensors"))
    assert torch.equal(layer["Delta"].float(), torch.stack([start, start + 1]).unflatten(1, [3, 2]))
    assert torch.allclose(layer["spread"].square(), torch.tensor([[1.4], [0]]).double())


@pytest.mark.parametrize(
    ("network", "arguments", "said"),
    [
        ({"patch_drop_rate": 0.5}, {}, "vit: got patch_drop_rate > 0, expected 0"),
        ({"dynamic_img_size": True}, {}, "vit: got dynamic_img_size=True"),
        ({}, {"blocks": [2]}, "blocks: got"),
        ({"name": "eva02_tiny_patch14_224", "embed_dim": 48}, {}, "vit: got EvaAttention"),
    ],
)
def test_networks_that_do_not_fit_are_refused(network, arguments, said):
    network = vit(**network)
    before = network.state_dict().keys()
    with pytest.raises(ValueError, match=said):
        sa_zoo.add_positions(network, **arguments)
    assert network.state_dict().keys() == before
