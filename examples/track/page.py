"""Render docs/track.md from the recorded lines of the track.

    python -m examples.track.page
"""

from statistics import mean, stdev

from examples.recipes.page import figure, markdown_table, ran_on
from examples.recipes.run import ROOT
from examples.track.run import BUDGETS, SEEDS, SIGNIFICANT, TRACK, history, welch

HEAD = """# A track for small ideas

Which entry reaches the fewest bits per byte on held-out text with a fixed amount of arithmetic (about two minutes on
two cores)? An entry is one file of keys in `examples/track/entries`; `examples/track/README.md` has the rules, the
reasons for them and how to enter.

```text
python -m examples.track.run baseline --budget=sprint --seeds=5
python -m examples.track.run compare muon baseline --budget=sprint
```

The budget is the number of floating-point operations of matrix products in the traced step, the optimizer's included,
so that results of different machines stand in one table; CPU-seconds are beside it. A record needs {seeds} seeds and
p < {p} in Welch's one-sided t-test against the entry that holds it. This page is rendered from
`examples/track/history.jsonl` by `python -m examples.track.page`."""


def first_line(entry):
    """Return what an entry says of itself."""
    return (TRACK / f"entries/{entry}.py").read_text().split('"""')[1].strip().replace("\n", " ")


def standings(budget):
    """Return the section of a budget: the entries from the best, with their distance from the baseline."""
    found = history(budget)
    head = f"## `--budget={budget}`: {BUDGETS[budget]:.0e} operations"
    if not found:
        return [head, "**Not run yet.**"]
    values = {entry: [line["bits_per_byte"] for line in lines.values()] for entry, lines in found.items()}
    rows = []
    for entry in sorted(values, key=lambda entry: mean(values[entry])):
        lines = [*found[entry].values()]
        p = "" if entry == "baseline" else "one has too few seeds"
        if entry != "baseline" and min(len(values[entry]), len(values.get("baseline", ""))) > 1:
            p = f"{welch(values[entry], values['baseline']):.2g}"
        rows.append((entry, first_line(entry), figure(values[entry]), str(len(lines)), f"{lines[0]['steps']:,}",
                     f"{mean(line['cpu_seconds'] for line in lines):,.0f}", p))
    titles = ("entry", "", "bits per byte", "seeds", "steps", "CPU-seconds with compilation", "p against the baseline")
    parts = [head, markdown_table(titles, rows)]
    if len(values.get("baseline", "")) > 1:
        parts.append(f"Noise: the standard deviation of the baseline over {len(values['baseline'])} seeds is "
                     f"{stdev(values['baseline']):.2g} bits per byte; ± is half of the mean's 95 % interval.")
    return [*parts, ran_on([line for lines in found.values() for line in lines.values()])]


def records(budget):
    """Return the history of records: each first with enough seeds that beat the one before significantly."""
    best, rows = None, []
    for entry, lines in history(budget).items():  # in the order in which they were first recorded
        values = [line["bits_per_byte"] for line in lines.values()]
        if len(values) < SEEDS or (best and welch(values, best) >= SIGNIFICANT):
            continue
        p = f"{welch(values, best):.2g}" if best else ""
        rows.append((next(iter(lines.values()))["date"], entry, figure(values), p))
        best = values
    titles = ("date", "entry", "bits per byte", "p against the one before")
    return [f"### Records at `--budget={budget}`", markdown_table(titles, rows)] if rows else []


def page():
    """Return the page."""
    parts = [HEAD.format(seeds=SEEDS, p=SIGNIFICANT)]
    for budget in BUDGETS:
        parts += [*standings(budget), *records(budget)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (ROOT / "docs/track.md").write_text(page())
