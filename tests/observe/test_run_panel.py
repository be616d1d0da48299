"""The drawing of a run, on terminals of several widths."""

import io
import math
import time

import numpy as np
import pytest
from rich.console import Console

from jaxtrain.observe.run_panel import Reading, columns_of, curve, figures_of, note, panel
from jaxtrain.pages.plain_text import age

LINE = {"step": 7, "loss": 2.5, "tokens_per_s": 12345.6, "mfu": 0.412, "step_time_s": 0.36, "data_wait_s": 0.0015}


def drawn(reading, width, **keys):
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=True)
    console.print(panel(reading, width, **keys))
    return console.file.getvalue().splitlines()


def test_a_curve_of_blocks():
    assert curve(np.array([0.0, 1, 2, 3, 4, 5, 6, 7])) == ["▁▂▃▄▅▆▇█"]
    assert curve(np.array([7.0, math.nan, 0, math.inf])) == ["█ ▁ "]
    assert curve(np.array([3.0, 3.0])) == ["▅▅"], "one value is in the middle"
    assert curve(np.array([0.0, 15.0]), rows=2) == [" █", "▁█"]
    assert curve(np.array([])) == [""]


def test_values_share_columns():
    np.testing.assert_array_equal(columns_of([1, 3, math.nan, 5, math.nan, math.inf], 3), [2, 5, math.nan])
    np.testing.assert_array_equal(columns_of([1, 2], 5), [1, 1, 2, 2])
    assert len(columns_of(range(1000), 77)) == 77 and len(columns_of([], 5)) == 0


@pytest.mark.parametrize("width", [30, 60, 100, 160])
def test_a_panel_is_as_wide_as_the_terminal(width):
    losses = [5.0 - n / 100 for n in range(400)]
    reading = Reading("runs/big", 7, 50_000, "running", "3:05:10 h", losses, figures_of(LINE) | {"loss": "not finite"},
                      ["12:00:00 hang " + "x" * 300])
    lines = drawn(reading, width, rows=3)
    assert {len(line) for line in lines} == {width}
    text = "\n".join(lines)
    assert "runs/big" in text and "loss" in text and "█" in text
    if width >= 60:
        assert "7/50,000  0.0%  3:05:10 h left" in text and "hang xxx" in text and "41.2%" in text
        assert lines[2].split()[-2].startswith("4.9") and lines[4].split()[-2].startswith("1.0")


def test_what_others_wrote_is_shown_as_it_is():
    """Neither as markup of rich nor as codes of the terminal."""
    event = {"kind": "[red]hang[/red]", "time": 0.0, "host": "h", "reason": "\x1b[2J\r\n[bold]\x07", "step": 1.23456}
    said = note(event)
    assert said.endswith("[red]hang[/red] reason=?[2J??[bold]? step=1.235") and "\x1b" not in said
    for odd in (math.nan, "x", None, 1e300):
        assert note({"kind": "x", "time": odd}) == "x"
    lines = drawn(Reading("[bold]a\x1b]0;x", notes=[said], figures={"[b]": "[/nothing]\x1b"}, losses=[math.nan]), 90)
    text = "\n".join(lines)
    assert "[bold]a?]0;x" in text and "[red]hang[/red]" in text and "[/nothing]?" in text and "\x1b" not in text


def test_figures_are_those_that_are_known():
    assert figures_of(LINE) == {"loss": "2.5000", "tokens/s": "12,346", "mfu": "41.2%", "step time": "0.36 s",
                                "data wait": "1.5 ms"}
    assert figures_of({"loss": None, "mfu": None, "tokens_per_s": "x"}) == {"loss": "not finite"}
    assert figures_of({}) == {}
    assert [age(seconds) for seconds in (-5, 61, 150, 7300, 300_000)] == ["0 s", "61 s", "2 min", "2 h", "3 d"]


def test_a_drawing_takes_milliseconds():
    """The run has ten thousand losses; the limit is for a machine that others use, too."""
    reading = Reading("runs/big", 7, 50_000, "running", "", np.linspace(5, 2, 10_000), figures_of(LINE))
    drawn(reading, 120)
    began = time.process_time()
    for _ in range(5):
        drawn(reading, 120)
    assert (time.process_time() - began) / 5 < 0.05
