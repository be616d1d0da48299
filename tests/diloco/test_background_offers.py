"""Offers that a thread makes while training goes on: the same bits as those that training waits for."""

import functools
import hashlib
import json
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.diloco import log_records, waiting_meeting
from jaxtrain.diloco.meeting import Offer
from jaxtrain.diloco.outer_exchange import KEPT, Exchange
from jaxtrain.distributed import exit_codes
from jaxtrain.errors import UserError
from jaxtrain.train_step.optimizers import outer
from jaxtrain.trainer.loop import train
from jaxtrain.trainer.session import Interrupted
from tests.diloco.archipelago import numbers
from tests.diloco.memory_meeting import MemoryMeeting, wait_until
from tests.diloco.test_island_runs import STEPS, Beside, built, islands, with_meeting
from tests.tiers import exhaustive, slow

EVERY, OVERLAP = 4, 3
CODECS = {"none": {}, "int4": dict(compression="int4"), "power_sgd": dict(compression="power_sgd", rank=1),
          "gossip": dict(mode="gossip", fragments=1, every=EVERY)}
SOME = ["int4", *slow("power_sgd")]
ALL = [*SOME, *exhaustive("none", "gossip")]


class HeldMeeting(MemoryMeeting):
    """A meeting that the offers of island 0 do not reach before they are let through."""

    def __init__(self, count=2):
        super().__init__(count)
        self.arriving, self.through, self.error = threading.Event(), threading.Event(), None

    def offer(self, offer, content):
        if not offer.island:
            self.arriving.set()
            assert self.through.wait(600)
            if self.error:
                raise self.error
        super().offer(offer, content)


class Foreground(Exchange):
    """Makes all offers before training goes on."""

    def offer(self, step, state, last=False, background=False):
        return super().offer(step, state, last)


class At:
    """An observer that does something before some steps, given as {step: what}."""

    def __init__(self, what):
        self._what = what

    def on_batch(self, step, batch):
        self._what.get(step, lambda: None)()

    def on_dispatch(self, step, metrics):
        pass

    def on_complete(self, record):
        pass


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(waiting_meeting, "PATIENCE_S", 0.02)


@functools.cache
def pair(codec, saves):
    section = dict(every=2 * EVERY, fragments=2, overlap=OVERLAP) | CODECS[codec]
    return [built(i, checkpoint={"every": saves, "keep": STEPS}, **islands(2, **section)) for i in range(2)]


def trained(codec, attempts, saves=STEPS, meeting=None):
    """Return what `attempts` make of the first island, and the log."""
    meeting, (one, two) = meeting or MemoryMeeting(2), pair(codec, saves)
    other = Beside(with_meeting(two, meeting, 1))
    state = attempts(one, meeting)
    return numbers((state, other.ended().params)), meeting.log


