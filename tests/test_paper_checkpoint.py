"""Checkpoints of the paper's own code, built here by the names and shapes of that code, and run by its equations."""

import json
import pickle

import pytest
import timm
import torch
import torch.nn.functional as F

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.verbs.finish import finish_copy

D, HIDDEN, LAYERS, SIDE = 400, 512, 6, 16


def reference_state(kind: str, heads: int = 9, classes: int = 10) -> dict[str, torch.Tensor]:
    """A state dict with the names that epfml/attention-cnn at 9ffaa306 gives, filled at random."""
    torch.manual_seed(0)

    def linear(name, inputs, outputs):
        return {
            f"{name}.weight": torch.randn(outputs, inputs) / inputs**0.5,
            f"{name}.bias": torch.randn(outputs),
        }

    def norm(name):
        return {f"{name}.weight": 1 + 0.1 * torch.randn(D), f"{name}.bias": 0.1 * torch.randn(D)}

    state = {"attention_mask": torch.tensor(1.0), **linear("features_upscale", 12, D)}
    for layer in range(LAYERS):
        block = f"encoder.layer.{layer}"
        attention = f"{block}.attention.self"
        if kind == "learned":
            state[f"{attention}.relative_indices"] = (
                torch.arange(SIDE)[None] - torch.arange(SIDE)[:, None] + SIDE - 1
            )
            for axis in ("row", "col"):
                state[f"{attention}.{axis}_embeddings.weight"] = torch.randn(2 * SIDE - 1, D)
                state[f"{attention}.head_keys_{axis}.weight"] = torch.randn(heads, D) / 20
        else:
            state[f"{attention}.attention_centers"] = 2 * torch.randn(heads, 2)
            shape = (heads,) if kind == "isotropic" else (heads, 2, 2)
            state[f"{attention}.attention_spreads"] = torch.rand(shape)
            state[f"{attention}.R"] = torch.zeros(
                2, 2, 2, 2, 5
            )  # there 50 x 50 x 50 x 50 x 5; never read
        state |= linear(f"{attention}.value", heads * D, D) | linear(
            f"{block}.attention.output.dense", D, D
        )
        state |= norm(f"{block}.attention.output.LayerNorm") | linear(
            f"{block}.intermediate.dense", D, HIDDEN
        )
        state |= linear(f"{block}.output.dense", HIDDEN, D) | norm(f"{block}.output.LayerNorm")
    return state | linear("classifier", D, classes)


def reference_scores(state: dict, attention: str, kind: str) -> torch.Tensor:
    """(H, W, N_h, H, W), by the formulas of that code: five-dimensional r_delta, tables by axis."""
    place = torch.arange(SIDE)
    if kind == "learned":
        index = state[f"{attention}.relative_indices"]
        row = (
            state[f"{attention}.row_embeddings.weight"][index]
            @ state[f"{attention}.head_keys_row.weight"].T
        )
        col = (
            state[f"{attention}.col_embeddings.weight"][index]
            @ state[f"{attention}.head_keys_col.weight"].T
        )
        return (row[None, :, None, :] + col[:, None, :, None]).permute(
            0, 1, 4, 2, 3
        )  # [i, j, h, k, l]
    first = (
        (place[None, :] - place[:, None])[:, None, :, None].expand(SIDE, SIDE, SIDE, SIDE).float()
    )
    second = (
        (place[None, :] - place[:, None])[None, :, None, :].expand(SIDE, SIDE, SIDE, SIDE).float()
    )
    r_delta = torch.stack([first, second, first**2, second**2, first * second], dim=-1)
    mu, spread = state[f"{attention}.attention_centers"], state[f"{attention}.attention_spreads"]
    inverse = (
        torch.diag_embed((spread**2)[:, None].expand(-1, 2))
        if kind == "isotropic"
        else spread @ spread.mT
    )
    a, b, c = inverse[:, 0, 0], inverse[:, 0, 1], inverse[:, 1, 1]
    u = -0.5 * torch.stack(
        [-2 * (a * mu[:, 0] + b * mu[:, 1]), -2 * (c * mu[:, 1] + b * mu[:, 0]), a, c, 2 * b],
        dim=-1,
    )
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
        mixed = linear(
            f"{block}.attention.output.dense", linear(f"{block}.attention.self.value", mixed)
        )
        x = norm(f"{block}.attention.output.LayerNorm", mixed + x)
        hidden = F.gelu(linear(f"{block}.intermediate.dense", x))
        x = norm(f"{block}.output.LayerNorm", linear(f"{block}.output.dense", hidden) + x)
    return linear("classifier", x.mean(dim=(1, 2)))


def saved(state: dict, path):
    torch.save({"epoch": 299, "test_accuracy": torch.tensor(0.5), "model_state_dict": state}, path)
    return path


