"""Render docs/recipes.md and its curves from the recipes and their recorded lines.

    python -m examples.recipes.page            # writes docs/recipes.md and docs/recipes/NAME.svg

What a recipe says of itself is in NAME/recipe.toml, what it reached in NAME/results.jsonl (run.py), and what is planned
for accelerators in NAME/plan.jsonl (plan.py).
"""

import json
from statistics import mean

from examples.recipes.run import RECIPES, ROOT, read_recipe
from jaxtrain.plan.report.log_log import log_log
from jaxtrain.runs.report.seed_statistics import interval

ORDER = ("gpt", "characters", "experts", "hybrid", "spoken", "instructions", "tool_use", "smol", "smol_lora",
         "smol_dpo", "gpt2_124m", "chat",
         "continued_1b")
STYLE = """<style>.curves{font:12px system-ui,sans-serif;fill:#1d2129;background:#fff}
.curves polyline,.curves circle,.curves path{fill:none;stroke-width:2}.axis{stroke:#596273}
.line0{stroke:#1f5f99}.line1{stroke:#b8480a}</style>"""
HEAD = """# Recipes

Each recipe is a folder of `examples/recipes` with its commands, what they reached and what that cost. To run one:

```text
python -m examples.recipes.run NAME --seeds=3
```

Figures are means over seeds, with half of the 95 % interval of the mean by Student's t where there are several seeds.
The machines were shared with other work, so that CPU-seconds and the load are given and wall-clock time says little: no
figure here is a claim of speed. This page is rendered from the lines in `results.jsonl` by
`python -m examples.recipes.page`."""


def lines_of(name, file="results.jsonl"):
    """Return the recorded lines of a recipe, of each seed the newest."""
    path = RECIPES / name / file
    lines = list(map(json.loads, path.read_text().splitlines())) if path.exists() else []
    return [*{line.get("seed", number): line for number, line in enumerate(lines)}.values()]


def figure(values):
    """Return the mean of some values with its interval, as text."""
    margin = f" ± {interval(values):.2g}" if len(values) > 1 else " (one seed)"
    return f"{mean(values):.4g}{margin}"


def curves(title, lines):
    """Return the curves of recorded lines as SVG: the mean of the seeds over steps."""
    series = {}
    for label in lines[0]["curves"]:
        each = [dict(map(tuple, line["curves"][label])) for line in lines if label in line["curves"]]
        shared = sorted(set.intersection(*map(set, each)))
        series[label] = [(step, mean(curve[step] for curve in each)) for step in shared]
    drawn = log_log(title, "step", series)
    drawn = drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return drawn.replace("</svg>", f"{STYLE}</svg>") + "\n"


def markdown_table(head, rows):
    """Return a table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def commands_of(name, recipe):
    """Return a recipe's commands as they are run, as a block, with words in the place of its folders and seed."""
    lines = [line for key in ("prepare", "commands", "planned_commands") for line in recipe.get(key, [])]
    text = "\n".join(["```text", *lines, "```"])
    for place, word in (("here", f"examples/recipes/{name}"), ("work", "FOLDER"), ("out", "WORKDIR"), ("seed", "SEED")):
        text = text.replace(f"{{{place}}}", word)
    return text


def results(name, recipe, lines):
    """Return what a recipe reached: its figures, provenance and curves."""
    if not lines:
        return ["**Not run yet.**"]
    rows = [(label, figure([line["figures"][label] for line in lines]),
             ", ".join(f"{line['figures'][label]:.4g}" for line in lines)) for label in recipe["figures"]]
    many = f"{len(lines)} seeds" if len(lines) > 1 else "One seed"
    begun = " (of the last call: a run had begun before)" if any(line.get("resumed") for line in lines) else ""
    waited = [line["seconds"] for line in lines]
    cpu = mean(line["cpu_seconds"] for line in lines)
    cost = (f"{many}; {cpu:,.0f} CPU-seconds a seed with start and compiling{begun}, "
            f"in {' to '.join(dict.fromkeys(f'{one:,.0f}' for one in (min(waited), max(waited))))} s. "
            f"{ran_on(lines)}")
    return [markdown_table(("", "mean", "each seed"), rows), cost, f"![{recipe['title']}](recipes/{name}.svg)"]


def ran_on(lines):
    """Return, in a sentence, the machine, versions and commits of recorded lines."""
    about, loads = lines[-1], [value for line in lines for value in line["load"]]
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    return (f"Machine: {about['machine']['cores']} cores ({about['machine']['cpu']}), shared with other work (load "
            f"{min(loads):.0f} to {max(loads):.0f}); Python {about['python']}, JAX {about['jax']}, commit {commits}, "
            f"{about['date']}.")


def planned(lines):
    """Return the table of what `jaxtrain plan` predicts of a recipe for accelerators."""
    rows = [(line["target"], f"{line['step_seconds']:.3g} s", f"{line['mfu']:.0%}", f"{line['gigabytes']:.0f} GB",
             f"{line['hours']:.3g} h", f"${line['dollars']:,.0f}") for line in lines]
    commits = ", ".join(dict.fromkeys(f"{line['commit']}, {line['date']}" for line in lines))
    return [markdown_table(("target", "a step", "MFU", "memory a device", "all steps", "price"), rows),
            f"**Not run.** All of this is predicted by [the planner](planner.md) (commit {commits})."]


def page():
    """Return the page, and the drawings by file."""
    parts, drawings = [HEAD], {}
    for name in ORDER:
        recipe, lines = read_recipe(name), lines_of(name)
        parts += [f"## {recipe['title']}", f"{recipe['teaches']} `examples/recipes/{name}`", f"Text: {recipe['text']}"]
        if "plan" in recipe:
            parts += [recipe["expected"], *planned(lines_of(name, "plan.jsonl"))]
        else:
            parts += results(name, recipe, lines)
            if lines:
                drawings[f"{name}.svg"] = curves(recipe["title"], lines)
        parts += [recipe[key] for key in ("judge", "note") if key in recipe]
        parts.append(commands_of(name, recipe))
    return "\n\n".join(parts) + "\n", drawings


def main():
    """Write the page and its drawings."""
    text, drawings = page()
    (ROOT / "docs/recipes").mkdir(exist_ok=True)
    (ROOT / "docs/recipes.md").write_text(text)
    for name, drawing in drawings.items():
        (ROOT / "docs/recipes" / name).write_text(drawing)


if __name__ == "__main__":
    main()
