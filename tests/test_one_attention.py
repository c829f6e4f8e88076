"""Networks and convolutional layers share one attention, which has the properties that the paper proves."""

import pytest
import torch
from torch import nn

from sa_zoo.convolution.layer_conversion import attention_from_conv
from sa_zoo.models.attention import Attention, probabilities_from
from sa_zoo.models.content import Absolute, Content, Relative
from sa_zoo.models.terms import Learned, Quadratic

H, W, D, B = 11, 13, 7, 5


def random_layer(conv: nn.Conv2d) -> nn.Module:
    """`conv` as attention whose Delta and alpha have then been moved, differently for each head."""
    layer = attention_from_conv(conv.double(), 1.7)
    with torch.no_grad():
        layer.Delta.add_(0.4 * torch.randn_like(layer.Delta))
        layer.alpha.mul_(torch.rand_like(layer.alpha) + 0.5)
    return layer


def as_network_attention(layer: nn.Module, grid: tuple[int, int]) -> Attention:
    """Attention with a quadratic term of the same Delta, alpha and value matrices."""
    heads = len(layer.alpha)
    attention = Attention(D, heads, (Quadratic,), grid, dtype=torch.float64)
    attention.terms[0].Delta = nn.Parameter(layer.Delta.detach().clone())
    attention.terms[0].spread = nn.Parameter((2 * layer.alpha.detach()).sqrt())
    slices = layer.W_val().detach().flatten(2)  # (D_out, D_in, N_h)
    attention.W_val.weight = nn.Parameter(slices.transpose(1, 2).flatten(1))
    attention.W_val.bias = nn.Parameter(layer.b_out.detach().clone())
    attention.W_out = nn.Identity()
    return attention


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_a_convolutional_layer_is_attention_with_a_quadratic_term_on_the_padded_image(padding):
    torch.manual_seed(padding)
    layer = random_layer(nn.Conv2d(D, D, 3, padding=padding))
    x = torch.randn(B, D, H, W, dtype=torch.float64, requires_grad=True)
    keys = layer.pad(x)
    attention = as_network_attention(layer, tuple(keys.shape[2:]))
    # Query i of the layer stands on the key i + padding; Attention has queries on all keys.
    rows, columns = (slice(padding, padding + count) for count in layer(x).shape[2:])
    expected = attention(keys.permute(0, 2, 3, 1))[:, rows, columns].permute(0, 3, 1, 2)
    direction = torch.randn_like(expected)
    inputs = [
        x,
        attention.terms[0].Delta,
        attention.W_val.weight,
        attention.W_val.bias,
        attention.terms[0].spread,
    ]
    wanted = torch.autograd.grad(expected, inputs, direction, retain_graph=True)
    spread = attention.terms[0].spread.detach()
    for forward in (layer, layer.definition):
        y = forward(x)
        assert (y - expected).abs().max() < 1e-10
        got = torch.autograd.grad(
            y, [x, layer.Delta, layer.W_val.weight, layer.b_out, layer.alpha], direction
        )
        kernel = got[2].flatten(2).transpose(1, 2).flatten(1)
        for mine, theirs in zip((*got[:2], kernel, got[3], got[4] * spread), wanted, strict=True):
            assert (mine - theirs).abs().max() < 1e-10 * max(1.0, float(theirs.abs().max()))


def test_lemma_2_the_weights_of_equation_8_give_quadratic_scores():
    """W_qry = W_key = 0, What_key = I, D_p = 3: v^T r_delta = -alpha (|delta|^2 - 2 <delta, Delta>)."""
    torch.manual_seed(0)
    heads = 3
    term = Quadratic(D, heads, (H, W), dtype=torch.float64)
    alpha = term.spread.detach().square() / 2
    y, x = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
    position = torch.stack([y, x], dim=-1).flatten(0, 1).double()  # (T, 2)
    delta = position[None, :] - position[:, None]  # (T, T, 2), k - q
    r_delta = torch.cat([delta.square().sum(dim=-1, keepdim=True), delta], dim=-1)  # (T, T, D_p)
    Delta = term.Delta.detach()
    v = -alpha[:, None] * torch.stack(
        [torch.ones(heads), -2 * Delta[:, 0], -2 * Delta[:, 1]], dim=1
    )  # (N_h, D_p)
    X, u, What_key = (
        torch.randn(H * W, D, dtype=torch.float64),
        torch.randn(heads, D).double(),
        torch.eye(3).double(),
    )
    W_qry = W_key = torch.zeros(D, D, dtype=torch.float64)
    query, key = X @ W_qry, X @ W_key
    A = torch.stack(
        [
            query @ key.T + torch.einsum("qd,qkd->qk", query[:, :3], r_delta @ What_key.T) + u[h] @ key.T
            + torch.einsum("d,qkd->qk", v[h], r_delta @ What_key.T)
            for h in range(heads)
        ]
    )  # fmt: skip
    expected = -alpha[:, None, None] * (delta[None] - Delta[:, None, None]).square().sum(dim=-1)
    constant = alpha * Delta.square().sum(dim=1)  # does not depend on the key
    assert (A - constant[:, None, None] - expected).abs().max() < 1e-10
    scores = term(X.unflatten(0, (H, W))[None])
    assert (scores - expected).abs().max() < 1e-10
    assert (probabilities_from(scores) - probabilities_from(A)).abs().max() < 1e-10


