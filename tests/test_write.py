"""Files and folders appear completely or not at all."""

import os
import stat
from hashlib import sha256
from pathlib import Path

import pytest

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.folders.write import (
    SUMS,
    damage,
    new_folder,
    write_file,
    write_json,
)


def power_cut(*_: object) -> None:
    raise OSError("power cut")


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    path = write_file(tmp_path / "a.txt", "before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", power_cut)
        with pytest.raises(OSError, match="power cut"):
            write_file(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    assert write_file(path, b"after").read_bytes() == b"after"


def test_contents_and_names_are_on_the_disk_after_a_write(tmp_path, monkeypatch):
    """A file and then its folder; a folder also before it gets its name."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(stat.S_ISDIR(os.fstat(fd).st_mode)))
    with new_folder(tmp_path / "folder") as folder:
        write_file(folder / "b.txt", "content")
    assert synced == [False, True, True, True]


def test_windows_which_cannot_open_or_replace_folders(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    def replace(old, new, real=os.replace):
        return refuse(new) if Path(new).is_dir() else real(old, new)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "replace", replace)
    (tmp_path / "folder").mkdir()
    with new_folder(tmp_path / "folder") as folder:
        write_file(folder / "b.txt", "before")
    assert write_file(tmp_path / "folder" / "b.txt", "after").read_text() == "after"


def test_a_folder_appears_when_it_is_complete(tmp_path):
    out = tmp_path / "runs" / "folder"
    with pytest.raises(ValueError, match="halfway"), new_folder(out) as folder:
        write_file(folder / "a.txt", "content")
        raise ValueError("halfway")
    assert list(out.parent.iterdir()) == []
    with new_folder(out) as folder:
        write_file(folder / "a.txt", "content")
        assert not out.exists()
    assert list(out.parent.iterdir()) == [out] and (out / "a.txt").read_text() == "content"


def test_a_folder_with_something_in_it_is_not_replaced(tmp_path):
    (tmp_path / "mine.txt").touch()
    for out in (tmp_path, tmp_path / "mine.txt", Path()):
        with pytest.raises(FileExistsError, match="expected the name of a new"), new_folder(out):
            pass


@pytest.mark.parametrize("name", ["../outside", "/dev/null", "figures/../../outside"])
def test_a_manifest_of_files_outside_of_it_is_refused(tmp_path, name):
    (tmp_path / "run" / "figures").mkdir(parents=True)
    (tmp_path / "outside").touch()
    write_json(tmp_path / "run" / SUMS, {name: sha256(b"").hexdigest()})
    assert "expected a file or folder inside of" in damage(tmp_path / "run")
