"""Tar archives, as tarfile reads them, and what no archive can be is refused by the member's name."""

import io
import tarfile

import pytest

from jaxtrain.data.formats.tar_members import content_of, members
from jaxtrain.errors import UserError

LONG = "folder/" + "n" * 200 + "é.txt"


def made(form: int, *infos: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for info in infos:
            archive.addfile(info, io.BytesIO(b"x" * info.size) if info.isreg() else None)
    return out.getvalue()


def info(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, **keys) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.type = size, kind
    for key, value in keys.items():
        setattr(made, key, value)
    return made


def forged(name: str, size: int, kind: bytes = tarfile.REGTYPE, behind: bytes = b"") -> bytes:
    """An archive that claims a size, in tar's binary form, which holds any."""
    header = bytearray(info(name, 0, kind).tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + size.to_bytes(11, "big") if size >= 0 else b"\xff" + (size % 2**88).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + behind


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_tarfile(form):
    infos = [info("a.wav", 700), info("folder", 0, tarfile.DIRTYPE), info("empty.txt"),
             info("link", 0, tarfile.SYMTYPE, linkname="/etc/passwd"),
             info("hard", 0, tarfile.LNKTYPE, linkname="a.wav"),
             info("/dev/zero", 0, tarfile.CHRTYPE), info("../../up.txt", 3), info("é.txt", 512)]
    if form != tarfile.USTAR_FORMAT:
        infos += [info(LONG, 5), info("b", 0, tarfile.SYMTYPE, linkname="l" * 300), info("c.txt", 1)]
    content = made(form, *infos)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        want = [(one.name, one.isfile(), one.offset, archive.extractfile(one).read() if one.isfile() else b"")
                for one in archive]
    file = io.BytesIO(content)
    assert [(one.name, one.is_file, one.place, content_of(file, one)) for one in members(file, "a.tar")] == want


def test_a_sparse_member_is_refused():
    with pytest.raises(UserError, match=r"a.tar cannot be read as a tar \(its member 'big.wav' is sparse\); write "):
        list(members(io.BytesIO(forged("big.wav", 512, tarfile.GNUTYPE_SPARSE, bytes(512))), "a.tar"))
    sparse = made(tarfile.PAX_FORMAT, info("big.wav", 5, pax_headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": "9"}))
    with pytest.raises(UserError, match=r"its member 'big\.wav' is sparse"):
        list(members(io.BytesIO(sparse), "a.tar"))


@pytest.mark.parametrize(("content", "why"), [
    (forged("a.wav", 2**60), "its member 'a.wav' claims 1,152,921,504,606,846,976 bytes, where 0 are left"),
    (forged("a.wav", -10240, behind=bytes(2048)), "its member 'a.wav' claims -10,240 bytes"),
    (forged("x", 2**60, tarfile.XHDTYPE), "its member 'x' claims"),
    (forged("x", 2**60, tarfile.GNUTYPE_LONGNAME), "its member 'x' claims"),
    (forged("x", 2**21, tarfile.XHDTYPE, bytes(2**21)), "a header has 2,097,152 bytes, more than 1,048,576"),
    (forged("x", 512, tarfile.XHDTYPE, b"0 path=a\n".ljust(512, b"\0")), "a header is damaged"),
    (forged("x", 512, tarfile.XHDTYPE, b"999 path=a\n".ljust(512, b"\0")), "a header is damaged"),
    (forged("x", 512, tarfile.XHDTYPE, b"9" * 512), "a header is damaged"),
    (made(tarfile.PAX_FORMAT, info("a.wav", 5, pax_headers={"size": "9" * 30})), "its member 'a.wav' claims"),
    (made(tarfile.GNU_FORMAT, info("a.wav", 2000))[:1024], "its member 'a.wav' claims 2,000 bytes, where 512 are left"),
    (made(tarfile.GNU_FORMAT, info("a.wav", 100))[:1024] + b"no header", "byte 1,024: truncated header"),
    (b"", "it is empty"), (b"x" * 512, "byte 0: "),
], ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_what_an_archive_cannot_hold_is_refused_by_name(content, why):
    with pytest.raises(UserError) as refused:
        list(members(io.BytesIO(content), "a.tar"))
    assert f"--input: a.tar cannot be read as a tar ({why}" in f"{refused.value}"


def test_an_archive_that_becomes_shorter():
    file = io.BytesIO(made(tarfile.GNU_FORMAT, info("a.wav", 2000)))
    one, = members(file, "a.tar")
    file.truncate(600)
    with pytest.raises(EOFError, match=r"it ends within 'a.wav'"):
        content_of(file, one)
