"""Figures: what they draw is what the files hold, and where it belongs."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from model_folders import EPOCHS, METRICS, TEST, make_run
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.analysis.figures import figure_files, figures_of, gaussian_layers
from sa_zoo.analysis.head_figures import head_depth, head_maps, head_paths, head_positions
from sa_zoo.analysis.heads import layers_of, measure
from sa_zoo.analysis.run_figures import (
    confusion,
    learning_curves,
    reliability,
)
from sa_zoo.cli import app
from sa_zoo.folders.opened import open_model
from sa_zoo.models.network import attention_in

DETAIL = {
    "confusion_matrix": [[5, 2, 0], [1, 6, 0], [3, 0, 8]],
    "calibration_error": 0.07,
    "calibration_curve": {"confidence": [0.41, 0.83], "accuracy": [0.37, 0.91], "images": [7, 18]},
}
SMALL = {"embed_dim": 11, "depth": 2, "hidden_dim": 13, "num_heads": 3}


@pytest.fixture
def run(tmp_path):
    """A run of a quadratic model, with everything that a run of today records."""
    folder = make_run(tmp_path / "run", "sa_quadratic_tiny_cifar", num_classes=3, **SMALL)
    (folder / "metrics.json").write_text(json.dumps({**METRICS, "test": TEST | DETAIL}))
    weights = {
        key: value
        for key, value in load_file(folder / "model.safetensors").items()
        if ".terms." in key
    }
    save_file(
        {key: np.stack([value + 1, value]) for key, value in weights.items()},
        folder / "heads.safetensors",
    )
    return folder


QUADRATIC = ["learning_curve", "head_positions", "head_paths", "head_maps", "head_depth"]


def test_a_quadratic_run_gets_all_figures_and_the_same_bytes_each_time(run):
    drawn = figure_files(open_model(str(run)))
    assert [Path(name).stem for name in drawn] == [*QUADRATIC, "confusion_matrix", "reliability"]
    for content in drawn.values():
        pixels = imread(BytesIO(content))
        assert pixels[..., :3].std() > 0.05, "not blank"
        assert 300 <= pixels.shape[1] <= 1200, "of a width that a card shows"
    assert figure_files(open_model(str(run))) == drawn


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("sa_quadratic_tiny_cifar", ["head_positions", "head_maps", "head_depth"]),
        ("sa_learned_tiny_cifar", ["head_maps", "head_depth"]),
        ("sa_content_tiny_cifar", []),
        ("resnet_tiny_cifar", []),
    ],
)
def test_an_older_run_gets_the_figures_that_it_has_data_for(tmp_path, name, figures):
    sizes = SMALL if name.startswith("sa_") else {}
    folder = make_run(tmp_path / "run", name, **sizes)
    assert [Path(name).stem for name in figure_files(open_model(str(folder)))] == [
        "learning_curve",
        *figures,
    ]


def test_a_content_run_gets_the_maps_that_it_recorded(tmp_path):
    folder = make_run(tmp_path / "run", "sa_content_tiny_cifar", **SMALL)
    save_file(
        {f"blocks.{i}.attn": np.random.rand(3, 8, 8) for i in range(2)},
        folder / "attention.safetensors",
    )
    assert [Path(name).stem for name in figure_files(open_model(str(folder)))] == [
        "learning_curve",
        "head_maps",
    ]


def test_the_figures_of_one_layer_and_one_epoch_are_whole():
    figure = head_positions([{"Delta": torch.zeros(3, 2), "spread": torch.ones(3)}])
    figure.canvas.draw()
    for label in (figure._supxlabel, figure._supylabel):
        extent = label.get_window_extent()
        assert (
            0 <= extent.x0 <= extent.x1 <= figure.bbox.width
            and 0 <= extent.y0 <= extent.y1 <= figure.bbox.height
        )
    line = {"epoch": 1, "loss": 0.5, "top1": 0.75}
    for axes in learning_curves([line]).axes:
        assert all(float(tick).is_integer() for tick in axes.xaxis.get_major_locator()())


def test_a_truncated_file_is_named(run):
    recorded = run / "heads.safetensors"
    recorded.write_bytes(recorded.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"heads\.safetensors: got a truncated or damaged file"):
        figures_of(open_model(str(run)))


def test_the_curves_hold_the_history():
    loss, accuracy = learning_curves(EPOCHS).axes
    training, held_out = loss.get_lines()
    assert training.get_ydata().tolist() == [line["loss"] for line in EPOCHS]
    assert held_out.get_ydata().tolist() == [line["validation"]["loss"] for line in EPOCHS]
    assert accuracy.get_lines()[0].get_ydata() == pytest.approx(
        [100 * line["top1"] for line in EPOCHS]
    )


def test_a_history_without_held_out_images_has_one_curve():
    history = [
        {key: value for key, value in line.items() if key != "validation"} for line in EPOCHS
    ]
    assert [len(axes.get_lines()) for axes in learning_curves(history).axes] == [1, 1]


def test_rows_of_the_confusion_matrix_are_shares_of_the_true_class():
    axes = confusion(DETAIL["confusion_matrix"], ["ant", "bee", "cat"]).axes[0]
    shown = np.asarray(axes.images[0].get_array())
    assert shown.sum(1) == pytest.approx(100) and shown[0] == pytest.approx([500 / 7, 200 / 7, 0])
    assert (axes.get_ylabel(), [label.get_text() for label in axes.get_yticklabels()]) == (
        "true class",
        ["ant", "bee", "cat"],
    )
    assert not confusion(np.eye(37, dtype=int).tolist()).axes[0].texts


def test_the_reliability_diagram_has_a_point_and_a_bar_per_bin():
    upper, lower = reliability(DETAIL["calibration_curve"], 0.07).axes
    assert upper.get_lines()[-1].get_xydata().tolist() == [[0.41, 0.37], [0.83, 0.91]]
    assert [bar.get_height() for bar in lower.patches] == [7, 18] and "7.0 %" in upper.get_title()


def rendered(figure):
    """Pixels (height, width, 3), the first row at the top."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].astype(int)


