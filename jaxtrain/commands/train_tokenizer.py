"""Train a byte-level BPE tokenizer on text of your own.

    jaxtrain train_tokenizer --input=jaxtrain --vocab_size=2000 --output=corpora/tokenizer.json

Every text can be encoded, and digits are never merged. Any program that reads a Hugging Face tokenizer.json can use the
result, such as `jaxtrain prepare`.
"""

import argparse
from pathlib import Path

from jaxtrain.commands.flags import add_overwrite, command, parser_of
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.data.train_tokenizer import EOD, texts, train
from jaxtrain.errors import UserError, tell
from jaxtrain.files import atomic_files


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 2 means a user error, reported in one line."""
    flags = parse(argv)
    output = Path(flags.output)
    if output.exists() and not flags.overwrite:
        raise UserError("--output", f"{output} exists", "name another file, or give --overwrite")
    content = train(texts(flags.input, flags.text_field, flags.bytes), flags.vocab_size, flags.special_tokens)
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
    add_overwrite(parser, "the file")
    parser.add_argument("--vocab_size", type=int, default=32_768, help="size of the vocabulary; default: 32768")
    parser.add_argument("--special_tokens", nargs="+", default=[],
                        help="special tokens, such as '<|im_start|>' '<|im_end|>'")
    parser.add_argument("--text_field", default="text",
                        help="field of a JSON record or Parquet row that holds the text")
    parser.add_argument("--bytes", type=int, default=2**30, help="train on at most this much text")
    return parser.parse_args(argv)
