"""The tokenizer of a trained model, as a run has kept it or a published folder has it, and prompts in its tokens."""

from pathlib import Path

from jaxtrain.data.tokenizers.special_tokens import Specials
from jaxtrain.data.tokenizers.tokenizer import (
    RECORD,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    begun,
    load_tokenizer,
)
from jaxtrain.errors import UserError
from jaxtrain.hub.adapters import adapter_files


def tokenizer_of(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a workdir or a published folder, with the tokens around texts that it was trained with.
    """
    kept, published = Path(folder) / "tokenizer", Path(folder)
    if kept.is_dir():
        return load_tokenizer(f"{kept}")
    if not any((published / name).is_file() for name in (RECORD, "tokenizer.json", "tokenizer.model")):
        if adapter_files.is_adapter_folder(published):
            return tokenizer_of(adapter_files.base_of(published))
        raise UserError("WORKDIR", f"{kept} is not there", "copy it from where the run was trained")
    return load_tokenizer(f"{published}")


def prompt_ids(tokenizer: Tokenizer, text: str, begin: bool = True) -> list[int]:
    """Return the tokens of a prompt; special tokens in it are such, as a chat template writes them.

    `begin`: put the token in front that begins every text, if the tokenizer has one and the text does not.
    """
    if isinstance(tokenizer, JsonTokenizer | ByteTokenizer):
        (ids, _, _), = Specials(tokenizer).encode([text])
    else:
        ids = tokenizer.encode(text.encode())
    if not begin or (len(ids) and ids[0] == tokenizer.bos):
        return ids.tolist()
    return begun(ids, tokenizer).tolist()
