"""Continue prompts with a model: one record per prompt, generated in batches on the mesh that the model lives on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxtrain.base import arguments
from jaxtrain.data.tokenizers.tokenizer import Tokenizer, encode_documents, load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.hub.adapters import stacked_adapters
from jaxtrain.hub.decoding import Decoding, bucket, decoding
from jaxtrain.hub.folders.generation_config import ends_of
from jaxtrain.hub.sampling import Sampling, Tempered
from jaxtrain.hub.trained_tokenizer import tokenizer_of
from jaxtrain.train_step import partition

if TYPE_CHECKING:
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState

Prompt = str | Sequence[int]
CHUNK = 32  # tokens between looks for stop strings, which are found on the host


@dataclass(frozen=True)
class Generated:
    """The continuation of a prompt."""

    text: str  # without the stop string
    tokens: tuple[int, ...]  # without the stop token; they end with the token in which a stop string begins
    logprobs: tuple[float, ...] | None  # of each token by the model itself, before temperature and filters
    finish_reason: str  # "stop": a stop token or string; "length": there was no room for more
    end: tuple[int, float] | None = None  # the stop token that ended it, and its log-probability


def generate(run: "Run", state: "TrainState", prompts: Sequence[Prompt], *, max_new_tokens: int = 128,
             temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
             repetition_penalty: float = 1.0, stop: Sequence[str | int] = (), ignore_end: bool = False,
             keep_stop: bool = False, seed: int = 0, logprobs: bool = False, tempered: bool = False,
             batch_size: int = 64, tokenizer: Tokenizer | str | Path = "", adapters: Sequence[str | None] | None = None,
             drawn: Sequence[tuple[int, int]] | None = None) -> list[Generated]:
    """Continue prompts with a key-value cache; return a record for each.

    The continuation depends on `seed` and on the prompt's position among the prompts, not on the other prompts, the
    size of batches or the mesh.

    Args:
        run: the run whose mesh is used: rows are split over every axis except `tensor`, heads over `tensor`.
        state: the state whose parameters are used.
        prompts: texts, or lists of token ids.
        max_new_tokens: the most tokens to generate, limited by the room in `model.max_seq_len`.
        temperature: 0 always picks the most probable token.
        top_k: sample from this many of the most probable tokens; 0: from all.
        top_p: sample from the smallest set of tokens whose probabilities add up to at least this.
        min_p: sample from tokens at least this many times as probable as the most probable one.
        repetition_penalty: above 1, tokens already in the prompt or the text become less likely.
        stop: texts or token ids before which a text ends. So do the tokenizer's end of a document, and the tokens that
            generation_config.json names if `tokenizer` is the folder of a model.
        ignore_end: continue after the end of a document.
        keep_stop: a stop text's own tokens count, to the one with its end; the record's text is still without it.
        seed: another seed gives another text.
        logprobs: also return the log-probability of each token.
        tempered: those of the model at the temperature at which tokens are drawn, not at 1.
        batch_size: the number of prompts continued at once; others take the places of finished ones.
        tokenizer: a tokenizer, or the folder of one, of a run or of a published model; by default that of the
            run's data. Without a tokenizer, if all prompts are token ids, the records have no text.
        adapters: the name of an adapter for each prompt, among those that `jt.load_model` or `jt.with_adapters` loaded;
            None: the base model, which is the default for all prompts.
        drawn: for each prompt the position by which it is seeded, and how many tokens at its end were drawn so before:
            what follows is what would have followed them. By default its own position, and none.
    """
    sampling = (Tempered if tempered else Sampling)(temperature, top_k, top_p, min_p, repetition_penalty)
    check(prompts, max_new_tokens, stop, batch_size, seed)
    arguments.is_run(run)
    if run.own:
        raise UserError("run", "a model of your own has no key-value cache", "generate with a model of the config")
    if not run.config.model.text:
        raise UserError("run", f"{run.config.model.name} is not a decoder of text",
                        "evaluate it with run.evaluate(state)")
    run.sharded.check_devices()
    strings = [one for one in stop if isinstance(one, str)]
    words: Tokenizer | None = None
    if tokenizer or strings or any(isinstance(prompt, str) for prompt in prompts):
        words = _opened(tokenizer) if tokenizer else run.corpus.tokenizer
    ends = [one for one in stop if not isinstance(one, str)] + ([words.eod] if words and not ignore_end else [])
    if isinstance(tokenizer, str | Path) and tokenizer and not ignore_end:
        ends += ends_of(tokenizer)
    ids = _encoded(run, prompts, words)
    params = partition.without(state.all_params, run.objective.frozen_axes)  # of the model alone
    seeds = np.zeros((len(ids), 3), np.uint32)
    numbers, seeds[:, 2] = zip(*drawn, strict=True) if drawn else (range(len(ids)), 0)
    seeds[:, :2] = seeds_of(seed, numbers)
    queue = _Queue(ids, [min(max_new_tokens, run.config.model.max_seq_len - len(prompt)) for prompt in ids],
                   seeds, list(range(len(ids))), stacked_adapters.chosen(state, len(ids), adapters))
    records: dict[int, Generated] = {}
    while queue.waiting:
        records |= _Batch(decoding(run), params, queue, batch_size, ends).finish(
            sampling, words, strings, logprobs, keep_stop)
    return [records[number] for number in range(len(ids))]


def seeds_of(seed: int, numbers: Sequence[int]) -> np.ndarray:
    """Return the two words of the key of random numbers of texts at these positions [B, 2]."""
    key, padded = jax.random.key(seed), np.zeros(bucket(len(numbers)), np.uint32)
    padded[:len(numbers)] = numbers
    words = jax.vmap(lambda number: jax.random.key_data(jax.random.fold_in(key, number)))(padded)
    return np.asarray(words)[:len(numbers)]


def sample(run: "Run", state: "TrainState", prompt: str = "", length: int = 200, *, temperature: float = 0.8,
           seed: int = 0, tokenizer: str | Path = "") -> str:
    """Return `prompt` continued by at most `length` tokens, as many as `data.seq_len` has room for.

    At `temperature=0` each token is the most probable one. `tokenizer` is the folder of one that was kept, such as
    "WORKDIR/tokenizer", for where the data is no longer there.
    """
    arguments.is_run(run)
    words = load_tokenizer(f"{tokenizer}") if tokenizer else run.corpus.tokenizer
    # A document's first token has no predecessor in training, so an empty prompt starts behind a line's end.
    begin, = encode_documents([(prompt or "\n").encode()], words)
    begin, seq_len = begin[-(run.config.data.seq_len - 1):].tolist(), run.config.data.seq_len
    found, = generate(run, state, [begin], max_new_tokens=min(length, seq_len - len(begin)), temperature=temperature,
                      ignore_end=True, seed=seed, tokenizer=tokenizer)
    return words.decode([*(begin if prompt else []), *found.tokens])


@dataclass(frozen=True)
class _Queue:
    """All prompts, and the numbers of those that wait for a place in a batch."""

    ids: list[list[int]]
    limits: list[int]  # how many tokens may follow each
    seeds: np.ndarray
    waiting: list[int]
    chosen: np.ndarray | None  # what each multiplies stacked adapters by

    def fitting(self, width: float = np.inf, room: float = np.inf) -> list[int]:
        """Return the numbers of those that wait, are not longer than `width` and have no more than `room` to follow."""
        return [number for number in self.waiting if len(self.ids[number]) <= width and self.limits[number] <= room]

    def take(self, many: int, *fits: int) -> list[int]:
        """Return the numbers of the first `many` that fit; they wait no more."""
        found = self.fitting(*fits)[:many]
        self.waiting[:] = sorted({*self.waiting} - {*found})
        return found


class _Batch:
    """Prompts that are continued together; others that wait take the places of those that are finished."""

    def __init__(self, programs: Decoding, params, queue: _Queue, size: int, ends: list[int]):
        self.programs, self.params, self.queue = programs, params, queue
        first = queue.take(size)
        self.size, self.held = len(first), dict[int, int]()  # held: the number of the prompt in each place
        prompts, begins, chosen = self._aligned(first)
        rows = len(prompts)
        self.limits, self.seeds = np.zeros(rows, np.int32), np.zeros((rows, 3), np.uint32)
        self._hold(first)
        self.stops = np.full(bucket(len(ends)), -1, np.int32)
        self.stops[:len(ends)] = ends
        self.fits = prompts.shape[1], bucket(int(self.limits.max()))
        self.state = programs.start(params, prompts, begins, self.fits[1], chosen)

    def finish(self, sampling: Sampling, words: Tokenizer | None, strings: list[str], logprobs: bool,
               keep_stop: bool = False) -> dict[int, Generated]:
        """Generate until all rows are finished; return a record for each prompt by its number."""
        known, rows, step = self.programs.run.config.model.vocabulary, np.arange(len(self.limits)), 0
        records: dict[int, Generated] = {}
        while self.held:
            # A pass over new prompts has the price of some steps, so a quarter of the batch is replaced at once.
            waits = bool(self.queue.fitting(*self.fits))
            enough = len(rows) - self.size + max(1, self.size // 4) if waits else len(rows)
            limits, seeds = self.placed
            self.state = self.programs.go_on(self.params, self.state, step + CHUNK if strings else 2**31 - 1, limits,
                                             self.stops, seeds, sampling, words.vocab_size if words else known, enough)
            seen = self.programs.read(self.state)
            step, cut = int(seen["step"]), {}  # cut: the texts that a stop string ended, and tokens of each
            if words and strings:
                for row, number in self.held.items():
                    if found := _before(strings, words, self.queue.ids[number],
                                        seen["tokens"][row, :seen["count"][row]], keep_stop):
                        cut[row] = found
            done = seen["done"] | np.isin(rows, list(cut))
            for row in [row for row in self.held if done[row]]:
                number = self.held.pop(row)
                records[number] = self._record(row, number, seen, cut.get(row), words, logprobs)
            if cut:
                self.state = {**self.state, "done": self.programs.place(done)}
            if waits and self.held and done.sum() >= enough:  # without any that is held, another batch begins
                self._refill()
        return records

    def _refill(self) -> None:
        """Give the places of finished rows to prompts that wait."""
        new = self.queue.take(self.size - len(self.held), *self.fits)
        source = np.full(len(self.limits), -1)
        source[self._hold(new)] = np.arange(len(new))
        prompts, begins, chosen = self._aligned(new)
        self.state = self.programs.refill(self.params, self.state, prompts, begins, source, chosen)

    def _hold(self, numbers: list[int]) -> list[int]:
        """Note that these prompts have the first free places; return the places."""
        places = [row for row in range(self.size) if row not in self.held][:len(numbers)]
        self.held |= dict(zip(places, numbers, strict=True))
        self.limits[places] = [self.queue.limits[number] for number in numbers]
        self.seeds[places] = self.queue.seeds[numbers]
        # Copies: on a CPU arrays of JAX may share memory with what they are made of.
        self.placed = self.programs.place(self.limits.copy()), self.programs.place(self.seeds.copy())
        return places

    def _aligned(self, numbers: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return these prompts as rows that end in the same slot, the slots where they begin, and what they choose."""
        ids = [self.queue.ids[number] for number in numbers]
        # Powers of two, so that batches of other lengths use the same programs.
        width, rows = bucket(max(map(len, ids))), self.programs.rows_for(len(ids))
        prompts, begins = np.zeros((rows, width), np.int32), np.full(rows, width)
        for row, prompt in enumerate(ids):
            begins[row] = width - len(prompt)
            prompts[row, begins[row]:] = prompt
        if (chosen := self.queue.chosen) is not None:
            chosen = np.pad(chosen[numbers], [(0, rows - len(numbers)), (0, 0)])
        return prompts, begins, chosen

    def _record(self, row: int, number: int, seen: dict[str, np.ndarray], cut: tuple[str, int] | None,
                words: Tokenizer | None, logprobs: bool) -> Generated:
        many = cut[1] if cut else int(seen["count"][row])
        tokens = seen["tokens"][row, :many]
        text = cut[0] if cut else text_of(words, self.queue.ids[number], tokens) if words else ""
        said = tuple(seen["logprobs"][row, :many].tolist()) if logprobs else None
        stopped = cut is not None or many < self.queue.limits[number]
        end = None if cut or not stopped else (int(seen["end"][row]), float(seen["end_logprob"][row]))
        return Generated(text, tuple(tokens.tolist()), said, "stop" if stopped else "length", end)


