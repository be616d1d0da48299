"""Whole sweeps over an engine in memory: which trials begin, which stop, and what is left after a kill."""

import itertools

import pytest

from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.launch import job_record
from jaxtrain.launch import jobs as jobs_command
from jaxtrain.launch import submission as launch
from jaxtrain.launch.job_record import Status
from jaxtrain.launch.sweep import sweeper as sweeper_module
from tests.launch.sweep.plain_halving import RUNGS, STEPS, published
from tests.launch.sweep.simulated import RATE, Killed, Machine, described, loss, swept
from tests.tiers import exhaustive, slow


def test_trials_run_side_by_side_and_are_told(tmp_path, monkeypatch, capsys):
    machine = Machine(tmp_path, crash=(3,))
    found = swept(machine, monkeypatch, pace=40, parallel=4)
    assert machine.most == 4 and [line["trial"] for line in found] == [*range(12)]
    for line in found:
        expected = loss(line["keys"][RATE], 0, 81)
        state = "complete" if line["trial"] != 3 and expected == expected else "failed"
        assert line["state"] == state and line["seed"] == 0 and line["workdir"].endswith(f"trial-{line['trial']:04}")
        assert line["value"] == (expected if state == "complete" else None)
        assert (line["steps"], line["tokens"]) == ((0, 0) if line["trial"] == 3 else (81, 810))
    assert machine.begun.count("trial-0003") == 4, "a job that was killed is submitted again, three times"
    assert "all 12 trials of the budget have begun" in capsys.readouterr().err


@pytest.mark.slow
def test_an_engine_that_takes_no_job_for_a_while_is_asked_again(tmp_path, monkeypatch, capsys):
    def failing(do, times):
        def done(*words):
            if next(times):
                raise UserError("sbatch", "the controller does not answer", "wait")
            return do(*words)
        return done

    machine = Machine(tmp_path)
    submit, machine.status = machine.submit, failing(machine.status, itertools.cycle([0, 0, 1]))
    machine.submit = failing(submit, itertools.cycle([0, 0, 1]))
    found = swept(machine, monkeypatch, parallel=3)
    assert [line["trial"] for line in found] == [*range(12)] and len(machine.begun) == 12
    assert "cannot be submitted now, and will be tried again: sbatch: the" in capsys.readouterr().err
    machine.submit = failing(submit, itertools.repeat(1))
    with pytest.raises(UserError, match="does not answer"):  # nothing has worked yet, so it may never work
        swept(machine, monkeypatch, budget={"trials": 13})


def test_every_point_gets_the_same_seeds(tmp_path, monkeypatch):
    found = swept(Machine(tmp_path), monkeypatch, pace=81, parallel=4, seeds=[5, 6, 9])
    for point in itertools.batched(found, 3) if hasattr(itertools, "batched") else zip(*[iter(found)] * 3, strict=True):
        assert [line["seed"] for line in point] == [5, 6, 9]
        assert len({line["keys"][RATE] for line in point}) == 1 and len({line["value"] for line in point}) == 3
    assert len({line["keys"][RATE] for line in found}) == 4


METHODS = {"random": {"parallel": 3}, "grid": {"method": "grid", "keys": {RATE: [0.1, 0.01, 0.3, 2.0]}, "budget": {}},
           "tpe": {"method": {"name": "tpe", "n_startup_trials": 3}, "parallel": 2, "budget": {"trials": 8}},
           "nsgaii": {"method": {"name": "nsgaii", "population_size": 3}, "budget": {"trials": 8}},
           "halving": {"stop": {"first": 9}, "budget": {"trials": 9}},
           "seeds": {"method": {"name": "tpe", "n_startup_trials": 2}, "seeds": 2, "parallel": 3}}


@pytest.mark.parametrize("method", ["grid", *slow("random", "nsgaii", "halving", "seeds"), *exhaustive("tpe")])
def test_a_sweep_that_is_killed_anywhere_ends_as_one_that_is_not(tmp_path, monkeypatch, method):
    """Killed at every third write: the same points, none twice, and no trial more often than it needs."""
    if "method" in METHODS[method] and method != "grid":
        pytest.importorskip("optuna")
    said = METHODS[method]
    (tmp_path / "whole").mkdir()
    whole = swept(Machine(tmp_path / "whole"), monkeypatch, **said)
    machine, calls, kills = Machine(tmp_path), itertools.count(1), 0

    def killing(do):
        def done(*words, **keys):
            number = next(calls)
            if number % 7 == 3:
                raise Killed
            result = do(*words, **keys)
            if number % 7 == 6:
                raise Killed
            return result
        return done

    monkeypatch.setattr(atomic_files, "write_json", killing(atomic_files.write_json))  # trial.json and job.json
    monkeypatch.setattr(sweeper_module, "write_results", killing(sweeper_module.write_results))
    while True:
        try:
            killed = swept(machine, monkeypatch, pace=27, **said)
            break
        except Killed:
            kills += 1
            assert kills < 100
    if "stop" in said:  # how far a trial comes until it is stopped depends on when somebody looks
        assert "complete" in {line["state"] for line in killed}
        killed, whole = ([{key: line[key] for key in ("trial", "keys")} for line in lines] for lines in (killed, whole))
    assert kills > 3 and [{**line, "seconds": 0, "workdir": ""} for line in killed] == [
        {**line, "seconds": 0, "workdir": ""} for line in whole]
    assert machine.most <= said.get("parallel", 1)
    assert len({f"{line['keys']} {line.get('seed')}" for line in killed}) == len(killed)
    assert all(machine.begun.count(name) <= 2 + ("stop" in said) for name in machine.begun)


