"""suites.py: the subjects of the benchmark are what their names say."""

import pytest
import suites
import timm
import torch
from benchmark import measure
from torch import nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from sa_zoo.kernels import fused
from sa_zoo.kernels.choose import ROUTES, choose, only
from sa_zoo.models.network import SANet, attention_in

CPU = torch.device("cpu")
SMALL = {
    "embed_dim": 7,
    "depth": 3,
    "num_heads": 2,
    "hidden_dim": 13,
    "img_size": (16, 20),
    "num_classes": 11,
}


@pytest.fixture
def steps(monkeypatch) -> list[tuple]:
    """The networks, routes and types of the steps that a suite builds."""
    made = []

    def recorded(network, x, route="", dtype=torch.float32, compiled=None):
        made.append((network, x, route, dtype, compiled))
        return lambda: None

    monkeypatch.setattr(suites, "step", recorded)
    return made


def test_the_convolutional_twin_differs_in_attention_alone():
    network = timm.create_model("sa_quadratic_cifar", **SMALL).eval()
    twin, x = suites.with_convolutions(network), torch.randn(5, 3, 16, 20)
    assert twin.forward_features(x).shape == network.forward_features(x).shape
    mixing = [block.attn[1] for block in twin.blocks]
    assert all(isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3) for layer in mixing)
    others = {name: p for name, p in twin.state_dict().items() if ".attn." not in name}
    assert all(torch.equal(p, network.state_dict()[name]) for name, p in others.items())
    first, last = torch.randn(1, 5, 3, 7), nn.functional.conv2d
    expected = last(first.permute(0, 3, 1, 2), mixing[0].weight, mixing[0].bias, padding=1).permute(
        0, 2, 3, 1
    )
    assert torch.allclose(twin.blocks[0].attn(first), expected, atol=1e-6)


