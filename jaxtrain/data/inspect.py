"""Show the rows of a training batch as text: documents, and the tokens trained on."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.corpus import Tokens
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.redaction import printable

COLOURS = (153, 157, 223, 183, 216, 159)  # of successive documents
GREY = 240  # tokens without loss


def cuts(tokens: Tokens, config: DataConfig) -> str:
    """Describe how many conversations are cut."""
    if config.packing in ("pairs", "answers"):
        return f"cut: no {config.packing}; those longer than a row are dropped"
    long = sum(int((np.diff(shard.offsets) - 1 > config.seq_len).sum()) for shard in tokens.shards)
    if config.packing in ("best_fit", "bucket"):
        return f"cut: {long:,} of {tokens.num_documents:,} conversations, longer than data.seq_len={config.seq_len}"
    return f"cut: conversations where rows end; data.packing=best_fit would cut {long:,} of {tokens.num_documents:,}"


def show(number: int, row: dict[str, np.ndarray], tokenizer: Tokenizer, tokens: bool, style: str,
         froms: Sequence[str] = ()) -> str:
    """Render one row, a paragraph per document; `froms` says where each segment comes from."""
    segments, weights = row["segments"], row["weights"]
    edges = [0, *map(int, np.flatnonzero(np.diff(segments)) + 1), len(segments)]
    lines = [f"row {number}: {len(segments)} tokens, {len(np.unique(segments[segments > 0]))} documents or parts, "
             f"{int((weights > 0).sum())} carry loss, {int((segments == 0).sum())} are padding"]
    for start, stop in pairwise(edges):
        segment, begins = segments[start], row["positions"][start]
        if segment == 0:
            lines.append(f"  [{start}:{stop}] padding")
            continue
        silent = int((weights[start:stop] == 0).sum())
        lines.append(f"  [{start}:{stop}] document {segment}, positions from {begins}"
                     + (f", {silent} without loss" if silent else "")
                     + (f"; {froms[segment - 1]}" if len(froms) >= segment else ""))
        plain = style == "plain"
        text = _text(tokenizer, row["tokens"][start:stop]) if plain else _marked(row, start, stop, tokenizer, style)
        lines.append("    " + text.replace("\n", "\n    "))
        if tokens:
            lines.append("    " + " ".join(map(str, row["tokens"][start:stop])))
    return "\n".join(lines)


def facts(number: int, row: dict[str, np.ndarray], tokenizer: Tokenizer, froms: Sequence[str] = ()) -> JsonObject:
    """Return what `show` renders, as scripts read it: a row, and each of its documents or parts."""
    segments, weights = row["segments"], row["weights"]
    edges = [0, *map(int, np.flatnonzero(np.diff(segments)) + 1), len(segments)]
    parts = []
    for start, stop in pairwise(edges):
        if (segment := int(segments[start])) == 0:
            continue
        ids = row["tokens"][start:stop]
        parts.append({"document": segment, "start": start, "stop": stop, "position": int(row["positions"][start]),
                      "from": froms[segment - 1] if len(froms) >= segment else None, "text": tokenizer.decode(ids),
                      "token_ids": ids.tolist(), "weights": weights[start:stop].tolist()})
    return {"row": number, "tokens": len(segments), "trained_on": int((weights > 0).sum()),
            "padding": int((segments == 0).sum()), "documents": parts}


def _text(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return printable(tokenizer.decode(ids)) + " ⏹" * bool(ids[-1] == tokenizer.eod)


def _marked(row: dict[str, np.ndarray], start: int, stop: int, tokenizer: Tokenizer, style: str) -> str:
    """Render a document: trained tokens in its colour and others grey, or trained tokens in brackets."""
    ids = np.append(row["tokens"][start:stop], row["targets"][stop - 1])
    learnt = np.append(False, row["weights"][start:stop] > 0)
    size = stop - start + int(learnt[-1])  # a last target without loss belongs to another document
    edges = [0, *(np.flatnonzero(np.diff(learnt[:size])) + 1).tolist(), size]
    colour = COLOURS[row["segments"][start] % len(COLOURS)]

    def stretch(a: int, b: int) -> str:
        text = printable(tokenizer.decode(ids[a:b], specials=True))
        if style == "brackets":
            return f"‹{text}›" if learnt[a] else text
        return f"\033[38;5;{colour if learnt[a] else GREY}m{text}"

    return "".join(stretch(a, b) for a, b in pairwise(edges)) + "\033[0m" * (style == "colour")
