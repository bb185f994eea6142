import os
from pathlib import Path

import pytest

from verl._base.durable import clear_staging, link_atomic, publish, write_atomic


@pytest.mark.parametrize("kind", ["device", "pipe", "directory", "link to a device", "link to a file", "broken link"])
def test_a_file_takes_the_place_of_a_regular_file_alone(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "out.html", tmp_path / "target"
    if kind == "device":
        try:
            os.mknod(path, 0o20666, os.makedev(1, 7))  # as /dev/full
        except PermissionError:
            pytest.skip("devices cannot be made here")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        target.write_text("mine") if kind == "link to a file" else None
        path.symlink_to("/dev/full" if kind == "link to a device" else target)
    before = path.lstat()
    with pytest.raises(OSError, match="is no regular file"):
        write_atomic(path, "text")
    assert path.lstat() == before
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry != target) == ["out.html"]
    assert not target.exists() or target.read_text() == "mine"


def test_a_link_takes_the_place_of_a_link_alone(tmp_path: Path) -> None:
    link = tmp_path / "latest"
    for target in ("one", "two"):
        link_atomic(link, target)
        assert os.readlink(link) == target
    link.unlink()
    link.write_text("mine")
    link_atomic(link, "three")
    assert link.read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest"]


def test_what_a_user_calls_staging_or_replaced_is_kept(tmp_path: Path) -> None:
    names = [".replaced-mine", ".staging-mine", ".replaced-", ".replaced-a~b~c~mine", "replaced-x~1~~mine"]
    for name in [*names, "mine", "new"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "note").write_text(name)
    clear_staging(tmp_path)
    publish(tmp_path / "new", tmp_path / "mine")
    clear_staging(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {*names, "mine"}
    for name in names:
        assert (tmp_path / name / "note").read_text() == name
    assert (tmp_path / "mine" / "note").read_text() == "new"
