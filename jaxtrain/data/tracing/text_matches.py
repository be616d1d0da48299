"""Find the documents that contain a text, byte by byte, and the tokens that hold it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.data.tracing.document_texts import ReadDocument
from jaxtrain.data.tracing.found_documents import FoundDocument
from jaxtrain.data.tracing.stretches import Stretch


@dataclass(frozen=True)
class TextMatch:
    """One place of a document that has the text."""

    document: FoundDocument
    bytes: tuple[int, int]  # of the document's text
    tokens: tuple[int, int]  # of the document; the first and the last may hold more than the text
    same_tokens: bool  # whether these are the tokens that the text has by itself

    @property
    def stretch(self) -> Stretch:
        """The tokens that hold it."""
        start = self.document.start
        return Stretch(self.document.source, start + self.tokens[0], start + self.tokens[1])


@dataclass(frozen=True)
class TextSearch:
    """The search for a text: the same bytes, so the same letters, case, spaces and line ends."""

    text: bytes

    def search(self, documents: Sequence[ReadDocument], tokenizer: Tokenizer) -> list[TextMatch]:
        """Return all places with the text that do not overlap."""
        found, alone = [], tokenizer.encode(self.text)
        for one in documents:
            content, at = one.text.encode(), -len(self.text)
            while (at := content.find(self.text, at + len(self.text))) >= 0:
                first, stop = one.stretch(tokenizer, at, at + len(self.text))
                inside = one.tokens[first - one.before: stop - one.before]
                found.append(TextMatch(one.document, (at, at + len(self.text)), (first, stop),
                                       np.array_equal(inside, alone)))
        return found
