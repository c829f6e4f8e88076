"""Figures: what they draw is what the files hold."""

import json

import numpy as np
import pytest
from matplotlib.image import imread
from model_folders import EPOCHS, make_run

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.analysis.figures import draw_figures, head_maps, head_positions, layers_of, learning_curve


def test_a_quadratic_run_gets_a_learning_curve_and_head_positions(tmp_path):
    run = make_run(tmp_path / "run", "sa_quadratic_tiny_cifar")
    drawn = draw_figures(run)
    assert [path.name for path in drawn] == ["learning_curve.png", "head_positions.png"]
    for path in drawn:
        assert imread(path)[..., :3].std() > 0.05, "not blank"


def test_a_learned_run_gets_head_maps_and_a_resnet_none(tmp_path):
    learned = make_run(tmp_path / "learned", "sa_learned_tiny_cifar")
    assert [path.name for path in draw_figures(learned)] == ["learning_curve.png", "head_maps.png"]
    resnet = make_run(tmp_path / "resnet", "resnet_tiny_cifar")
    assert [path.name for path in draw_figures(resnet)] == ["learning_curve.png"]


def test_drawing_twice_gives_the_same_bytes(tmp_path):
    run = make_run(tmp_path / "run", "sa_quadratic_tiny_cifar")
    first = [path.read_bytes() for path in draw_figures(run)]
    assert [path.read_bytes() for path in draw_figures(run)] == first


def test_the_curves_hold_the_history():
    loss, accuracy = learning_curve(EPOCHS).axes
    training, held_out = loss.get_lines()
    assert training.get_ydata().tolist() == [line["loss"] for line in EPOCHS]
    assert held_out.get_ydata().tolist() == [line["validation"]["loss"] for line in EPOCHS]
    assert accuracy.get_lines()[0].get_ydata() == pytest.approx([100 * line["top1"] for line in EPOCHS])


def test_a_history_without_held_out_images_has_one_curve():
    history = [{key: value for key, value in line.items() if key != "validation"} for line in EPOCHS]
    assert [len(axes.get_lines()) for axes in learning_curve(json.loads(json.dumps(history))).axes] == [1, 1]


@pytest.mark.parametrize("general", [False, True], ids=["isotropic", "any covariance"])
def test_contours_hold_the_share_of_attention_that_they_claim(general):
    random = np.random.default_rng(0)
    Delta = np.array([[2.0, -3.0]])
    spread = np.array([[[1.3, 0.4], [-0.2, 0.7]]]) if general else np.array([0.7])
    S = spread[0] if general else spread[0] * np.eye(2)
    drawn = random.multivariate_normal(Delta[0], np.linalg.inv(S @ S.T), size=20_011)[:, ::-1]  # (column, row)
    centre, *contours = head_positions([{"Delta": Delta, "spread": spread}]).axes[0].get_lines()
    assert centre.get_xydata().tolist() == [[-3.0, 2.0]]
    inside = [contour.get_path().contains_points(drawn).mean() for contour in contours]
    assert inside == pytest.approx([0.5, 0.9], abs=0.01)


def test_maps_are_the_softmax_of_the_scores_by_displacement():
    random = np.random.default_rng(0)
    layer = {
        key: random.normal(size=shape)
        for key, shape in {"row": (7, 5), "col": (9, 5), "w": (2, 5), "v": (2, 5)}.items()
    }
    shown = np.asarray(head_maps([layer]).axes[1].images[0].get_array())
    scores = (layer["col"] @ layer["v"][1])[:, None] + (layer["row"] @ layer["w"][1])[None, :]
    assert shown == pytest.approx(np.exp(scores) / np.exp(scores).sum())


def test_layers_come_in_the_order_of_the_network():
    weights = {
        f"blocks.{index}.attn.terms.0.{name}": np.array(index) for index in (10, 9, 1) for name in ("Delta", "spread")
    }
    weights["blocks.4.other.Delta"] = np.array(4)
    assert [int(layer["Delta"]) for layer in layers_of(weights, ("Delta", "spread"))] == [1, 9, 10]
