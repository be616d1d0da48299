"""The lines of metrics.jsonl, in order, exact, and none twice; and the loop held back no sooner than promised."""

import json
import math
import os
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain.observe.metrics as metrics_module
from jaxtrain.errors import UserError
from jaxtrain.observe import Constants, MetricsWriter
from jaxtrain.observe.events import events
from jaxtrain.observe.ledger import Ledger
from tests.odd_files import device, fifo, folder, in_time

CONSTANTS = Constants(tokens_per_step=10, flops_per_token=3.0, flops_per_token_full=4.0, peak=60.0)


def open_writer(path, **overrides):
    return MetricsWriter(path, **{"start_step": 0, "last_step": 100, "constants": CONSTANTS, **overrides})


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets; `writer.flush()` makes the thread read it."""
    class Clock:
        now = 0.0

    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: Clock.now)
    return Clock


def push_at(writer, clock, step, now, **host):
    clock.now = now
    writer.push(step, {"loss": jnp.float32(step)}, host)
    writer.flush()


def test_a_line(tmp_path, clock):
    with open_writer(tmp_path) as writer:
        push_at(writer, clock, 1, 5.0, data_wait_s=0.5)
        push_at(writer, clock, 2, 7.0, data_wait_s=0.25)
    first, second = lines(tmp_path)
    assert first == {"step": 1, "loss": 1.0, "tokens": 10, "step_time_s": None, "idle_s": None, "data_wait_s": 0.5,
                     "tokens_per_s": None, "mfu": None, "mfu_full": None}
    assert second == {"step": 2, "loss": 2.0, "tokens": 20, "step_time_s": 2.0, "idle_s": 0.0, "data_wait_s": 0.25,
                      "tokens_per_s": 5.0, "mfu": 5 * 3 / 60, "mfu_full": 5 * 4 / 60}


def test_examples_are_counted_where_there_are_no_tokens(tmp_path, clock):
    constants = Constants(10, unit="examples")
    with open_writer(tmp_path, constants=constants) as writer:
        push_at(writer, clock, 1, 5.0)
        push_at(writer, clock, 2, 7.0)
    second = lines(tmp_path)[1]
    assert (second["examples"], second["examples_per_s"]) == (20, 5.0) and not {"tokens", "tokens_per_s"} & {*second}


def test_averages_between_lines(tmp_path, clock):
    with open_writer(tmp_path, log_every=3, last_step=7) as writer:
        for step, now in enumerate((100, 101, 103, 104, 108, 109, 119), start=1):
            push_at(writer, clock, step, now, data_wait_s=float(step))
    assert [(r["step"], r["loss"], r["step_time_s"], r["data_wait_s"]) for r in lines(tmp_path)] == [
        (3, 3.0, 1.5, 2.0),  # the first step is in no average of times
        (6, 6.0, 2.0, 5.0), (7, 7.0, 10.0, 7.0)]


def test_idle_time_is_from_the_end_of_a_step_to_the_dispatch_of_the_next(tmp_path, clock):
    """There is none where the dispatch came while the step before still ran, or where there is no step before."""
    with open_writer(tmp_path) as writer:
        for step, (began, ended) in enumerate(((0.0, 1.0), (0.5, 3.0), (3.25, 5.0)), start=1):
            clock.now = ended
            writer.push(step, {"loss": 0.0}, {}, began)
            writer.flush()
    assert [line["idle_s"] for line in lines(tmp_path)] == [None, 0.0, 0.25]


def test_evaluations_are_in_order_and_not_in_the_step_time(tmp_path, clock):
    with open_writer(tmp_path) as writer:
        push_at(writer, clock, 1, 1.0)
        push_at(writer, clock, 2, 2.0)
        clock.now = 50.0
        writer.write_eval(2, {"eval_loss": jnp.float32(0.5), "eval_bits_per_byte": 0.75})
        writer.flush()
        push_at(writer, clock, 3, 51.0)
    assert lines(tmp_path)[2] == {"step": 2, "eval_loss": 0.5, "eval_bits_per_byte": 0.75}
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 2, 3]
    assert lines(tmp_path)[3]["step_time_s"] == 1.0


def test_an_evaluation_ends_when_the_loop_says_so_however_late_the_thread_is(tmp_path, clock):
    free = threading.Event()
    late = SimpleNamespace(write=lambda record: free.wait(60), close=lambda: None)
    with open_writer(tmp_path, sinks=[late]) as writer:
        writer.push(1, {"loss": 1.0})
        clock.now = 50.0
        writer.write_eval(1, {"eval_loss": 0.5})
        clock.now = 57.0
        free.set()
        writer.flush()
        push_at(writer, clock, 2, 60.0)
        writer.restart_clock()
        push_at(writer, clock, 3, 61.0)
    assert [line.get("step_time_s") for line in lines(tmp_path)] == [None, None, 10.0, 1.0]


@pytest.mark.parametrize("compiled, completed, seconds", [(9.0, 5.0, 1.0), (6.0, 7.0, 3.0)])
def test_what_is_compiled_after_the_first_step_is_not_in_the_step_time(tmp_path, clock, compiled, completed, seconds):
    """Whether compiling ends after the step or before it."""
    with open_writer(tmp_path) as writer:
        push_at(writer, clock, 1, completed)
        clock.now = compiled
        writer.restart_clock(during=True)
        push_at(writer, clock, 2, 10.0)
    assert lines(tmp_path)[1]["step_time_s"] == seconds


def test_no_mfu_without_a_peak(tmp_path):
    with open_writer(tmp_path, constants=Constants(tokens_per_step=1)) as writer:
        writer.push(1, {"loss": 0.0})
    assert "mfu" not in lines(tmp_path)[0] and "mfu_full" not in lines(tmp_path)[0]


def test_full_precision_every_dtype_and_not_finite(tmp_path):
    third = np.float32(1) / np.float32(3)
    scalars = {"loss": jnp.float32(third), "half": jnp.bfloat16(0.1), "skipped": jnp.int32(3), "flag": jnp.array(True),
               "nan": jnp.float32(math.nan), "inf": jnp.float32(math.inf), "ninf": jnp.float32(-math.inf)}
    mesh = jax.make_mesh((8,), ("data",))
    scalars["sharded"] = jax.device_put(jnp.float32(2), jax.NamedSharding(mesh, jax.P()))
    with open_writer(tmp_path) as writer:
        writer.push(1, scalars, {"host": math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    assert np.float32(record["loss"]) == third and record["half"] == float(jnp.bfloat16(0.1))
    assert (record["skipped"], record["flag"], record["sharded"]) == (3, 1, 2.0)
    assert record["host"] is record["nan"] is record["inf"] is record["ninf"] is None


def test_no_transfer_on_the_loops_thread(tmp_path):
    with jax.transfer_guard("disallow"), open_writer(tmp_path) as writer:
        for step in range(1, 4):
            writer.push(step, {"loss": jax.device_put(np.float32(step))})
    assert [r["loss"] for r in lines(tmp_path)] == [1.0, 2.0, 3.0]


class Gate:
    """A sink at which the thread waits until it is opened."""

    def __init__(self):
        self.open, self.records, self.closed = threading.Event(), [], False

    def write(self, record):
        self.open.wait(60)
        self.records.append(record)

    def close(self):
        self.closed = True


@pytest.mark.parametrize("process", [0, 1])
def test_back_pressure(tmp_path, monkeypatch, process):
    monkeypatch.setattr(jax, "process_index", lambda: process)
    gate, passed = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(jax, "block_until_ready", lambda _: gate.wait(60))  # a device that is not done
    writer = open_writer(tmp_path, max_lag=2)

    def loop():
        for step in range(1, 6):
            writer.push(step, {"loss": 0.0})
            passed.release()

    loop_thread = threading.Thread(target=loop, daemon=True)
    loop_thread.start()
    assert passed.acquire(timeout=60) and passed.acquire(timeout=60)
    assert not passed.acquire(timeout=0.3)  # the third waits for a completion
    gate.set()
    loop_thread.join(60)
    assert not loop_thread.is_alive()
    writer.close()
    assert (tmp_path / "metrics.jsonl").exists() == (process == 0)


def test_sinks_get_the_lines(tmp_path):
    sink = Gate()
    sink.open.set()
    with open_writer(tmp_path, sinks=[sink], log_every=2) as writer:
        for step in range(1, 5):
            writer.push(step, {"loss": 0.0})
        writer.write_eval(4, {"eval_loss": 1.0})
    assert sink.records == lines(tmp_path) and sink.closed
    assert [r["step"] for r in sink.records] == [2, 4, 4]


class Broken(Gate):
    def write(self, record):
        raise OSError("the disk is full")


def test_an_error_of_the_thread_reaches_the_loop(tmp_path):
    def loop(writer):
        for step in range(1, 100):  # more than max_lag: the dead thread must not hold the loop
            writer.push(step, {"loss": 0.0})

    with pytest.raises(OSError, match="the disk is full"), open_writer(tmp_path, sinks=[Broken()]) as writer:
        loop(writer)
    for call in (writer.flush, writer.close, lambda: writer.push(100, {})):
        with pytest.raises(OSError, match="the disk is full"):
            call()


def test_the_loops_own_error_is_the_one_seen(tmp_path):
    with pytest.raises(KeyError), open_writer(tmp_path, sinks=[Broken()]) as writer:
        writer.push(1, {"loss": 0.0})
        raise KeyError


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "lo', b'{"step": 4}'])
def test_resume_keeps_each_step_once(tmp_path, torn):
    with open_writer(tmp_path) as writer:
        for step in range(1, 6):
            writer.push(step, {"loss": float(step)})
            if step == 3:
                writer.write_eval(3, {"eval_loss": 1.0})
    file = tmp_path / "metrics.jsonl"
    kept = file.read_bytes().splitlines(keepends=True)[:4]
    gone = file.read_bytes().splitlines(keepends=True)[4:]
    file.write_bytes(file.read_bytes() + torn)
    with open_writer(tmp_path, start_step=3) as writer:
        assert file.read_bytes() == b"".join(kept)
        assert (tmp_path / "metrics.rolled_back.jsonl").read_bytes().startswith(b"".join(gone))
        writer.push(4, {"loss": 40.0})
    assert [(r["step"], r.get("loss")) for r in lines(tmp_path)] == [(1, 1), (2, 2), (3, 3), (3, None), (4, 40)]


@pytest.mark.parametrize("torn", [b'{"step": 2, "loss": 1', b'{"step": 2}', b"\0\0\0\n", b"7\n"])
def test_torn_last_line_goes_even_if_nothing_else_does(tmp_path, torn):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + torn)
    open_writer(tmp_path, start_step=5).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'


@pytest.mark.parametrize("damage", [b"\0" * 40 + b"\n", b"\0" * 9 + b'{"step": 2}\n', b"\xff\n", b'{"step": null}\n'],
                         ids=["NULs", "NULs and a line", "no text", "no number"])
def test_lines_behind_damaged_ones_stay(tmp_path, capsys, damage):
    """Lines that can still be read are kept after a power failure or on a bad disk."""
    text = b'{"step": 1}\n' + damage + b'{"step": 3}\n'
    (tmp_path / "metrics.jsonl").write_bytes(text + damage + b'{"step": 4}\n')
    open_writer(tmp_path, start_step=3).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == text
    assert (tmp_path / "metrics.rolled_back.jsonl").read_bytes() == damage + b'{"step": 4}\n'
    assert capsys.readouterr().err == (f"lines in the middle of {tmp_path}/metrics.jsonl are damaged (1 of them), as "
                                       "after a power failure; they are left as they are\n")
    assert [event["kind"] for event in events(tmp_path)] == ["metrics_damaged"]


def test_steps_with_damaged_digits_take_no_others_along(tmp_path):
    before = b'{"step": 1}\n{"step": 92}\n{"step": 3}\n'
    after = b'{"step": 4}\n{"step": 0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(before + after)
    open_writer(tmp_path, start_step=3).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "metrics.rolled_back.jsonl").read_bytes() == after


def test_lines_behind_a_long_hole_stay(tmp_path, capsys):
    text = b'{"step": 1}\n' + bytes(2**24 + 5) + b'{"step": 2}\n{"step": 3}\n'
    (tmp_path / "metrics.jsonl").write_bytes(text + b'{"step": 4}\n')
    open_writer(tmp_path, start_step=3).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == text
    assert "(1 of them)" in capsys.readouterr().err


def test_a_file_that_is_gone_is_told(tmp_path, capsys):
    open_writer(tmp_path).close()
    assert capsys.readouterr().err == ""
    (tmp_path / "metrics.jsonl").unlink()
    open_writer(tmp_path, start_step=7).close()
    assert capsys.readouterr().err == (f"{tmp_path}/metrics.jsonl is missing, and with it the lines of the first 7 "
                                       "steps; it begins again with those to come\n")
    assert [event["kind"] for event in events(tmp_path)] == ["metrics_missing"]


@pytest.mark.parametrize("make", [fifo, device, folder])
@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.rolled_back.jsonl"])
def test_what_is_no_file_is_refused_in_one_line(tmp_path, name, make):
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"--workdir: .*{name} cannot be written .*; move it away"):
        in_time(lambda: open_writer(tmp_path))


@pytest.mark.parametrize("line", ["[" * 100_000, "null", '{"step": "1"}', "\0" * 1000])
def test_lines_of_another_form_stay(tmp_path, line):
    text = f'{{"step": 1}}\n{line}\n{{"step": 2}}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    open_writer(tmp_path, start_step=5).close()
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_a_sparse_file_is_cut(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    os.truncate(tmp_path / "metrics.jsonl", 2**40)
    in_time(lambda: open_writer(tmp_path, start_step=5).close())
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_who_is_told_of_a_step_finds_it_in_the_ledger(tmp_path):
    ledger, told = Ledger(tmp_path, every=0), []
    with open_writer(tmp_path, ledger=ledger, completed=lambda step: told.append((step, ledger.reached[0]))) as writer:
        for step in (1, 2):
            writer.push(step, {})
    assert told == [(1, 1), (2, 2)]


def test_sinks_of_other_processes_get_lines_too(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    sink = SimpleNamespace(lines=[])
    sink.write, sink.close = sink.lines.append, lambda: None
    with open_writer(tmp_path, sinks=[sink]) as writer:
        writer.push(1, {"loss": 2.0}, {"data_wait_s": 0.5})
    assert [(line["step"], line["loss"], line["data_wait_s"]) for line in sink.lines] == [(1, 2.0, 0.5)]
    assert not (tmp_path / "metrics.jsonl").exists()
