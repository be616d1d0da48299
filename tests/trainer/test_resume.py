"""Nothing committed is lost: stopped, killed or failed, a run goes on as if it had not been."""

import errno
import importlib
import json
import os
import shutil
import signal
import threading
import time

import jax
import numpy as np
import pytest

from jaxtrain.checkpoint import CheckpointManager, manager, verify
from jaxtrain.checkpoint.restore import find_good
from jaxtrain.config.load import load_config
from jaxtrain.distributed import exit_codes
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.observe.events import events
from jaxtrain.run import Run
from jaxtrain.train_step.optimizers import make_schedule
from jaxtrain.trainer.rollback import AnomalyGuard
from tests.each_batch import at_each_batch
from tests.tiers import exhaustive, slow
from tests.tiny import slow_process, tiny_flags, wait_for_checkpoint, wait_for_lines

pytestmark = pytest.mark.usefixtures("cache", "on_two", "built_once")  # programs are traced and compiled once
STEPS = 12
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=1",
        "data.global_batch_size=8", f"train.steps={STEPS}", "train.eval_every=3", "checkpoint.every=3",
        "resilience.check_every=0"]
STATUS = {signal.SIGTERM: exit_codes.SAVED, signal.SIGINT: exit_codes.INTERRUPTED}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return tiny_flags(tmp_path_factory, TINY)


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory):
    """A run that nothing interrupts."""
    workdir = tmp_path_factory.mktemp("straight") / "work"
    assert main([*flags, f"--workdir={workdir}"]) == 0
    return workdir


@pytest.fixture
def halfway(straight, tmp_path):
    """The same run as it was after step 9, where the last checkpoint but one is."""
    shutil.copytree(straight, tmp_path / "halfway")
    shutil.rmtree(tmp_path / "halfway" / "checkpoints" / str(STEPS))
    return tmp_path / "halfway"


