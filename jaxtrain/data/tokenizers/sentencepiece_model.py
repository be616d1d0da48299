"""Run SentencePiece models, such as those of Llama 2, Gemma and T5.

A model may normalise text before it splits it: some drop line ends, or map unknown characters to one id. So `decode` of
`encode` gives the same text only if the model preserves it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jaxtrain.data.tokenizers.vocabulary import ENDS, Vocabulary, library, read_file, threads, uint32, without_metaspace
from jaxtrain.errors import UserError


class SentencePieceTokenizer(Vocabulary):
    """A tokenizer from a .model file, run by the `sentencepiece` library."""

    file = "tokenizer.model"

    def __init__(self, path: Path, eod: str = "", bos: str = ""):
        self.content, self.name = read_file(path), path.name
        processor = library("sentencepiece", path).SentencePieceProcessor
        try:
            if not self.content:
                raise ValueError  # the library would accept an empty model
            self._model = model = processor(model_proto=self.content)
            self.vocab_size = model.vocab_size()
        except (RuntimeError, ValueError) as error:
            raise UserError("data.tokenizer", f"{path} is not a SentencePiece model", "name another file") from error
        own = [model.id_to_piece(model.eos_id())] if model.eos_id() >= 0 else ENDS
        self.settle(path, hashlib.sha256(self.content).hexdigest(), eod, bos, own)
        self._lengths = np.array([self._byte_length(id) for id in range(self.vocab_size)])
        # `decode` removes the space that the model puts at the beginning of a text.
        self._begins = np.array([model.id_to_piece(id).startswith("▁") and model.decode([id])[:1] != " "
                                 for id in range(self.vocab_size)])

    def id_of(self, token: str) -> int | None:
        """Return the id of a control token; all other tokens, even user-defined ones, can result from text."""
        id = self._model.piece_to_id(token)
        return id if self._model.id_to_piece(id) == token and self._model.is_control(id) else None

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encode several documents at once, on all available threads."""
        decoded = [text.decode(errors="replace") for text in texts]
        found = self._model.encode(decoded, out_type=int, add_bos=False, add_eos=False, num_threads=threads())
        return [uint32(ids) for ids in found]

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """Return readable text; control tokens are dropped."""
        return self._model.decode([id for id in map(int, ids) if 0 <= id < self.vocab_size])

    def count_bytes(self, ids: np.ndarray) -> int:
        """Return the UTF-8 length of a document's text, from a table."""
        return int(self._lengths[ids].sum()) - bool(len(ids) and self._begins[ids[0]])

    def _byte_length(self, id: int) -> int:
        model = self._model
        if model.is_control(id) or model.is_unused(id):
            return 0
        if model.is_unknown(id):
            return len(model.decode([id]).encode())
        return 1 if model.is_byte(id) else without_metaspace(model.id_to_piece(id))