@pytest.mark.parametrize("Delta", [(0, 3), (-2, 0), (1, -3)])
def test_a_planted_head_is_found_on_the_correct_side_of_the_query(Delta):
    """(row, column) of Delta: positive rows are below the query, positive columns to its right."""
    model = timm.create_model("sa_quadratic_tiny_cifar", **SMALL | {"depth": 1, "num_heads": 1})
    term = model.blocks[0].attn.terms[0]
    with torch.no_grad():
        term.Delta.copy_(torch.tensor([Delta]))
        term.spread.fill_(9.0)
        P = model.attention_maps(torch.zeros(1, 3, 32, 32))[0][:, 4 * 8 + 4].unflatten(-1, (8, 8))
    planted = {"Delta": torch.tensor([Delta]).double(), "spread": torch.tensor([9.0]).double()}
    path = {"Delta": torch.tensor([[[0.0, 0.0]], [list(Delta)]])}
    for figure in (head_positions([planted]), head_paths([path])):
        canvas_up = figure.axes[0].transData.transform(
            [Delta[::-1], (0, 0)]
        )  # matplotlib counts pixels upwards
        assert np.sign(canvas_up[0] - canvas_up[1]).tolist() == [
            np.sign(Delta[1]),
            -np.sign(Delta[0]),
        ]
        dots = [line for line in figure.axes[0].get_lines() if line.get_marker() in (".", "o")]
        assert dots[-1].get_xydata()[-1].tolist() == list(Delta[::-1])
    picture = rendered(head_maps([P]))
    colored = np.argwhere(
        np.ptp(picture, axis=-1) > 40
    )  # all of the map; what is around it is gray
    corner, size = colored.min(0), np.ptp(colored, axis=0) + 1
    brightest = np.argwhere((picture > (240, 220, -1)).all(-1) & (picture[..., 2] < 100)).mean(0)
    assert 8 * (brightest - corner) / size - 4.5 == pytest.approx(Delta, abs=0.3)


