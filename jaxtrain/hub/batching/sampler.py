"""Continuous batching: prompts join while others are continued, and finished ones leave at once.

    sampler = Sampler(run, state, rows=64)
    number = sampler.submit(tokens, limit=128)
    while sampler.busy:
        sampler.step()
        for number, record in sampler.collect().items(): ...

Between two rounds of the compiled loop (decoding.py), finished rows are given to prompts that wait, or, where none
does, are left out, so that the next round has fewer rows. The cache has room for what rows have, not for what they may
come to have. Equal prompts that join together are computed once. On a mesh, a row stays with the devices that began it.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.base.annotations import PyTree
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.hub.batching import told_routes
from jaxtrain.hub.batching.continuations import Generated, before, text_of
from jaxtrain.hub.batching.page_numbers import PageNumbers
from jaxtrain.hub.batching.rounding import bucket
from jaxtrain.hub.batching.texts import Text, keys
from jaxtrain.hub.decoding import PAGES, ROUND, State, decoding
from jaxtrain.hub.sampling import Sampling
from jaxtrain.models.attention.cache_pages import NONE, PAGE
from jaxtrain.models.attention.kv_cache import joined
from jaxtrain.train_step import partition

if TYPE_CHECKING:
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState

FEWEST_ROWS = 8  # a step with fewer takes hardly less time: it has to read all weights
FEWEST_SLOTS = 64  # less room is hardly less work, and would be one more program to compile
SHORTEST = 16  # prompts are computed as if at least so long, for the same reason
AT_ONCE = 8192  # tokens of prompts that are computed between two rounds while others wait for the next


class Sampler:
    """Texts that a model continues, of which more may be submitted at any time."""

    def __init__(self, run: "Run", state: "TrainState", *, sampling: Sampling | None = None, rows: int = 64,
                 ends: list[int] | None = None, strings: list[str] | None = None, words: Tokenizer | None = None,
                 logprobs: bool = False, chunk: int = 32, seed: int = 0, keep_stop: bool = False):
        """Take a model.

        Args:
            run: the run whose mesh is used.
            state: the state whose parameters are used.
            sampling: how tokens are chosen; by default from the model's own distribution.
            rows: how many texts are continued at once, at most.
            ends: tokens that end a text.
            strings: texts that end one, which need a tokenizer.
            words: the tokenizer, without which records have no text.
            logprobs: whether records have log-probabilities.
            chunk: tokens between looks for `strings`, which are found on the host.
            seed: what keys of random numbers are made of, together with the numbers of texts.
            keep_stop: records have the tokens of the string that ended them, to the one with its end.
        """
        self.programs, self.sampling, self.size = decoding(run), sampling or Sampling(), rows
        self.strings, self.words, self.logprobs, self.seed = strings or [], words, logprobs, seed
        self.keep_stop = keep_stop
        self.round = min(chunk, ROUND) if self.strings else ROUND
        self.params = partition.without(state.all_params, run.objective.frozen_axes)  # of the model alone
        self.ready = self.programs.ready(self.params)
        self.stops = np.array([*(ends or []), *[-1] * (bucket(len(ends or [])) - len(ends or []))], np.int32)
        self.known = words.vocab_size if words else run.config.model.vocabulary
        self.devices = self.programs.rows
        self.waiting: list[Text] = []
        self.live: list[Text] = []
        self.found: dict[int, Generated] = {}
        self.asked = self.places = self.slots = 0  # places: rows on each device
        self.longest = 0, 0  # of all prompts, and of what may follow one
        self.state: State = {}
        self.pages = PageNumbers(self.devices) if self.programs.in_pages else None
        self.kept: PyTree = None  # the pages themselves
        self.changed = False  # whether rows are other ones than the device knows of

    @property
    def busy(self) -> bool:
        """Whether there are texts to continue."""
        return bool(self.waiting or self.live)

    def submit(self, ids: list[int], limit: int, key: np.ndarray | None = None,
               chosen: np.ndarray | None = None) -> int:
        """Take a prompt; return its number, under which `collect` will have its continuation.

        Args:
            ids: its tokens.
            limit: how many may follow.
            key: of its random numbers, as two words, and how many tokens at its end were drawn with it before, as
                `keys` gives them [3]; by default that of its number, and none.
            chosen: what it multiplies stacked adapters by.
        """
        key = keys(self.seed, [(self.asked, 0)])[0] if key is None else key
        text = Text(self.asked, ids, limit, key, chosen)
        self.asked += 1
        self.longest = tuple(map(max, self.longest, (len(ids), limit)))
        self.waiting.append(text)
        return text.number

    def collect(self) -> dict[int, Generated]:
        """Return the continuations that ended since the last call, by the numbers of their prompts."""
        found, self.found = self.found, {}
        return found

    def step(self) -> None:
        """Let waiting prompts join where there is room, and continue all texts by a round."""
        self._arrange(self._joining())
        if not self.live:
            return
        if self.pages is None:
            until = min(self.round, self.slots - max(text.slots for text in self.live))
        else:
            until = min(self.round, 2 * PAGE)
            self._have_pages(until)
        self.state = self.programs.go_on(self.ready, self.state, until, self.stops, self.sampling, self.known,
                                         self._enough())
        self.changed, self.kept = False, self.state.pop(PAGES, None)
        seen = self.programs.read(self.state)
        routes = self._routes([text for text in self.live if seen["done"][text.device * self.places + text.place]])
        for text in [*self.live]:
            row = text.device * self.places + text.place
            new = int(seen["count"][row]) - len(text.tokens)
            text.tokens += seen["tokens"][row, :new].tolist()
            text.logprobs += seen["logprobs"][row, :new].tolist()
            cut = None
            if self.words and self.strings:
                cut = before(self.strings, self.words, text.ids, text.tokens, self.keep_stop)
            if cut or seen["done"][row]:
                self.found[text.number] = replace(self._record(text, cut, int(seen["end"][row]), float(
                    seen["end_logprob"][row])), routes=routes.get(text.number))
                self.live.remove(text)
                self.changed |= not seen["done"][row]
                if self.pages is not None:
                    self.pages.release(text.device, text.pages)

    def _routes(self, texts: list[Text]) -> dict[int, np.ndarray]:
        """Return the routes of the tokens of texts that have ended, by their numbers, where layers keep them."""
        if not texts or not self.programs.run.config.rl.replay_routes:
            return {}
        entries = self.state["entries"]
        entries = entries if self.pages is None else joined(self.kept, entries)  # stacks of states alone count too
        layers, many = told_routes.layers_of(entries), self.programs.run.config.model.num_layers
        if self.pages is None:
            rows = np.array([text.device * self.places + text.place for text in texts])
            found = self.programs.routes(entries, np.resize(rows, bucket(len(rows))))
            return {text.number: told_routes.of_text(found[:, at], layers, self.slots, many)
                    for at, text in enumerate(texts)}
        pages = np.concatenate([text.device * self.pages.size + np.array(text.pages) for text in texts])
        found, made, at = self.programs.routes(entries, np.resize(pages, bucket(len(pages)))), {}, 0
        for text in texts:
            own = found[:, at:at + len(text.pages)]
            own = own.reshape(len(own), -1, own.shape[-1])
            made[text.number] = told_routes.of_text(own, layers, own.shape[1], many)
            at += len(text.pages)
        return made

    # --------------------------------------------------------------------------------------------- which rows there are

    @property
    def _many(self) -> int:
        """The rows that have to be free before prompts join: a pass over them has the price of some steps."""
        return max(1, self.size // 8)

    def _enough(self) -> int:
        """Return how many finished rows end a round: as many as let prompts join, or as let half of the rows do."""
        rows, live = self.devices * self.places, len(self.live)
        if self.waiting:
            return rows - live + max(1, self._many - (self.size - live))
        return rows - min(live - 1, rows // 2) if self.places > self._least else rows

    @property
    def _limit(self) -> int:
        """The most tokens that a row may come to have."""
        return max(SHORTEST, bucket(self.longest[0])) + bucket(self.longest[1])

    @property
    def _least(self) -> int:
        return bucket(-(-min(FEWEST_ROWS, self.size) // self.devices))

    def _joining(self) -> list[Text]:
        """Return the prompts that join now, with the devices that are to continue them."""
        free = self.size - len(self.live)
        if not self.waiting or (self.live and free < min(self._many, len(self.waiting))):
            return []
        room = -(-self.size // self.devices)
        held = [room - sum(text.device == device for text in self.live) for device in range(self.devices)]
        joining, prompts, width = [], {}, 0
        for text in self.waiting[:free]:
            # Beside an equal prompt, if there is room.
            device = prompts.get(text.prompt, -1)
            if device < 0 or not held[device]:
                device = max(range(self.devices), key=held.__getitem__)
                width = max(width, len(text.ids))
                if self.live and joining and (len(prompts) + 1) * width > AT_ONCE:
                    break
                prompts[text.prompt] = device
            held[device] -= 1
            text.device = device
            joining.append(text)
        self.waiting = self.waiting[len(joining):]
        return joining

    def _arrange(self, joining: list[Text]) -> None:
        """Make the rows those of texts that go on and of texts that join."""
        texts = self.live + joining
        most = max((sum(text.device == device for text in texts) for device in range(self.devices)), default=0)
        places, slots = max(bucket(most), self._least), max((text.slots for text in texts), default=0) + 1
        slots = 0 if self.pages is not None else slots  # what rows have is elsewhere
        if self.waiting or joining:
            places = max(places, self.places)
        if not texts:
            return
        moved = places != self.places or slots > self.slots
        if moved:
            self.slots = min(max(bucket(slots + PAGE - 1), FEWEST_SLOTS), max(self._limit, slots))
        if joining:
            new, at = self._prefilled(joining)
            if not self.live:
                self._place([], joining, places)
                self.state = self.programs.arrange(new, self._numbers(at, joining, places), self.slots)
            else:
                if moved:
                    self._move(places)
                self._place(self.live, joining, places)
                each = bucket(max(self._many // self.devices, *(
                    sum(text.device == device for text in joining) for device in range(self.devices))))
                source, where = np.zeros((self.devices, each), int), np.full((self.devices, each), places)
                for device in range(self.devices):
                    there = [text for text in joining if text.device == device]
                    source[device, :len(there)] = [at[text.number] for text in there]
                    where[device, :len(there)] = [text.place for text in there]
                self.state = self.programs.put(self.state, new, source.ravel(), where.ravel())
        elif moved:
            self._move(places)
        self.live, self.places = texts, places
        if joining or moved or self.changed:
            self._tell()

    def _move(self, places: int) -> None:
        """Take the rows of texts that go on, so many places on each device."""
        before = {text.number: text.place for text in self.live}
        if places != self.places:
            self._place([], self.live, places)
        self.state = self.programs.arrange(self.state, self._numbers(before, self.live, places), self.slots)

    def _place(self, held: list[Text], new: list[Text], places: int) -> None:
        """Give the first free places on their devices to new texts."""
        for device in range(self.devices):
            taken = {text.place for text in held if text.device == device}
            free = (place for place in range(places) if place not in taken)
            for text in new:
                if text.device == device:
                    text.place = next(free)

    def _numbers(self, at: dict[int, int], texts: list[Text], places: int) -> np.ndarray:
        """Return which row each place on each device takes, from those of texts by their numbers."""
        source = np.zeros((self.devices, places), int)
        for text in texts:
            source[text.device, text.place] = at[text.number]
        return source.ravel()

    def _prefilled(self, joining: list[Text]) -> tuple[State, dict[int, int]]:
        """Compute the prompts of texts; return the rows, and which on its device is that of each text."""
        rows: list[dict] = [{} for _ in range(self.devices)]
        at = {text.number: rows[text.device].setdefault(text.prompt, (len(rows[text.device]), text))[0]
              for text in joining}
        each, width = bucket(max(map(len, rows))), max(SHORTEST, bucket(max(len(text.ids) for text in joining)))
        prompts, begins = np.zeros((self.devices, each, width), np.int32), np.full((self.devices, each), width)
        chosen = None
        if joining[0].chosen is not None:
            chosen = np.zeros((self.devices, each, len(joining[0].chosen)), joining[0].chosen.dtype)
        for device, found in enumerate(rows):
            for row, text in found.values():
                begins[device, row] = width - len(text.ids)
                prompts[device, row, begins[device, row]:] = text.ids
                if chosen is not None:
                    chosen[device, row] = text.chosen
        new = self.programs.prefill(self.params, prompts.reshape(-1, width), begins.ravel(),
                                    None if chosen is None else chosen.reshape(-1, chosen.shape[-1]),
                                    self.sampling.penalizes)
        return (new if self.pages is None else self._in_pages(new, joining, at, width)), at

    # -------------------------------------------------------------------------------------- where the cache is in pages

    def _in_pages(self, new: State, joining: list[Text], at: dict[int, int], width: int) -> State:
        """Put prompts into pages, which texts with an equal prompt share but for one that is not full; return the rest.
        """
        assert self.pages is not None
        texts, new = self.programs.paged(new)
        table = np.full((self.devices, len(new["logits"]) // self.devices, width // PAGE), NONE, np.int32)
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(self.devices)]
        first: dict[tuple[int, int], Text] = {}
        wanted = [0] * self.devices
        for text in joining:
            full, rest = divmod(len(text.ids), PAGE)
            wanted[text.device] += (rest > 0) + full * (first.setdefault((text.device, at[text.number]), text) is text)
        self._grow(wanted)
        for text in joining:
            full, rest = divmod(len(text.ids), PAGE)
            like = first[text.device, at[text.number]]
            if like is text:
                text.pages = self.pages.take(text.device, full + (rest > 0))
                table[text.device, at[text.number], :len(text.pages)] = text.pages
                continue
            self.pages.share(text.device, like.pages[:full])
            text.pages = like.pages[:full] + self.pages.take(text.device, rest > 0)
            if rest:
                pairs[text.device].append((like.pages[full], text.pages[full]))
        copies = np.full((self.devices, bucket(max(map(len, pairs))), 2), NONE, np.int32)
        for device, each in enumerate(pairs):
            copies[device, :len(each)] = np.reshape(each, (-1, 2))
        self.kept = self.programs.store(self.kept, texts, table.reshape(-1, table.shape[-1]), copies.reshape(-1, 2),
                                        self.pages.size)
        return new

    def _have_pages(self, until: int) -> None:
        """Give every text pages for so many more tokens, and say on the devices which each has."""
        assert self.pages is not None
        wanted = [max(0, -(-min(text.slots + until, len(text.ids) + text.limit) // PAGE) - len(text.pages))
                  for text in self.live]
        self._grow([sum(many for many, text in zip(wanted, self.live, strict=True) if text.device == device)
                    for device in range(self.devices)])
        for many, text in zip(wanted, self.live, strict=True):
            text.pages += self.pages.take(text.device, many)
        table = np.full((self.devices, self.places, bucket(max(len(text.pages) for text in self.live))), NONE, np.int32)
        for text in self.live:
            table[text.device, text.place, :len(text.pages)] = text.pages
        self.state |= {"table": self.programs.place(table.reshape(-1, table.shape[-1])), PAGES: self.kept}

    def _grow(self, wanted: list[int]) -> None:
        """Have so many free pages on each device."""
        assert self.pages is not None
        if self.pages.grown(wanted, bucket(-(-self.size // self.devices)) * -(-self._limit // PAGE)) and (
                self.kept is not None):
            self.kept = self.programs.more(self.kept, self.pages.size)

    def _tell(self) -> None:
        """Say on the devices what each row is."""
        rows = self.devices * self.places
        numbers = {name: np.zeros(rows, np.int32) for name in ("slot", "count", "limits")}
        numbers |= {"done": np.ones(rows, bool), "seeds": np.zeros((rows, 3), np.uint32)}
        if self.live[0].chosen is not None:
            numbers["chosen"] = np.zeros((rows, len(self.live[0].chosen)), self.live[0].chosen.dtype)
        for text in self.live:
            row = text.device * self.places + text.place
            own: dict[str, Any] = {"slot": text.slots, "count": len(text.tokens), "limits": text.limit, "done": False,
                   "seeds": text.key, "chosen": text.chosen}
            for name, column in numbers.items():
                column[row] = own[name]
        self.state |= {name: self.programs.place(column) for name, column in numbers.items()}

    def _record(self, text: Text, cut: tuple[str, int] | None, end: int, end_logprob: float) -> Generated:
        many = cut[1] if cut else len(text.tokens)
        tokens = text.tokens[:many]
        said = cut[0] if cut else text_of(self.words, text.ids, tokens) if self.words else ""
        stopped = cut is not None or many < text.limit
        return Generated(said, tuple(tokens), tuple(text.logprobs[:many]) if self.logprobs else None,
                         "stop" if stopped else "length", None if cut or not stopped else (end, end_logprob))