def _opened(tokenizer: Tokenizer | str | Path) -> Tokenizer:
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    return tokenizer_of(tokenizer) if (Path(tokenizer) / "config.json").is_file() else load_tokenizer(f"{tokenizer}")


def text_of(words: Tokenizer, prompt: Sequence[int], tokens: Sequence[int] | np.ndarray) -> str:
    """Return the text of tokens behind a prompt. Alone, they may lack the space with which they begin."""
    begin, whole = words.decode(prompt), words.decode([*prompt, *map(int, tokens)])
    return whole[len(begin):] if whole.startswith(begin) else words.decode([*map(int, tokens)])


def _before(strings: list[str], words: Tokenizer, prompt: list[int], tokens: np.ndarray,
            whole: bool) -> tuple[str, int] | None:
    """Return the text before the first of some strings, and how many tokens reach into it; None without one.

    `whole`: how many reach its end.
    """
    text = text_of(words, prompt, tokens)
    found = min(((place, place + len(one) - 1 if whole else place) for one in strings
                 if (place := text.find(one)) >= 0), default=None)
    if found is None:
        return None
    at, reached = found
    many = len(tokens)  # the fewest that give what is kept and more; parts of a character may look like several
    while many and len(text_of(words, prompt, tokens[:many - 1])) > reached:
        many -= 1
    return text[:at], many


