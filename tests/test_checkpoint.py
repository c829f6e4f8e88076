"""Checkpoints: what is saved comes back, damage is noticed, and the one before is there to fall back on."""

import os
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from damage import DAMAGES
from timm.optim import Lamb

from sa_zoo.folders.write import read_json, write_json, write_sums
from sa_zoo.training.checkpoint import Counters, load_checkpoint, save_checkpoint

FILES = ("state.safetensors", "state.json", "sha256.json")


def trained(steps: int, optimizer: type = torch.optim.AdamW) -> tuple:
    """Modules and optimizer after some steps."""
    torch.manual_seed(steps)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.Flatten()
    )
    model = model.to(memory_format=torch.channels_last)
    opt = optimizer(
        model.parameters(), lr=0.1, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {})
    )
    for _ in range(steps):
        model(torch.randn(2, 3, 7, 7)).square().mean().backward()
        opt.step()
    return {"model": model}, opt


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def two(tmp_path):
    """A folder with checkpoints of steps 5 and 6."""
    for step in (5, 6):
        save_checkpoint(tmp_path, *trained(step), Counters(epoch=0, step=step))
    return tmp_path, tmp_path / "epoch-00000-step-0000005", tmp_path / "epoch-00000-step-0000006"


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, Lamb])
def test_a_checkpoint_gives_back_what_it_was_given(tmp_path, optimizer):
    (modules, opt), (others, other_opt) = trained(3, optimizer), trained(1, optimizer)
    counters = Counters(epoch=2, step=7, loss_sum=0.1 + 0.2, history=[{"loss": 1e-9}])
    save_checkpoint(tmp_path, modules, opt, counters)
    assert load_checkpoint(tmp_path, others, other_opt) == counters
    for key, value in modules["model"].state_dict().items():
        assert torch.equal(value, others["model"].state_dict()[key])
    for mine, theirs in zip(opt.state.values(), other_opt.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert torch.equal(mine[key], theirs[key])
            assert mine[key].stride() == theirs[key].stride()


def test_lamb_goes_on_to_the_same_bits(tmp_path):
    (modules, opt), (others, other_opt) = trained(3, Lamb), trained(1, Lamb)
    save_checkpoint(tmp_path, modules, opt, Counters(epoch=0, step=3))
    load_checkpoint(tmp_path, others, other_opt)
    for model, optimizer in ((modules["model"], opt), (others["model"], other_opt)):
        torch.manual_seed(7)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 7, 7)).square().mean().backward()
        optimizer.step()
    for key, value in modules["model"].state_dict().items():
        assert torch.equal(value, others["model"].state_dict()[key])


