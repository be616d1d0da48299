"""The reference's sums over answers, computed before the first step (`preference.reference=precomputed`).

The sums of log-probabilities of a row's answers are found by a hash of the row, whatever step, epoch or source it comes
from. So each row is computed once, and a row of another corpus, tokenizer or packing is never taken for it.
"""

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import optax

from jaxtrain.base.annotations import JsonMapping, JsonObject, PyTree
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.skipped_batches import SkippedBatches, remaining
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError, say
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import LINE, exceeds_memory, opened, parsed, reason
from jaxtrain.hub.initial_params import origin
from jaxtrain.objectives.reference_policy import WithReference
from jaxtrain.observe.own_parts import describe_data
from jaxtrain.run import Begun, Extension, Run, identity, shapes_of
from jaxtrain.train_step.compiler_options import compiled
from jaxtrain.train_step.state import Params, TrainState

FILE = "reference_sums.bin"  # of a workdir
KEY = "preference.reference"
EVERY_S = 60  # seconds between lines of progress, and between saves
_FORM = {"parameters": str, "covers": {"of": str, "start": int, "stop": int}, "rows": int, "sha256": str}
_ELSEWHERE = {"source", "cache_dir", "cache_bytes", "prefetch", "workers"}  # keys of data that change no row
Row = dict[str, np.ndarray]
Phase = Callable[[str], contextlib.AbstractContextManager[Any]]