def _encoded(run: "Run", prompts: Sequence[Prompt], words: Tokenizer | None) -> list[list[int]]:
    """Return the tokens of each prompt; refuses one that the model cannot continue."""
    c, found = run.config.model, []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            assert words is not None
            try:
                prompt, = encode_documents([prompt.encode()], words)
            except UnicodeEncodeError as error:
                raise UserError(f"prompts[{number}]", "it is not text: half of a character",
                                "give text in UTF-8") from error
        ids = [int(id) for id in prompt]
        if not ids:
            raise UserError(f"prompts[{number}]", "it has no tokens", "give a text to continue, such as a line's end")
        if len(ids) >= c.max_seq_len:
            raise UserError(f"prompts[{number}]", f"its {len(ids)} tokens leave no room in model.max_seq_len="
                            f"{c.max_seq_len}", f"give at most {c.max_seq_len - 1}")
        if wrong := next((id for id in ids if not 0 <= id < c.vocabulary), None):
            raise UserError(f"prompts[{number}]", f"token {wrong} is not below model.vocab_size={c.vocabulary}",
                            "use the tokenizer with which the model was trained")
        found.append(ids)
    return found


def check(prompts: Sequence[Prompt], max_new_tokens: int, stop: Sequence[str | int], batch_size: int,
          seed: int) -> None:
    """Refuse what no model can do."""
    if isinstance(prompts, str):
        raise UserError("prompts", "it is a single text", "give a list of texts")
    if isinstance(stop, str):
        raise UserError("stop", "it is a single text", "give a list of texts or token ids")
    for key, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(key, f"{value} is below 1", "give 1 or more")
    if not 0 <= seed < 2**32:
        raise UserError("seed", f"{seed} is out of range", "give 0 or more, and less than 2^32")
    if wrong := [one for one in stop if not isinstance(one, str) and not 0 <= one < 2**31]:
        raise UserError("stop", f"{wrong[0]} is not a token", "give texts or token ids")
    if "" in stop:
        raise UserError("stop", "an empty text matches everywhere", "leave it out")
