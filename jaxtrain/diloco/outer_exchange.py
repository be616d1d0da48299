"""The exchange of an island with the others: after some of its steps, the only thing that changes its state.

Progress is what the island's parameters moved from the outer ones since both were last equal. The island offers it, and
applies the log's entries to its copy of the outer state (outer_replica.py) until one has its offer; then its parameters
become the outer ones. After an entry without it, which moves its parameters by as much as the outer ones, the island
offers again for the next entry.

All of this depends on the log and the state alone: an island that is killed and resumed gets the same entries for the
same offers, and goes on with the same bits.

With `diloco.overlap` a thread encodes and sends the offer while steps go on. Until it is confirmed the state says that
it is due: saved at the step of the offer, it has all to make the same one again. Later saves wait for it, or, if the
run is to stop before, keep it, with what it lacks, in a file from which the resumed island sends it. The state knows
nothing of that: without the file, the island offers what it has by then.
"""

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint import verify
from jaxtrain.config.schema import hash_of
from jaxtrain.config.sections.diloco_keys import OWN, DilocoConfig
from jaxtrain.diloco import gossip, log_records
from jaxtrain.diloco.host_arrays import HostArrays, of_first
from jaxtrain.diloco.meeting import BackgroundMeeting, Offer, Trimmed, Unanswered
from jaxtrain.diloco.outer_replica import OuterReplica
from jaxtrain.distributed.coordination import exchange
from jaxtrain.extensions import ema
from jaxtrain.run import Stopped
from jaxtrain.sharding.axis_rules import Axes
from jaxtrain.train_step.optimizers.outer import DUE, NAME
from jaxtrain.train_step.state import TrainState

KEPT = "island_offer"  # in the workdir: the last offer that a stopped run could not send
PATIENCE_S = 1.0  # of one question for entries, after which the island looks whether it is to stop
_Made = tuple[Offer, bytes, np.ndarray | None, np.ndarray | None]  # with its content; unsent before it, and after it