class ReferenceSums:
    """The sums of answers' log-probabilities under a run's first parameters, by row."""

    def __init__(self, run: Run, workdir: str | Path | None = None):
        """Compute nothing yet; `workdir`: where they are kept, if anywhere."""
        self.run, self.path = run, None if workdir is None else Path(workdir) / FILE
        goal: Any = run.objective
        self.columns = {prefix: goal.sums_of(prefix) for prefix in goal.prefixes}
        self.names = [name for name in goal.batch_spec if name not in self.columns.values()]
        self.known: dict[bytes, np.ndarray] = {}  # of a row, those of each prefix one after the other
        self.covers = {"of": "", "start": 0, "stop": 0}  # the steps whose rows are all known, and of which data
        self._programs: dict[tuple[int, int], jax.stages.Compiled] = {}

    # --------------------------------------------------------------------------------------------- joined to batches
    def added_to(self, batches: BatchSource) -> "WithSums":
        """Return these batches with the sums."""
        return WithSums(batches, self)

    def beside(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return some rows with the sums, each at the first token of its answer's segment."""
        self._check(batch)
        made = {name: np.zeros(np.shape(batch["tokens"]), np.float32) for name in self.columns.values()}
        for row in range(len(batch["tokens"])):
            places = {prefix: _segments(batch[f"{prefix}segments"][row]) for prefix in self.columns}
            if not any(len(numbers) for numbers, _ in places.values()):
                continue
            if not self.covers["of"]:
                raise UserError("batch", "the reference's numbers were not computed", "call run.see(0, state) with the "
                                "state at step 0 before the first batch")
            if (sums := self.known.get(self._digest(batch, row))) is None:
                raise UserError("batch", f"it has a row for which the reference's numbers were not computed: they are "
                                f"there for {self.run.config.train.steps} steps and the evaluations between them",
                                "raise train.steps")
            for prefix, (numbers, first) in places.items():
                made[self.columns[prefix]][row, first], sums = sums[:len(numbers)], sums[len(numbers):]
        return {**batch, **made}

    def _check(self, batch: Mapping[str, np.ndarray]) -> tuple[int, ...]:
        """Refuse a batch whose arrays, without sums, are not those that it should have; return its shape."""
        spec = shapes_of(self.run).spec
        return replace(spec, dtypes={name: spec.dtypes[name] for name in self.names}).check(batch)

    def _digest(self, batch: Mapping[str, np.ndarray], row: int) -> bytes:
        found = hashlib.blake2b(digest_size=16)
        for name in self.names:
            found.update(np.ascontiguousarray(batch[name][row]).data)
        return found.digest()

    # ------------------------------------------------------------------------------------------- computed beforehand
    def see(self, step: int, state: TrainState) -> None:
        """Take the state at step 0, for a loop of one's own."""
        if step == 0 and self.path is None:
            self.known, self.covers = {}, {"of": "", "start": 0, "stop": 0}
            self.prepare(lambda: state)

    def initial(self, parts: Mapping[str, PyTree]) -> TrainState:
        """Return the state at step 0 without the optimizer's: the state to go on from may be on the devices already.

        `parts`: what `identity.own_parts` returned for the workdir.
        """
        layout = self.run.layout
        bare = replace(layout, state=replace(layout.state, opt_state=optax.EmptyState(), extras={}))
        settings = replace(self.run.sharded.settings, optimizer=optax.identity())
        sharded = replace(self.run.sharded, settings=settings, layout=bare, hooks=())
        return replace(self.run, sharded=sharded).init(parts=parts)

    def prepare(self, initial: Callable[[], TrainState], start: int = 0, skipped: SkippedBatches | None = None,
                begun: JsonMapping | None = None, phase: Phase = contextlib.nullcontext) -> None:
        """Compute what is missing for the steps from `start` on, in their order, and keep it.

        Args:
            initial: returns the state at step 0; called only if something is missing.
            skipped: the batches that the run leaves out.
            begun: what run.json says of the parameters that the run began with.
            phase: a context for each batch, by a name of its own, which tells the watchdog that the run goes on.
        """
        stop, skipped = self.run.config.train.steps, skipped or SkippedBatches()
        parameters, of = self._parameters(begun), self._data(skipped)
        self._load(parameters)
        if self.covers["of"] == of and self.covers["start"] <= start and stop <= self.covers["stop"]:
            return
        missing, began = self._missing(start, stop, skipped), time.monotonic()
        if (first := next(missing, None)) is not None:
            if start:
                self._check_beginning(begun)
            params = initial().all_params
            _tell(f"{KEY}: the reference's log-probabilities are computed before the first step, once for each row")
            self._compute(params, itertools.chain([first], missing), parameters, phase)
            _tell(f"{KEY}: {len(self.known):,} rows have theirs, after {time.monotonic() - began:.0f} s")
        self.covers = {"of": of, "start": start, "stop": stop}
        self._save(parameters)

    def _missing(self, start: int, stop: int, skipped: SkippedBatches) -> Iterator[tuple[bytes, Row, float]]:
        """Yield rows whose sums are not known: the hash, the row, and which share of all batches was looked through."""
        run = self.run
        trained, evaluated = remaining(run.batch_source, skipped), run.eval_batches
        asked: list[tuple[BatchSource, int]] = [(trained, step) for step in range(start, stop)]
        if evaluated is not None:
            every = range(evaluated.num_batches or 0)
            asked += [(evaluated, step) for step in every[:run.config.train.eval_batches or None]]
        seen: set[Any] = set()
        for number, (batches, step) in enumerate(asked):
            rows = range(batches.shape(step)[0])
            if run.data is None:  # it is known without reading which rows have come before
                origins: Any = batches
                places = [(name, id(source), at) for name, source, at in (origins.origin(step, row) for row in rows)]
                rows = [row for row in rows if places[row] not in seen]
                seen.update(places)
            if not rows:
                continue
            batch = batches.rows(step, rows) if run.data is None else batches[step]
            shape = self._check(batch)
            if run.data is not None:
                shapes_of(run).allow(shape)
            for row in range(len(rows)):
                there = any(batch[f"{prefix}segments"][row].any() for prefix in self.columns)
                digest = self._digest(batch, row)
                if there and digest not in seen and digest not in self.known:
                    seen.add(digest)
                    yield digest, {name: batch[name][row] for name in self.names}, number / len(asked)

    def _compute(self, params: Params, rows: Iterator[tuple[bytes, Row, float]], parameters: str, phase: Phase) -> None:
        """Compute rows in batches of one length each, while the next ones are read."""
        waiting: dict[int, list[tuple[bytes, Row]]] = {}
        computed: list[Any] = []  # the batch that the devices work on
        saved = time.monotonic()

        def compute(some: list[tuple[bytes, Row]]) -> None:
            with phase(f"reference, row {len(self.known)}"):
                computed.append(self._dispatched(params, some))
                if len(computed) > 1:
                    self._take(*computed.pop(0))

        for digest, row, share in rows:
            some = waiting.setdefault(len(row["tokens"]), [])
            some.append((digest, row))
            if len(some) == self._rows(len(row["tokens"])):
                compute(waiting.pop(len(row["tokens"])))
                if time.monotonic() - saved > EVERY_S:
                    _tell(f"{KEY}: {len(self.known):,} rows, {share:.0%} of the batches")
                    self._save(parameters)
                    saved = time.monotonic()
        for some in waiting.values():
            compute(some)
        self._take(*computed.pop())

    def _rows(self, length: int) -> int:
        """Return how many rows of this length are computed at once: as many as in a micro-batch of a step."""
        run = self.run
        shapes = [*run.batch_source.shapes_of(0, max(run.config.train.steps, 1)),
                  (run.config.data.global_batch_size, run.config.data.seq_len)]
        return next(rows for rows, tokens in shapes if tokens == length) // run.config.train.accumulation

    def _dispatched(self, params: Params, some: list[tuple[bytes, Row]]) -> tuple[list[tuple[bytes, Row]], Any]:
        """Return rows, and their sums as futures."""
        size, length = self._rows(len(some[0][1]["tokens"])), len(some[0][1]["tokens"])
        batch = {name: np.zeros((size, length), some[0][1][name].dtype) for name in self.names}
        for number, (_, row) in enumerate(some):
            for name in self.names:
                batch[name][number] = row[name]
        return some, self.program(size, length)(params, self.run.sharded.place(batch))

    def program(self, rows: int, length: int) -> jax.stages.Compiled:
        """Return the compiled function from parameters and a batch to sums, for this many rows of this length."""
        if (rows, length) not in self._programs:
            run, goal = self.run, self.run.objective
            batch = {name: jax.ShapeDtypeStruct((rows, length), shapes_of(run).spec.dtypes[name],
                                                sharding=run.layout.batch(2)) for name in self.names}
            assert isinstance(goal, WithReference)
            sums = jax.jit(lambda params, batch: goal.reference_sums(run.sharded.cast(params), batch))
            with run.sharded.context():
                self._programs[rows, length] = compiled(sums.lower(run.abstract.all_params, batch),
                                                        run.sharded.compiler_options)
        return self._programs[rows, length]

    def _take(self, some: list[tuple[bytes, Row]], sums: Mapping[str, jax.Array]) -> None:
        """Wait for the sums of these rows, and note them."""
        found = jax.device_get(sums)
        for number, (digest, row) in enumerate(some):
            self.known[digest] = np.concatenate([
                found[column][number, _segments(row[f"{prefix}segments"])[0]]
                for prefix, column in self.columns.items()])

    # -------------------------------------------------------------------------------------------------- kept on disk
    def _parameters(self, begun: JsonMapping | None) -> str:
        """Return a hash of what decides the parameters at step 0."""
        c = self.run.config
        return atomic_files.digest([_without_places(begun or {}), asdict(c.model), asdict(c.lora), c.train.seed])

    def _check_beginning(self, begun: JsonMapping | None) -> None:
        """Refuse to compute with other parameters than the run began with."""
        source = self.run.config.train.init_from
        now = origin(source) if source else {}
        if _without_places(now) != _without_places(begun or {}):
            was = f"{(begun or {}).get('workdir') or (begun or {}).get('folder') or 'nothing'}"
            at = f"@{begun['step']}" if begun and "step" in begun else ""
            raise UserError(KEY, f"{self.path} lacks numbers of the reference, and train.init_from={source} differs "
                            "from the model that the run started from", f"set train.init_from={was}{at}, or restore "
                            "the file")

    def _data(self, skipped: SkippedBatches) -> str:
        """Return a hash of what decides which rows come when."""
        run, c = self.run, self.run.config
        data = {key: value for key, value in asdict(c.data).items() if key not in _ELSEWHERE}
        return atomic_files.digest([data, identity.manifests(run), skipped.to_dict()["batches"], c.train.eval_batches,
                                    None if run.data is None else describe_data(run.data)])

    def _save(self, parameters: str) -> None:
        if self.path is None or jax.process_index():
            return
        counts = np.array([len(sums) for sums in self.known.values()], np.int32)
        body = b"".join([*self.known, counts.tobytes(), *(sums.tobytes() for sums in self.known.values())])
        about = {"parameters": parameters, "covers": self.covers, "rows": len(counts),
                 "sha256": hashlib.sha256(body).hexdigest()}
        with atomic_files.written(self.path, shared=False) as file:
            file.write(json.dumps(about).encode() + b"\n" + body)

    def _load(self, parameters: str) -> None:
        """Read what was kept, if it is whole, of these parameters, and the same for all processes."""
        if self.path is None or self.known:
            return
        about, known = {}, {}
        try:
            with opened(self.path) as file:
                if exceeds_memory(os.fstat(file.fileno()).st_size):
                    raise ValueError("is larger than the memory of this machine")
                about, body = parsed(file.readline(LINE), _FORM), file.read()
            if about["sha256"] != hashlib.sha256(body).hexdigest():
                raise ValueError("is not as it was written")
            if about["parameters"] != parameters:
                raise ValueError("is of a run that began with other parameters")
            known = _unpacked(body, about["rows"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            _tell(f"{KEY}: {self.path} {reason(error)}: the reference's numbers are computed anew")
        if len(set(exchange(about["sha256"] if known else ""))) == 1 and known:
            self.known, self.covers = known, about["covers"]


@dataclass(frozen=True)
class PrecomputedReference(Extension):
    """A run whose batches have the reference's sums (`preference.reference=precomputed`)."""

    sums: ReferenceSums | None = None  # of a run that is built
    keeps: ClassVar[bool] = True

    def for_run(self, run: Run, workdir: Path | None) -> "PrecomputedReference":
        """Return it with the sums of this run, if its objective takes them from batches."""
        if not getattr(run.objective, "precomputed", False):
            return self
        return PrecomputedReference(ReferenceSums(run, workdir))

    def added_to(self, batches: BatchSource) -> BatchSource:
        """Return these batches with the sums."""
        return batches if self.sums is None else self.sums.added_to(batches)

    def prepare(self, state: TrainState | None, begun: Begun) -> None:
        """Compute the sums that the steps to come will need."""
        if (sums := self.sums) is not None:
            sums.prepare(lambda: state or sums.initial(begun.parts), begun.start, begun.skipped, begun.about,
                         begun.phase)

    def see(self, step: int, state: TrainState) -> None:
        """Compute the sums of all steps with the state at step 0, in a loop of one's own."""
        if self.sums is not None:
            self.sums.see(step, state)


class WithSums:
    """Batches with the reference's sums, for those who place them on the mesh."""

    def __init__(self, batches: BatchSource, sums: ReferenceSums):
        self._batches, self._sums = batches, sums
        self.num_batches, self.tokens, self.epochs = batches.num_batches, batches.tokens, batches.epochs

    def __getitem__(self, step: int) -> Row:
        return self._sums.beside(self._batches[step])

    def rows(self, step: int, indices: Sequence[int]) -> Row:
        """Return only these rows of the batch at `step`."""
        return self._sums.beside(self._batches.rows(step, indices))

    def shape(self, step: int) -> tuple[int, int]:
        """Return the number of rows, and of tokens per row, at this step."""
        return self._batches.shape(step)

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the distinct shapes that the batches of steps `start` to `stop` may have."""
        return self._batches.shapes_of(start, stop)


def _segments(segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of a row's segments, and the place of the first token of each."""
    numbers, first = np.unique(segments, return_index=True)
    return numbers[numbers > 0], first[numbers > 0]


def _unpacked(body: bytes, rows: int) -> dict[bytes, np.ndarray]:
    """Return sums by row: all hashes, the number of sums of each row, and all sums."""
    counts = np.frombuffer(body, np.int32, rows, 16 * rows)
    sums = np.split(np.frombuffer(body, np.float32, offset=20 * rows), np.cumsum(counts)[:-1])
    return {body[16 * row: 16 * row + 16]: some for row, some in enumerate(sums)}


def _without_places(begun: JsonMapping) -> JsonObject:
    """Return what tells parameters from others, of an entry `init_from` of run.json."""
    return {key: _without_places(value) if key == "base" else value for key, value in begun.items()
            if key in ("parameters", "sha256", "base")}


def _tell(text: str) -> None:
    if jax.process_index() == 0:
        say(text)