def test_the_convolutional_twin_of_a_pyramid_is_normalized_as_it_is():
    network = timm.create_model("sa_pyramid_tiny_cifar", embed_dim=(7, 5, 11)).eval()
    for block in network.blocks:
        nn.init.uniform_(block.attn.W_out.bn.running_var, 0.5, 2.0)
    twin, X = suites.with_convolutions(network), torch.randn(3, 13, 17, 7)
    _, convolution, _, _ = twin.blocks[0].attn
    convolved = convolution(X.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    expected = network.blocks[0].attn.W_out(convolved)
    assert torch.allclose(twin.blocks[0].attn(X), expected, atol=1e-6)
    assert twin(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_models_are_measured_in_all_phases_with_the_same_weights(steps):
    cases = {case.phase: case for case in suites.models(["sa_quadratic_tiny_cifar"], 3, CPU)}
    assert tuple(cases) == suites.PHASES
    for phase, case in cases.items():
        steps.clear()
        subjects = case.subjects()
        assert case.yardstick in subjects
        assert ("folded" in subjects) == phase.startswith("inference")
        for name, (network, x, route, dtype, _) in zip(subjects, steps, strict=True):
            assert network.training == phase.startswith("training")
            assert route == ("definition" if name.startswith("definition") else "")
            assert dtype == (
                torch.bfloat16
                if "bfloat16" in phase and name != "definition, float32"
                else torch.float32
            )
            assert x.shape == (3, 3, 32, 32) and x.dtype == next(network.parameters()).dtype
            drops = {m.p for key, m in network.named_modules() if key.endswith("attn_drop")}
            assert drops <= ({0.1} if "dropout" in phase else {0.0})
        if phase == "training, float32":
            built, definition = (
                steps[list(subjects).index(name)][0] for name in ("as built", "definition")
            )
            assert all(
                torch.equal(a, b)
                for a, b in zip(built.parameters(), definition.parameters(), strict=True)
            )


def test_subjects_of_the_same_function_have_the_same_logits():
    case = next(suites.models(["sa_quadratic_tiny_cifar"], 2, CPU))
    assert {key: subject.function for key, subject in case.subjects().items()} == {
        **dict.fromkeys(["as built", "folded", "definition"], "model"),
        **{key: key for key in ["3x3 convolutions", "resnet18_cifar"]},
    }


def test_a_cnn_is_its_own_yardstick(steps):
    cases = list(suites.models(["resnet_tiny_cifar"], 2, CPU))
    assert len(cases) == 4 and {case.yardstick for case in cases} == {"as built"}
    assert "definition" not in cases[0].subjects()


def missing_compiler() -> str:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return ""


@pytest.mark.skipif(missing_compiler() != "", reason="torch.compile finds no C++ compiler")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # of torch.compile itself
def test_the_compiled_network_takes_part():
    subjects = next(suites.models(["sa_quadratic_tiny_cifar"], 2, CPU, "default")).subjects()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert subjects["compiled"].counted is subjects["folded"].run
    subjects["compiled"].run()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_layers_take_every_side_and_leave_out_maps_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(suites, "LARGEST_MAPS", 4 * 9 * 5**4)
    every = {"as built": "", "definition": "definition"}
    cases = list(suites.layers("sa_quadratic_tiny_cifar", [5, 7], CPU, every))
    names = [f"one layer of sa_quadratic_tiny_cifar, {side} tokens" for side in ("5x5", "7x7")]
    assert [(case.model, case.yardstick) for case in cases] == [
        (names[0], "definition"),
        (names[1], "as built"),
    ]
    rows = [row for case in cases for row in measure(case, 1, CPU)]
    assert [row["subject"] for row in rows] == ["as built", "definition", "as built"]
    assert rows[1]["mib"] * 2**20 > 4 * 9 * 25 * 25


def test_layers_train_in_bfloat16_on_batches_of_so_many_pixels(steps):
    pair = {"by axes": "by axes", "definition": "definition"}
    phase = "training, bfloat16"
    (case,) = suites.layers("sa_quadratic_tiny_cifar", [5], CPU, pair, phase, pixels=60)
    assert (case.phase, case.images) == (phase, 2)
    subjects = case.subjects()
    for layer, x, route, dtype, _ in steps:
        assert layer.training and x.shape[:3] == (2, 5, 5) and x.requires_grad
        assert route in pair and dtype == torch.bfloat16
    assert all(subject.dtype == torch.bfloat16 for subject in subjects.values())


def test_every_route_is_measured_against_another_one(steps):
    known = {route.name for route in ROUTES}
    cases = [case for case in suites.routes() if case.yardstick in known]
    names = [[name for name in case.subjects() if name != "as built"] for case in cases]
    compiled = {"fused"} if fused.LIBRARY else set()
    # "as published" is the definition or by axes, and "taps" needs networks of its own.
    own = known - {"as published", "taps"}
    assert {case[0] for case in names} | {"definition", "fused"} == own
    assert {name for case in names for name in case} == (own - {"fused"}) | compiled
    assert all(
        case.yardstick == route[-1] != route[0] for case, route in zip(cases, names, strict=True)
    )


def test_taps_of_a_kernel_are_the_pixels_closest_to_its_center():
    network = timm.create_model("sa_pyramid_h5_tiny_cifar")
    for layer in attention_in(network.blocks).values():
        layer.terms[0].Delta.data += 3
    suites.with_kernels(network)
    for layer in attention_in(network.blocks).values():
        taps = set(map(tuple, layer.terms[0].taps()))
        assert taps == {(-1, 0), (0, -1), (0, 0), (0, 1), (1, 0)}


@pytest.mark.parametrize("change", [suites.with_taps, suites.with_folded_kernels])
@pytest.mark.parametrize("name", ["sa_quadratic_kernel_tiny_cifar", "sa_pyramid_h5_tiny_cifar"])
def test_networks_with_taps_take_their_route(name, change):
    network = change(timm.create_model(name).eval())
    for layer in attention_in(network.blocks).values():
        with torch.inference_mode():
            assert choose(layer, torch.randn(2, 7, 5, layer.W_val.out_features))[0].name == "taps"


@pytest.mark.parametrize(("model", "phase", "batch", "names"), suites.ROUTES)
def test_routes_of_a_case_give_the_same_logits(model, phase, batch, names):
    if "fused" in names and fused.LIBRARY is None:
        pytest.skip("the compiled route needs AVX-512 and a compiler")
    torch.manual_seed(0)
    network = timm.create_model(model, **{**SMALL, "img_size": 32, "embed_dim": 16}).train(
        phase.startswith("training")
    )
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x, logits = torch.randn(2, 3, 32, 32), []
    for name in names:
        with only(name), torch.set_grad_enabled(network.training):
            logits.append(network(x))
    assert all(torch.allclose(some, logits[-1], atol=1e-5) for some in logits)


def test_convolutions_are_measured_against_attention_made_of_them(monkeypatch):
    monkeypatch.setattr(suites, "CONVOLUTIONS", ((3, 7),))
    cases = list(suites.convolutions())
    monkeypatch.setattr(suites, "resolve_model_data_config", lambda _: {"input_size": (3, 32, 32)})
    gmacs = (
        1_814_073_344 - 512_000
    ) / 49e9 + 512_000 / 1e9  # convolutions of a 49th of the pixels, and the classifier
    assert [row["gmacs"] for row in measure(cases[0], 1, CPU)] == pytest.approx([gmacs, gmacs])
    assert [(case.model, case.images, case.yardstick) for case in cases[:2]] == [
        ("mhsa_resnet18", batch, "resnet18") for batch in (1, 8)
    ]
    assert [(case.model, case.images) for case in cases[2:]] == [
        (f"3x3 layer, 3 channels, 7x7, alpha {alpha}", batch)
        for alpha in (20, 4)
        for batch in (8, 32)
    ]
    rows = measure(cases[2], 1, CPU)
    assert [row["subject"] for row in rows] == ["nn.Conv2d", "attention", "definition"]
    assert [row["subject"] for row in measure(cases[3], 1, CPU)] == ["nn.Conv2d", "attention"]
    assert rows[0]["gmacs"] == pytest.approx(
        3 * 3 * 9 * 49 * 3 / 1e9
    )  # forward, gradients of kernel and input


def test_images_of_a_recipe_are_measured_within_a_step_and_alone(monkeypatch):
    monkeypatch.setattr(suites, "IMAGES", 128)
    monkeypatch.setattr(suites, "STEPS", 2)
    rows = {row["subject"]: row for row in measure(suites.recipe("quickstart", CPU), 1, CPU)}
    assert rows.keys() == {"with images", "on one batch", "images"}
    assert rows["images"]["gmacs"] == 0 < rows["on one batch"]["gmacs"]
    with pytest.raises(ValueError, match="--device: got meta, expected cpu, where recipes train"):
        suites.recipe("quickstart", torch.device("meta"))


def test_networks_are_measured_against_a_cnn(steps):
    cases = list(suites.against("resnet_tiny_cifar", ["sa_pyramid_tiny_cifar"], 3, CPU))
    assert [case.phase for case in cases] == [
        phase for phase in suites.PHASES if "dropout" not in phase
    ]
    for case in cases:
        steps.clear()
        subjects = case.subjects()
        networks = dict(zip(subjects, (network for network, *_ in steps), strict=True))
        assert case.yardstick == "resnet_tiny_cifar"
        assert isinstance(networks.pop(case.yardstick), timm.models.ResNet)
        assert all(isinstance(network, SANet) for network in networks.values())
        if case.phase == "inference, float32":
            layer = networks["taps of a 3x3 kernel"].blocks[0].attn
            assert choose(layer, torch.randn(2, 5, 7, 56))[0].name == "taps"
            layer = networks["folded"].blocks[0].attn
            assert choose(layer, torch.randn(2, 5, 7, 56))[0].name != "taps"


def test_only_nine_heads_with_centers_become_a_kernel(steps):
    names = "sa_content_tiny_cifar", "resnet18_cifar"
    for case in suites.against("resnet_tiny_cifar", names, 2, CPU):
        assert "taps of a 3x3 kernel" not in case.subjects()
