"""Train a byte-level BPE tokenizer, which can encode every text, and never merges digits."""

from collections.abc import Iterator, Sequence

from jaxtrain.data.formats import inputs
from jaxtrain.data.formats.conversations import Example
from jaxtrain.data.formats.inputs import Text
from jaxtrain.data.tokenizers.vocabulary import ENDS
from jaxtrain.errors import UserError, install_extra

EOD = ENDS[0]
# Short forms, words with the character before them, single digits, punctuation, lines, space: the split that Qwen2 has
# too (https://github.com/QwenLM/Qwen), which faster engines know.
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
           r"\s*[\r\n]+|\s+(?!\S)|\s+")


def train(texts: Iterator[str], vocab_size: int, specials: Sequence[str] = ()) -> str:
    """Train on texts, and return the content of a tokenizer.json with `vocab_size` ids.

    256 ids are bytes, one ends documents, and the `specials` are the tokens that a chat template puts around turns.
    """
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise UserError("--output", "training a tokenizer needs the package tokenizers",
                        install_extra("data")) from error
    added = list(dict.fromkeys([EOD, *specials]))
    if vocab_size < (least := 256 + len(added)):
        raise UserError("--vocab_size", f"{vocab_size} leaves no room for all bytes and {', '.join(added)}",
                        f"use {least} or more")
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=added, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


def texts(sources: list[str], field: str, limit: int) -> Iterator[str]:
    """Yield documents up to `limit` bytes, evenly from all tasks; of conversations, the text of the messages."""
    tasks = inputs.find_tasks(sources)
    form = inputs.find_format(tasks, field)
    share = limit // len(tasks)
    for task in tasks:
        left = share
        for piece in task:
            with inputs.readable(piece.path):
                for found in inputs.read(piece, field, form=form):
                    if isinstance(found, Text) and left > 0:
                        left -= len(found.content)
                        yield from [found.content.decode(errors="replace")] if form == "text" \
                            else Example.from_bytes(found.content).texts()
            if left <= 0:
                break