@pytest.mark.slow
def test_longer_on_purpose(flags, straight, tmp_path, capsys):
    """A finished run goes on with the schedule of its new length, and says so; its first steps stay as they were."""
    shutil.copytree(straight, tmp_path / "longer")
    again = [*flags, f"--workdir={tmp_path / 'longer'}", "--config.train.steps=16"]
    assert main(again) == 2 and "; add --may_change=train.steps to continue it so, or give" in capsys.readouterr().err
    allowed = "--may_change=train.steps,optimizer.warmup_steps,optimizer.learning_rate"
    assert main([*again, "--config.optimizer.learning_rate=2e-3", allowed]) == 0
    said = capsys.readouterr().err
    assert f"from step {STEPS} on train.steps=16 (was {STEPS})" in said and "learning rate: " in said
    config = load_config(tmp_path / "longer/config.json")
    schedule = make_schedule(config.optimizer, 16)
    lines = [json.loads(line) for line in (tmp_path / "longer/metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line}
    assert {step: rate for step, rate in rates.items() if step > STEPS} == {
        step: pytest.approx(float(schedule(step - 1))) for step in range(STEPS + 1, 17)}
    before = (straight / "metrics.jsonl").read_text().splitlines()
    assert (tmp_path / "longer/metrics.jsonl").read_text().splitlines()[:len(before)] == before
    assert main(again[:-1]) == 2  # back again would be a change, too


def told(workdir):
    """Return the lines of metrics.jsonl without the times."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    times = ("_s", "_wait", "mfu", "goodput")
    return [{key: value for key, value in line.items() if not key.endswith(times)} for line in lines]


def saved(flags, workdir, step=STEPS):
    config = load_config(flags[0].partition("=")[2], dict(f.removeprefix("--config.").split("=") for f in flags[1:]))
    run = importlib.import_module("jaxtrain.trainer.loop").build(config)  # once
    return jax.tree.leaves(jax.device_get(CheckpointManager(workdir / "checkpoints").restore(step, run.abstract)))


def assert_same_run(flags, workdir, straight):
    assert told(workdir) == told(straight)
    for ours, theirs in zip(saved(flags, workdir), saved(flags, straight), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_straight(flags, straight):
    lines = told(straight)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6, 9, 12]
    assert saved(flags, straight)[0] == STEPS  # the state's own step
    assert CheckpointManager(straight / "checkpoints").meta(STEPS)["step"] == STEPS


@pytest.mark.parametrize("number", [
    pytest.param(signal.SIGINT, marks=pytest.mark.slow), pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)],
    ids=lambda number: number.name)
def test_stopped(flags, straight, tmp_path, capfd, monkeypatch, number):
    def signalled(self, done, metrics, look=AnomalyGuard.look):
        if done == 4:
            os.kill(os.getpid(), number)
        look(self, done, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(AnomalyGuard, "look", signalled)
        assert main([*flags, f"--workdir={tmp_path}"]) == STATUS[number]
    err = capfd.readouterr().err
    step = CheckpointManager(tmp_path / "checkpoints").latest()
    assert step == 5 and err.endswith(f"saved at step {step}; run the same command again to resume\n")
    assert "stopping after this step; Ctrl-C ends at once" in err
    assert [line["step"] for line in told(tmp_path) if "loss" in line] == list(range(1, step + 1))
    assert main([*flags, f"--workdir={tmp_path}"]) == 0
    assert_same_run(flags, tmp_path, straight)


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_killed(flags, straight, tmp_path, capsys, kills):
    for lines, newest in ((7, 3), (12, 6))[:kills]:  # lines of 3 steps and an evaluation for each checkpoint
        with slow_process(flags, tmp_path) as started:
            wait_for_lines(tmp_path, lines, started)
            wait_for_checkpoint(tmp_path, newest, started)
            started.kill()
        assert newest <= CheckpointManager(tmp_path / "checkpoints").latest() < STEPS
    capsys.readouterr()
    assert main([*flags, f"--workdir={tmp_path}", "--config.checkpoint.every=5", "--config.checkpoint.keep=9"]) == 0
    assert "resumed from step " in capsys.readouterr().err
    assert_same_run(flags, tmp_path, straight)


@pytest.mark.parametrize("times, status", [
    pytest.param(3, exit_codes.DONE, marks=pytest.mark.exhaustive),
    pytest.param(100, exit_codes.RESTART, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_at_the_end(flags, straight, tmp_path, monkeypatch, capsys, times, status):
    """The last save is tried again; if it comes to nothing, the next start does the last steps again."""
    looks, usage = iter(range(times)), shutil.disk_usage
    last = tmp_path / "work" / "metrics.jsonl"

    def full(path):
        ended = last.exists() and f'{{"step": {STEPS}, ' in last.read_text()
        return type(usage(path))(0, 0, 0) if ended and next(looks, None) is not None else usage(path)

    monkeypatch.setattr(manager, "AGAIN_S", (0.01,) * 5)
    monkeypatch.setattr(shutil, "disk_usage", full)
    assert main([*flags, f"--workdir={tmp_path}/work"]) == status
    if status != exit_codes.DONE:
        assert "checkpoint: step 12 could not be saved in" in capsys.readouterr().err.splitlines()[-1]
        monkeypatch.undo()
        assert main([*flags, f"--workdir={tmp_path}/work"]) == 0
    assert_same_run(flags, tmp_path / "work", straight)


@pytest.mark.exhaustive
def test_a_storage_that_does_not_answer_at_the_end(flags, straight, tmp_path, monkeypatch, capsys):
    looks, usage = iter((errno.ENOSPC, errno.EIO, errno.ESTALE)), shutil.disk_usage
    last = tmp_path / "work" / "metrics.jsonl"

    def broken(path):
        ended = last.exists() and f'{{"step": {STEPS}, ' in last.read_text()
        if ended and (number := next(looks, None)):
            raise OSError(number, os.strerror(number))
        return usage(path)

    monkeypatch.setattr(manager, "AGAIN_S", (0.01,) * 5)
    monkeypatch.setattr(shutil, "disk_usage", broken)
    assert main([*flags, f"--workdir={tmp_path}/work"]) == exit_codes.DONE
    assert capsys.readouterr().err.count("could not be saved (") == 3
    assert_same_run(flags, tmp_path / "work", straight)


@pytest.mark.exhaustive
def test_sigterm_ends_the_wait_for_a_disk_that_is_full(flags, tmp_path, monkeypatch, capsys):
    usage, last = shutil.disk_usage, tmp_path / "work" / "metrics.jsonl"

    def full(path):
        ended = last.exists() and f'{{"step": {STEPS}, ' in last.read_text()
        return type(usage(path))(0, 0, 0) if ended else usage(path)

    def waiting(seconds, sleep=time.sleep):
        if seconds == 1 and threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGTERM)
        sleep(0.01)

    monkeypatch.setattr(manager, "AGAIN_S", (1000,) * 5)
    monkeypatch.setattr(shutil, "disk_usage", full)
    monkeypatch.setattr(time, "sleep", waiting)
    assert main([*flags, f"--workdir={tmp_path}/work"]) == exit_codes.RESTART
    err = capsys.readouterr().err
    assert err.count("the last step is in memory only; saving it again in 1000 s") == 1
    assert err.count("checkpoint 12 could not be saved") == 2  # the second one after the signal


@pytest.mark.exhaustive  # an elastic run and one of two processes go on elsewhere, too
def test_on_another_mesh(flags, straight, halfway):
    mesh = ["--config.mesh.data=1", "--config.mesh.tensor=2"]
    assert main([*flags, *mesh, f"--workdir={halfway}"]) == 0
    for ours, theirs in zip(told(halfway), told(straight), strict=True):
        assert ours.keys() == theirs.keys() and ours["step"] == theirs["step"]
        key = "loss" if "loss" in ours else "eval_loss"
        np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-5)
    for ours, theirs in zip(saved(flags, halfway), saved(flags, straight), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_finished(flags, straight, capsys):
    def files():  # run.json tells of the last start, and so of the commit it was made from; so does the heartbeat
        return {path: path.read_bytes() for path in straight.rglob("*")
                if path.is_file() and path.name not in ("run.json", "process-0")}

    before = files()
    assert main([*flags, f"--workdir={straight}"]) == 0
    assert capsys.readouterr().err.endswith(
        f"nothing to do: {straight} has all {STEPS} steps; to train longer, add --config.train.steps={2 * STEPS} "
        "--may_change=train.steps,optimizer.warmup_steps\n")
    assert files() == before


@pytest.mark.exhaustive  # test_order.py has an evaluation that a stop left out
def test_an_evaluation_cut_off_is_made_up_for(flags, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "work")
    lines = (straight / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "work" / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert main([*flags, f"--workdir={tmp_path}/work"]) == 0
    assert_same_run(flags, tmp_path / "work", straight)


def test_other_shapes_are_refused(flags, straight, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "work")
    other = [*flags, f"--workdir={tmp_path}/work", "--config.model.embed_dim=64"]
    assert main(other) == 2
    assert capsys.readouterr().err == (
        f"--workdir: {tmp_path}/work holds a run with model.embed_dim=32, this config has 64; give another --workdir "
        "or --config.model.embed_dim=32\n")
    (tmp_path / "work" / "config.json").unlink()  # so that only the checkpoint knows
    assert main(other) == 2
    assert "holds a run with model.embed_dim=32, this config has 64" in capsys.readouterr().err.splitlines()[-1]
    (tmp_path / "work" / "run.json").unlink()
    assert main([*other, "--adopt"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "in the checkpoint" in line and "in this run; build the model and optimizer of that checkpoint" in line


def test_a_run_that_failed_before_its_first_step_begins_anew(flags, tmp_path, monkeypatch, capsys):
    """Keys may be corrected; a run that has trained a step is kept, though it has saved nothing."""
    def failing(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Run, "init", failing)
    corrected, runs = [*flags, f"--workdir={tmp_path}", "--config.model.embed_dim=64"], []
    for words in (corrected[:-1], corrected, corrected):
        with pytest.raises(RuntimeError, match="out of memory"):
            main(words)
        runs.append((identity(tmp_path), json.loads((tmp_path / "config.json").read_text())["model"]["embed_dim"]))
    assert runs[0][0] != runs[1][0] and runs[1] == runs[2] and [width for _, width in runs] == [32, 64, 64]
    assert capsys.readouterr().err.count(f"{tmp_path} holds a run with model.embed_dim=32, this config has 64; that "
                                         "one has trained nothing, and a new run begins\n") == 1
    whole = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(whole[:-9])  # damage is told, and nothing is removed for it
    assert main(corrected[:-1]) == 2 and (tmp_path / "config.json").read_text() == whole[:-9]
    (tmp_path / "config.json").write_text(whole)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(corrected[:-1]) == 2
    assert "holds a run with model.embed_dim=64, this config has 32; give" in capsys.readouterr().err


@pytest.fixture(scope="module")
def foreign(flags, tmp_path_factory):
    """Another run, with the same shapes and other initial values."""
    workdir = tmp_path_factory.mktemp("foreign") / "work"
    assert main([*flags, "--config.train.seed=1", f"--workdir={workdir}"]) == 0
    return workdir


def identity(workdir):
    return json.loads((workdir / "run.json").read_text())["run"]


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused(flags, halfway, foreign, capsys):
    shutil.copytree(foreign / "checkpoints" / str(STEPS), halfway / "checkpoints" / str(STEPS))
    before = (halfway / "run.json").read_bytes(), (halfway / "metrics.jsonl").read_bytes()
    for _ in range(2):
        assert main([*flags, f"--workdir={halfway}"]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == (
            f"checkpoint: step {STEPS} in {halfway} belongs to another run than run.json there (id {identity(foreign)} "
            f"instead of {identity(halfway)}); move it away, or give --adopt to resume from it anyway")
    assert before == ((halfway / "run.json").read_bytes(), (halfway / "metrics.jsonl").read_bytes())


@pytest.mark.exhaustive
def test_a_checkpoint_of_another_run_is_adopted(flags, straight, halfway, foreign):
    """Once adopted, it may be gone on from again."""
    shutil.rmtree(halfway / "checkpoints" / "9")
    shutil.copytree(foreign / "checkpoints" / "9", halfway / "checkpoints" / "9")
    before = identity(halfway)
    for adopt in (["--adopt"], []):
        assert main([*flags, *adopt, f"--workdir={halfway}"]) == 0
        assert identity(halfway) == before != identity(foreign)
        assert json.loads((halfway / "run.json").read_text())["adopted"] == [[identity(foreign), 9]]
        assert verify.saved_meta(halfway / "checkpoints" / str(STEPS))["run"] == before
        shutil.rmtree(halfway / "checkpoints" / str(STEPS))
    assert told(halfway)[:-4] == told(straight)[:-4]
    ours, theirs = ([line["loss"] for line in told(workdir)[-4:] if "loss" in line] for workdir in (halfway, foreign))
    assert ours == theirs  # the data are the same


@pytest.mark.slow
def test_a_checkpoint_alone_is_adopted_by_another_config(flags, foreign, tmp_path, capsys):
    shutil.copytree(foreign / "checkpoints", tmp_path / "checkpoints")
    assert main([*flags, f"--workdir={tmp_path}"]) == 2
    assert "holds a run with train.seed=1, this config has 0; give" in capsys.readouterr().err
    assert main([*flags, "--adopt", f"--workdir={tmp_path}"]) == 0
    assert identity(tmp_path) != identity(foreign)


@pytest.mark.parametrize("lost", [
    pytest.param(["run.json", "config.json"], marks=pytest.mark.slow),
    *(pytest.param([one], marks=pytest.mark.exhaustive) for one in ("run.json", "config.json"))])
def test_without_run_files_the_checkpoint_tells(flags, straight, halfway, capsys, lost):
    for name in lost:
        (halfway / name).unlink()
    assert main([*flags, "--config.optimizer.learning_rate=0.5", f"--workdir={halfway}"]) == 2
    assert "holds a run with optimizer.learning_rate=" in capsys.readouterr().err
    assert main([*flags, f"--workdir={halfway}"]) == 0
    assert_same_run(flags, halfway, straight)
    assert identity(halfway) == identity(straight)


@pytest.mark.parametrize("names, same", [
    *exhaustive((["run.json"], False)), *slow((["run.json", "config.json"], True))])
def test_the_identity_of_a_run_that_begins(flags, straight, tmp_path, names, same):
    """It stays if the workdir's run begins again; with another config, which config.json would refuse, it may not."""
    for name in names:
        shutil.copy(straight / name, tmp_path)
    assert main([*flags, f"--workdir={tmp_path}"]) == 0
    assert (identity(tmp_path) == identity(straight)) == same and len(identity(tmp_path)) == 16


@pytest.mark.slow
def test_a_copy_from_the_mirror_knows_its_run(flags, straight, halfway, tmp_path):
    mirrored = [*flags, f"--config.checkpoint.mirror={tmp_path / 'mirror'}"]
    assert main([*mirrored, f"--workdir={halfway}"]) == 0
    assert main([*mirrored, f"--workdir={tmp_path / 'lost'}"]) == 0
    assert identity(tmp_path / "lost") == identity(straight) and json.loads(
        (tmp_path / "lost" / "run.json").read_text())["adopted"] == []
    other = [*mirrored, "--config.train.seed=1", f"--workdir={tmp_path / 'other'}"]
    assert main([*other, "--config.checkpoint.mirror="]) == 0
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    assert main(other) == 2  # its own are lost, and the mirror has copies of another run


@pytest.mark.parametrize("edited, told", [
    (["seal"], "checkpoint 11 is damaged (good.json is that of step 9)"),
    (["fingerprint"], "checkpoint 11 is damaged (it is the checkpoint of step 9)"),
    (["fingerprint", "meta"], "halfway holds the state of step 9; move it away")], ids=["seal", "one", "both"])
def test_a_checkpoint_under_another_step(flags, halfway, capsys, edited, told):
    """The folder was renamed, and its files were edited to fit."""
    folder = (halfway / "checkpoints" / "9").rename(halfway / "checkpoints" / "11")
    record = json.loads((folder / "good.json").read_text())
    (folder / "good.json").unlink()
    if edited == ["seal"]:
        verify.write_mark(folder.parent, 11, {key: record[key] for key in ("files", "fingerprint", "meta")})
        edited = []
    for part in edited:
        file = folder / part / "metadata"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"step": 11}))
    assert main([*flags, f"--workdir={halfway}"]) == 2
    assert told in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_read(flags, halfway, capsys):
    broken = halfway / "checkpoints" / "9"
    for file in broken.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert main([*flags, f"--workdir={halfway}"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.splitlines()[0].startswith("checkpoint 9 is damaged (")
    for _ in range(2):  # and it is not forgotten
        assert f"checkpoint: none of the checkpoints in {broken.parent} is good (9.dam" in err.splitlines()[-1]
        assert main([*flags, f"--workdir={halfway}"]) == 2
        err = capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over(flags, straight, tmp_path, capsys):
    """The run goes on from the good one before it, and ends as if nothing had been."""
    shutil.copytree(straight, tmp_path / "work")
    file = max((tmp_path / "work" / "checkpoints" / str(STEPS)).rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main([*flags, f"--workdir={tmp_path / 'work'}"]) == 0
    err = capsys.readouterr().err
    assert f"checkpoint {STEPS} is damaged (state/" in err and "resumed from step 9" in err
    assert_same_run(flags, tmp_path / "work", straight)
    assert (tmp_path / "work" / "checkpoints" / f"{STEPS}.damaged").is_dir()


@pytest.mark.slow
def test_one_that_loads_as_another_is_passed_over(flags, straight, tmp_path, capsys, monkeypatch):
    """The files are whole, and still the state is not what was saved, as when a device's memory is bad."""
    shutil.copytree(straight, tmp_path / "work")
    right = verify.saved_fingerprint

    def other(folder):
        saved = right(folder)
        return {path: (what, "0" * 16) for path, (what, _) in saved.items()} if folder.name == str(STEPS) else saved

    with monkeypatch.context() as patch:
        patch.setattr(verify, "saved_fingerprint", other)
        patch.setattr(CheckpointManager, "save", lambda *args: 0.0)
        assert main([*flags, f"--workdir={tmp_path / 'work'}"]) == 0
    assert "resumed from step 9" in capsys.readouterr().err
    assert main([*flags, f"--workdir={tmp_path / 'work'}"]) == 0
    assert_same_run(flags, tmp_path / "work", straight)


@pytest.mark.slow
def test_metrics_that_are_damaged_in_the_middle(flags, straight, halfway, capsys):
    lines = (halfway / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (halfway / "metrics.jsonl").write_bytes(b"".join([*lines[:3], b"\0" * 50 + b"\xff\n", *lines[4:]]))
    assert main([*flags, f"--workdir={halfway}"]) == 0
    assert "are damaged (1 of them), as after a power failure" in capsys.readouterr().err
    kept = (halfway / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert kept[:3] == lines[:3] and kept[4:12] == lines[4:12]


def test_what_a_checkpoint_says_of_its_run(flags, straight):
    meta = CheckpointManager(straight / "checkpoints").meta(STEPS)
    line = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()][-2]
    run = json.loads((straight / "run.json").read_text())
    assert meta["step"] == STEPS == line["step"] and meta["time"] > 0
    assert (meta["tokens"], meta["loss"]) == (line["tokens"], line["loss"])
    assert meta["config"] == json.loads((straight / "config.json").read_text())
    assert run.items() <= meta.items() and {"config_hash", "git_commit", "packages", "mesh"} <= run.keys()


def test_seconds_held_up_are_in_the_metrics(straight):
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    told = {line["step"] for line in lines if "checkpoint_blocked_s" in line}
    assert told == {4, 7, 10}  # the step after each save
    kinds = [event["kind"] for event in events(straight)]
    assert kinds == ["checkpoint"] * 4
    assert all(event["blocked_s"] > 0 for event in events(straight))


@pytest.mark.parametrize("error", [
    *exhaustive(RuntimeError("the disk is gone")), *slow(UserError("data.source", "it is gone", "find it"))])
def test_an_error_in_the_data_thread(flags, tmp_path, monkeypatch, capsys, error):
    """The error itself is raised, and what was saved before it is whole."""
    def failing(step, place):
        if step == 7:
            raise error
        return place()

    with monkeypatch.context() as patch:
        at_each_batch(failing, patch.setattr)
        if isinstance(error, UserError):
            assert main([*flags, f"--workdir={tmp_path}"]) == 2
            assert capsys.readouterr().err.endswith("data.source: it is gone; find it\n")
        else:
            with pytest.raises(RuntimeError, match="the disk is gone"):
                main([*flags, f"--workdir={tmp_path}"])
    step, _ = find_good(tmp_path)
    assert step == 6


@pytest.mark.slow
def test_an_error_in_the_metrics_thread(flags, tmp_path, monkeypatch):
    from jaxtrain import observe

    def full(self, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(observe.Progress, "write", full)
    with pytest.raises(OSError, match="No space left"):
        main([*flags, f"--workdir={tmp_path}"])
