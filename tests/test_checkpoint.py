"""Checkpoints: what is saved comes back, damage is noticed, and the one before is there to fall back on."""

import shutil
from pathlib import Path

import pytest
import torch
from damage import DAMAGES
from timm.optim import Lamb

from sa_zoo.folders.write import read_json, write_json, write_sums
from sa_zoo.training.checkpoint import Counters, load_checkpoint, save_checkpoint

FILES = ("state.safetensors", "state.json", "sha256.json")
OLDER, NEWER = "epoch-00000-step-0000005", "epoch-00000-step-0000006"
LATER = "epoch-00002-step-0000000"


def trained(steps: int, optimizer: type = torch.optim.AdamW, **settings: float) -> tuple:
    """A model and its optimizer after some steps."""
    torch.manual_seed(steps)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.Flatten()
    )
    model = model.to(memory_format=torch.channels_last)
    opt = optimizer(model.parameters(), lr=0.1, **settings)
    for _ in range(steps):
        model(torch.randn(2, 3, 7, 7)).square().mean().backward()
        opt.step()
    return model, opt


def save_step(folder: Path, step: int) -> None:
    save_checkpoint(folder, *trained(step), Counters(step=step))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def two(tmp_path):
    """A folder with checkpoints of steps 5 and 6."""
    for step in (5, 6):
        save_step(tmp_path, step)
    return tmp_path


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {}), (Lamb, {})],
)
def test_a_checkpoint_gives_back_what_it_was_given(tmp_path, optimizer, settings):
    model, opt = trained(3, optimizer, **settings)
    other, other_opt = trained(1, optimizer, **settings)
    counters = Counters(epoch=2, step=7, loss_sum=0.1 + 0.2, history=[{"loss": 1e-9}])
    save_checkpoint(tmp_path, model, opt, counters)
    assert load_checkpoint(tmp_path, other, other_opt) == counters
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key])
    for mine, theirs in zip(opt.state.values(), other_opt.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert torch.equal(mine[key], theirs[key])
            assert mine[key].stride() == theirs[key].stride()


def test_the_last_two_are_kept_and_nothing_else(two):
    (two / f".{LATER}.incomplete").mkdir()  # left by a process that was killed
    save_checkpoint(two, *trained(7), Counters(epoch=1))
    assert names(two) == [NEWER, "epoch-00001-step-0000000"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(two, damage, file):
    DAMAGES[damage](two / NEWER / file)
    model, opt = trained(1)
    warning = f"got {two / NEWER}, truncated or damaged: .*; resuming from {OLDER}"
    with pytest.warns(UserWarning, match=warning):
        assert load_checkpoint(two, model, opt) == Counters(step=5)
    for key, value in trained(5)[0].state_dict().items():
        assert torch.equal(value, model.state_dict()[key])
    assert names(two) == [OLDER, NEWER], "reading changes nothing"


def test_two_damaged_checkpoints_are_an_error_that_names_both(two):
    for name in (OLDER, NEWER):
        DAMAGES["flipped bit"](two / name / "state.safetensors")
    both = rf"(?s)got {two / NEWER}, truncated.*state\.safeten.*got {two / OLDER}, .*a new --out"
    with pytest.raises(ValueError, match=both):
        load_checkpoint(two, *trained(1))


@pytest.mark.parametrize(
    ("name", "step", "kept"),
    [
        (NEWER, 6, [OLDER, NEWER]),
        (NEWER, 7, [OLDER, "epoch-00000-step-0000007"]),
        (LATER, 6, [OLDER, NEWER]),
    ],
    ids=["replaced", "followed", "of a later step"],
)
def test_saving_after_falling_back_leaves_only_good_ones(two, name, step, kept):
    (two / NEWER).rename(two / name)
    DAMAGES["flipped bit"](two / name / "state.safetensors")
    save_step(two, step)
    assert names(two) == kept
    assert load_checkpoint(two, *trained(1)).step == step
    good = (two / kept[-1]).stat().st_ino
    save_step(two, step)
    assert (two / kept[-1]).stat().st_ino == good, "it is not replaced"


def test_files_of_others_are_neither_read_nor_removed(two, tmp_path_factory):
    precious = tmp_path_factory.mktemp("precious")
    (precious / "thesis.tex").touch()
    (two / "epoch-00009-step-0000000").touch()
    shutil.copytree(precious, two / f"{NEWER}-copy")
    (two / "epoch-00000-step-0000001").symlink_to(precious)
    others = {*names(two)} - {OLDER, NEWER}
    save_step(two, 7)
    assert load_checkpoint(two, *trained(1)).step == 7
    assert {*names(two)} == others | {NEWER, "epoch-00000-step-0000007"}
    assert names(precious) == names(two / f"{NEWER}-copy") == ["thesis.tex"]


def test_files_saved_along_go_back_next_to_the_checkpoints(tmp_path):
    heads = tmp_path / "heads"
    heads.write_text("of step 5")
    save_checkpoint(tmp_path / "checkpoints", *trained(5), Counters(step=5), [heads])
    heads.write_text("later")
    before = names(tmp_path)
    load_checkpoint(tmp_path / "checkpoints", *trained(1))
    assert heads.read_text() == "of step 5" and names(tmp_path) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(groups=7),
        lambda state: state["counters"].update(epoch="first"),
    ],
)
def test_a_state_no_run_wrote_is_an_error_that_names_the_file(two, change):
    path = two / NEWER / "state.json"
    state = read_json(path)
    change(state)
    write_json(path, state)
    write_sums(two / NEWER, FILES[:2])
    with pytest.raises(ValueError, match=rf"^checkpoint: got {path}, which no run wrote: .+$"):
        load_checkpoint(two, *trained(1))


class Grouping(torch.optim.Adam):
    """Its state has more than tensors and numbers, as that of timm's Kron."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["seen"] = {1, 2, 3}


def test_a_state_that_no_file_can_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="got an optimizer whose state cannot be saved"):
        save_checkpoint(tmp_path, *trained(3, Grouping), Counters())
    assert not names(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save_checkpoint(tmp_path, *trained(3), Counters())
    model = torch.nn.Linear(3, 5)
    with pytest.raises(ValueError, match=r"got .*, which is of another model: "):
        load_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()))
