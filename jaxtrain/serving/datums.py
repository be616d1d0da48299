"""Data of the API as batches: one datum a row, padded to lengths and numbers of rows that few programs serve.

Shape suffixes: B rows, T tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxtrain.errors import UserError, nearest
from jaxtrain.serving.token_loss import LOSSES

SHORTEST = 16  # tokens of the shortest rows
UNPUBLISHED = {
    "stable_reinforce": "its formula is not published, and it needs what only Thinking Machines' samplers record",
    "custom": "losses are not uploaded to this server: forward_backward_custom runs a function on the client"}
Inputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Datum:
    """A sequence of tokens, and what the loss reads of each."""

    tokens: np.ndarray  # int32 [T]
    inputs: Inputs = field(default_factory=dict)  # by name, [T]

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens)


def checked(datums: Sequence[Datum], loss_fn: str, numbers: Mapping[str, float], *, vocabulary: int,
            longest: int) -> list[Datum]:
    """Return data with all that the loss reads, by its names in a batch; refuse what cannot be computed."""
    if loss_fn not in LOSSES:
        raise UserError("loss_fn", f"{loss_fn!r} cannot be computed here: {UNPUBLISHED[loss_fn]}" if loss_fn
                        in UNPUBLISHED else f"there is no loss {loss_fn!r}",
                        f"use one of {', '.join(LOSSES)}" if loss_fn in UNPUBLISHED else nearest(loss_fn, LOSSES))
    known = LOSSES[loss_fn].numbers
    if unknown := sorted(numbers.keys() - known.keys()):
        raise UserError(f"loss_fn_config.{unknown[0]}", f"{loss_fn} does not read it", nearest(unknown[0], known)
                        if known else "leave it out")
    if wrong := [name for name, value in numbers.items() if not np.isfinite(value)]:
        raise UserError(f"loss_fn_config.{wrong[0]}", f"{numbers[wrong[0]]} is not a finite number", "give a number")
    if not datums:
        raise UserError("data", "there is none", "give one datum or more")
    return [_checked(datum, loss_fn, {**known, **numbers}, f"data[{number}]", vocabulary, longest)
            for number, datum in enumerate(datums)]


def _checked(datum: Datum, loss_fn: str, numbers: Mapping[str, float], at: str, vocabulary: int,
             longest: int) -> Datum:
    loss, given, length = LOSSES[loss_fn], dict(datum.inputs), datum.length
    if not 0 < length <= longest:
        raise UserError(f"{at}.model_input", f"it has {length:,} tokens", f"give 1 to {longest:,}: the model's longest "
                        "row")
    required = ("target_tokens", *loss.inputs, *(("weights",) if loss.needs_weights else ()))
    if missing := [name for name in required if name not in given]:
        raise UserError(f"{at}.loss_fn_inputs", f"{loss_fn} needs {missing[0]}", f"give {', '.join(required)}")
    allowed = {*required, "weights", *numbers}
    if unknown := sorted(given.keys() - allowed):
        raise UserError(f"{at}.loss_fn_inputs.{unknown[0]}", f"{loss_fn} does not read it",
                        nearest(unknown[0], allowed))
    for name, values in given.items():
        if values.shape != (length,):
            several = name == "target_tokens" and values.ndim == 2
            raise UserError(f"{at}.loss_fn_inputs.{name}", f"its shape is {list(values.shape)}, and the datum has "
                            f"{length} tokens", "give one target for each token: several are not supported" if several
                            else "give one number for each token of model_input")
        if name != "target_tokens" and not np.isfinite(values).all():
            raise UserError(f"{at}.loss_fn_inputs.{name}", "it has numbers that are not finite", "leave the datum out")
    targets = given.pop("target_tokens")
    for name, ids in (("model_input", datum.tokens), ("loss_fn_inputs.target_tokens", targets)):
        if ids.dtype.kind not in "iu":
            raise UserError(f"{at}.{name}", f"its numbers are {ids.dtype}", "give whole numbers")
        if len(wrong := ids[(ids < 0) | (ids >= vocabulary)]):
            raise UserError(f"{at}.{name}", f"{wrong[0]} is not a token of the model, which has {vocabulary:,}",
                            "use the tokenizer of the model")
    whole = {"weights": np.ones(length, np.float32), **{name: np.full(length, value, np.float32)
                                                          for name, value in numbers.items()}, **given}
    return Datum(datum.tokens, {"targets": targets, **whole})


def batches(datums: Sequence[Datum], *, shards: int, tokens: int, longest: int,
            multiple: int = 1) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yield batches with the numbers of their data, the shortest first.

    Args:
        datums: what `checked` returned.
        shards: a batch has a multiple of so many rows.
        tokens: that a batch has at most, as far as so many rows allow.
        longest: the tokens of the longest rows.
        multiple: a row's length is a multiple of it.
    """
    waiting = sorted(range(len(datums)), key=lambda number: datums[number].length)
    while waiting:
        first = width(datums[waiting[0]].length, longest, multiple)
        here = [number for number in waiting if datums[number].length <= first]
        most = shards * floor_power(max(tokens // (first * shards), 1))
        here, waiting = here[:most], waiting[min(len(here), most):]
        rows = shards * width(-(-len(here) // shards), most // shards, shortest=1)
        yield here, _rows([datums[number] for number in here], rows, first)


def width(length: int, longest: int, multiple: int = 1, shortest: int = SHORTEST) -> int:
    """Return the length of the rows in which this many tokens are computed: a power of two, or the longest."""
    power = max(shortest, 1 << max(length - 1, 0).bit_length())
    return min(-(-power // multiple) * multiple, longest)


def floor_power(number: int) -> int:
    """Return the greatest power of two that is not above this number."""
    return 1 << (number.bit_length() - 1)


def _rows(datums: Sequence[Datum], rows: int, length: int) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {
        "tokens": np.zeros((rows, length), np.int32), "segments": np.zeros((rows, length), np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)).copy()}
    for row, datum in enumerate(datums):
        arrays["tokens"][row, :datum.length] = datum.tokens
        arrays["segments"][row, :datum.length] = 1
        for name, values in datum.inputs.items():
            kind = np.int32 if name == "targets" else np.float32
            arrays.setdefault(name, np.zeros((rows, length), kind))[row, :datum.length] = values
    return arrays