class Exchange:
    """An island's part in the exchanges; every process of it makes all calls, at the same steps."""

    def __init__(self, config: DilocoConfig, abstract: TrainState, axes: Axes, meeting: BackgroundMeeting,
                 tokens: Callable[[int], int] = lambda step: step, kind: str = ""):
        """Exchange nothing yet.

        Args:
            abstract: shapes of the state.
            axes: the logical names of the trained parameters.
            meeting: the log and its offers.
            tokens: from a step to the number of the island's tokens before it.
            kind: identifies what else all islands have to have in common, such as the model.
        """
        self.diloco, self._meeting, self._tokens = config, meeting, tokens
        self._replica = OuterReplica(config, abstract.params, axes, self._asked, self._count)
        self._fragments = self._replica.fragments
        self._gossips = config.mode == "gossip"
        self._fields: dict[str, float] = {}
        self._leaving = False
        self._open = 0  # the round of the offer that is under way; 0: none is; DUE: one is to be made
        self._stop: Callable[[], bool] = lambda: False  # whether not to wait for a meeting that does not answer
        self._offered = 0  # after which step the open offer was made
        alike = {key: value for key, value in dataclasses.asdict(config).items() if key not in OWN}
        self._kind = hash_of({"islands": alike, "kind": {"": kind}}).encode()
        self._unsent: tuple[int, np.ndarray | None] = 0, None  # its fragment, and what was unsent of it before
        self._thread = ThreadPoolExecutor(1, "island-offer")
        self._made: Future[_Made] | None = None  # the offer that it makes; None: none is under way
        self._folder: Path | None = None

    # ---------------------------------------------------------------------------------------------- what the loop calls
    def begin(self, step: int, state: TrainState, stopping: Callable[[int], bool] = lambda step: False,
              folder: Path | None = None) -> TrainState:
        """Return the state to begin with: at the end of the log, if the island is new; an open exchange is ended.

        Args:
            stopping: whether not to wait for that.
            folder: the workdir, where a run that stops keeps an offer that it could not send.

        Raises:
            Stopped: that has to wait, and the run is `stopping`.
        """
        self._stop, self._folder = (lambda: stopping(step)), folder
        if self._made:  # of an attempt before a rollback
            wait([self._made])
            self._made = None
        outer = state.extras[NAME]
        position, self._open = int(jax.device_get(outer["position"])), int(jax.device_get(outer["open"]))
        self._replica.position = position
        self._offered = step - step % self.diloco.interval
        self._unsent = self._fragment(position), None
        if not step and not position:
            return self._catch_up(state)
        if self._open == DUE:
            # At the step of the offer the state has all to make it again; a file may be of another checkpoint.
            state = (self._sent_again(state) if step > self._offered else None) or self.offer(step, state)
        if self._open and step % self.diloco.interval >= self.diloco.overlap:
            state = self.finish(step, state, stopping)
            self._check_ended()
        elif self._open == DUE:
            raise Stopped
        return state

    def after(self, step: int, state: TrainState, last: bool = False,
              stopping: Callable[[int], bool] = lambda step: False) -> TrainState:
        """Return the state after the exchange that is due after this step, if one is.

        Args:
            last: whether no step follows: every fragment is exchanged then, and the island leaves.
            stopping: whether to leave an exchange open that has to wait.

        Raises:
            Stopped: the last exchange has to wait for a meeting that does not answer, and the run is `stopping`.
        """
        self._stop = lambda: stopping(step)
        if self._open and (last or step % self.diloco.interval == self.diloco.overlap):
            state = self.finish(step, state, (lambda step: False) if last else stopping)
        elif self._made and self._stop():
            state = self._settled(state)
        if last:
            for left in reversed(range(len(self._fragments))):
                self._check_ended()
                state = self.finish(step, self.offer(step, state, last=not left))
            self._check_ended()
        elif step % self.diloco.interval == 0 and not self._open:
            state = self.offer(step, state, background=self.diloco.overlap > 0)
            if not self.diloco.overlap:
                state = self.finish(step, state, stopping)
        if self._folder and not jax.process_index() and (path := self._folder / KEPT).exists():
            log_records.remove_offer(path, self._replica.position, verify.steps(self._folder / "checkpoints"))
        return state

    def due(self, step: int, last: bool = False, stopping: Callable[[int], bool] = lambda step: False) -> bool:
        """Return whether anything is to be done after this step, or before the run stops after it."""
        here = step % self.diloco.interval
        return (last or not here or (self._open != 0 and here == self.diloco.overlap)
                or (self._made is not None and stopping(step)))

    def unsaved(self, step: int) -> bool:
        """Return whether the state of this step lacks an offer that is under way; only `saved` may be saved then."""
        return self._made is not None and self._offered < step

    def saved(self, step: int, state: TrainState, stopping: Callable[[int], bool] = lambda step: False) -> TrainState:
        """Return the state once the offer under way is sent, or, if the run is to stop before that, kept in a file.

        Raises:
            Stopped: the run is `stopping`, and there is no folder for that file.
        """
        self._stop = lambda: stopping(step)
        state = self._settled(state)
        if not self._made:
            return state
        if not self._folder:
            raise Stopped
        offer, content, _, unsent = self._made.result()
        path, lacking = self._folder / KEPT, b"" if unsent is None else unsent.tobytes()
        exchange(None, lambda _: log_records.write_offer(path, step, offer, content, lacking))
        return state

    def ended(self, folder: Path) -> None:
        """Remove what was kept in the workdir for checkpoints before the last one, which is on disk."""
        if not jax.process_index():
            (folder / KEPT).unlink(missing_ok=True)

    def pop_fields(self) -> dict[str, float]:
        """Return what the next line of metrics says of the exchanges since the last one."""
        fields, self._fields = self._fields, {}
        return fields

    # ---------------------------------------------------------------------------------------- the halves of an exchange
    def offer(self, step: int, state: TrainState, last: bool = False, background: bool = False) -> TrainState:
        """Begin an exchange: offer the progress of the fragment whose turn it is; it stays due if that is stopped.

        `background`: a thread makes the offer, and the exchange's end waits for it.
        """
        work = self._work(state)
        self._leaving = last
        with contextlib.suppress(Stopped):
            self._offer(step, work, background)
        return self._state(state, work)

    def finish(self, step: int, state: TrainState, stopping: Callable[[int], bool] = lambda step: False) -> TrainState:
        """End the exchange: apply entries until one has the island's offer. `stopping`: leave it open if that waits."""
        state = self._settled(state)
        if self._open == DUE:  # the run is to stop
            return state
        work, began, replica = self._work(state), time.perf_counter(), self._replica
        first = replica.position
        blend = self.diloco.blend if step > self._offered else 0.0  # steps went on meanwhile
        while self._open:
            try:
                entries = list(self._asked("entries", replica.position, PATIENCE_S))
                for entry, following in zip(entries, [*entries[1:], None], strict=False):
                    if replica.apply(entry, work, self._open - 1, blend):
                        self._open = 0
                        replica.keep_snapshot(entry, work)
                        break
                    if self.diloco.mode != "async":  # its offer came too late for this entry
                        blend, self._open = 0.0, DUE
                        self._take_back(work)
                        if replica.position - first > self.diloco.max_age:
                            replica.adopt(work, entry)
                            self._open = 0
                            break
                        if following is None or following.has(self.diloco.index, replica.position):
                            self._offer(step, work)
            except Trimmed:
                with contextlib.suppress(Stopped):
                    if replica.adopt_snapshot(work):
                        self._open = 0
                break
            except Stopped:
                break
            if self._open and not entries and stopping(step):
                break
        self._leave_open(step, work)
        self._count("island_wait_s", time.perf_counter() - began)
        self._fields["island_entry"] = replica.position
        return self._state(state, work)

    # -------------------------------------------------------------------------------------------------------- the parts
    def _asked(self, call: str, *given: object) -> Any:
        """Return what the meeting answers to a call; raises Stopped if the run is to stop before that."""
        while True:
            try:
                return getattr(self._meeting, call)(*given)
            except Unanswered:
                if self._stop():
                    raise Stopped from None

    def _leave_open(self, step: int, work: HostArrays) -> None:
        """Let the resumed island make an offer of this very step again, if the run stops before its entry.

        Its bits are the same, and it is known then as one that was made here: how it is blended, and what was unsent
        before. Of `async`, entries may have come since.
        """
        if self._open > 0 and self._offered == step and self.diloco.mode != "async" and self._stop():
            self._take_back(work)
            self._open = DUE

    def _check_ended(self) -> None:
        if self._open and self._stop():
            raise Stopped

    def _work(self, state: TrainState) -> HostArrays:
        outer = state.extras[NAME]
        return HostArrays({"own": state.params, "params": outer["params"],
                           **{name: outer[name] for name in self.diloco.kept}})

    def _state(self, state: TrainState, work: HostArrays) -> TrainState:
        trees, outer = work.trees(), state.extras[NAME]
        own = trees.pop("own")
        numbers = {name: _scalar(value, outer[name])
                   for name, value in (("position", self._replica.position), ("open", self._open))}
        return dataclasses.replace(state, params=own, extras=state.extras | {NAME: {**outer, **trees, **numbers}})

    def _fragment(self, position: int) -> int:
        return position % len(self._fragments)  # of the entry that follows

    def _offer(self, step: int, work: HostArrays, background: bool = False) -> None:
        replica, leaving = self._replica, self._leaving
        base = replica.position
        number = self._fragment(base)
        fragment = self._fragments[number]
        own = work.get("own", fragment)
        before = work.get("unsent", fragment) if "unsent" in self.diloco.kept else None
        outer = work.get("params", fragment)
        tokens = self._tokens(step) - self._tokens(max(0, step - self.diloco.every))

        def made() -> _Made:
            content, unsent = replica.payloads[number].encode(own if replica.exact else outer - own, before, base)
            if self._gossips:
                content = gossip.packed(content, outer)
            alike = b"" if self._gossips and base else outer.tobytes()
            same = hashlib.sha256(self._kind + alike).hexdigest()
            offer = Offer(self.diloco.index, base, number, float(tokens), hashlib.sha256(content).hexdigest(),
                          min(step, self.diloco.every), tokens, leaving, same)
            if background:
                self._meeting.begin(offer, content)
            return offer, content, before, unsent

        self._open, self._offered = DUE, step
        if background:
            self._made = self._thread.submit(made)
        else:
            self._confirm(work, *made())

    def _confirm(self, work: HostArrays, offer: Offer, content: bytes, before: np.ndarray | None,
                 unsent: np.ndarray | None) -> None:
        """Return once an offer is made."""
        if self._replica.payloads[offer.fragment].from_first:
            content = of_first(np.frombuffer(content, np.uint8)).tobytes()
            offer = dataclasses.replace(offer, sha256=hashlib.sha256(content).hexdigest())
            unsent = None if unsent is None else of_first(unsent)
        self._replica.remember(offer, content)
        self._asked("offer", offer, content)
        self._open = self._replica.position + 1
        if unsent is not None:  # only now: until then the offer can be made again, of the same state
            self._unsent = offer.fragment, before
            work.set("unsent", self._fragments[offer.fragment], unsent)
        self._count("island_sent_bytes", len(content))

    def _settled(self, state: TrainState) -> TrainState:
        """Return the state once the offer under way is made; unchanged if the run is to stop before."""
        if not self._made:
            return state
        work, began = self._work(state), time.perf_counter()
        with contextlib.suppress(Stopped):
            self._confirm(work, *self._made.result())
            self._made = None
        self._count("island_wait_s", time.perf_counter() - began)
        return self._state(state, work)

    def _sent_again(self, state: TrainState) -> TrainState | None:
        """Send the due offer from the file in which a stopped run kept it; return None if there is no such file."""
        name = self.diloco.index, self._replica.position
        kept = log_records.read_offer(self._folder / KEPT, *name) if self._folder else None
        if not exchange(kept is not None, lambda found: found[0]):
            return None
        offer, content, unsent = kept or (Offer(*name, 0, 0.0, ""), b"", b"")
        self._asked("offer", offer, content)  # that of the first process
        self._open, work = self._replica.position + 1, self._work(state)
        if "unsent" in self.diloco.kept:
            number = self._fragment(self._replica.position)
            before = work.get("unsent", self._fragments[number])
            lacking = np.frombuffer(unsent, np.float32) if kept else np.zeros_like(before)
            work.set("unsent", self._fragments[number], of_first(lacking))
            self._unsent = number, before
        self._count("island_sent_bytes", len(content))
        return self._state(state, work)

    def _take_back(self, work: HostArrays) -> None:
        """Undo that what an offer lacked is remembered, since nobody took the offer; after a restart all of it is lost.
        """
        if "unsent" in self.diloco.kept:
            number, before = self._unsent
            fragment = self._fragments[number]
            work.set("unsent", fragment, before if before is not None else np.zeros_like(work.get("own", fragment)))

    def _catch_up(self, state: TrainState) -> TrainState:
        """Return the state of a new island, without progress of its own: at the end of the log."""
        work = self._work(state)
        adopted = self._replica.catch_up(work)
        state = self._state(state, work)
        if adopted and ema.NAME in state.extras:  # the average begins with the parameters that the island begins with
            average = jax.jit(ema.begin, out_shardings=jax.tree.map(lambda a: a.sharding, state.extras[ema.NAME]))
            state = dataclasses.replace(state, extras=state.extras | {ema.NAME: average(state.params)})
        return state

    def _count(self, name: str, by: float) -> None:
        self._fields[name] = self._fields.get(name, 0) + by


def _scalar(value: int, like: jax.Array) -> jax.Array:
    with jax.transfer_guard("allow"):
        return jax.make_array_from_callback((), like.sharding, lambda _: np.int32(value))
