"""Train a byte-level BPE tokenizer on text of your own.

    jaxtrain train_tokenizer --input=jaxtrain --vocab_size=2000 --output=corpora/tokenizer.json

Every text can be encoded, and digits are never merged. Any program that reads a Hugging Face tokenizer.json can use the
result, such as `jaxtrain prepare`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtrain.data.formats import inputs
from jaxtrain.data.formats.conversations import Example
from jaxtrain.data.formats.inputs import Text
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.data.tokenizers.vocabulary import ENDS
from jaxtrain.errors import UserError, install_extra, tell
from jaxtrain.files import atomic_files
from jaxtrain.commands.flags import command, parser_of

EOD = ENDS[0]
# Words with the space before them, punctuation, space: GPT-2's split of text, except that digits stand alone.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


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


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 2 means a user error, reported in one line."""
    flags = parse(argv)
    output = Path(flags.output)
    if output.exists():
        raise UserError("--output", f"{output} exists", "name another file, or delete it")
    content = train(texts(flags.input, flags.field, flags.bytes), flags.vocab_size, flags.special_tokens)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_files.written(output) as file:
            file.write(content.encode())
    except OSError as error:
        reason = f"{output} cannot be written ({error.strerror})"
        raise UserError("--output", reason, "name another file") from error
    tell(f"{output}: {load_tokenizer(flags.output).vocab_size:,} ids, {EOD} ends a document")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the parsed flags."""
    parser = parser_of("train_tokenizer", __doc__)
    parser.add_argument("--input", nargs="+", required=True, help="files or folders, as for jaxtrain prepare")
    parser.add_argument("--output", required=True, help="the tokenizer.json to write")
    parser.add_argument("--vocab_size", type=int, default=32_768, help="size of the vocabulary; default: 32768")
    parser.add_argument("--special_tokens", nargs="+", default=[],
                        help="special tokens, such as '<|im_start|>' '<|im_end|>'")
    parser.add_argument("--field", default="text", help="field of a JSON record or Parquet row that holds the text")
    parser.add_argument("--bytes", type=int, default=2**30, help="train on at most this much text")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
