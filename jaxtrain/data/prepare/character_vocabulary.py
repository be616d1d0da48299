"""Collect the characters of the training text, for `--tokenizer=characters`."""

from collections.abc import Sequence

from jaxtrain.data.cleaning.cleaning_steps import Steps
from jaxtrain.data.formats import inputs
from jaxtrain.data.formats.inputs import Text
from jaxtrain.data.prepare.tasks import Options, Task
from jaxtrain.data.tokenizers.characters import PREFIX
from jaxtrain.errors import UserError


def tokenizer_of(tasks: Sequence[Task], options: Options) -> str:
    """Return the name of a tokenizer of all characters in `--input`, after the cleaning steps.

    The name contains the characters, so that workers on other machines need no file. A line end is always among them,
    because samples without a prompt begin behind one.
    """
    if options.format != "text":
        raise UserError("--tokenizer", f"characters are for text, and the input has --format={options.format}",
                        "use bytes or a tokenizer.json")
    found, steps = {"\n"}, Steps(options.steps)
    training = [piece for task in tasks for piece in task if not piece.split]
    if not training:
        raise UserError("--tokenizer", "characters are those of training text, and there is no --input",
                        "name the characters.json of the corpus to train on")
    for piece in training:
        with inputs.readable(piece.path):
            for document in inputs.read(piece, options.field, None, sorted(steps.fields), "text", options.record_bytes):
                clean = steps(document) if isinstance(document, Text) else ""
                if isinstance(clean, Text):
                    found.update(clean.content.decode())
    return PREFIX + "".join(sorted(found))
