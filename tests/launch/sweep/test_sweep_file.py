"""The refusals of a sweep's file: each mistake is reported in one line, before anything is written."""

import concurrent.futures
import json
import math

import pytest

from jaxtrain.commands.sweep import main
from jaxtrain.errors import UserError
from jaxtrain.launch import cost
from jaxtrain.launch.sweep import config_process, search_space, sweep_budget
from jaxtrain.launch.sweep.search_space import Range
from jaxtrain.launch.sweep.sweep_file import sweep_of
from tests.launch.sweep.simulated import RATE, VALUES

BASE = {"config": "base", "workdir": "runs/sweep", "keys": {RATE: [0.1, 0.01]}, "budget": {"trials": 2}}
WIDE = {RATE: {"low": 0.001, "high": 0.1}}
WRONG = [  # what is said otherwise, how the line begins, and a part of the rest
    ({"keyz": {}}, "keyz", "did you mean 'keys'"), ({"config": 1}, "config", "is not text"),
    ({"keys": {}}, "keys", "nothing is searched"), ({"keys": {RATE: 0.1}}, f"keys.{RATE}", "put it under fixed"),
    ({"keys": {"optimizer": {"learning_rate": 0.1}}}, f"keys.{RATE}", "put it under fixed"),
    ({"keys": {"optimizer.learning_ratee": [1]}}, "optimizer.learning_ratee", "did you mean 'learning_rate'"),
    ({"keys": {RATE: ["x"]}}, RATE, "is not a finite number"),
    ({"keys": {RATE: []}}, f"keys.{RATE}.values", "in [ ]"),
    ({"keys": {RATE: [0.1, 0.1]}}, f"keys.{RATE}.values", "there twice"),
    ({"keys": {RATE: {"low": 1}}}, f"keys.{RATE}.high", "missing"),
    ({"keys": {RATE: {"low": 1, "high": 0.5}}}, f"keys.{RATE}", "low=1 is not below high=0.5"),
    ({"keys": {RATE: {"low": 0, "high": 1, "log": True}}}, f"keys.{RATE}.low", "cannot begin at 0"),
    ({"keys": {RATE: {"low": 0.5, "high": 2, "int": True}}}, f"keys.{RATE}", "not whole numbers"),
    ({"keys": {RATE: {"low": 0, "high": 1, "log": 1}}}, f"keys.{RATE}.log", "not true or false"),
    ({"keys": {RATE: {"low": 0, "hihg": 1}}}, f"keys.{RATE}.hihg", "did you mean 'high'"),
    ({"keys": {RATE: {"values": [1.0], "low": 0}}}, f"keys.{RATE}", "values and a range"),
    ({"keys": {"model.num_heads": [4, 3]}}, "model.num_heads", "in the point model.num_heads=3"),
    ({"keys": {"model.num_heads": {"low": -1, "high": 2, "int": True}}, "method": "tpe"}, "model.num_heads", "-1"),
    ({"fixed": {RATE: 1.0}}, f"fixed.{RATE}", "searched too"), ({"fixed": {"train.stepz": 1}}, "train.stepz", "steps"),
    ({"method": "grid", "keys": WIDE, "budget": {}}, f"keys.{RATE}", "a grid needs values"),
    ({"trials": 3}, "trials", "write it below [budget]"),
    ({"keys": {RATE: {"min": 0.1, "max": 1}}}, f"keys.{RATE}.min", "or {low = 1, high = 2}"),
    ({"keys": {"model.num_layers": {"low": 1, "high": 4}}}, "keys.model.num_layers", "int = true"),
    ({"keys": {"model.num_layers": {"low": 1, "high": 4}}, "method": "tpe"}, "keys.model.num_layers", "int = true"),
    ({"method": {"name": "grid", "size": 3}}, "method.size", "has no options"),
    ({"objective": {"metrik": "loss"}}, "objective.metrik", "did you mean 'metric'"),
    ({"objective": {"goal": "best"}}, "objective.goal", "neither minimise nor maximise"),
    ({"objective": {"metric": "eval_loss_ema"}}, "objective.metric", "train.ema_decay=0.0"),
    ({"objective": {"metric": "eval_loss"}, "fixed": {"train.eval_every": 0}}, "objective.metric", "eval_every=0"),
    ({"parallel": 0}, "parallel", "is not a valid number of trials"), ({"seeds": 0}, "seeds", "not different seeds"),
    ({"seeds": [1, 1]}, "seeds", "not different seeds"), ({"seeds": ["a"]}, "seeds", "whole numbers"),
    ({"seeds": 2, "keys": {"train.seed": [1, 2]}}, "train.seed", "set for every trial by seeds"),
    ({"seeds": 2, "budget": {"trials": 3}}, "budget.trials", "a multiple of 2"),
    ({"budget": {"trials": -1}}, "budget.trials", "give more than 0"),
    ({"budget": {"tokens": 0}}, "budget.tokens", "spent already"),
    ({"budget": {"time": "3h"}}, "budget.time", "write H:MM:SS"),
    ({"budget": {"dollar": 3}}, "budget.dollar", "dollars"),
    ({"budget": {"dollars": 3}}, "budget.dollars", "the price of the trials"),
    ({"budget": {}, "keys": WIDE}, "budget", "nothing ends the sweep"),
    ({"stop": {"factor": 3}}, "stop", "has no 'first'"), ({"stop": {"first": 0}}, "stop.first", "give 1 or more"),
    ({"stop": {"first": 1, "factor": 1}}, "stop.factor", "give 2 or more"),
    ({"stop": {"first": 81}}, "stop.first", "a trial has 81 steps"),
    ({"fixed": {"train.epochs": 3}}, "train.epochs", "give train.steps under fixed"),
    ({"stop": {"first": 1}, "fixed": {"train.eval_every": 9}}, "stop.first", "before step 9"),
    ({"stop": {"first": 1}, "fixed": {"train.log_every": 5}, "objective": {"metric": "loss"}}, "stop.first", "step 5"),
    ({"stop": {"first": 9}, "seeds": 2}, "stop", "no mean over its seeds"),
    ({"job": {"nodez": 1}}, "job.nodez", "did you mean 'nodes'"),
]


