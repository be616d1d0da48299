"""Find the text of a file that is not text, in a file of the same name."""

from jaxtrain import storage
from jaxtrain.data.formats.inputs import Piece
from jaxtrain.errors import UserError


def text_beside(piece: Piece, what: str) -> Piece:
    """Return the file with the text of a piece, as a piece: `a.txt` of `a.wav`. `what`: how a message calls it."""
    path, name = (f"{whole.rpartition('.')[0]}.txt" for whole in (piece.path, piece.name))
    if not storage.exists(path):
        raise UserError("--target", f"{piece.name} has no {what}", f"write {name}, or use --target=none")
    size = storage.size(path)
    return Piece(name, path, "text", 0, size, size)
