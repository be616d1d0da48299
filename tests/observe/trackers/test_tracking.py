"""Trackers have every line once, whatever happens to the run, to them and to their servers; and nothing waits."""

import json
import threading

import numpy as np
import pytest

from jaxtrain.observe import events, system_metrics
from jaxtrain.observe.trackers import tracking
from jaxtrain.observe.trackers.tracker import NOTHING, About, Tracker, position
from jaxtrain.observe.trackers.tracking import Tracking


def line(step, loss=1.0, key="loss"):
    return {"step": step, key: loss, "mfu": None}


class Backend:
    """The content of a service, which survives the process."""

    def __init__(self):
        self.runs, self.ended, self.down, self.extras = {}, [], False, []
        self.called = threading.Condition()

    def has(self, id="r1"):
        return [position(one) for one in self.runs.get(id, [])]


class Fake(Tracker):
    """Tells what it has, as MLflow does; `tells=False`: cannot tell; `forgets`: as TensorBoard does."""

    def __init__(self, backend, tells=True, forgets=False):
        self.backend, self.tells, self.forgets = backend, tells, forgets

    def begin(self, run, since):
        if self.backend.down:
            raise ConnectionError("refused by https://me:secret@host")
        lines = self.mine = self.backend.runs.setdefault(run.id, [])
        if self.forgets:
            lines[:] = [one for one in lines if position(one) <= since]
            return since
        return max(map(position, lines), default=NOTHING) if self.tells else None

    def log(self, lines):
        if self.backend.down:
            raise ConnectionError("refused")
        with self.backend.called:
            self.mine += lines
            self.backend.called.notify_all()

    def text(self, step, name, text):
        self.backend.extras.append((step, name, text))

    def histogram(self, step, name, counts, edges):
        raise ValueError("it takes no histograms")

    def finish(self, status):
        self.backend.ended.append(status)


class Attempt:
    """A run as its trackers see it: lines in the file, and news of them."""

    def __init__(self, workdir, *trackers):
        self.file = workdir / "metrics.jsonl"
        about = About("r1", "name", "project", workdir, {"train": {"steps": 9}}, {"run": "r1"})
        self.tracking = Tracking(about, trackers)
        self.tracking.start()

    def write(self, *lines):
        with open(self.file, "a") as file:
            file.writelines(json.dumps(one) + "\n" for one in lines)
        self.tracking.write(lines[-1])
        return self

    def end(self, status="finished"):
        self.tracking.finish(status)