@pytest.mark.parametrize(("said", "key", "part"), WRONG, ids=[f"{case[1]}-{case[2]}" for case in WRONG])
def test_a_mistake_is_a_sentence(said, key, part):
    with pytest.raises(UserError) as found:
        sweep_of({**BASE, **said}, VALUES)
    assert str(found.value).startswith(f"{key}: ") and part in str(found.value)


def test_keys_may_be_written_as_tables():
    layers = {"low": 1, "high": 3, "int": True}
    said = {"keys": {"optimizer": {"learning_rate": [0.1]}, "model": {"num_layers": layers}},
            "fixed": {"train": {"steps": 5}}}
    made = sweep_of({**BASE, **said}, VALUES)
    assert made.ranges == {RATE: Range((0.1,)), "model.num_layers": Range(low=1, high=3, int=True)}
    assert made.fixed == {"train.steps": 5} and made.config_of({RATE: 0.1}).train.steps == 5


def test_ranges():
    assert [Range(low=1, high=3, int=True).at(part) for part in (0, 0.34, 0.67, 0.999)] == [1, 2, 3, 3]
    assert Range(low=1e-4, high=1.0, log=True).at(0.5) == pytest.approx(0.01)
    assert Range(low=1, high=8, int=True, log=True).at(0.999) == 8 and Range(low=2, high=4).at(0.25) == 2.5
    ranges = {"a": Range((1, 2)), "b": Range(("x", "y", "z")), "c": Range(low=0, high=3, int=True)}
    points = [*search_space.random_points(ranges, 3)]
    assert len(points) == 24 == len({repr(point) for point in points}) == search_space.size(ranges)
    assert points == [*search_space.random_points(ranges, 3)] != [*search_space.random_points(ranges, 4)]
    last = [*search_space.random_points({"a": Range(low=1, high=1000, int=True)}, 0)]
    assert len(last) == 1000 == len({point["a"] for point in last}), "the last ones are seldom drawn"
    first = [*search_space.grid({"a": Range((1, 2)), "b": Range(("x", "y"))})]
    assert first == [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
    drawn = [point["a"] for _, point in zip(range(2000), search_space.random_points({"a": Range(
        low=1e-4, high=1.0, log=True)}, 0), strict=False)]
    for decade in range(-4, 0):  # as many between 0.1 and 1 as between 0.0001 and 0.001
        assert abs(sum(decade <= math.log10(value) < decade + 1 for value in drawn) - 500) < 60


def test_what_it_costs_at_most():
    job = {"accelerator": "h100", "accelerators_per_node": 8, "time": "2:00:00"}
    made = sweep_of({**BASE, "job": job, "budget": {"trials": 3}, "keys": {RATE: [0.1, 0.01, 0.2, 0.3]}}, VALUES)
    hour = cost.dollars_an_hour(made.job)
    tokens = 3 * 81 * made.config_of({}).data.seq_len * made.config_of({}).data.global_batch_size
    assert sweep_budget.at_most(made)[1:] == [f"about {tokens:,} tokens at most",
                                              f"about ${6 * hour:,.2f} at most, if no trial takes longer than 2:00:00"]
    capped = {**BASE, "keys": WIDE, "job": job, "parallel": 2, "budget": {"tokens": 5e3, "dollars": 9}}
    most = f"about ${9 + 4 * hour:,.2f} at most, if no trial takes longer than 2:00:00"  # two go on to their end
    assert sweep_budget.at_most(sweep_of(capped, VALUES)) == [
        "any number of trials", f"about {5000 + 2 * tokens // 3:,} tokens at most", most]
    del job["time"]
    assert sweep_budget.at_most(sweep_of(capped, VALUES))[-1].startswith("about $9.00, and what the trials that run by")
    steps = {"train.steps": [10, 81]}
    assert sweep_budget.at_most(sweep_of({**BASE, "keys": steps}, VALUES))[1] == (
        f"about {2 * tokens // 3:,} tokens at most"), "of which one has fewer"


@pytest.mark.slow
def test_a_metric_that_no_run_has(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor",  # a process of its own imports JAX again
                        lambda workers, context: concurrent.futures.ThreadPoolExecutor(workers))
    for metric, nearest in (("grad_normz", "'grad_norm_z'"), ("eval_accuracyy", "known: cross_entropy, eval_b")):
        with pytest.raises(UserError, match=f"objective.metric: runs have no '{metric}'; .*{nearest}"):
            config_process.check_metric(sweep_of({**BASE, "objective": {"metric": metric}}, VALUES))
    config_process.check_metric(sweep_of({**BASE, "objective": {"metric": "grad_norm_z"}}, VALUES))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "told"), [
    ("tpee", "method: there is no sampler 'tpee'; did you mean 'tpe'?"),
    ({"name": "tpe", "n_startup": 3}, "method.n_startup: tpe has no such option; did you mean 'n_startup_trials'?"),
    ({"name": "nsgaii", "population_size": 1}, "method: Optuna refuses nsgaii: "),
    ({"n_startup_trials": 1}, "method: there is no sampler ''")])