@functools.cache
def waited_for(codec, saves=STEPS):
    """The result of offers in the foreground, and what was saved and measured meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        found = trained(codec, lambda one, meeting: train(with_meeting(one, meeting, kind=Foreground), folder), saves)
        return *found, lines(folder), checkpoints(codec, folder, saves)


def checkpoints(codec, folder, saves):
    manager = CheckpointManager(Path(folder) / "checkpoints")
    return {step: numbers(manager.restore(step, pair(codec, saves)[0].abstract)) for step in manager.steps()}


def lines(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def sent(found):
    return sum(line.get("island_sent_bytes", 0) for line in found)


def ends_alike(codec, got, log):
    want, known, *_ = waited_for(codec)
    chex.assert_trees_all_equal(got, want)
    assert log == known


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_the_same_bits_offers_metrics_and_checkpoints_as_in_the_foreground(codec, tmp_path):
    got, log = trained(codec, lambda one, meeting: train(with_meeting(one, meeting), tmp_path), 1)
    want, known, measured, saved = waited_for(codec, 1)
    chex.assert_trees_all_equal(got, want)
    assert log == known
    again, found = checkpoints(codec, tmp_path, 1), lines(tmp_path)
    assert set(again) == set(saved) == set(range(1, STEPS + 1))
    for step, state in again.items():
        mine, other = ({**one.extras[outer.NAME]} for one in (state, saved[step]))
        if step % EVERY == 0 and step < STEPS:  # it is saved before the offer is confirmed, and has it to make again
            assert (int(mine.pop("open")), int(other.pop("open"))) == (outer.DUE, step // EVERY)
            mine.pop("unsent", None), other.pop("unsent", None)
        chex.assert_trees_all_equal((state.params, state.opt_state, mine),
                                    (saved[step].params, saved[step].opt_state, other))
    assert sent(found) == sent(measured) > 0
    entries = [[(line["step"], line["island_entry"]) for line in some if "island_entry" in line]
               for some in (found, measured)]
    assert entries[0] == entries[1]
    assert all("island_wait_s" in line for line in found if "island_sent_bytes" in line)


@pytest.mark.slow
def test_an_asynchronous_island_ends_with_the_same_bits(tmp_path):
    """One alone: what becomes of two depends on the order in which their offers arrive."""
    run = built(**islands(1, every=EVERY, overlap=OVERLAP, mode="async", compression="int4"))
    one, other = (train(with_meeting(run, MemoryMeeting(1, "async"), kind=kind), tmp_path / kind.__name__)
                  for kind in (Exchange, Foreground))
    chex.assert_trees_all_equal(numbers(one), numbers(other))


@pytest.mark.parametrize("codec", ALL)
def test_steps_go_on_while_an_offer_is_on_its_way(codec, tmp_path):
    meeting, done = HeldMeeting(), []

    def arriving():
        assert meeting.arriving.wait(600)
        done.append("arriving")

    def let_through():
        assert not meeting.log
        done.append("through")
        meeting.through.set()

    at = At({EVERY + 1: arriving, EVERY + OVERLAP: let_through})
    ends_alike(codec, *trained(codec, lambda one, _: train(with_meeting(one, meeting), tmp_path, observers=[at]),
                               meeting=meeting))
    assert done == ["arriving", "through"]


def held(one, meeting, folder, what, at=EVERY + 2):
    """Train until an offer is under way, and then do `what`."""
    def now():
        assert meeting.arriving.wait(600)
        what()
    return train(with_meeting(one, meeting), folder, observers=[At({at: now})])


def killed():
    raise RuntimeError("killed")


def released(meeting, arrives):
    """Let the offer arrive that an ended run left under way, or let it get lost."""
    meeting.error = None if arrives else OSError("lost")
    here = [thread for thread in threading.enumerate() if thread.name == "islands-call"]
    meeting.through.set()
    for thread in here:  # that of the other island, if it waits for an entry, comes back in a second
        thread.join(600)
    meeting.error = None


@pytest.mark.parametrize("codec", SOME)
@pytest.mark.parametrize("arrives", [True, *slow(False)])
def test_an_island_that_is_killed_meanwhile_makes_the_same_offer_again(codec, arrives, tmp_path):
    """From a checkpoint of the step of the offer; known or not."""
    def attempts(one, meeting):
        with pytest.raises(RuntimeError, match="killed"):
            held(one, meeting, tmp_path, killed)
        released(meeting, arrives)
        assert list(checkpoints(codec, tmp_path, EVERY)) == [EVERY]
        return train(with_meeting(one, meeting), tmp_path)

    ends_alike(codec, *trained(codec, attempts, EVERY, HeldMeeting()))


@pytest.mark.parametrize("codec", SOME)
@pytest.mark.parametrize(("step", "arrives"), [(EVERY + 2, False), *slow((EVERY + 1, False), (EVERY + 2, True),
                                                                         (EVERY + OVERLAP, False))])
def test_an_island_that_is_stopped_meanwhile_saves_and_sends_the_same_offer_later(codec, step, arrives, tmp_path):
    """Between the steps of an exchange and at its end; and stopped once more before that is answered."""
    def attempts(one, meeting):
        with pytest.raises(Interrupted) as stopped:
            held(one, meeting, tmp_path, lambda: signal.raise_signal(signal.SIGTERM), step)
        assert (stopped.value.code, stopped.value.step) == (exit_codes.SAVED, step)
        assert list(checkpoints(codec, tmp_path, STEPS)) == [step] and (tmp_path / KEPT).exists()
        meeting.arriving.clear()
        caller = threading.Thread(target=lambda: (meeting.arriving.wait(600), signal.raise_signal(signal.SIGTERM)))
        caller.start()
        with pytest.raises(Interrupted) as stopped:
            train(with_meeting(one, meeting), tmp_path)
        caller.join()
        assert (stopped.value.code, stopped.value.step) == (exit_codes.SAVED, step)
        released(meeting, arrives)
        return train(with_meeting(one, meeting), tmp_path)

    ends_alike(codec, *trained(codec, attempts, meeting=HeldMeeting()))
    assert sent(lines(tmp_path)) == sent(waited_for(codec)[2])


@pytest.mark.parametrize("codec", ["int4", *slow("gossip")])
def test_a_checkpoint_of_the_step_of_the_offer_makes_it_again_though_a_file_has_it(codec, tmp_path):
    """As where the run is killed between the file and its checkpoint, or that one is damaged."""
    def attempts(one, meeting):
        with pytest.raises(Interrupted):
            held(one, meeting, tmp_path, lambda: signal.raise_signal(signal.SIGTERM))
        released(meeting, False)
        assert (tmp_path / KEPT).exists()
        shutil.rmtree(tmp_path / "checkpoints" / f"{EVERY + 2}")
        assert list(checkpoints(codec, tmp_path, EVERY)) == [EVERY]
        return train(with_meeting(one, meeting), tmp_path)

    ends_alike(codec, *trained(codec, attempts, EVERY, HeldMeeting()))


def test_the_file_of_an_offer_is_removed_once_no_checkpoint_needs_it(tmp_path):
    """Killed before that, the island goes on from it once more; killed at the end, the next start removes it."""
    def gone():
        """As retention does, some saves later."""
        wait_until(lambda: EVERY + 4 in checkpoints("int4", tmp_path, EVERY))
        shutil.rmtree(tmp_path / "checkpoints" / f"{EVERY + 2}", ignore_errors=True)

    def attempts(one, meeting):
        with pytest.raises(Interrupted):
            held(one, meeting, tmp_path, lambda: signal.raise_signal(signal.SIGTERM))
        released(meeting, True)
        there = []
        look = At({step: lambda: there.append((tmp_path / KEPT).exists()) for step in range(1, STEPS + 1)})
        drop = At({EVERY + 6: gone})
        with pytest.raises(RuntimeError, match="killed"):  # with the entry applied, and no checkpoint since
            train(with_meeting(one, meeting), tmp_path, observers=[At({EVERY + OVERLAP + 1: killed})])
        assert (tmp_path / KEPT).exists() and max(checkpoints("int4", tmp_path, EVERY)) == EVERY + 2
        state = train(with_meeting(one, meeting), tmp_path, observers=[look, drop])
        assert there == [True] * 5 + [False]
        (tmp_path / KEPT).touch()
        train(with_meeting(one, meeting), tmp_path)
        assert not (tmp_path / KEPT).exists()
        return state

    ends_alike("int4", *trained("int4", attempts, EVERY, HeldMeeting()))


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "int4"])
def test_without_its_file_a_stopped_island_offers_what_it_has(codec, tmp_path):
    """As where only the mirror's checkpoints are left; other bits, and every exchange."""
    def attempts(one, meeting):
        with pytest.raises(Interrupted):
            held(one, meeting, tmp_path, lambda: signal.raise_signal(signal.SIGTERM))
        released(meeting, False)
        (tmp_path / KEPT).unlink()
        (saved,) = checkpoints(codec, tmp_path, STEPS).values()
        # What the first offer lacked is part of the island's progress still, which is offered once.
        assert not any(map(np.any, jax.tree.leaves(saved.extras[outer.NAME].get("unsent"))))
        return train(with_meeting(one, meeting), tmp_path)

    (state, others), log = trained(codec, attempts, meeting=HeldMeeting())
    chex.assert_trees_all_equal(state.params, others)
    assert [len(entry.contributions) for entry in log] == [2] * len(waited_for(codec)[1])


