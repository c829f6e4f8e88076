"""The network as users meet it: sizes, maps, pooling, checks of its input."""

import pytest
import torch
from torchvision.ops import StochasticDepth

from sa_zoo.models.attention import Attention
from sa_zoo.models.blocks import DropPath, PostNormBlock
from sa_zoo.models.content import Absolute, Content, ContentKernel, Relative
from sa_zoo.models.network import SANet
from sa_zoo.models.stages import Stage
from sa_zoo.models.terms import GeneralizedQuadratic, Learned, Quadratic
from sa_zoo.models.variants import TERMS

SMALL = {"embed_dim": 7, "depth": 3, "num_heads": 2, "hidden_dim": 13, "num_classes": 11}


def net(term=Quadratic, **kwargs) -> SANet:
    torch.manual_seed(0)
    return SANet(((term,),), **(SMALL | {"img_size": (10, 6)} | kwargs)).eval()


@pytest.mark.parametrize(
    ("term", "by_position"),
    [
        (Quadratic, True),
        (GeneralizedQuadratic, True),
        (Learned, True),
        (Content, False),
        (Relative, False),
        (Absolute, False),
    ],
)
def test_attention_maps_are_the_probabilities_used(term, by_position):
    model, x = net(term), torch.randn(3, 3, 10, 6)
    maps = model.attention_maps(x)
    assert [tuple(P.shape) for P in maps] == [(2, 15, 15) if by_position else (3, 2, 15, 15)] * 3
    tokens = model.embed(x)
    for block, P in zip(model.blocks, maps, strict=True):
        assert torch.allclose(P.sum(-1), torch.ones(()), atol=1e-6)
        attn = block.attn
        assert torch.allclose(attn(tokens), attn.W_out(attn.values(P, tokens)), atol=1e-6)
        tokens = block(tokens)
    assert torch.equal(model.forward_head(tokens), model(x))


def test_groups_of_terms_divide_the_blocks_equally():
    groups = ((Quadratic,), (Learned, Content), (Relative,))
    blocks = SANet(groups, **SMALL | {"depth": 7, "img_size": 10}).blocks
    built = [tuple(type(term) for term in block.attn.terms) for block in blocks]
    assert built == [groups[0]] * 3 + [groups[1]] * 2 + [groups[2]] * 2


@pytest.mark.parametrize(("heads", "kernel"), [(9, 3), (25, 5)])
def test_heads_that_start_as_a_kernel_are_a_convolution_of_their_value_matrices(heads, kernel):
    model = SANet(
        TERMS["quadratic_kernel"], **SMALL | {"num_heads": heads, "depth": 2, "img_size": 34}
    ).double()
    attn = model.blocks[0].attn
    slices = attn.W_val.weight.unflatten(
        1, [heads, 7]
    )  # (out, heads, in), heads in row-major order of the pixels
    weight = slices.transpose(1, 2).unflatten(2, [kernel, kernel])
    X, half = torch.randn(5, 17, 17, 7, dtype=torch.double), kernel // 2
    expected = torch.nn.functional.conv2d(X.permute(0, 3, 1, 2), weight, attn.W_val.bias).permute(
        0, 2, 3, 1
    )
    for spread, error in (None, 0.1), (30.0, 1e-12):  # as it starts, and in the limit
        if spread:
            attn.terms[0].spread.data.fill_(spread)
        inner = attn.definition(X)[:, half:-half, half:-half]
        assert (inner - expected).norm() <= error * expected.norm()


@pytest.mark.parametrize(("heads", "kernel"), [(9, 3), (25, 5)])
def test_content_that_starts_as_a_kernel_is_a_convolution_and_learns_to_look(heads, kernel):
    layer = Attention(23, heads, (ContentKernel,), (11, 13))
    slices = layer.W_val.weight.unflatten(1, [heads, 23])
    weight = slices.transpose(1, 2).unflatten(2, [kernel, kernel])
    X, half = torch.randn(5, 11, 13, 23), kernel // 2
    expected = torch.nn.functional.conv2d(X.permute(0, 3, 1, 2), weight, layer.W_val.bias)
    expected = expected.permute(0, 2, 3, 1)
    inner = layer.definition(X)[:, half:-half, half:-half]
    assert (inner - expected).norm() < 0.15 * expected.norm()
    layer.definition(X).square().sum().backward()
    term = layer.terms[0]
    assert not term.W_key.weight.any() and term.W_key.weight.grad.any()
    term.W_key.reset_parameters()
    term.reset_parameters()
    assert torch.equal(layer.definition(X)[:, half:-half, half:-half], inner)


def test_only_the_first_half_of_the_blocks_starts_as_a_kernel_and_all_other_weights_are_the_same():
    torch.manual_seed(5)
    usual = SANet(
        TERMS["quadratic"], **SMALL | {"depth": 4, "num_heads": 7, "img_size": 10}
    ).state_dict()
    torch.manual_seed(5)
    kernel = SANet(
        TERMS["quadratic_kernel"], **SMALL | {"depth": 4, "num_heads": 7, "img_size": 10}
    ).state_dict()
    changed = {key for key, value in kernel.items() if not torch.equal(value, usual[key])}
    assert changed == {
        f"blocks.{block}.attn.terms.0.{name}" for block in (0, 1) for name in ("Delta", "spread")
    }
    nearest = [
        [-1, -1],
        [-1, 0],
        [-1, 1],
        [0, -1],
        [0, 0],
        [0, 1],
        [1, 0],
    ]  # to the middle, as there are 7 heads
    assert kernel["blocks.1.attn.terms.0.Delta"].tolist() == nearest


