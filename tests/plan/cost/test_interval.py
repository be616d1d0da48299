"""The interval of a predicted step is that of the published runs that docs/planner.md lists."""

import re
import statistics
from pathlib import Path

import pytest

from jaxtrain.config.load import load_config
from jaxtrain.plan.cost.interval import FACTORS, interval
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.report.table import explained, figures_of
from jaxtrain.plan.targets import TARGETS

ROOT = Path(__file__).parents[3]
CHIPS = {"cuda": r"(a100|h100|h200)$", "tpu": r"(v5p|v6e)$"}


def published(platform):
    """Return the seconds of each published run, as a part of those predicted."""
    found = []
    for line in (ROOT / "docs/planner.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 10 and cells[9] in ("calibrated", "held out", "later") and re.search(CHIPS[platform], cells[1]):
            found.append(1 + float(cells[8].rstrip("%")) / 100)
    return found


@pytest.mark.parametrize(("platform", "runs"), [("cuda", 23), ("tpu", 10)])
def test_four_of_five_published_runs_lie_within(platform, runs):
    found = published(platform)
    tenths = statistics.quantiles(found, n=10, method="inclusive")
    assert len(found) == runs
    assert FACTORS[platform] == (round(tenths[0], 2), round(tenths[-1], 2))


def test_what_no_run_tells_has_none():
    assert interval("cpu", 1.0, 0) is None and interval("cuda", 1.0, 8) is None
    assert interval("tpu", 2.0, 8) == (2 * FACTORS["tpu"][0], 2 * FACTORS["tpu"][1])


def test_a_plan_says_it():
    guess = estimate(load_config(str(ROOT / "configs/gpt.py") + ":tiny", {"mesh.data": 1}), TARGETS["h100"], 1)
    least, most = guess.seconds * FACTORS["cuda"][0], guess.seconds * FACTORS["cuda"][1]
    assert f"{least:.3g} to {most:.3g} s" in explained(guess)
    assert figures_of(guess, 1e9)["seconds_interval"] == (least, most)