def test_depth_is_drawn_head_by_head():
    layers = layers_of(
        timm.create_model("sa_quadratic_tiny_cifar", **SMALL), torch.zeros(1, 3, 32, 32)
    )
    measured = [measure(layer) for layer in layers]
    reach, share = head_depth(measured, 3).axes
    for axes, values in (
        (reach, torch.cat([heads.reach for heads in measured]).tolist()),
        (share, torch.cat([100 * heads.share for heads in measured]).tolist()),
    ):
        first, second, means = axes.get_lines()
        assert [*first.get_ydata(), *second.get_ydata()] == pytest.approx(values)
        assert means.get_ydata() == pytest.approx([np.mean(values[:3]), np.mean(values[3:])])


@pytest.mark.parametrize("general", [False, True], ids=["isotropic", "any covariance"])
def test_contours_hold_the_share_of_attention_that_they_claim(general):
    random = np.random.default_rng(0)
    Delta = np.array([[2.0, -3.0]])
    spread = np.array([[[1.3, 0.4], [-0.2, 0.7]]]) if general else np.array([0.7])
    S = spread[0] if general else spread[0] * np.eye(2)
    drawn = random.multivariate_normal(Delta[0], np.linalg.inv(S @ S.T), size=20_011)[
        :, ::-1
    ]  # (column, row)
    layer = {"Delta": torch.from_numpy(Delta), "spread": torch.from_numpy(spread)}
    center, *contours = head_positions([layer]).axes[0].get_lines()
    assert center.get_xydata().tolist() == [[-3.0, 2.0]]
    inside = [contour.get_path().contains_points(drawn).mean() for contour in contours]
    assert inside == pytest.approx([0.5, 0.9], abs=0.01)


def test_a_head_that_attends_everywhere_is_drawn_too():
    layer = {"Delta": torch.tensor([[0.0, 0.0], [1.0, 2.0]]), "spread": torch.tensor([0.0, 1.0])}
    assert head_positions([layer]).axes[0].get_xlim()[1] < 30


def test_layers_come_in_the_order_in_which_they_run(tmp_path):
    sizes = {"embed_dim": (5, 7, 11), "num_heads": 2, "num_classes": 3}
    folder = make_run(tmp_path / "run", "sa_pyramid_tiny_cifar", **sizes)
    path = folder / "model.safetensors"
    weights = load_file(path)
    order = list(attention_in(timm.create_model("sa_pyramid_tiny_cifar", **sizes).blocks))
    for row, layer in enumerate(order):
        weights[f"blocks.{layer}.terms.0.Delta"][:] = row
    save_file(weights, path)
    heads = {name: np.stack([rows] * 2) for name, rows in weights.items() if ".terms." in name}
    save_file(heads, folder / "heads.safetensors")  # sorted by name, which is another order
    figures = figures_of(open_model(str(folder)))
    for row in range(len(order)):
        assert figures["head_paths"].axes[row].lines[0].get_ydata()[-1] == row
        assert figures["head_positions"].axes[row].texts[0].xy[1] == row


def test_the_heads_of_a_convolution_as_attention_are_gaussian_too_and_those_of_a_single_pixel_are_left_out():
    weights = {
        "a.Delta": torch.zeros(9, 2),
        "a.alpha": torch.full((9,), 2.0),
        "b.Delta": torch.zeros(1, 2),
        "b.alpha": torch.ones(1),
        "c.Delta": torch.zeros(3, 2),  # of no head: nothing says how sharp it is
    }
    (layer,) = gaussian_layers(weights)
    assert layer["spread"].tolist() == [2.0] * 9


def test_nothing_is_drawn_through_a_link_out_of_the_folder(run, tmp_path):
    (tmp_path / "outside").mkdir()
    (run / "figures").symlink_to("../outside")
    result = CliRunner().invoke(app, ["card", str(run)])
    assert result.exit_code == 1 and "figures/learning_curve.png, a link to" in result.stderr, (
        result.output
    )
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize("line", ["[" * 100_000, "7", "{"])
def test_a_history_that_is_not_json_is_reported(run, line):
    (run / "history.jsonl").write_text(f"{line}\n")
    result = CliRunner().invoke(app, ["card", str(run)])
    assert result.exit_code == 1 and f"{run}/history.jsonl: got" in result.stderr, result.exception
