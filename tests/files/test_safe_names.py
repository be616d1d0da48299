"""Names that a file or another machine gives stay inside their folder."""

import os
from types import SimpleNamespace

import pytest

from jaxtrain.files.safe_names import Outside, inside, linked


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "", ".", "..", "a//b", "a/./b", "a\0b", "a\\b",
                                  None, 3, ["a"]])
def test_names_that_lead_out_are_refused(tmp_path, name):
    for check in (inside, linked):
        with pytest.raises(Outside):
            check(tmp_path, name)


def test_links_that_lead_out_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "out").symlink_to(tmp_path)
    (tmp_path / "in" / "file").symlink_to("/dev/zero")
    (tmp_path / "in" / "beside").symlink_to("other")
    for name in ("out/a", "file"):
        with pytest.raises(Outside, match="leads out of"):
            inside(tmp_path / "in", name)
    assert inside(tmp_path / "in", "beside") == tmp_path / "in" / "beside"
    assert inside(tmp_path / "in", "a/b.bin") == tmp_path / "in" / "a" / "b.bin"


def test_links_of_the_folders_owner_may_lead_out(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").symlink_to("../blob")
    (tmp_path / "in" / "sub").symlink_to(tmp_path)
    assert linked(tmp_path / "in", "file") == tmp_path / "in" / "file"
    assert linked(tmp_path / "in", "sub/blob") == tmp_path / "in" / "sub" / "blob"
    monkeypatch.setattr(os, "lstat", lambda path: SimpleNamespace(st_uid=os.stat(tmp_path).st_uid + 1))
    for name in ("file", "sub/blob"):
        with pytest.raises(Outside, match="somebody else than the owner of"):
            linked(tmp_path / "in", name)
    assert linked(tmp_path / "in", "other") == tmp_path / "in" / "other"  # only links are asked for their owner