@pytest.mark.parametrize(
    ("model", "kind", "heads"),
    [
        ("sa_quadratic_cifar", "isotropic", 9),
        ("sa_quadratic_h16_cifar", "isotropic", 16),
        ("sa_quadratic_gen_cifar", "general", 9),
        ("sa_learned_cifar", "learned", 9),
    ],
)
def test_a_converted_checkpoint_computes_what_the_papers_code_does(model, kind, heads, tmp_path):
    state = reference_state(kind, heads, classes=7)
    finish_copy(saved(state, tmp_path / "final.checkpoint"), tmp_path / "out", model)
    net = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(net(images), reference_forward(state, images, kind), atol=1e-4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architecture"] == model and config["num_classes"] == 7
    assert "num_classes" not in config["model_args"]


def test_a_checkpoint_of_another_variant_is_refused_and_nothing_written(tmp_path):
    path = saved(reference_state("learned"), tmp_path / "final.checkpoint")
    with pytest.raises(ValueError, match="expected one of sa_quadratic_cifar"):
        finish_copy(path, tmp_path / "out", "sa_quadratic_cifar")
    assert [entry.name for entry in tmp_path.iterdir()] == ["final.checkpoint"]


def test_unknown_tensors_are_named(tmp_path):
    state = reference_state("isotropic") | {
        "encoder.layer.0.attention.self.query.weight": torch.zeros(1)
    }
    with pytest.raises(ValueError, match=r"query\.weight"):
        finish_copy(saved(state, tmp_path / "c"), tmp_path / "out", "sa_quadratic_cifar")


def test_files_that_are_no_such_checkpoint_are_refused(tmp_path):
    path = tmp_path / "c"
    with pytest.raises(FileNotFoundError, match="which is not there"):
        finish_copy(path, tmp_path / "out", "sa_quadratic_cifar")
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="expected a complete file that torch"):
        finish_copy(path, tmp_path / "out", "sa_quadratic_cifar")
    torch.save({"epoch": 299}, path)
    with pytest.raises(ValueError, match="KeyError: 'state_dict'"):
        finish_copy(path, tmp_path / "out", "sa_quadratic_cifar")
    saved(reference_state("isotropic"), path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="expected a complete file"):
        finish_copy(path, tmp_path / "out", "sa_quadratic_cifar")


@pytest.mark.parametrize(
    "state",
    [
        {"classifier.weight": 3},
        {3: torch.zeros(1)},
        {"classifier.weight": torch.tensor(1.0)},
        {"features_upscale.weight": torch.zeros(3)},
        {"features_upscale.weight": torch.zeros(5, 7)},
    ],
    ids=["a number", "no name", "no classes", "one axis", "an odd shape"],
)
def test_tensors_of_another_kind_or_shape_are_refused(state, tmp_path):
    with pytest.raises(ValueError, match=r"^checkpoint: got .*, expected one of"):
        finish_copy(saved(state, tmp_path / "c"), tmp_path / "out", "sa_quadratic_cifar")


def test_tensors_without_memory_of_their_own_do_not_ask_for_it(tmp_path):
    one, path = torch.zeros(1), tmp_path / "c"
    huge = {"classifier.weight": one.expand(200_000, 400), "classifier.bias": one.expand(200_000)}
    with pytest.raises(
        ValueError, match=r"^checkpoint: got .*, expected one of .* more than [\d,]+ parameters"
    ):
        finish_copy(
            saved(reference_state("isotropic") | huge, path), tmp_path / "out", "sa_quadratic_cifar"
        )
    huge = {"features_upscale.weight": one.expand(8_000_000_000, 12)}
    with pytest.raises(
        ValueError, match=r"(?s)^checkpoint: got .*size mismatch for patch_embed.weight"
    ):
        finish_copy(
            saved(reference_state("isotropic") | huge, path), tmp_path / "out", "sa_quadratic_cifar"
        )


class Bomb:
    def __reduce__(self):
        return print, ("code from a checkpoint ran",)


def test_code_in_a_checkpoint_does_not_run(tmp_path, capsys):
    path = tmp_path / "c"
    path.write_bytes(pickle.dumps({"model_state_dict": Bomb()}, protocol=2))
    with pytest.raises(ValueError, match="expected a complete file that torch"):
        finish_copy(path, tmp_path / "out", "sa_quadratic_cifar")
    assert "code from a checkpoint ran" not in capsys.readouterr().out


def test_other_names_and_folders_in_the_way_are_refused(tmp_path):
    path = saved(reference_state("isotropic"), tmp_path / "c")
    with pytest.raises(ValueError, match="expected one of sa_content_cifar"):
        finish_copy(path, tmp_path / "out", "sa_content_cifar")
    with pytest.raises(ValueError, match=r"expected the timm name .*as --model"):
        finish_copy(path, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(FileExistsError, match="expected the name of a new or an empty folder"):
        finish_copy(path, tmp_path / "out", "sa_quadratic_cifar")
