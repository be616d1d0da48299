"""Run a recipe at several seeds by its own commands, and record a line of results for each.

    python -m examples.recipes.run NAME                       # seeds 0, 1 and 2; prints each line
    python -m examples.recipes.run NAME --seeds=1 --first=7   # seed 7 alone
    python -m examples.recipes.run NAME --record              # also adds the lines to NAME/results.jsonl

NAME/recipe.toml holds the commands, which are run as they stand there, with these words replaced: {here} by the
recipe's folder, {work} by a folder that its seeds share, {out} by a folder of one seed, {seed} by the seed. "torch" is
the Python that JAXTRAIN_TORCH_PYTHON names, for recipes that compare with torch's packages. Recorded lines have a
commit, so `--record` wants the code and the recipe committed.
"""

import argparse
import json
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples/recipes"
POINTS = 40  # of a curve, at most


def read_recipe(name):
    """Return what NAME/recipe.toml says."""
    return tomllib.loads((RECIPES / name / "recipe.toml").read_text())


def words_of(command, places):
    """Return a command's words, with its places filled in and this Python as the one that runs it."""
    for name, place in places.items():
        command = command.replace(f"{{{name}}}", f"{place}")
    words = shlex.split(command)
    own = {"python": [sys.executable], "jaxtrain": [sys.executable, "-m", "jaxtrain"],
           "torch": [os.environ.get("JAXTRAIN_TORCH_PYTHON", "")]}
    if not all(own.get(words[0], words)):
        raise SystemExit("JAXTRAIN_TORCH_PYTHON is not set: the recipe compares with torch's packages; name a Python "
                         "that has them")
    return [*own.get(words[0], [words[0]]), *words[1:]]


def call(command, places, quiet=True):
    """Run a command and return what it printed; end with its own words if it fails."""
    words = words_of(command, places)
    print("$", shlex.join(words), file=sys.stderr, flush=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [f"{ROOT}", os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(words, cwd=ROOT, text=True, capture_output=quiet, env=environment)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}\nended with {done.returncode}:\n{(done.stderr or '')[-2000:]}")
    return f"{done.stdout}{done.stderr}"


def metrics(folder, key):
    """Return the steps and values of a key in a run's metrics.jsonl."""
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def thinned(points, most=POINTS):
    """Return at most so many points: means of steps that lie together, at their last step."""
    size = -(-len(points) // most)
    parts = [points[at:at + size] for at in range(0, len(points), size)]
    return [[part[-1][0], round(sum(value for _, value in part) / len(part), 5)] for part in parts]


def figure_of(spec, places, printed):
    """Return one figure of a seed: the last, lowest or mean value of a metric, or a number that a command printed."""
    if "printed" in spec:
        found = re.findall(spec["printed"], printed)
        if not found:
            raise SystemExit(f"no command printed what {spec['printed']!r} matches")
        return float(found[-1])
    values = [value for _, value in metrics(spec["run"].format(**places), spec["key"])]
    take = spec.get("take", "last")
    if take in ("first", "final"):  # a mean of so many steps
        some = values[:spec["steps"]] if take == "first" else values[-spec["steps"]:]
        return sum(some) / len(some)
    return {"last": values[-1], "lowest": min(values), "highest": max(values)}[take]


def machine():
    """Return the processor and its cores."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", file.read_text()) if file.exists() else None
    return {"cpu": found[1].strip() if found else platform.processor(), "cores": os.cpu_count()}


def commit(paths):
    """Return the commit that these paths are at, or None where they differ from it."""
    git = ["git", "-C", f"{ROOT}"]
    if subprocess.run([*git, "status", "--porcelain", "--", *paths], capture_output=True, text=True).stdout:
        return None
    done = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or None


def provenance(paths):
    """Return what every recorded line says of its code and its machine."""
    return {"commit": commit(paths), "machine": machine(), "python": platform.python_version(),
            **{name: version(name) for name in ("jax", "flax", "optax")},
            "date": time.strftime("%Y-%m-%d", time.gmtime())}


def run_seed(name, recipe, seed, work):
    """Run the commands of one seed and return its line."""
    out = work / f"seed{seed}"
    resumed = {"resumed": True} if out.exists() else {}  # then its cost is not that of all commands
    places = {"here": f"examples/recipes/{name}", "work": work, "out": out, "seed": seed}
    began, load, before = time.perf_counter(), os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = "".join(call(command, places) for command in recipe["commands"])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    curves = {label: thinned(metrics(spec["run"].format(**places), spec["key"]))
              for label, spec in recipe["curves"].items()}
    return {"seed": seed, "seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(cpu, 2),
            "load": [round(load, 1), round(os.getloadavg()[0], 1)],
            "figures": {label: float(f"{figure_of(spec, places, printed):.6g}")
                        for label, spec in recipe["figures"].items()},
            "curves": curves, **resumed}


def main(arguments=None):
    """Run, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(path.parent.name for path in RECIPES.glob("*/recipe.toml")))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--folder", type=Path, help="for corpora and runs; default: a temporary one")
    parser.add_argument("--record", action="store_true", help="add the lines to NAME/results.jsonl")
    flags = parser.parse_args(arguments)
    recipe = read_recipe(flags.name)
    if "commands" not in recipe:
        raise SystemExit(f"{flags.name} was not run yet: it is for accelerators; its page says what to run")
    about = provenance(["jaxtrain", "configs", ":(glob)examples/*.py", "examples/sft", "examples/reinforce",
                        f"examples/recipes/{flags.name}/", ":!examples/recipes/*/results.jsonl"])
    if flags.record and not about["commit"]:
        raise SystemExit("--record: the code differs from its commit; commit first, so that the line can name one")
    work = flags.folder or Path(tempfile.mkdtemp())
    if not (work / "prepared").exists():
        for command in recipe.get("prepare", []):
            call(command, {"here": f"examples/recipes/{flags.name}", "work": work})
        work.mkdir(parents=True, exist_ok=True)
        (work / "prepared").touch()
    for seed in range(flags.first, flags.first + flags.seeds):
        line = json.dumps({**about, **run_seed(flags.name, recipe, seed, work)})
        print(line, flush=True)
        if flags.record:
            with (RECIPES / flags.name / "results.jsonl").open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
