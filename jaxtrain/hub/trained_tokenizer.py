"""The tokenizer of a trained model, and the chat template of its data: what a run has kept, or a published folder has.
"""

from pathlib import Path

from jaxtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import UserError


def tokenizer_of(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a workdir or a published folder, with the tokens around texts that it was trained with.
    """
    kept, published = Path(folder) / "tokenizer", Path(folder)
    if kept.is_dir():
        return load_tokenizer(f"{kept}")
    if not any((published / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise UserError("WORKDIR", f"{kept} is not there", "copy it from where the run was trained")
    return load_tokenizer(f"{published}")