def test_a_submission_that_was_cut_off_is_found_where_it_was_submitted(tmp_path, monkeypatch):
    """The sweeper is killed once the engine has a job, before its name is written."""
    machine, submit = Machine(tmp_path), Machine.submit

    def killed_after(job):
        submit(machine, job)
        raise Killed

    monkeypatch.setattr(launch.shutil, "rmtree", lambda *words, **keys: None)  # a kill runs nothing
    said = {"on": "slurm", "budget": {"trials": 2}}
    machine.submit = killed_after
    with pytest.raises(Killed):
        swept(machine, monkeypatch, **said)
    assert [job.id for job in job_record.cut_off(machine.root / "trial-0000")] == [""]
    machine.submit = lambda job: submit(machine, job)
    assert [line["steps"] for line in swept(machine, monkeypatch, **said)] == [81, 81]
    assert machine.begun == ["trial-0000", "trial-0001"]


def test_halving_stops_most_and_finds_the_best(tmp_path, monkeypatch, capsys):
    machine = Machine(tmp_path)
    said = {"stop": {"first": 9}, "parallel": 3, "budget": {"trials": 27}}
    found = swept(machine, monkeypatch, pace=3, **said)
    states = [line["state"] for line in found]
    assert len(found) == 27 and states.count("complete") in range(2, 8) and set(states) == {"complete", "stopped"}
    assert sum(line["steps"] for line in found) < 27 * 81 / 2 and machine.most == 3
    best = min(found, key=lambda line: loss(line["keys"][RATE], 0, 81) if line["keys"][RATE] < 1 else 9)
    assert best["state"] == "complete"
    # What goes on later, when it turns out to be among the best, goes on where it was stopped.
    again = [name for name in machine.begun if machine.begun.count(name) > 1]
    assert again and "continues: it is among the best at step" in capsys.readouterr().err
    stopped = [line for line in found if line["state"] == "stopped"]
    assert all(line["steps"] in range(9, 30) and line["value"] for line in stopped)
    monkeypatch.setattr(machine, "status", lambda job: Status("cancelled"))
    monkeypatch.setattr(jobs_command, "engine_of", lambda name: machine)
    rows = [row.split() for row in jobs_command.table(machine.root)[1:]]
    assert [row[3] for row in rows] == [state.replace("complete", "cancelled") for state in states]


def test_a_trial_that_a_killed_sweeper_decided_to_stop_is_told_by_the_next(tmp_path, monkeypatch):
    machine, told = Machine(tmp_path), []
    cancel = machine.cancel

    def killed_before_it_is_told(job, now):
        job.pause_file.write_text("cancel")
        raise Killed

    def telling(job, now):
        told.append(job.workdir.name)
        cancel(job, now)

    said = {"stop": {"first": 9}, "budget": {"trials": 3}}
    machine.cancel = killed_before_it_is_told
    with pytest.raises(Killed):
        swept(machine, monkeypatch, **said)
    machine.cancel = telling
    assert [line["state"] for line in swept(machine, monkeypatch, **said)].count("stopped") >= 1
    assert told[0] == "trial-0000" and told.count("trial-0000") == machine.begun.count("trial-0000")


def test_a_trial_that_a_cluster_has_preempted_for_good_is_submitted_again(tmp_path, monkeypatch):
    machine, before = Machine(tmp_path), []
    status = machine.status

    def preempted(job):
        if status(job).state == "running" and job.workdir.name == "trial-0001" and not before:
            before.append(job)
            machine.jobs[f"{job.folder}"] = "failed"
            machine.locks.pop(job.workdir).close()
            return Status("failed", "PREEMPTED")
        return status(job)

    machine.status = preempted
    found = swept(machine, monkeypatch, on="slurm", budget={"trials": 2})
    assert machine.begun == ["trial-0000", "trial-0001", "trial-0001"]
    assert [line["steps"] for line in found] == [81, 81]