@pytest.mark.slow
def test_a_save_between_waits_for_the_offer(tmp_path):
    """So that the checkpoint needs no file beside it."""
    meeting, letting = HeldMeeting(), []

    def let_through():
        assert meeting.arriving.wait(600)
        letting.append(threading.Timer(0.1, meeting.through.set))  # while the save waits, or before
        letting[0].start()

    at = At({EVERY + 1: let_through})
    trained("int4", lambda one, _: train(with_meeting(one, meeting), tmp_path, observers=[at]), EVERY + 1, meeting)
    found = checkpoints("int4", tmp_path, EVERY + 1)
    chex.assert_trees_all_equal(found, waited_for("int4", EVERY + 1)[3])
    assert not (tmp_path / KEPT).exists()


@pytest.mark.parametrize("error", [UserError("HOST:7000", "the coordinator does not accept this island's certificate",
                                             "make another"), ConnectionError("out of reach")], ids=["TLS", "network"])
def test_what_an_offer_fails_with_ends_the_run_where_the_exchange_ends(error, tmp_path):
    meeting, reached = HeldMeeting(1), []
    meeting.error = error
    meeting.through.set()
    at = At({step: functools.partial(reached.append, step) for step in range(1, STEPS + 1)})
    with pytest.raises(type(error)) as raised:
        train(with_meeting(pair("none", STEPS)[0], meeting), tmp_path, observers=[at])
    assert raised.value is error
    assert reached[-1] == EVERY + OVERLAP


def test_an_offer_in_a_file_is_read_whole_or_not_at_all(tmp_path):
    content = np.arange(5, dtype=np.uint8).tobytes() + b"\n\n"
    offer = Offer(1, 7, 0, 2.5, hashlib.sha256(content).hexdigest(), 3, 4, same="0" * 64)
    log_records.write_offer(tmp_path / KEPT, 9, offer, content, b"what it lacks")
    assert log_records.read_offer(tmp_path / KEPT, 1, 7) == (offer, content, b"what it lacks")
    assert log_records.read_offer(tmp_path / KEPT, 1, 8) is log_records.read_offer(tmp_path / KEPT, 0, 7) is None
    whole = (tmp_path / KEPT).read_bytes()
    for position, steps in ((7, ()), (8, (9,)), (8, (7, 9, 11))):
        log_records.remove_offer(tmp_path / KEPT, position, steps)
        assert (tmp_path / KEPT).exists(), "it is not in the log, or its checkpoint is there"
    log_records.remove_offer(tmp_path / KEPT, 8, (11,))
    assert not (tmp_path / KEPT).exists()
    log_records.remove_offer(tmp_path / KEPT, 8, ())
    for damaged in (b"", whole[:-1], whole[1:], whole + b"\0"):
        (tmp_path / KEPT).write_bytes(damaged)
        assert log_records.read_offer(tmp_path / KEPT, 1, 7) is None