@pytest.mark.filterwarnings("ignore:.*opt_einsum")
class Grouping(torch.optim.Adam):
    """Its state has more than tensors and numbers, as that of timm's Kron."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["seen"] = {1, 2, 3}


def test_a_state_that_no_file_can_hold_is_refused(tmp_path):
    modules, opt = trained(3, Grouping)
    with pytest.raises(
        ValueError, match=r"optim.name: got an optimizer whose state cannot be saved"
    ):
        save_checkpoint(tmp_path, modules, opt, Counters(epoch=0, step=3))
    assert not names(tmp_path)


def test_the_last_two_are_kept_and_nothing_else(two):
    folder, _, newer = two
    (folder / ".epoch-00000-step-0000007.incomplete").mkdir()  # left by a process that was killed
    save_checkpoint(folder, *trained(7), Counters(epoch=1, step=0))
    assert names(folder) == [newer.name, "epoch-00001-step-0000000"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(two, damage, file):
    folder, older, newer = two
    DAMAGES[damage](newer / file)
    modules, opt = trained(1)
    with pytest.warns(
        UserWarning, match=f"got {newer}, truncated or damaged: .*; resuming from {older.name}"
    ):
        assert load_checkpoint(folder, modules, opt) == Counters(epoch=0, step=5)
    for key, value in trained(5)[0]["model"].state_dict().items():
        assert torch.equal(value, modules["model"].state_dict()[key])
    assert names(folder) == [older.name, newer.name], "reading changes nothing"


@pytest.mark.parametrize("damage", DAMAGES)
def test_two_damaged_checkpoints_are_an_error_that_names_both(two, damage):
    folder, older, newer = two
    for checkpoint in (older, newer):
        DAMAGES[damage](checkpoint / "state.safetensors")
    with pytest.raises(
        ValueError, match=rf"(?s)got {newer}, truncated.*state\.safeten.*got {older}, .*a new --out"
    ):
        load_checkpoint(folder, *trained(1))


def test_an_incomplete_copy_next_to_a_good_checkpoint_is_passed_over(two):
    folder, _, newer = two
    shutil.copytree(newer, folder / "epoch-00003-step-0000000", ignore=lambda *_: {"sha256.json"})
    with pytest.warns(UserWarning, match=f"epoch-00003.*sha256.json.*; resuming from {newer.name}"):
        assert load_checkpoint(folder, *trained(1)) == Counters(epoch=0, step=6)


@pytest.mark.parametrize("step", [6, 7], ids=["replaced", "followed"])
def test_saving_after_falling_back_leaves_only_good_ones(two, step):
    folder, older, newer = two
    DAMAGES["flipped bit"](newer / "state.safetensors")
    save_checkpoint(folder, *trained(step), Counters(epoch=0, step=step))
    assert names(folder) == [older.name, f"epoch-00000-step-{step:07d}"]
    assert load_checkpoint(folder, *trained(1)) == Counters(epoch=0, step=step)


def test_a_damaged_checkpoint_of_a_later_step_is_removed_with_the_next_save(two):
    folder, older, newer = two
    later = newer.rename(folder / "epoch-00002-step-0000000")
    DAMAGES["emptied"](later / "state.json")
    save_checkpoint(folder, *trained(6), Counters(epoch=0, step=6))
    assert names(folder) == [older.name, newer.name]


@pytest.mark.parametrize("call", range(9))
def test_a_power_cut_at_any_write_leaves_the_last_good_one(two, monkeypatch, call):
    """Calls 0 to 7 are those of one save: three files, each with its folder, then the folder and its parent."""
    folder, _, _ = two
    calls, fsync = [], os.fsync

    def power_cut(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        if len(calls) > call:
            raise OSError("power cut")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", power_cut)
        if call < 8:
            with pytest.raises(OSError, match="power cut"):
                save_checkpoint(folder, *trained(7), Counters(epoch=0, step=7))
        else:
            save_checkpoint(folder, *trained(7), Counters(epoch=0, step=7))
            synced = [path.name.removesuffix(f".{os.getpid()}.incomplete") for path in calls]
            assert synced[:6:2] == [".state.safetensors", ".state.json", ".sha256.json"], (
                "the sums are written last"
            )
            assert calls[1::2][:3] == [calls[6]] * 3, (
                "each entry of the new folder, then the folder as a whole"
            )
            assert calls[7] == folder, "and the name of the folder"
            assert len(calls) == 8
    step = load_checkpoint(folder, *trained(1)).step
    assert step == (6 if call < 7 else 7)


def test_what_somebody_else_left_there_is_neither_read_nor_removed(two, tmp_path_factory):
    folder, _, _ = two
    precious = tmp_path_factory.mktemp("precious")
    (precious / "thesis.tex").write_text("years of work")
    for name in (".DS_Store", "epoch-notes", "epoch-00009-step-0000000"):
        (folder / name).write_text("a file")
    for name in ("best-so-far", "epoch-00000-step-0000006-copy"):
        shutil.copytree(precious, folder / name)
    for name, target in (
        ("epoch-00000-step-0000001", precious),
        ("epoch-00000-step-0000002", folder / "nowhere"),
    ):
        (folder / name).symlink_to(target)
    before = {path for path in names(folder) if path not in (two[1].name, two[2].name)}
    save_checkpoint(folder, *trained(7), Counters(epoch=0, step=7))
    assert load_checkpoint(folder, *trained(1)).step == 7
    assert set(names(folder)) == before | {two[2].name, "epoch-00000-step-0000007"}
    assert [
        path.read_text() for path in (*precious.iterdir(), folder / "best-so-far" / "thesis.tex")
    ] == ["years of work"] * 2


@pytest.mark.parametrize("name", ["../../outside", "/outside", "figures/inside"])
def test_files_are_restored_next_to_the_checkpoints_and_nowhere_else(tmp_path, name):
    name = name.replace("/outside", f"{tmp_path}/outside") if name.startswith("/") else name
    folder = tmp_path / "runs" / "run" / "checkpoints"
    for step in (5, 6):
        save_checkpoint(folder, *trained(step), Counters(epoch=0, step=step))
    newer = folder / "epoch-00000-step-0000006"
    (newer / "figures").mkdir()
    (newer / name).write_text("evil")
    write_json(
        newer / "sha256.json",
        read_json(newer / "sha256.json") | {name: sha256(b"evil").hexdigest()},
    )
    before = set(tmp_path.rglob("*"))
    if name == "figures/inside":
        assert load_checkpoint(folder, *trained(1)).step == 6
    else:
        with pytest.warns(
            UserWarning, match="sha256.json names .*outside, which is not in the folder; resuming"
        ):
            assert load_checkpoint(folder, *trained(1)).step == 5
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("manifest", ["{}", "[" * 100_000])
def test_a_manifest_without_the_files_is_passed_over_for_the_one_before(two, manifest):
    folder, older, newer = two
    (newer / "sha256.json").write_text(manifest)
    (newer / "state.safetensors").unlink()
    with pytest.warns(UserWarning, match=rf"sha256.json(?s:.*); resuming from {older.name}"):
        assert load_checkpoint(folder, *trained(1)).step == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("scalars"),
        lambda state: state.pop("groups"),
        lambda state: state.pop("counters"),
        lambda state: state.update(scalars=[]),
        lambda state: state.update(scalars={"optimizer.first.step": 1}),
        lambda state: state.update(groups=7),
        lambda state: state.update(counters=[1]),
        lambda state: state["counters"].update(epoch="first"),
    ],
)
def test_a_state_that_no_run_wrote_is_an_error_that_names_the_file(two, change):
    folder, _, newer = two
    state = read_json(newer / "state.json")
    change(state)
    write_json(newer / "state.json", state)
    write_sums(newer, FILES[:2])
    with pytest.raises(
        ValueError, match=rf"^checkpoint: got {newer / 'state.json'}, which no run wrote: .+$"
    ):
        load_checkpoint(folder, *trained(1))
