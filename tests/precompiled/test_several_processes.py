"""Two processes of two devices start with what one process compiled for four."""

import json

import pytest

from jaxtrain.config.load import load_config
from jaxtrain.precompiled import compiling
from tests.precompiled.conftest import TINY
from tests.tiny import ROOT, devices, tiny_flags
from tests.trainer.test_multiprocess import ended, two_of

# Training that prints the programs that it compiles.
COUNTED = """
import sys, jax

def note(event, seconds, **about):
    if event.endswith("backend_compile_duration"):
        print("compiled", about.get("fun_name"), file=sys.stderr)

jax.monitoring.register_event_duration_secs_listener(note)
from jaxtrain.main import main
sys.exit(main())
"""
OURS = {f"compiled jit({name})" for name in ("_init", "step", "evaluation", "hashes", "_sums")}


@pytest.mark.slow
def test_they_compile_none_of_the_programs_and_have_the_same_bits(secret, tmp_path_factory, tmp_path):
    flags = tiny_flags(tmp_path_factory, [*TINY, "mesh.data=2", "mesh.fsdp=2"])
    overrides = dict(flag.removeprefix("--config.").split("=", 1) for flag in flags[1:])
    with devices(4):
        target, here = compiling.devices_of("cpu")
        compiling.compile_into(tmp_path / "compiled", load_config(f"{ROOT}/configs/gpt.py:tiny", overrides), target,
                               here)
    told = {}
    for name, more in (("ours", [f"--compiled={tmp_path / 'compiled'}"]), ("theirs", [])):
        with two_of(["-c", COUNTED, *flags, *more, f"--workdir={tmp_path / name}"], devices=2) as processes:
            said = ended(processes)
        assert [process.returncode for process in processes] == [0, 0], said
        lines = [set(text.splitlines()) & OURS for text in said]
        assert lines == ([set(), set()] if more else [OURS, OURS])
        told[name] = [{key: value for key, value in json.loads(line).items()
                       if key in ("step", "loss", "grad_norm", "eval_loss")}
                      for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        told[name, "state"] = json.loads((tmp_path / name / "checkpoints/4/good.json").read_text())["fingerprint"]
    assert told["ours"] == told["theirs"] and len(told["ours"]) == 6
    assert told["ours", "state"] == told["theirs", "state"]
