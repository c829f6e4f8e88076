"""Removing and resetting heads: what stays, what goes, and that both are models like any other."""

import pytest
import timm
import torch
from tiny_runs import tiny_config
from transformers import AutoModelForImageClassification, TimmWrapperForImageClassification

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.folders.metrics import Metrics
from sa_zoo.folders.opened import load_model
from sa_zoo.interchange.pruned_heads import prune_heads, reset_heads, write_changed
from sa_zoo.models.terms import TERMS
from sa_zoo.training.train import train
from sa_zoo.verbs.fit import finish_folder

HEADS, D = 5, 11
SIZES = {
    "img_size": 8,
    "patch_size": 2,
    "embed_dim": D,
    "depth": 3,
    "hidden_dim": 13,
    "num_heads": HEADS,
}
CHOSEN = {0: [1, 4], 2: [0]}


def network(variant="quadratic", classes=7):
    torch.manual_seed(0)
    return timm.create_model(f"sa_{variant}_cifar", num_classes=classes, **SIZES).eval()


def of_heads(name, value):
    """A parameter of attention with an axis of heads, moved to the front and apart; None if it has none."""
    if ".attn." not in name or name.endswith(
        ("W_val.bias", "W_out.weight", "W_out.bias", ".row", ".col", ".P")
    ):
        return None
    axis = 1 if name.endswith("W_val.weight") else 0
    return value.unflatten(axis, [HEADS, -1]).movedim(axis, 0)


@pytest.mark.parametrize("variant", TERMS)
def test_heads_without_values_are_removed_without_a_trace(variant):
    model, x = network(variant), torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        for block, heads in CHOSEN.items():
            model.blocks[block].attn.W_val.weight.unflatten(1, [HEADS, D])[:, heads] = 0
        pruned = prune_heads(model, CHOSEN)
        assert torch.allclose(pruned(x), model(x), rtol=0, atol=1e-6)
    assert [block.attn.W_val.in_features // D for block in pruned.blocks] == [3, 5, 4]
    expected = sum(
        value.numel() if (by_head := of_heads(name, value)) is None else by_head[0].numel() * count
        for block, count in enumerate((3, 5, 4))
        for name, value in model.named_parameters()
        if name.startswith(f"blocks.{block}.")
    )
    rest = sum(
        value.numel() for name, value in model.named_parameters() if not name.startswith("blocks.")
    )
    assert sum(value.numel() for value in pruned.parameters()) == expected + rest


@pytest.mark.parametrize("variant", TERMS)
def test_resetting_changes_the_chosen_heads_and_nothing_else(variant):
    model = network(variant)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                1
            )  # as if trained: some heads of an untrained network are always the same
    before, after = model.state_dict(), reset_heads(model, CHOSEN).state_dict()
    for name, value in before.items():
        block = int(name.split(".")[1]) if name.startswith("blocks.") else -1
        if block not in CHOSEN or (mine := of_heads(name, value)) is None:
            assert torch.equal(value, after[name]), name
            continue
        theirs = of_heads(name, after[name])
        equal = [head for head in range(HEADS) if torch.equal(mine[head], theirs[head])]
        assert equal == [head for head in range(HEADS) if head not in CHOSEN[block]], name


def test_a_reset_is_reproducible_and_draws_from_no_generator_of_the_caller():
    model, state = network(), torch.get_rng_state()
    one, two = (reset_heads(model, CHOSEN).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_pruned_model_is_written_loaded_by_every_library_and_trained_further(tmp_path):
    model, x = network("quadratic_gen", classes=10), torch.randn(3, 3, 8, 8)
    pruned, folder = prune_heads(model, CHOSEN), tmp_path / "pruned"
    write_changed(pruned, folder, Metrics())
    finish_folder(folder)
    with torch.no_grad():
        for load in (load_model, AutoModelForImageClassification.from_pretrained):
            output = load(str(folder)).eval()(x)
            assert torch.allclose(getattr(output, "logits", output), pruned(x), rtol=0, atol=1e-6)
        wrapper = TimmWrapperForImageClassification.from_pretrained(folder)
        assert torch.allclose(wrapper(x).logits, pruned(x), rtol=0, atol=1e-6)
    init = {"name": "sa_quadratic_gen_cifar", "args": {}, "init": f"local-dir:{folder}"}
    train(tiny_config(model=init, train={"epochs": 1}), tmp_path / "tuned")
    tuned = load_model(str(tmp_path / "tuned"))
    assert [block.attn.W_val.in_features // D for block in tuned.blocks] == [3, 5, 4]


def test_a_model_whose_size_and_classes_were_changed_is_pruned_as_it_is():
    model = network("learned", classes=10)
    model.set_input_size((16, 12))
    model.reset_classifier(7)
    assert prune_heads(model, CHOSEN)(torch.randn(3, 3, 16, 12)).shape == (3, 7)


@pytest.mark.parametrize("change", [prune_heads, reset_heads])
def test_a_model_keeps_its_type_and_the_pooling_that_it_was_changed_to(change):
    model = network().double()
    model.reset_classifier(5, "")
    logits = change(model, CHOSEN)(torch.randn(3, 3, 8, 8, dtype=torch.float64))
    assert logits.dtype == torch.float64 and logits.shape == (3, 4, 4, 5)


@pytest.mark.parametrize(
    ("model", "heads", "said"),
    [
        (
            network(),
            {1: list(range(HEADS))},
            "heads: got all those of block 2, expected at least one",
        ),
        (network(), {3: [0]}, r"heads: got \[0\] of block 3"),
        (network(), {0: [HEADS]}, r"heads: got \[5\] of block 0"),
        (timm.create_model("test_vit"), {0: [0]}, "model: got VisionTransformer"),
    ],
)
def test_heads_that_cannot_be_removed_are_refused(model, heads, said):
    with pytest.raises(ValueError, match=said):
        prune_heads(model, heads)


@pytest.mark.parametrize("num_heads", [0, [3, 2], [3, 0, 2]])
def test_a_number_of_heads_that_does_not_fit_the_blocks_is_refused(num_heads):
    with pytest.raises(
        ValueError,
        match=r"num_heads: got .*, expected a positive number, or one for each of 3 blocks",
    ):
        timm.create_model("sa_quadratic_cifar", **SIZES | {"num_heads": num_heads})
