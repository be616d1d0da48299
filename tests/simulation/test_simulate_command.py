"""`jaxtrain simulate`: its table, its JSON, its workdir, the published cases, and its refusals."""

import json

import pytest

from jaxtrain.commands import goodput, simulate
from jaxtrain.observe.goodput import account, incarnations
from jaxtrain.simulation.published_runs import CASES
from jaxtrain.simulation.run_durations import Durations
from tests.simulation.test_replay import RECORDED

FEW = ["--runs=3", "--days=5"]


def test_a_table_and_a_sentence_for_each_number_of_devices(capsys):
    assert simulate.main(["--devices", "64", "2048", "--spares", "2", *FEW]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith(("| 64", "| 2,048"))]
    assert len(rows) == 6 and out.startswith("predicted, not measured:") and "assumed: Llama 3 405B" in out
    assert "\n64 devices: checkpoint.local_checkpoint_every=" in out and "\n2,048 devices: checkpoint." in out


def test_spare_machines_are_worth_more_where_more_can_fail(capsys):
    assert simulate.main(["--devices", "8", "8192", "--spares", "0", "4", "--json", *FEW]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line["predicted"] and line["ettr_low"] <= line["ettr"] <= line["ettr_high"] for line in lines)
    ettr = {(line["devices"], line["spares"]): line["ettr"] for line in lines}
    assert ettr[8192, 4] - ettr[8192, 0] > 0.05 > ettr[8, 4] - ettr[8, 0]
    assert sum(lines[0]["shares"].values()) == pytest.approx(1.0, abs=0.01)


def test_a_simulated_run_is_a_workdir(tmp_path, capsys):
    assert simulate.main(["--devices", "4096", f"--output={tmp_path}/run", "--elastic", *FEW]) == 0
    capsys.readouterr()
    assert goodput.main([f"{tmp_path}/run", "--json"]) == 0
    account = json.loads(capsys.readouterr().out)
    assert account["failures"] > 3 and account["ended"] == "finished" and account["step"] > 30_000
    assert account["seconds_left"] == 0
    assert simulate.main([f"--replay={tmp_path}/run"]) == 2  # it has no config
    assert simulate.main(["--devices", "8", f"--output={tmp_path}/run"]) == 2  # nothing is overwritten


@pytest.mark.parametrize("name, published", [("llama3", 0.90), ("byterobust", 0.97)])
def test_published_shares_lie_between_the_inputs_that_are_published(name, published, capsys):
    case = CASES[name]()
    found = case.predictions(2, 0)
    shares = [one.effective for one in found.values()]
    assert min(shares) < published < max(shares) and max(shares) - min(shares) < 0.12
    assert all(0.9 * case.interruptions < one.failures * case.interruptions / case.unplanned < 1.1 * case.interruptions
               for one in found.values())


def test_a_case_says_what_is_assumed(capsys):
    assert simulate.main(["--case=byterobust", "--runs=1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("published: 97 % ETTR") and "\nassumed: steps of 10 s" in out


def test_durations_of_ones_own_run(capsys):
    assert simulate.main(["--devices", "64", f"--measured={RECORDED}/second", "--runs=1", "--days=1"]) == 0
    assert f"durations of {RECORDED}/second: steps of 0.3" in capsys.readouterr().out
    assert simulate.main([f"--replay={RECORDED}/third"]) == 0
    assert "8 failures; ETTR 78.2% measured, 78." in capsys.readouterr().out


def test_rates_of_ones_own_run(capsys):
    assert simulate.main(["--devices", "2", "--devices_per_node=1", "--rates=own", f"--measured={RECORDED}/second",
                          "--runs=2", "--days=1", "--json"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    life = account(incarnations(RECORDED / "second")).life
    assert line["seconds_between_failures"] == pytest.approx(life / 6)


def test_the_defaults_are_those_of_the_durations():
    for flag, (name, _) in simulate._SECONDS.items():
        assert flag == "start_time" or simulate._default(name) == getattr(Durations(), name)
    assert Durations().start == 65.0


@pytest.mark.parametrize("flag, said", [
    ("--rates=own", "add --measured=WORKDIR"),
    ("--devices=0", "--devices: 0 is not a number of devices"), ("--rates=lama3", "did you mean 'llama3'"),
    ("--rates=-1", "not a positive number of failures"), ("--days=0", "--days: 0 is not a positive number"),
    ("--days=nan", "invalid int value"), ("--runs=0", "--runs: 0 is too few"),
    ("--spares=-1", "--spares: -1 is negative"),
    ("--step_time=0", "--step_time"), ("--start_time=-1", "--start_time"),
    ("--case=llama4", "--case: there is no case"),
    ("--measured=/nowhere", "--measured"), ("--replay=/nowhere", "--replay"), ("--shape=0", "--shape"),
    ("--devices_per_node=0", "--devices_per_node"), ("--seed=-1", "--seed: -1 is negative"),
    ("--output=/dev/null", "--output: /dev/null"), ("--shape=0.005", "--shape"),
    ("--spare=1", "there is no such flag")])
def test_refused_in_one_sentence(flag, said, capsys):
    assert simulate.main([flag]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1
