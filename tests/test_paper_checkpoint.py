"""Checkpoints of the paper's own code, built here by the names and shapes of that code, and run by its equations."""

import pytest
import timm
import torch
import torch.nn.functional as F

import sa_zoo

pytestmark = pytest.mark.usefixtures("without_figures")
D, HIDDEN, LAYERS, SIDE, HEADS = 400, 512, 6, 16, 9


def reference_state(kind: str) -> dict[str, torch.Tensor]:
    """A state dict with the names that epfml/attention-cnn at 9ffaa306 gives, filled at random."""
    torch.manual_seed(0)
    state = {"attention_mask": torch.tensor(1.0)}

    linear = {"features_upscale": (D, 12), "classifier": (7, D)}
    for layer in range(LAYERS):
        block = f"encoder.layer.{layer}"
        attention = f"{block}.attention.self"
        if kind == "learned":
            place = torch.arange(SIDE)
            state[f"{attention}.relative_indices"] = place[None] - place[:, None] + SIDE - 1
            for axis in ("row", "col"):
                state[f"{attention}.{axis}_embeddings.weight"] = torch.randn(2 * SIDE - 1, D)
                state[f"{attention}.head_keys_{axis}.weight"] = torch.randn(HEADS, D) / 20
        else:
            shape = [HEADS] if kind == "isotropic" else [HEADS, 2, 2]
            state[f"{attention}.attention_centers"] = 2 * torch.randn(HEADS, 2)
            state[f"{attention}.attention_spreads"] = torch.rand(shape)
            state[f"{attention}.R"] = torch.zeros(2, 2, 2, 2, 5)  # never read
        linear[f"{attention}.value"] = D, HEADS * D
        linear[f"{block}.attention.output.dense"] = D, D
        linear[f"{block}.intermediate.dense"] = HIDDEN, D
        linear[f"{block}.output.dense"] = D, HIDDEN
        for norm in ("attention.output", "output"):
            state[f"{block}.{norm}.LayerNorm.weight"] = 1 + 0.1 * torch.randn(D)
            state[f"{block}.{norm}.LayerNorm.bias"] = 0.1 * torch.randn(D)
    for name, (outputs, inputs) in linear.items():
        state[f"{name}.weight"] = torch.randn(outputs, inputs) / inputs**0.5
        state[f"{name}.bias"] = torch.randn(outputs)
    return state


def reference_scores(state: dict, attention: str, kind: str) -> torch.Tensor:
    """(H, W, N_h, H, W), by the formulas of that code: five-dimensional r_delta, tables by axis."""
    if kind == "learned":
        index = state[f"{attention}.relative_indices"]
        row, col = (
            state[f"{attention}.{axis}_embeddings.weight"][index]
            @ state[f"{attention}.head_keys_{axis}.weight"].T
            for axis in ("row", "col")
        )
        return torch.einsum("jlh,ik->ijhkl", row, torch.ones(SIDE, SIDE)) + torch.einsum(
            "ikh,jl->ijhkl", col, torch.ones(SIDE, SIDE)
        )
    place = torch.arange(SIDE).float()
    delta = place[None, :] - place[:, None]
    first = delta[:, None, :, None].expand([SIDE] * 4)
    second = delta[None, :, None, :].expand([SIDE] * 4)
    r_delta = torch.stack([first, second, first**2, second**2, first * second], dim=-1)
    mu, spread = state[f"{attention}.attention_centers"], state[f"{attention}.attention_spreads"]
    if kind == "isotropic":
        spread = torch.diag_embed(spread[:, None].expand(-1, 2))
    inverse = spread @ spread.mT
    a, b, c = inverse[:, 0, 0], inverse[:, 0, 1], inverse[:, 1, 1]
    down, across = mu.T
    linear = [-2 * (a * down + b * across), -2 * (c * across + b * down)]
    u = -0.5 * torch.stack([*linear, a, c, 2 * b], dim=-1)
    return torch.einsum("ijklr,hr->ijhkl", r_delta, u)


def reference_forward(state: dict, images: torch.Tensor, kind: str) -> torch.Tensor:
    """The forward pass of that code: (B, 3, 32, 32) -> (B, classes)."""

    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(x, (D,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-12)

    x = images.permute(0, 2, 3, 1)  # (B, 32, 32, 3), then neighbours side by side: (y, x, channel)
    x = x.reshape(-1, SIDE, 2, SIDE, 2, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, SIDE, SIDE, 12)
    x = linear("features_upscale", x)
    for layer in range(LAYERS):
        block = f"encoder.layer.{layer}"
        scores = reference_scores(state, f"{block}.attention.self", kind)
        P = scores.flatten(3).softmax(-1).unflatten(3, [SIDE, SIDE])
        mixed = torch.einsum("ijhkl,bkld->bijhd", P, x).flatten(3)
        mixed = linear(f"{block}.attention.self.value", mixed)
        mixed = linear(f"{block}.attention.output.dense", mixed)
        x = norm(f"{block}.attention.output.LayerNorm", mixed + x)
        hidden = F.gelu(linear(f"{block}.intermediate.dense", x))
        x = norm(f"{block}.output.LayerNorm", linear(f"{block}.output.dense", hidden) + x)
    return linear("classifier", x.mean(dim=(1, 2)))


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("sa_quadratic_cifar", "isotropic"),
        ("sa_quadratic_gen_cifar", "general"),
        ("sa_learned_cifar", "learned"),
    ],
)
def test_a_checkpoint_computes_what_the_papers_code_does(model, kind, tmp_path):
    state = reference_state(kind)
    torch.save({"epoch": 299, "model_state_dict": state}, tmp_path / "final.checkpoint")
    sa_zoo.finish(tmp_path / "final.checkpoint", tmp_path / "out", model)
    net = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(net(images), reference_forward(state, images, kind), atol=1e-4)


def test_a_checkpoint_of_another_variant_is_refused(tmp_path):
    torch.save({"model_state_dict": reference_state("learned")}, tmp_path / "c")
    with pytest.raises(ValueError, match=r"^checkpoint: got .*, expected"):
        sa_zoo.finish(tmp_path / "c", tmp_path / "out", "sa_quadratic_cifar")
    assert not (tmp_path / "out").exists()


def test_a_truncated_checkpoint_is_refused(tmp_path):
    torch.save({"epoch": 299}, tmp_path / "c")
    (tmp_path / "c").write_bytes((tmp_path / "c").read_bytes()[:-100])
    with pytest.raises(ValueError, match="got "):
        sa_zoo.finish(tmp_path / "c", tmp_path / "out", "sa_quadratic_cifar")