def test_a_wrong_sampler_is_a_sentence(method, told):
    pytest.importorskip("optuna")
    from jaxtrain.launch.sweep import optuna_points

    with pytest.raises(UserError) as found:
        optuna_points.check(sweep_of({**BASE, "method": method}, VALUES))
    assert str(found.value).startswith(told)


def test_the_command(tmp_path, monkeypatch, capsys):
    """Before anything runs: what is not a sweep, what it would try, and a folder that has another."""
    monkeypatch.setattr("jaxtrain.commands.sweep.values_of", lambda config: VALUES)
    monkeypatch.chdir(tmp_path)

    def said(text, *flags, name="sweep.toml"):
        (tmp_path / name).write_text(text)
        status = main([name, *flags])
        return status, *capsys.readouterr()

    lines = 'config = "base"\nworkdir = "root"\nkeys."optimizer.learning_rate" = [0.1, 0.01]\n'
    status, out, err = said(lines + 'method = "grid"\n', "--on=local", "--dry_run")
    assert (status, err) == (0, "") and out.splitlines()[:3] == [
        "optimizer.learning_rate=0.1", "optimizer.learning_rate=0.01", "2 trials of 2 points"]
    python = "def get_sweep():\n    return {'config': 'base', 'workdir': 'root', 'keys': {'a.b': 1 / 0}}\n"
    assert said(python, "--on=local", name="s.py")[2] == (
        "SWEEP: s.py raised ZeroDivisionError: division by zero; fix it\n")
    assert said("a = ", "--on=local")[2].startswith("SWEEP: sweep.toml cannot be read (")
    assert said("pass", "--on=local", name="s.py")[2].startswith("SWEEP: s.py has no get_sweep() that returns a dict")
    assert said(lines)[2].startswith("--on: nothing says where trials run; give local")
    assert said(lines, "--on=skypilot")[2].startswith("--on: 'skypilot' runs no trials")
    assert said(lines, "--report")[2].startswith("--report: ")
    job = "[job]\nnodes = 2\n"
    assert said(lines + job, "--on=local")[2] == "nodes: there are not 2 machines here; set nodes=1\n"
    word = "data.mixture.a.source = 's3://me:hunter2@host/a'\n"
    assert said(lines + "[fixed]\n" + word, "--on=local")[2].startswith("config: a URL in it has a password")
    assert not (tmp_path / "root").exists()
    (tmp_path / "root").mkdir()
    begun = {"content": {"config": "base", "workdir": "root", "keys": {RATE: [0.2]}}, "values": VALUES,
             "directory": str(tmp_path), "began": 1.0}
    (tmp_path / "root" / "sweep.json").write_text(json.dumps(begun))
    assert said(lines, "--on=local")[2] == ("workdir: the sweep in root was begun with another keys; give another "
                                            "workdir, or undo the change\n")
