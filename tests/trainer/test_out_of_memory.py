"""The report when a device's memory runs out, from real texts of the error and a real program."""

import dataclasses
import re
import traceback

import jax
import numpy as np
import pytest

from jaxtrain.observe import device_memory, events
from jaxtrain.observe.metrics import Constants, MetricsWriter
from jaxtrain.plan import targets
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.report import memory_report
from jaxtrain.run import compiled_step
from jaxtrain.trainer import out_of_memory

# As an H200 and a TPU say it.
GPU = ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 52.26GiB with allocator GPU_0_bfc on device 0. "
       "[executable_name='jit_step'] [tf-allocator-allocation-error='']")
TPU = ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 31.84G of 15.75G hbm. Exceeded hbm capacity by "
       "16.09G.\n\nTotal hbm usage >= 32.09G:\n    reserved        258.00M")


def explained(run, workdir, error):
    """The end of a traceback, as a run prints it."""
    with pytest.raises(type(error)) as caught, out_of_memory.explained(run, workdir):
        raise error
    return "".join(traceback.format_exception(caught.value))


def test_an_error_about_memory_is_explained(two, tmp_path, monkeypatch):
    assert compiled_step(two)  # there is a program to explain
    monkeypatch.setattr(memory_report, "estimate", lambda *_: 1 / 0)  # which takes a while, and may fail
    monkeypatch.setattr(out_of_memory, "device_memory", lambda: {"memory_bytes": 70 * 10**9, "memory_peak_bytes": 2,
                                                                 "memory_limit_bytes": 80 * 10**9})
    said = explained(two, tmp_path, jax.errors.JaxRuntimeError(GPU))
    assert f"The memory of a device ran out: {GPU}" in said
    assert "of a device: the limit is 80.0 GB, in use 70.0 GB, at most so far" in said
    assert "the step, by the compiler:" in said and "kernels/loss_head/cross_entropy.py:" in said
    assert (tmp_path / "memory.prof").read_bytes() and "memory.prof (for pprof)" in said
    event, = events.events(tmp_path)
    assert (event["kind"], event["memory_bytes"]) == ("out_of_memory", 70 * 10**9) and event["why"] == GPU


def test_other_errors_are_left_alone(two, tmp_path):
    assert "memory of a device" not in explained(two, tmp_path, ValueError("another"))
    assert not list(tmp_path.iterdir())


def test_of_a_compilers_error_the_first_line_is_told_again(two, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_report, "report", lambda run: "  the report")
    said = explained(two, tmp_path, jax.errors.JaxRuntimeError(TPU))
    assert f"The memory of a device ran out: {TPU.splitlines()[0]}\n  the report\n" in said


def test_trouble_with_the_explanation_does_not_hide_the_error(two, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_report, "report", lambda run: 1 / 0)
    said = explained(two, tmp_path / "none", jax.errors.JaxRuntimeError(GPU))
    assert "RESOURCE_EXHAUSTED" in said and "nothing more is known (ZeroDivisionError: division by zero)" in said


def test_the_largest_arrays_are_those_of_the_program(two):
    """Logits and attention's scores are known by their shapes; all are within what the compiler allocates."""
    compiled = compiled_step(two)
    rows = memory_report.largest(compiled.as_text(), count=1000)
    sizes = [size for size, *_ in rows]
    assert sizes == sorted(sizes, reverse=True) and 0 < sizes[0] <= compiled.memory_analysis().temp_size_in_bytes
    of = {one.result: (size, place) for size, _, one, place in rows}
    c = two.config
    scores = [c.data.global_batch_size // 2, c.model.num_heads, c.data.seq_len, c.data.seq_len]
    size, place = of[f"f32[{','.join(map(str, scores))}]"]
    assert size == 4 * np.prod(scores) and place.startswith("kernels/attention/xla_attention.py:")
    tokens = c.data.global_batch_size // 2 * c.data.seq_len
    logits = [size for size, _, one, place in rows
              if place.startswith("kernels/loss_head/cross_entropy.py:")
              and one.arrays[0][1] == (tokens, c.model.vocab_size)]
    assert logits and set(logits) == {4.0 * tokens * c.model.vocab_size}


def test_updates_in_place_and_memory_of_hosts_do_not_count():
    text = """HloModule jit_step

%body (p: (f32[8,4], s32[])) -> (f32[8,4], s32[]) {
  %p = (f32[8,4], s32[]) parameter(0)
  %stack = f32[8,4]{1,0} get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %row = f32[1,4]{1,0} broadcast(%n)
  %dynamic-update-slice.1 = f32[8,4]{1,0} dynamic-update-slice(%stack, %row, %n, %n)
  ROOT %tuple = (f32[8,4], s32[]) tuple(%dynamic-update-slice.1, %n)
}

ENTRY %main (x: f32[8,4], n: s32[]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %n0 = s32[] parameter(1)
  %zeros = f32[8,4]{1,0} broadcast(%n0)
  %init = (f32[8,4], s32[]) tuple(%zeros, %n0)
  %loop = (f32[8,4], s32[]) while(%init), condition=%cond, body=%body
  %away = f32[9,4]{1,0:S(5)} broadcast(%n0)
  ROOT %out = f32[8,4]{1,0} get-tuple-element(%loop), index=0
}
"""
    assert [(size, one.name) for size, _, one, _ in memory_report.largest(text)] == [(128, "zeros"), (16, "row")]


def test_lines_of_metrics_have_the_memory_where_devices_tell(tmp_path, monkeypatch):
    class Device:
        def __init__(self, used):
            self.used = used

        def memory_stats(self):
            return self.used and {"bytes_in_use": self.used, "peak_bytes_in_use": 2 * self.used}

    assert device_memory.device_memory() == {}  # CPUs do not tell
    monkeypatch.setattr(device_memory.jax, "local_devices", lambda: [Device(5), Device(7), Device(None)])
    with MetricsWriter(tmp_path, start_step=0, last_step=1, constants=Constants(1)) as writer:
        writer.push(1, {"loss": np.float32(1)})
    assert (writer.last["memory_bytes"], writer.last["memory_peak_bytes"]) == (7, 14)
    assert "memory_limit_bytes" not in writer.last


@pytest.mark.exhaustive
def test_the_advice_takes_less_than_the_run_does(two):
    """The report says so where nothing takes less."""
    *_, planned, advice = memory_report.report(two).splitlines()
    now = float(re.match(r"  the step, by the planner: ([\d.e-]+) GB: .*parameters", planned)[1])
    keys, then = re.match(r"  use (\w+\.\w+=\S+(?: \w+\.\w+=\S+)*), predicted to take ([\d.e-]+) GB", advice).groups()
    assert float(then) <= memory_report.LESS * now and keys
    whole = estimate(two.config, targets.here(jax.devices()[:2]), 2)
    nothing = dataclasses.replace(whole, target=dataclasses.replace(whole.target, memory=1000.0, usable=1.0))
    assert memory_report.advice(nothing) == "use more devices, a smaller model or shorter rows"
