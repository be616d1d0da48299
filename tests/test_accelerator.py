"""The half hour on a lent card, rehearsed; a block that hangs or crashes costs only itself."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.bench import records
from tools.device import accelerator, accelerator_blocks, accelerator_plans, accelerator_truth

ROOT = Path(__file__).parents[1]
# The same program with blocks that misbehave; each is run by this script again, as a child.
BAD = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tools.device import accelerator
from tools.device.accelerator_blocks import BLOCKS, Block

def hang(session):
    session.figures(str(os.getpid()), answer=1)
    time.sleep(1000)

def crash(session):
    raise RuntimeError("on purpose")

def fine(session):
    session.figures("fine", answer=42)

BLOCKS.clear()
BLOCKS.update({{f.__name__: Block(f.__name__, f, 15 if f is hang else 300) for f in (hang, crash, fine)}})
sys.exit(accelerator.main(None))
"""


def run(script, *words, env=None):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # one device, as there
    return subprocess.run([sys.executable, script, *words], cwd=ROOT, capture_output=True, text=True, timeout=900,
                          env={**environment, "JAX_PLATFORMS": "cpu", **(env or {})})


def statuses(results):
    return {line["name"]: line["status"] for line in records.read(results) if line["what"] == "block"}


@pytest.mark.slow
def test_a_block_that_hangs_or_crashes_costs_only_itself(tmp_path):
    script, results = tmp_path / "bad.py", tmp_path / "results.jsonl"
    script.write_text(BAD)
    done = run(script, f"--results={results}")
    assert done.returncode == 1
    told = statuses(results)
    assert told["hang"] == "took longer than 15 s" and told["fine"] == "done"
    assert told["crash"] == "RuntimeError: on purpose" and "on purpose" in done.stderr
    answers = {line["name"]: line["figures"]["answer"] for line in records.read(results) if line["what"] == "figures"}
    assert answers["fine"] == 42
    assert "| fine | done |" in done.stdout

    # A clean checkout at this commit: what is done is not done again, and what failed is tried again.
    lines = [{**line, "commit": "c" * 40} for line in records.read(results)]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    here = {**lines[0], "commit": "c" * 40}
    assert accelerator.done(results, "fine", here) and not accelerator.done(results, "crash", here)
    assert not accelerator.done(results, "fine", {**here, "commit": "d" * 40})
    assert not accelerator.done(results, "fine", {**here, "commit": "c" * 40 + "-dirty"})
    assert not accelerator.done(results, "fine", {**here, "device": "NVIDIA H200"})


@pytest.mark.slow
def test_whoever_ends_it_ends_its_blocks(tmp_path):
    script, results = tmp_path / "bad.py", tmp_path / "results.jsonl"
    script.write_text(BAD.replace("15 if f is hang", "900 if f is hang"))
    process = subprocess.Popen([sys.executable, script, f"--results={results}", "--blocks=hang"], cwd=ROOT,
                               env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=subprocess.DEVNULL)
    try:
        while not results.exists() or not results.read_text().endswith("\n"):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
    child = int(records.read(results)[0]["name"])
    assert not Path(f"/proc/{child}").exists() or Path(f"/proc/{child}/stat").read_text().split(") ")[1][0] == "Z"


@pytest.mark.exhaustive
def test_rehearsal(tmp_path):
    results = tmp_path / "results.jsonl"
    done = run(ROOT / "tools/device/accelerator.py", "--rehearse", f"--results={results}")
    assert done.returncode == 0, done.stderr[-5000:]
    assert statuses(results) == {name: "done" for name in accelerator_blocks.BLOCKS}
    lines = records.read(results)
    assert {line["label"] for line in lines if line["what"] == "figures"} == {
        "alive", "truth", "kernels", "tokamax", "parts", "calibrate"}
    runs = [line for line in lines if line["what"] in ("run", "compare")]
    assert {line["label"] for line in runs} >= {"124M", "1B", "8B", "experts", "fp8", "beside", "causal", "remat",
                                               "memory", "flags"}
    assert all("failed" not in line for line in runs)
    assert sum("profile" in line for line in runs) >= 3
    assert all(line["rehearsal"] and (line["what"] != "run" or line["name"].startswith("toy ")) for line in lines)
    real = {key: value for key, value in lines[-1].items() if key != "rehearsal"} | {"commit": "c" * 40}
    results.write_text("".join(json.dumps({**line, "commit": "c" * 40}) + "\n" for line in lines))
    assert not accelerator.done(results, "alive", real), "a rehearsal is not a result"


