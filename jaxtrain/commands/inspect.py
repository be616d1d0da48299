"""Show any training batch of a run: documents, their text, and the tokens trained on.

    jaxtrain inspect --config=configs/gpt.py:tiny --config.data.source=corpora/own --step=3 --row=0

Prints exactly the batch that training gets at that step. A token is marked as trained on if it is the target of a
position with a loss. Each segment is shown with the target of its last position.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxtrain.commands.flags import add_config, add_json, command, need_config, overrides_of, parser_of, tell_json
from jaxtrain.config.load import load_config
from jaxtrain.data.corpus.origins import origins
from jaxtrain.data.corpus.text_cache import load_corpus
from jaxtrain.data.inspect import cuts, facts, show
from jaxtrain.data.loading.batches import eval_batches, train_batches
from jaxtrain.data.loading.skipped_batches import SkippedBatches, remaining
from jaxtrain.errors import UserError


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 2 means a user error, reported in one line."""
    flags, overrides = parse(argv)
    if flags.workdir and not Path(flags.workdir).is_dir():
        raise UserError("--workdir", f"{flags.workdir} is not a folder", "give the workdir of a run, or leave it out")
    whole = load_config(flags.config, overrides)
    if whole.rl.prompts:
        raise UserError("rl.prompts", "batches are made of the answers of the model as it trains",
                        "read WORKDIR/rollouts/STEP.jsonl of a run, which has them")
    config = whole.data
    corpus = load_corpus(config)
    batches: Any = (eval_batches if flags.split == "eval" else train_batches)(config, corpus)
    if batches is None:
        raise UserError("--split", f"{config.source} has no evaluation split", "look at --split=train")
    if flags.workdir and flags.split == "train":
        batches = remaining(batches, SkippedBatches.read(flags.workdir) or SkippedBatches())
    last = 2**62 if batches.num_batches is None else batches.num_batches - 1
    if not 0 <= flags.step <= last:
        raise UserError("--step", f"{flags.step} is out of range", f"use 0 to {last}")
    size = batches.shape(flags.step)[0]
    rows = range(size) if flags.row is None else [flags.row]
    if not 0 <= rows[0] < size:
        raise UserError("--row", f"{flags.row} is out of range: the batch has {size} rows", "count from 0")
    batch = batches.rows(flags.step, rows)
    masked = getattr(corpus, flags.split).masked
    colour = sys.stdout.isatty() if flags.colour == "auto" else flags.colour == "always"
    style = "colour" if colour else "brackets" if masked else "plain"
    if masked and not flags.json:
        print(cuts(getattr(corpus, flags.split), config))
    for i, row in enumerate(rows):
        one = {key: column[i] for key, column in batch.items()}
        froms = origins(corpus, flags.split, *batches.origin(flags.step, row))
        if flags.json:
            tell_json({"step": flags.step, **facts(row, one, corpus.tokenizer, froms)})
            continue
        print(show(row, one, corpus.tokenizer, flags.token_ids, style, froms))


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the parsed flags and the dotted config overrides."""
    parser = parser_of("inspect", __doc__)
    add_config(parser)
    parser.add_argument("--step", type=int, default=0, help="step whose batch to show; default: 0")
    parser.add_argument("--workdir", help="workdir of a run: skip the batches that its rollbacks skipped")
    parser.add_argument("--row", type=int, help="show this row of the batch only")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="default: train")
    parser.add_argument("--token_ids", action="store_true", help="also print token ids")
    parser.add_argument("--colour", choices=("auto", "always", "never"), default="auto",
                        help="colour the tokens that are trained on; default: if the output is a terminal")
    add_json(parser, "print a JSON object for each row: its documents, their tokens and the weights of their losses")
    flags, rest = parser.parse_known_args(argv)
    overrides = overrides_of(rest, vars(flags))
    need_config(flags)
    return flags, overrides
