"""The measurements of this machine as a file for the planner, and the figures that it changes and leaves."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.commands.calibrate import main as calibrate
from jaxtrain.commands.plan import main
from jaxtrain.plan import targets
from jaxtrain.plan.calibrate import device_rates as rates
from tests.tiny import virtual_devices

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_quick_on_two_virtual_devices(tmp_path, capsys):
    file = tmp_path / "mine.json"
    done = subprocess.run(
        [sys.executable, "-m", "jaxtrain", "calibrate", "--quick", f"--output={file}"], capture_output=True,
        text=True, timeout=500, env=os.environ | {"XLA_FLAGS": virtual_devices(2)})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in file.with_suffix(".rows.jsonl").read_text().splitlines()]
    assert {row["what"] for row in rows} == {"llm", "square", "attention", "memory", *rates.KINDS}
    assert {row["dtype"] for row in rows if row["what"] == "llm"} == {"float32", "bfloat16"}
    assert all(row["seconds"] > 0 and f"{' x '.join(map(str, row['shape']))}" in done.stdout for row in rows)

    def reached(what, dtype="float32"):
        return statistics.median(row["rate"] for row in rows if (row["what"], row["dtype"]) == (what, dtype))

    target, devices = targets.parse("cpux2", file)
    assert devices == 2 and f"--target=cpux{devices}" in done.stdout
    for dtype in ("float32", "bfloat16"):
        assert target.peak[dtype] * target.efficiency["matmul"] == pytest.approx(reached("llm", dtype))
    assert target.bandwidth * target.efficiency["memory"] == pytest.approx(reached("memory"))
    assert target.peak["float32"] * target.efficiency["attention"] == pytest.approx(reached("attention"))
    assert target.links != targets.TARGETS["cpu"].links and target.links[0].name == "memory"

    assert main(["--config=configs/llama3_8b.py:tiny", "--target=cpux2", f"--targets={file}", "--explain",
                 "--config.mesh.fsdp=2"]) == 0
    assert "time of a step" in capsys.readouterr().out


def made(devices=8, link=(2e11, 3e-6), **reached):
    """Rows as if measured on so many H100s at these rates."""
    rows = rates.planned(rates.FULL, "bfloat16", devices)
    for row in rows:
        row.seconds = row.work / reached.get(f"{row.what}_{row.dtype}", 1e12)
        if row.what in rates.KINDS:
            row.seconds = row.work / link[0] + row.steps * link[1]
    return rows


def test_data_sheets_stay_and_products_are_what_was_measured(tmp_path):
    sheet = targets.TARGETS["h100"]
    rows = made(llm_bfloat16=6e14, llm_float32=5e13, attention_bfloat16=4e14, memory_float32=3e12)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"h100": rates.calibrated(sheet, "bfloat16", rows)}))
    mine, _ = targets.parse("h100x8", file)
    assert (mine.peak["bfloat16"], mine.bandwidth) == (sheet.peak["bfloat16"], sheet.bandwidth)
    assert mine.efficiency["matmul"] == pytest.approx(6e14 / sheet.peak["bfloat16"])
    assert mine.peak["float32"] * mine.efficiency["matmul"] == pytest.approx(5e13)
    assert mine.efficiency["attention"] == pytest.approx(4e14 / sheet.peak["bfloat16"])
    assert mine.efficiency["memory"] == pytest.approx(3e12 / sheet.bandwidth)
    assert mine.links[0].bandwidth * mine.efficiency["links"] == pytest.approx(2e11)
    assert mine.links[0].latency == pytest.approx(3e-6)
    assert (mine.links[0].devices, mine.links[1:]) == (sheet.links[0].devices, sheet.links[1:])
    for left in ("links", "overlap"):
        assert mine.efficiency[left] == sheet.efficiency[left]
    assert (mine.memory, mine.price, mine.chip) == (sheet.memory, sheet.price, sheet.chip)


def test_one_device_has_no_links_and_what_was_left_out_stays():
    rows = made(devices=1)
    assert not {row.what for row in rows} & set(rates.KINDS)
    for row in rows:
        if row.what != "llm" or row.dtype != "bfloat16":
            row.seconds = 0.0  # time was up
    keys = rates.calibrated(targets.TARGETS["h100"], "bfloat16", rows)
    assert set(keys["efficiency"]) == {"matmul"} and set(keys["peak"]) == {"bfloat16"}
    assert "links" not in keys and "bandwidth" not in keys


def test_a_latency_below_nothing_is_noise():
    rows = [row for row in made() if row.what == "all-reduce"]
    for row in rows:
        row.seconds = row.work**1.2 / 1e11
    bandwidth, latency = rates.fitted(rows)
    assert bandwidth > 0 and latency > 0


def test_dry_run_and_mistakes(tmp_path, capsys):
    assert calibrate(["--dry-run"]) == 0
    assert "all-reduce" in capsys.readouterr().out
    for words in ([], [f"--output={tmp_path}"], [f"--output={tmp_path / 'no' / 'mine.json'}"]):
        assert calibrate(["--quick", *words]) == 2
        assert "--output: " in capsys.readouterr().err