def test_blocks_are_chosen_in_their_order_and_misspelt_ones_refused(capsys):
    assert [block.name for block in accelerator.chosen("truth, alive")] == ["alive", "truth"]
    assert accelerator.main(["--blocks=truht"]) == 2
    assert "did you mean 'truth'?" in capsys.readouterr().err


def test_the_first_ten_minutes_are_for_whole_steps_and_for_what_others_reach():
    """Whole steps with our attention, 8B in 8 bits, PyTorch beside, tokamax beside: a lent card may be gone then."""
    first = accelerator.chosen("")[:6]
    assert [block.name for block in first] == ["124M", "1B", "8B", "fp8", "beside", "tokamax"]
    assert sum(block.seconds for block in first) <= 600 and all(block.timed for block in first)
    asked = []

    class Asked(accelerator_blocks.Session):
        def bench(self, name, size, keys, *flags, **how):
            asked.append((self.block, size, keys.get("train.precision"), *flags))
            return {}

    for block in first[:5]:
        session = Asked(Path("unused.jsonl"), block.name, False, {"device": "NVIDIA H200"})
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(accelerator_plans, "best", lambda *_: [{}])
            block.run(session)
    assert asked == [("124M", "124M", None, "--profile"), ("1B", "1B", None, "--profile"),
                     ("8B", "8B", None, "--profile"), ("fp8", "8B", "fp8", "--profile"),
                     ("beside", "124M", None, "--compare=torch.compile"),
                     ("beside", "1B", None, "--compare=torch.compile")]


def test_what_was_planned_before_there_is_a_card_is_what_is_measured(tmp_path):
    session = accelerator_blocks.Session(tmp_path / "results.jsonl", "8B", False, {"device": "NVIDIA H200"})
    (tmp_path / "results.8B.h200.json").write_text('[{"data.global_batch_size": 3}]')
    assert accelerator_plans.best(session, "8B") == [{"data.global_batch_size": 3}]


@pytest.mark.slow
def test_the_figures_of_a_cpu_are_those_that_are_kept_and_a_wrong_one_is_seen():
    wanted = accelerator_truth.wanted()
    assert set(wanted) == set(accelerator_truth.FAMILIES)
    got = accelerator_truth.computed("llama_window")
    errors = accelerator_truth.errors(got, wanted["llama_window"])
    assert max(errors["loss"], errors["grad_norm"], errors["gradient"]) < 1e-5
    assert wanted["llama_window"]["losses"][-1] < 0.9 * wanted["llama_window"]["losses"][0], "it learns"
    name = "blocks/layer/attention/q/kernel"
    got["gradients"][name]["elements"] = list(-np.array(got["gradients"][name]["elements"]))
    errors = accelerator_truth.errors(got, wanted["llama_window"])
    assert errors["of"] == name and errors["gradient"] > 1
    got["losses"][5] *= 1.001
    assert accelerator_truth.errors(got, wanted["llama_window"])["loss"] == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize(("answers", "tried", "failures"), [
    (["out of memory: much"] * 2 + [""], 3, 0), (["ptxas failed"], 1, 1), ([""], 1, 0)])
def test_the_next_best_is_tried_where_memory_runs_out(answers, tried, failures, tmp_path, monkeypatch):
    def measured(argv, *_):
        calls.append(argv)
        failed = answers[len(calls) - 1]
        return {**about, "what": "run", **({"failed": failed} if failed else {
            "step_ms": {"median": 1.0}, "mfu": 0.5, "tokens_per_s": 1.0})}

    calls, about = [], {"commit": "c" * 40, "device": "NVIDIA H100 80GB HBM3", "devices": 1}
    monkeypatch.setattr(accelerator_blocks.sweep, "measured", measured)
    session = accelerator_blocks.Session(tmp_path / "results.jsonl", "speed", False, about)
    kept = tmp_path / "results.1B.h100.json"
    kept.write_text(json.dumps([{"data.global_batch_size": rows} for rows in (16, 8, 4)]))
    accelerator_blocks.at_best(session, "1B", steps=5)
    assert len(calls) == tried and len(session.failures) == failures
    if tried == 3:  # and what was measured is not measured again, but on another device it is
        assert session.kept(("run",), "1B global_batch_size=4") and not session.kept(("run",), "1B global_batch_size=8")
        session.about["device"] = "NVIDIA H200"
        assert not session.kept(("run",), "1B global_batch_size=4")


def test_settings_become_variables():
    assert accelerator_blocks.with_settings(["--xla_a=1", "JAX_B=O1", "--xla_c="]) == {
        "JAX_B": "O1", "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_a=1 --xla_c=".strip()}