@pytest.mark.parametrize("term", [Quadratic, GeneralizedQuadratic])
@pytest.mark.parametrize("size", [(4, 22), (34, 38)])
def test_quadratic_models_take_any_size(term, size):
    assert net(term)(torch.randn(2, 3, *size)).shape == (2, 11)


@pytest.mark.parametrize("term", [Learned, Content, Relative, Absolute])
def test_learned_encodings_refuse_another_size_until_told_and_then_take_it_and_say_so(term, caplog):
    model, x = net(term), torch.randn(2, 3, 14, 26)
    with pytest.raises(AssertionError, match="set_input_size"):
        model(x)
    model.set_input_size((14, 26))
    assert "interpolated from images of (10, 6) to (14, 26)" in caplog.text
    assert model(x).shape == (2, 11)


@pytest.mark.parametrize("term", [Learned, Content, Relative, Absolute])
def test_an_unchanged_size_changes_no_encoding(term):
    model, x = net(term), torch.randn(2, 3, 10, 6)
    y = model(x)
    model.set_input_size((10, 6))
    assert torch.equal(model(x), y)


def test_sizes_that_patches_do_not_tile_are_refused():
    with pytest.raises(ValueError, match="got 9x6, expected positive multiples of 2"):
        net(img_size=(9, 6))
    with pytest.raises(AssertionError, match="image width"):
        net()(torch.randn(1, 3, 10, 7))


@pytest.mark.parametrize("num_heads", [0, 2.0, [3, 2, 3]])
def test_a_number_of_heads_is_a_positive_whole_number(num_heads):
    with pytest.raises(ValueError, match=r"num_heads, .* expected positive whole numbers"):
        net(num_heads=num_heads)


def test_an_unknown_pooling_is_refused():
    with pytest.raises(ValueError, match="got 'max', expected 'avg'"):
        net(global_pool="max")


def test_the_wrong_number_of_channels_is_named():
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 5"):
        net()(torch.randn(1, 5, 10, 6))


def test_a_single_image_without_a_batch_is_refused():
    with pytest.raises(AssertionError, match=r"expected four dimensions, \(B, C, H, W\)"):
        net()(torch.randn(3, 10, 6))


@pytest.mark.parametrize(
    "terms",
    ["quadratic", (("quadratic",), (Quadratic,)), Quadratic, (Quadratic,), (), ((), (Quadratic,))],
)
def test_terms_that_are_no_groups_of_classes_are_refused(terms):
    with pytest.raises(ValueError, match="expected tuples of classes"):
        SANet(terms, **SMALL)


def test_the_embedding_is_space_to_depth_and_a_linear_map():
    model, x = net(in_chans=5), torch.randn(2, 5, 10, 6)
    depth = torch.nn.functional.pixel_unshuffle(x, 2).permute(
        0, 2, 3, 1
    )  # (B, 5, 3, 5 * 4), channel major
    expected = torch.nn.functional.linear(
        depth, model.patch_embed.weight.flatten(1), model.patch_embed.bias
    )
    assert torch.allclose(model.embed(x), expected, atol=1e-6)


def test_init_weights_draws_anew_from_the_same_distributions():
    model = SANet(((Quadratic,),), embed_dim=101, depth=1, num_heads=97, hidden_dim=103)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.init_weights()
    for name, value in model.state_dict().items():
        if "norm" in name:
            assert torch.equal(value, before[name])
        else:
            assert not torch.equal(value, before[name])
            assert value.std().item() == pytest.approx(before[name].std().item(), rel=0.5)
    term = model.blocks[0].attn.terms[0]
    assert term.Delta.std().item() == pytest.approx(2, rel=0.2)
    assert term.spread.mean().item() == pytest.approx(1, abs=0.01)


def test_drop_path_grows_with_depth_and_spares_evaluation():
    model = net(drop_path_rate=0.5)
    assert [block.drop_path.p for block in model.blocks] == [0.0, 0.25, 0.5]
    x = torch.randn(2, 3, 10, 6)
    assert torch.equal(model(x), model(x))
    torch.manual_seed(1)
    assert not torch.equal(model.train()(x), model(x))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_drop_path_is_that_of_torchvision(p):
    x = torch.randn(17, 5, 3, 7)
    results = []
    for module in (DropPath(p), StochasticDepth(p, mode="row")):
        torch.manual_seed(6)
        results.append(module.train()(x))
        assert torch.equal(module.eval()(x), x)
    assert torch.equal(*results)


def test_dropout_leaves_the_residual_alone():
    block = PostNormBlock(Stage(7, 1, 3, 11), (Quadratic,), (5, 3), proj_drop=1.0)
    x = torch.randn(2, 5, 3, 7)
    assert torch.equal(block(x), block.norm2(block.norm1(x)))
