"""The command: runs are read from their workdirs and from sweeps, saved, drawn, and used by the planner."""

import json
import re

import pytest

import jaxtrain as jt
from jaxtrain.commands import plan
from jaxtrain.commands import scaling as scaling_command
from jaxtrain.plan.scaling_laws import finished_runs, saved_fit
from jaxtrain.plan.scaling_laws.parametric_loss import Fit, Law, Point
from tests.numerics import reference

LAW = Law(E=1.5, A=40.0, B=60.0, alpha=0.3, beta=0.35)
STEPS = 20


def run_of(folder, width, tokens, done=STEPS, **line):
    """A workdir as a run leaves it."""
    folder.mkdir(parents=True)
    config = reference.tiny("gpt2", model__embed_dim=width, model__mlp_dim=4 * width)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    # By hand: a layer has 4 matrices of attention and 2 of the MLP, and the tied table is the head.
    parameters = 2 * 12 * width**2 + reference.VOCAB * width
    loss = LAW.loss(parameters, tokens)
    lines = [{"step": 1, "eval_loss": 9.0, "accuracy": 0.5}, {"step": done, "loss": 9.0, "tokens": tokens},
             {"step": done, "eval_loss": loss} | line]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return Point(parameters, tokens, loss, f"{folder}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {folder / f"{width}-{tokens}": run_of(folder / f"{width}-{tokens}", width, tokens)
            for width in (16, 32, 64) for tokens in (10**5, 10**6, 10**7)}


@pytest.fixture(scope="module")
def fit_file(runs, tmp_path_factory):
    file = tmp_path_factory.mktemp("fit") / "scaling.json"
    words = [f"--output={file}", f"--output={file.with_suffix('.html')}", "--samples=4"]
    assert scaling_command.main([*map(str, runs), *words]) == 0
    return file


@pytest.mark.slow
def test_a_run_is_its_size_its_tokens_and_its_last_loss(runs):
    assert finished_runs.points(runs) == list(runs.values())


@pytest.mark.slow
def test_the_trials_of_a_sweep_are_runs(runs, tmp_path, capsys):
    line = {"trial": 0, "keys": {}, "seed": 0, "steps": STEPS}  # of a sweep that compares accuracies
    lines = [line | {"workdir": point.name, "state": "complete", "value": 0.5, "tokens": point.tokens}
             for point in runs.values()]
    lines += [line | {"workdir": "gone", "state": "failed", "value": None, "tokens": 0}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert finished_runs.points([tmp_path / "results.jsonl"]) == list(runs.values())
    assert "1 of 10 trials did not finish and are skipped" in capsys.readouterr().err


@pytest.mark.slow
def test_the_fit_is_saved_and_drawn(runs, fit_file, capsys):
    found = saved_fit.load(fit_file)
    assert found.law.alpha == pytest.approx(LAW.alpha, abs=0.01) and len(found.points) == 9
    assert scaling_command.main([*map(str, runs), "--json", "--samples=4"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["law"]["alpha"] == pytest.approx(LAW.alpha, abs=0.01) and len(said["runs"]) == 9
    page = fit_file.with_suffix(".html").read_text()
    assert page.count("<svg") == 4 and "NaN" not in page and "nan" not in page


@pytest.mark.slow
def test_the_planner_says_what_loss_a_run_reaches(fit_file, capsys):
    flags = ["--config=configs/gpt.py:tiny", "--target=h100x1", "--explain", f"--scaling={fit_file}", "--tokens=1e6"]
    assert plan.main(flags) == 0
    said = capsys.readouterr().out
    parameters = 2 * 12 * 64**2 + 320 * 64
    loss = re.search(r"scaling.json, the loss is (\S+) \(.* to .*\) with 119k parameters and 1M tokens\n", said)
    assert loss and float(loss[1]) == pytest.approx(LAW.loss(parameters, 1e6), rel=1e-3)
    assert "FLOPs, as many, get at best" in said
    assert plan.main([*flags, "--dollars=100"]) == 0
    assert "FLOPs, $100, get at best" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "message"), [
    (["--flops=1e20"], "--flops: it is read with --scaling only; give that too, or leave it out"),
    (["--dollars=5"], "--dollars: it is read with --scaling only"),
    (["--scaling={tmp}/none"],
     "--scaling: {tmp}/none is not there; give the file that jaxtrain scaling --output wrote"),
    (["--scaling={tmp}/bad"], "--scaling: {tmp}/bad is not of the form expected: it has no 'law'"),
    (["--scaling={tmp}/empty"], "--scaling: {tmp}/empty has numbers that no fit has"),
    (["--scaling={tmp}/good", "--flops=0"], "--flops: 0.0 is not a budget; give a number above 0"),
    (["--scaling={tmp}/good", "--flops=1e9", "--dollars=3"], "--dollars: --flops is a budget already"),
])
def test_what_the_planner_cannot_use_is_told_in_one_line(flags, message, tmp_path, capsys):
    (tmp_path / "bad").write_text("{}")
    saved_fit.save(Fit(LAW, [LAW], [Point(1.0, 2.0, 3.0)]), tmp_path / "good", "eval_loss")
    saved_fit.save(Fit(LAW, [LAW], [Point(0.0, 2.0, 3.0)]), tmp_path / "empty", "eval_loss")
    words = ["--config=configs/gpt.py:tiny", "--target=h100x1", *(flag.format(tmp=tmp_path) for flag in flags)]
    assert plan.main(words) == 2
    assert capsys.readouterr().err.startswith(message.format(tmp=tmp_path))


def test_runs_that_are_none_are_told(tmp_path, capsys):
    (tmp_path / "file").write_text("nothing\n")
    for given, message in ((tmp_path, "is neither a run's workdir nor a sweep's folder"),
                           (tmp_path / "file", "has no line of a trial")):
        assert scaling_command.main([str(given)]) == 2
        assert message in capsys.readouterr().err
    short, lacking = tmp_path / "short", tmp_path / "lacking"
    run_of(short, 16, 100, done=STEPS - 1)
    run_of(lacking, 16, 100)
    assert finished_runs.points([short]) == []
    assert f"{short}: skipped, because it is at step 19 of 20" in capsys.readouterr().err
    with pytest.raises(jt.UserError, match=r"--metric: .*lacking/metrics.jsonl has no accuracy at step 20"):
        finished_runs.points([lacking], "accuracy")
    trial = {"workdir": f"{lacking}", "state": "complete", "value": 3.0, "tokens": 100}
    (tmp_path / "results.jsonl").write_text(json.dumps(trial) + "\n")
    assert finished_runs.points([tmp_path]) == finished_runs.points([lacking])  # whatever the sweep compares


def test_numbers_are_said_in_short():
    assert [saved_fit.short(x) for x in (12, 1.5e3, 7e10, 1.4e12)] == ["12", "1.5k", "70B", "1.4T"]
    fit = Fit(LAW, [LAW], [Point(1e6, 1e7, 3.0)])
    assert "20 times as much as in any run of the fit" in saved_fit.predicted(fit, 2e7, 1e7)
    assert saved_fit.vague(LAW) == []
    (line,) = saved_fit.vague(Law(E=1.5, A=40.0, B=60.0, alpha=20.6, beta=0.35))
    assert line.startswith("warning: alpha=20.6: so steep a law")
    assert "times" not in saved_fit.predicted(fit, 1e6, 1e7)
    flat = Law(E=1.5, A=40.0, B=60.0, alpha=0.0, beta=0.35)
    assert saved_fit.at_best(Fit(flat, [flat], fit.points), 1e20).startswith("not known")