@pytest.mark.slow
def test_halving_finds_the_highest_where_that_is_best(tmp_path, monkeypatch):
    found = swept(Machine(tmp_path), monkeypatch, pace=3, stop={"first": 9}, budget={"trials": 27},
                  objective={"goal": "maximise"})
    best = max((line for line in found if line["keys"][RATE] < 1), key=lambda line: line["keys"][RATE])
    assert best["state"] == "complete" and sum(line["state"] == "complete" for line in found) < 8


@pytest.mark.slow
def test_one_trial_at_a_time_comes_as_far_as_published(tmp_path, monkeypatch):
    found = swept(Machine(tmp_path), monkeypatch, pace=3, stop={"first": 3}, budget={"trials": 40})
    steps = [*RUNGS, STEPS]
    curves = [{step: value if (value := loss(line["keys"][RATE], 0, step)) == value else 1e9 for step in steps}
              for line in found]
    furthest = dict(sorted(published(curves, workers=1)))  # of equal trials the last counts, which is the highest
    assert [line["steps"] for line in found] == [steps[furthest[line["trial"]]] for line in found]
    assert sum(line["steps"] == STEPS for line in found) in range(1, 6)


@pytest.mark.slow
def test_a_pruner_of_optuna_stops_too(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    found = swept(Machine(tmp_path), monkeypatch, pace=3, parallel=2, method="tpe", stop={
        "pruner": "median", "n_startup_trials": 3, "n_warmup_steps": 5})
    states = [line["state"] for line in found]
    assert "stopped" in states and "complete" in states
    best = min(line["value"] for line in found if line["state"] == "complete")
    assert all(loss(line["keys"][RATE], 0, 81) >= best for line in found if line["state"] == "stopped")


@pytest.mark.parametrize(("budget", "why"), [
    ({"tokens": 2000}, "tokens of 2,000 are spent"),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        ({"time": "0:01:00"}, "the time of the sweep (0:01:00) is over"), ({"dollars": 3}, "of $3.00 are spent")))])
def test_nothing_begins_once_the_budget_is_spent(tmp_path, monkeypatch, capsys, budget, why):
    machine = Machine(tmp_path)
    monkeypatch.setattr(sweeper_module.time, "time", lambda: 2.0 * sum(machine.steps.values()))  # 2 s a step
    monkeypatch.setattr(sweeper_module.child_processes, "gpus", lambda environment: ["0"])
    monkeypatch.setattr("jaxtrain.launch.sweep.trials.Trial.seconds", lambda trial: 3600.0 * (trial.curve.steps > 80))
    job = {"accelerator": "h100", "accelerators_per_node": 1}
    found = swept(machine, monkeypatch, budget={**budget, "trials": 30}, job=job)
    assert why in capsys.readouterr().err and 1 <= len(found) <= 3 and found[0]["dollars"] > 1


def test_trials_get_gpus_of_their_own(tmp_path, monkeypatch):
    machine, given = Machine(tmp_path), []
    monkeypatch.setattr(sweeper_module.child_processes, "gpus", lambda environment: [*"0123456"])
    submit = machine.submit

    def seen(job):
        given.append({trial: job_record.newest(trial).spec.env["CUDA_VISIBLE_DEVICES"] for trial in machine.locks})
        given[-1][job.workdir] = job.spec.env["CUDA_VISIBLE_DEVICES"]
        return submit(job)

    machine.submit = seen
    swept(machine, monkeypatch, parallel=3, job={"accelerators_per_node": 2}, budget={"trials": 6})
    assert len(given) == 6 and {len(side) for side in given} == {1, 2, 3}
    for side in given:
        devices = ",".join(side.values()).split(",")
        assert len(devices) == len({*devices}) == 2 * len(side) and {*devices} <= {*"0123456"}
    with pytest.raises(UserError, match="4 trials at a time with 2 GPUs each need 8, and there are 7"):
        swept(machine, monkeypatch, parallel=4, job={"accelerators_per_node": 2})
    with pytest.raises(UserError, match="2 trials at a time would share 7 GPUs"):
        swept(machine, monkeypatch, parallel=2)


@pytest.mark.slow
def test_what_a_config_refuses_is_told_to_the_sampler(tmp_path, monkeypatch, capsys):
    """Such a point of a grid is a mistake; a sampler may draw some, and goes on."""
    pytest.importorskip("optuna")
    keys = {RATE: {"low": 0.001, "high": 0.1}, "model.num_heads": {"low": 1, "high": 8, "int": True}}
    with pytest.raises(UserError, match=r"does not divide .*in the point optimizer"):
        described(Machine(tmp_path), keys=keys)
    found = swept(Machine(tmp_path), monkeypatch, keys=keys, method="tpe")
    refused = [line for line in found if 64 % line["keys"]["model.num_heads"]]
    assert refused and all(line["state"] == "failed" and line["steps"] == 0 for line in refused)
    assert len(found) == 12 and "is refused: model.num_heads" in capsys.readouterr().err
