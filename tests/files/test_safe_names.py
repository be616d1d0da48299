"""Names that a file or another machine gives stay inside their folder."""

import pytest

from jaxtrain.files.safe_names import Outside, inside


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "", ".", "..", "a//b", "a/./b", "a\0b", "a\\b",
                                  None, 3, ["a"]])
def test_names_that_lead_out_are_refused(tmp_path, name):
    with pytest.raises(Outside):
        inside(tmp_path, name)


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
