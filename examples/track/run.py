"""Train an entry of the track within its budget of arithmetic, and score it on the held-out text.

    python -m examples.track.run ENTRY --budget=sprint --seeds=5
    python -m examples.track.run ENTRY --budget=sprint --seeds=5 --record     # adds lines to history.jsonl
    python -m examples.track.run compare NEW OLD --budget=sprint

examples/track/README.md has the rules.
"""

import argparse
import hashlib
import json
import math
import os
import runpy
import time
import zipfile
from pathlib import Path

from examples.recipes.run import ROOT, provenance

TRACK = ROOT / "examples/track"
HISTORY = TRACK / "history.jsonl"
BUDGETS = {"minutes": 8e12, "sprint": 1e12}  # operations of matrix products
WHEEL = "sympy-1.14.0-py3-none-any.whl"
DIGEST = "a933fa2fa639617a09380825599cd9e9ca80f4d4a72a51edf2d2ebff2dc58eaf"
ROWS, LENGTH, BATCHES = 8, 256, 32  # that are scored
FREE = {"model": None, "optimizer": None, "train": {"unroll", "remat", "precision", "accumulation"},
        "data": {"seq_len", "global_batch_size"}}  # the keys of an entry
SIGNIFICANT, SEEDS = 0.01, 5


def unpacked(wheel, folder):
    """Unpack the text of the wheel, and return its folder and hash."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".py") and "/tests/" not in name)
        for name in names:
            digest.update(content := archive.read(name))
            (place := folder / name).parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    return digest.hexdigest()


def text_of(folder):
    """Return the folder of the track's text, unpacked once and checked."""
    wheel, text = folder / WHEEL, folder / "text"
    if not wheel.exists():
        raise SystemExit(f"{wheel} is missing: python -m pip download --no-deps -d {folder} sympy==1.14.0")
    if unpacked(wheel, text) != DIGEST:
        raise SystemExit(f"{wheel} has another text than the track's: download it anew")
    return text


def stages_of(entry):
    """Return an entry's stages, each a number of steps and its keys; end where it sets a key that is not its own."""
    stages = runpy.run_path(f"{entry}")["stages"]()
    for _, keys in stages:
        for section, values in keys.items():
            own = FREE.get(section, set())
            for key in values:
                if own is not None and key not in own:
                    raise SystemExit(f"{entry}: {section}.{key} is not an entry's to set: remove it "
                                     "(examples/track/README.md, rule 3)")
    return stages


def configs_of(stages, text, seed):
    """Return the configs of the stages, and the one by which the held-out text is scored."""
    import jaxtrain as jt

    steps = sum(count for count, _ in stages)

    def made(keys, **more):
        flat = {f"{section}.{key}": value for section, values in keys.items() for key, value in values.items()}
        return jt.load_config(f"{ROOT}/configs/gpt.py:tiny", {
            **flat, "data.source": f"{text}", "data.seed": seed, "train.seed": seed, "train.steps": steps, **more})

    scored = made(stages[-1][1], **{"data.seq_len": LENGTH, "data.global_batch_size": ROWS, "data.seed": 0})
    return [made(keys) for _, keys in stages], scored


def operations(run):
    """Return the floating-point operations of all matrix products of one step, counted in its trace."""
    from jaxtrain.plan.trace import reader
    from jaxtrain.run import shapes_of

    traced = run.sharded.trace(shapes_of(run).abstract())
    block = reader.read(traced.jaxpr, dict(run.mesh.shape), "cpu")
    return sum(op.flops * times for op, times in block.all())