def test_lemma_2_the_term_with_all_of_equation_8_can_be_quadratic():
    """With r_delta split by axis, D_p = 4: (dx^2, dx) and (dy^2, dy)."""
    torch.manual_seed(0)
    D_p, heads = 4, 3
    quadratic = Quadratic(D_p, heads, (H, W), dtype=torch.float64)
    eq8 = Relative(D_p, heads, (H, W), dtype=torch.float64)
    alpha, Delta = quadratic.spread.detach().square() / 2, quadratic.Delta.detach()
    with torch.no_grad():
        for projection in (eq8.W_qry, eq8.W_key):
            projection.weight.zero_()
        eq8.W_key_pos.weight.copy_(torch.eye(D_p).repeat(heads, 1))
        for table, size in ((eq8.row, W), (eq8.col, H)):
            displacement = torch.arange(1 - size, size).double()
            table.copy_(torch.stack([displacement.square(), displacement], dim=1))
        one = torch.ones(heads)
        v = torch.stack([one, -2 * Delta[:, 1], one, -2 * Delta[:, 0]], dim=1)
        eq8.v.copy_(-alpha[:, None] * v * D_p**0.5)  # scores are divided by sqrt(D_h)
    X = torch.randn(1, H, W, D_p, dtype=torch.float64)
    assert (probabilities_from(eq8(X))[0] - probabilities_from(quadratic(X))).abs().max() < 1e-10


def test_attention_without_positional_terms_is_permutation_equivariant():
    """Eq. 2 alone, Content without encodings: it cannot tell one arrangement of pixels from another."""
    torch.manual_seed(0)
    layer = Attention(D, 3, (Content,), (H, W), dtype=torch.float64)
    X = torch.randn(B, H, W, D, dtype=torch.float64)
    order = torch.randperm(H * W)

    def permuted(tokens: torch.Tensor) -> torch.Tensor:
        return tokens.flatten(1, 2)[:, order].unflatten(1, (H, W))

    assert (layer(permuted(X)) - permuted(layer(X))).abs().max() > 1e-2
    with torch.no_grad():
        layer.terms[0].row.zero_()
        layer.terms[0].col.zero_()
        assert (layer(permuted(X)) - permuted(layer(X))).abs().max() < 1e-10


@pytest.mark.parametrize("terms", [(Quadratic,), (Learned,), (Relative,), (Quadratic, Content)])
def test_attention_with_relative_terms_is_translation_equivariant_away_from_borders(terms):
    """Tokens in the middle of an otherwise empty image, to which narrow heads attend, are moved by (2, 3)."""
    torch.manual_seed(0)
    height, width, shift = 23, 29, (2, 3)
    layer = Attention(D, 3, (*terms, Quadratic), (height, width), dtype=torch.float64)
    with torch.no_grad():
        layer.terms[-1].Delta.normal_(std=0.5)
        layer.terms[-1].spread.fill_(6.0)  # no head sees farther than 3 pixels
    X = torch.zeros(B, height, width, D, dtype=torch.float64)
    X[:, 8:13, 9:16] = torch.randn(B, 5, 7, D, dtype=torch.float64)
    moved = X.roll(shift, dims=(1, 2))
    inside = (slice(None), slice(6, 17), slice(7, 21))
    assert (layer(moved) - layer(X).roll(shift, dims=(1, 2)))[inside].abs().max() < 1e-10
    absolute = Attention(D, 3, (Absolute, Quadratic), (height, width), dtype=torch.float64)
    absolute.terms[1].load_state_dict(layer.terms[-1].state_dict())
    assert (absolute(moved) - absolute(X).roll(shift, dims=(1, 2)))[inside].abs().max() > 1e-6
