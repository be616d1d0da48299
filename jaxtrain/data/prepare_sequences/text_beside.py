"""Find the texts of files that are not text, each in a file of the same name."""

from collections.abc import Callable, Sequence

from jaxtrain import storage
from jaxtrain.data.formats.inputs import Piece
from jaxtrain.errors import UserError

TEXT_BYTES = 2**24  # of the text of a clip or an image
TEXT_TOO_LARGE = f"a text of more than {TEXT_BYTES:,} bytes"

def with_texts(pieces: Sequence[Piece], has_text: Callable[[str], bool], what: str) -> list[tuple[Piece, ...]]:
    """Return each piece, followed by the file with its text (`a.txt` of `a.wav`) where there is one.

    `has_text`: whether a piece of this name has a file with its text. `what`: how a message calls that text. Texts
    that are all missing are an error, since they are then somewhere else; a piece without one is dropped when read.
    """
    groups: list[tuple[Piece, ...]] = [
        (piece, *_text_of(piece)) if has_text(piece.name) else (piece,) for piece in pieces]
    files = [group for group in groups if has_text(group[0].name)]
    if files and len(files) == len(pieces) and all(len(group) == 1 for group in files):
        name = files[0][0].name
        raise UserError("--label", f"{name} has no {what}, nor has any other file",
                        f"write {_text_name(name)} and so on, or use --label=none")
    return groups


def text_beside(task: Sequence[Piece], number: int) -> Piece | None:
    """Return the text of a task's piece as `with_texts` arranged them; None: it has none."""
    after = task[number + 1] if number + 1 < len(task) else None
    return after if after and after.name == _text_name(task[number].name) else None


def _text_of(piece: Piece) -> tuple[Piece, ...]:
    name, path = _text_name(piece.name), _text_name(piece.path)
    if not storage.exists(path):
        return ()
    size = storage.size(path)
    return (Piece(name, path, "text", 0, size, size),)


def _text_name(name: str) -> str:
    return f"{name.rpartition('.')[0]}.txt"