def train(stages, text, seed, budget):
    """Train the stages one after the other, and return the line of this seed."""
    import jaxtrain as jt

    configs, scored = configs_of(stages, text, seed)
    runs = [jt.build(config) for config in configs]
    needed = sum(count * operations(run) for (count, _), run in zip(stages, runs, strict=True))
    if needed > budget:
        raise SystemExit(f"the entry needs {needed:.4g} operations and may use {budget:.4g}: take "
                         f"{math.floor(sum(count for count, _ in stages) * budget / needed)} steps")
    state, step, losses = runs[0].init(), 0, []
    began, cpu, load = time.perf_counter(), time.process_time(), os.getloadavg()[0]
    for (count, _), run in zip(stages, runs, strict=True):
        for _ in range(count):
            state, metrics = run.step(state, run.batch(step))
            step += 1
            losses.append(metrics["loss"])
    last = float(losses[-1])  # when all steps are done
    took = {"seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(time.process_time() - cpu, 1),
            "load": [round(load, 1), round(os.getloadavg()[0], 1)]}
    bits = jt.build(scored).evaluate(state, BATCHES)["eval_loss"] / math.log(2)  # a token is a byte
    return {"seed": seed, "bits_per_byte": round(bits, 5), "last_loss": round(last, 5), "steps": step,
            "operations": needed, **took}


def welch(new, old):
    """Return the p-value of Welch's t-test for new values being lower than old ones."""
    from scipy.stats import ttest_ind

    return float(ttest_ind(new, old, equal_var=False, alternative="less").pvalue)


def history(budget):
    """Return the bits per byte of every entry at this budget, by seed; the newest line of a seed counts."""
    found = {}
    lines = HISTORY.read_text().splitlines() if HISTORY.exists() else []
    for line in map(json.loads, lines):
        if line["budget"] == budget:
            found.setdefault(line["entry"], {})[line["seed"]] = line
    return found


def claim(new, old):
    """Return, in a sentence, whether new lines are a record against old ones."""
    values = [[line["bits_per_byte"] for line in lines.values()] for lines in (new, old)]
    if min(map(len, values)) < SEEDS:
        return f"no claim: {len(values[0])} and {len(values[1])} seeds, and a record needs {SEEDS}"
    p = welch(*values)
    return f"p = {p:.2g}: {'a record' if p < SIGNIFICANT else f'no record, which needs p < {SIGNIFICANT}'}"


def main(arguments=None):
    """Run an entry or compare two."""
    entries = sorted(path.stem for path in (TRACK / "entries").glob("*.py"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", metavar="ENTRY", help=f"one of {', '.join(entries)}; or: compare NEW OLD")
    parser.add_argument("--budget", choices=BUDGETS, default="minutes")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--folder", type=Path, default=Path("build/track"), help="of the wheel, and for its text")
    parser.add_argument("--record", action="store_true", help="add the lines to history.jsonl")
    flags = parser.parse_args(arguments)
    if flags.words[0] == "compare":
        known = history(flags.budget)
        missing = [name for name in flags.words[1:] if name not in known]
        if len(flags.words) != 3 or missing:
            parser.error(f"history.jsonl has no lines of {missing[0]} at this budget" if missing else "compare NEW OLD")
        print(claim(*(known[name] for name in flags.words[1:])))
        return
    (name,) = flags.words
    if name not in entries:
        parser.error(f"there is no entry {name!r}: known are {', '.join(entries)}")
    about = provenance(["jaxtrain", "configs", "examples/track/run.py", f"examples/track/entries/{name}.py"])
    if flags.record and not about["commit"]:
        parser.error("--record: the code differs from its commit; commit first, so that the line can name one")
    import jaxtrain as jt

    jt.enable_compilation_cache()
    stages, text = stages_of(TRACK / f"entries/{name}.py"), text_of(flags.folder)
    for seed in range(flags.first, flags.first + flags.seeds):
        try:
            found = train(scaled(stages, flags.budget), text, seed, BUDGETS[flags.budget])
        except jt.UserError as error:
            parser.error(f"{error}")
        line = json.dumps({"entry": name, "budget": flags.budget, **about, **found})
        print(line, flush=True)
        if flags.record:
            with HISTORY.open("a") as file:
                file.write(line + "\n")


def scaled(stages, budget):
    """Return the stages with their steps for this budget: entries are written for the larger one."""
    share = BUDGETS[budget] / BUDGETS["minutes"]
    return [(max(1, math.floor(count * share)), keys) for count, keys in stages]


if __name__ == "__main__":
    main()
