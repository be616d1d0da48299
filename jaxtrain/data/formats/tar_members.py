"""The members of a tar archive, of which nothing is believed that the archive's own size does not bear out.

Members are only listed and read, never unpacked to files, so that their names, links and devices do no harm.
"""

import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

from jaxtrain.errors import UserError

BLOCK = tarfile.BLOCKSIZE
HEADER = 2**20  # bytes of what stands before a member's own header, such as a long name
_RECORD = re.compile(rb"(\d{1,7}) ([^=]{1,999})=")  # of such a header: its length, and what it sets


@dataclass(frozen=True)
class Member:
    """A member, and where its content is."""

    name: str
    is_file: bool  # rather than a folder, link or device
    place: int  # the byte where its headers begin
    start: int
    size: int


def members(file: BinaryIO, path: str) -> Iterator[Member]:
    """Yield the members of an archive that is open for reading; raises a UserError where one cannot be right."""
    end = file.seek(0, io.SEEK_END)
    at, place, said = 0, 0, {}
    while (header := _read(file, at, BLOCK)) and header != bytes(BLOCK):
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            _refuse(path, f"byte {at:,}: {error}")
        at += BLOCK
        name = said.get("path", info.name)
        size = int(said["size"]) if said.get("size", "").isdecimal() else info.size
        if info.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse.") for key in said):
            _refuse(path, f"its member {name[:99]!r} is sparse", "write it without sparse files")
        if info.isreg() or info.type not in tarfile.SUPPORTED_TYPES or info.type in _BEFORE:
            if not 0 <= size <= end - at:
                _refuse(path, f"its member {name[:99]!r} claims {size:,} bytes, where {end - at:,} are left")
        else:
            size = 0  # whatever a link says
        if info.type in _BEFORE:
            if size > HEADER:
                _refuse(path, f"a header has {size:,} bytes, more than {HEADER:,}")
            said |= _said(info.type, _read(file, at, size), path)
        else:
            yield Member(name, info.isfile(), place, at, size)
            said = {}
        at += -(-size // BLOCK) * BLOCK
        place = place if info.type in _BEFORE else at
    if not end:
        _refuse(path, "it is empty")


def content_of(file: BinaryIO, member: Member) -> bytes:
    """Return the content of a member; raises EOFError if the archive has become shorter."""
    content = _read(file, member.start, member.size)
    if len(content) < member.size:
        raise EOFError(f"it ends within {member.name[:99]!r}")
    return content


_BEFORE = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME,
           tarfile.GNUTYPE_LONGLINK)  # headers that stand before a member's own


def _said(kind: bytes, content: bytes, path: str) -> dict[str, str]:
    """Return what a header says of the next member: its path, size and so on."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": _text(content.partition(b"\0")[0])}
    if kind in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
        return {}
    found, at = {}, 0
    while at < len(content) and content[at]:
        record = _RECORD.match(content, at)
        stop = at + int(record[1]) if record else 0
        if not record or not record.end() <= stop <= len(content):
            _refuse(path, "a header is damaged")
        found[_text(record[2])] = _text(content[record.end(): stop].removesuffix(b"\n"))
        at = stop
    return found


def _text(content: bytes) -> str:
    return content.decode(errors="surrogateescape")


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _refuse(path: str, why: str, fix: str = "write it again") -> NoReturn:
    raise UserError("--input", f"{path} cannot be read as a tar ({why})", fix)