def rolled_back(workdir, step):
    """Do what MetricsWriter does when a run resumes from this step."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [one for one in lines if json.loads(one)["step"] <= step]
    (workdir / "metrics.jsonl").write_text("".join(kept))
    with open(workdir / "metrics.rolled_back.jsonl", "a") as file:
        file.writelines(lines[len(kept):])


STEPS = [line(1), line(2), line(2, 1.1, "eval_loss"), line(3), line(4), line(4, 1.2, "eval_loss"), line(5)]
ALL = [position(one) for one in STEPS]
KINDS = [{}, {"tells": False}, {"forgets": True}]


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_once_over_a_crash(tmp_path, kind):
    """The run resumes from step 2; later lines were sent, and come again."""
    backend = Backend()
    Attempt(tmp_path, Fake(backend, **kind)).write(*STEPS[:5]).end("failed")
    rolled_back(tmp_path, 2)
    Attempt(tmp_path, Fake(backend, **kind)).write(*STEPS[3:]).end()
    assert backend.has() == ALL and backend.runs.keys() == {"r1"} and backend.ended == ["failed", "finished"]
    assert all(None not in one.values() for one in backend.runs["r1"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lost", [1, 3])
def test_lines_that_a_crash_kept_from_the_service(tmp_path, kind, lost):
    """Their position was not noted either."""
    backend = Backend()
    Attempt(tmp_path, Fake(backend, **kind)).write(*STEPS[:5]).end("failed")
    del backend.runs["r1"][-lost:]
    place = tmp_path / "trackers" / "Fake.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"sent": position(STEPS[4 - lost])}))
    Attempt(tmp_path, Fake(backend, **kind)).write(*STEPS[5:]).end()
    assert backend.has() == ALL


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollback_with_other_batches(tmp_path, kind, capsys):
    """The numbers differ: what cannot forget begins another run, which has all lines and none of the old ones."""
    backend = Backend()
    Attempt(tmp_path, Fake(backend, **kind)).write(*STEPS[:5]).end("rolled_back")
    rolled_back(tmp_path, 2)
    Attempt(tmp_path, Fake(backend, **kind)).write(line(3, 0.5), line(4, 0.5), line(5)).end()
    if kind.get("forgets"):
        id = "r1"
    else:
        id = "r1-2"
        assert backend.ended == ["rolled_back", "superseded", "finished"]
        assert "begins a new run there, name (2)" in capsys.readouterr().err
    assert backend.has(id) == [position(one) for one in (*STEPS[:5], line(5))]
    assert [one["loss"] for one in backend.runs[id] if "loss" in one] == [1.0, 1.0, 0.5, 0.5, 1.0]
    rolled_back(tmp_path, 4)  # and goes on with that
    Attempt(tmp_path, Fake(backend, **kind)).write(line(5), line(6)).end()
    assert backend.has(id)[-3:] == [(4, False), (5, False), (6, False)] and len(backend.runs) == (
        1 if kind.get("forgets") else 2)


def test_another_mesh_gives_other_last_digits(tmp_path):
    backend = Backend()
    Attempt(tmp_path, Fake(backend)).write(*STEPS[:5]).end("stopped")
    rolled_back(tmp_path, 2)
    Attempt(tmp_path, Fake(backend)).write(line(3, 1.00001), line(4), line(5)).end()
    assert backend.runs.keys() == {"r1"} and len(backend.has()) == 6


def test_down_costs_one_warning_and_no_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracking, "_LONGEST_S", 0.01)  # between two tries
    backend, well = Backend(), Backend()
    backend.down = True
    attempt = Attempt(tmp_path, Fake(backend), Fake(well))
    for one in STEPS[:4]:
        attempt.write(one)
    with well.called:
        assert well.called.wait_for(lambda: well.has() == ALL[:4], 60)  # the other one is not kept waiting
    while not [event for event in events.events(tmp_path) if event["kind"] == "tracker_down"]:
        pass
    backend.down = False
    attempt.write(*STEPS[4:]).end()
    assert backend.has() == ALL
    err = capsys.readouterr().err
    assert err.count("Fake is down (ConnectionError: refused by https://***@host)") == 1 and "secret" not in err
    assert err.count("Fake is reachable again and has all metrics") == 1
    assert "secret" not in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize("arrives", [True, False])
def test_a_call_that_fails(tmp_path, monkeypatch, arrives):
    """Whether the service has the lines it says when it is asked again."""
    monkeypatch.setattr(tracking, "_LONGEST_S", 0.0)  # between two tries

    class Loses(Fake):
        lost = False

        def log(self, lines):
            if self.lost or arrives:
                super().log(lines)
            if not self.lost:
                self.lost = True
                raise TimeoutError("no answer")

    backend = Backend()
    Attempt(tmp_path, Loses(backend)).write(*STEPS).end()
    assert backend.has() == ALL


def test_lines_that_were_taken_back_before_they_were_sent(tmp_path):
    """They count for nothing, now and later."""
    backend = Backend()
    Attempt(tmp_path, Fake(backend)).write(*STEPS[:4]).end("failed")
    backend.down = True
    Attempt(tmp_path, Fake(backend)).write(line(4, 1.0)).end("failed")
    rolled_back(tmp_path, 2)
    backend.down = False
    Attempt(tmp_path, Fake(backend)).write(line(3), line(4, 0.5)).end("failed")
    Attempt(tmp_path, Fake(backend)).write(line(5)).end()
    assert backend.runs.keys() == {"r1"} and [one.get("loss") for one in backend.runs["r1"]] == [1, 1, None, 1, 0.5, 1]


def test_several_rollbacks_while_it_is_down(tmp_path):
    """Only lines that were sent count, not those in between."""
    backend = Backend()
    Attempt(tmp_path, Fake(backend)).write(*STEPS[:4]).end("rolled_back")
    backend.down = True
    for _ in range(2):
        rolled_back(tmp_path, 2)
        Attempt(tmp_path, Fake(backend)).write(line(3, 0.5)).end("rolled_back")
    backend.down = False
    Attempt(tmp_path, Fake(backend)).write(line(4)).end()
    assert [one.get("loss") for one in backend.runs["r1-2"]] == [1, 1, None, 0.5, 1]


def test_down_at_the_end(tmp_path, capsys):
    """Then the same command sends the rest, even where there is nothing to do."""
    backend = Backend()
    backend.down = True
    Attempt(tmp_path, Fake(backend)).write(*STEPS).end()
    assert "Fake has the metrics of this run only up to step 0 (ConnectionError" in capsys.readouterr().err
    backend.down = False
    Attempt(tmp_path, Fake(backend)).end()
    assert backend.has() == ALL


def test_a_tracker_that_hangs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracking, "_HUNG_S", 0.0)
    monkeypatch.setattr(tracking, "_LAST_PATIENCE_S", 0.0)
    free, hangs = threading.Event(), threading.Event()

    class Hangs(Tracker):
        def log(self, lines):
            hangs.set()
            free.wait()

    monkeypatch.setattr(tracking, "_SHORTEST_S", 0.0)
    attempt = Attempt(tmp_path, Hangs()).write(STEPS[0])
    assert hangs.wait(60)
    attempt.write(STEPS[1])
    attempt.end()
    free.set()
    err = capsys.readouterr().err
    assert err.count("Hangs is down (it has not answered for 0 s)") == 1
    assert "Hangs has the metrics of this run only up to step 0" in err


def test_one_that_hung_in_an_attempt_that_was_rolled_back_gets_nothing_more_there(tmp_path, monkeypatch):
    """The next attempt sends the lines, and its notes are those that stay."""
    monkeypatch.setitem(tracking._PATIENCE_S, "rolled_back", 0.0)
    free, hangs, backend = threading.Event(), threading.Event(), Backend()

    class Hangs(Fake):
        def log(self, lines):
            hangs.set()
            free.wait()

    Hangs.__name__ = "Fake"
    first = Attempt(tmp_path, Hangs(backend)).write(STEPS[0])
    assert hangs.wait(60)
    first.end("rolled_back")
    Attempt(tmp_path, Fake(backend)).write(*STEPS[1:]).end()
    free.set()
    first.tracking._followers[0]._thread.join(60)
    assert not first.tracking._followers[0]._thread.is_alive()
    assert backend.has() == ALL and backend.ended == ["finished"]
    assert tuple(json.loads((tmp_path / "trackers" / "Fake.json").read_text())["sent"]) == ALL[-1]


def test_two_of_one_class_keep_their_notes_apart(tmp_path):
    """One was down at the end of a run; it gets what it lacks, and the other one nothing twice."""
    one, two = Backend(), Backend()
    two.down = True
    Attempt(tmp_path, Fake(one, tells=False), Fake(two, tells=False)).write(*STEPS[:4]).end("stopped")
    two.down = False
    Attempt(tmp_path, Fake(one, tells=False), Fake(two, tells=False)).write(*STEPS[4:]).end()
    assert one.has() == two.has() == ALL


def test_an_end_that_comes_just_before_a_look_is_seen(tmp_path, monkeypatch):
    """Whenever the end comes, the thread learns of it: here while it forgets the news so far."""
    backend = Backend()
    attempt = Attempt.__new__(Attempt)
    attempt.tracking = Tracking(About("r1", "name", "project", tmp_path, {}, {}), [Fake(backend)])
    follower, = attempt.tracking._followers
    follower._news.clear = lambda forget=follower._news.clear: (follower.end("finished"), forget())
    attempt.tracking.start()
    follower._thread.join(10)
    assert backend.ended == ["finished"]


def test_what_a_tracker_refuses_does_not_keep_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_LONGEST_S", 0.0)  # between two tries
    backend = Backend()
    attempt = Attempt(tmp_path, Fake(backend))
    for name in ("weights/a", "weights/b"):
        attempt.tracking.add("histogram", 1, name, np.ones(2), np.arange(3.0))
    attempt.tracking.add("text", 2, "sample", "some text")
    attempt.write(*STEPS).end()
    assert backend.has() == ALL and (2, "sample", "some text") in backend.extras
    kinds = [event["kind"] for event in events.events(tmp_path)]
    assert kinds.count("tracker_refuses") == 1 and kinds[-1] == "tracker_back"


def test_texts_come_once_and_evaluations_as_a_table(tmp_path):
    backend = Backend()
    attempt = Attempt(tmp_path, Fake(backend)).write(*STEPS[:5])
    attempt.tracking.add("text", 4, "sample", "four")
    attempt.end("failed")
    rolled_back(tmp_path, 2)
    again = Attempt(tmp_path, Fake(backend)).write(*STEPS[3:])
    again.tracking.add("text", 4, "sample", "four")
    again.tracking.add("text", 5, "sample", "five")
    again.end()
    assert [one for one in backend.extras if one[1] == "sample"] == [(4, "sample", "four"), (5, "sample", "five")]
    assert backend.extras[-1] == (4, "evaluations", "| step | eval_loss | mfu |\n| --- | --- | --- |\n"
                                  "| 2 | 1.1 | None |\n| 4 | 1.2 | None |")


def test_the_machine_is_looked_at_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(system_metrics, "read", lambda folder: {"host_cpu_percent": 50.0})
    backend = Backend()
    Attempt(tmp_path, Fake(backend)).write(*STEPS).end()
    assert [one["system/host_cpu_percent"] for one in backend.runs["r1"] if "system/host_cpu_percent" in one] == [50.0]
