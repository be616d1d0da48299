"""The supervisor, with small programs in place of training that do as they are told."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxtrain.commands import supervise as supervise_command
from jaxtrain.distributed import child_processes, exit_codes
from jaxtrain.errors import UserError
from jaxtrain.launch.supervisor import restart_policy
from jaxtrain.launch.supervisor import supervisor as supervise
from jaxtrain.observe.events import events
from tests.launch.waiting import LIMIT, wait_for

ROOT = Path(__file__).parents[3]
# What the processes do is a list of actions for each "attempt:rank", "rank" or "else".
FAKE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from jaxtrain.distributed import heartbeat

given = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
workdir, rank = Path(given["workdir"]), given.get("process_id", "0")
attempt = max(int(entry.name) for entry in (workdir / "logs").iterdir() if entry.name != "lock")
plan = json.loads((workdir / "plan.json").read_text())
actions = plan.get(f"{attempt}:{rank}", plan.get(rank, plan.get("else", ["exit 0"])))
if "mute" not in actions:
    heartbeat.hold()
(workdir / f"tmp-{rank}").write_text(str(os.getpid()))
(workdir / f"tmp-{rank}").rename(workdir / f"pid-{attempt}-{rank}")

for action in actions:
    verb, _, rest = action.partition(" ")
    if verb == "step":
        with open(workdir / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": int(rest), "loss": 1.0}) + "\\n")
    elif verb == "say":
        print(rest, flush=True)
    elif verb == "raise":
        raise RuntimeError(rest)
    elif verb == "kill":
        os.kill(os.getpid(), int(rest))
    elif verb == "save":  # at SIGTERM, as training does
        def save(number, frame):
            print("saved", flush=True)
            sys.exit(75 if number == signal.SIGTERM else 130)
        signal.signal(signal.SIGTERM, save)
        signal.signal(signal.SIGINT, save)
    elif verb == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif verb == "stacks":
        import faulthandler
        faulthandler.register(signal.SIGUSR1)
    elif verb == "await":  # a file
        (workdir / f"ready-{attempt}-{rank}").touch()
        while not (workdir / rest).exists():
            time.sleep(0.01)
    elif verb == "meet":  # another one
        while not (workdir / f"pid-{attempt}-{rest}").exists():
            time.sleep(0.01)
    elif verb == "tell":
        print(os.environ.get(rest), flush=True)
    elif verb == "outlive":
        while Path(f"/proc/{(workdir / f'pid-{attempt}-{rest}').read_text()}/exe").exists():
            time.sleep(0.01)
    elif verb == "child":
        print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
    elif verb == "exit":
        sys.exit(int(rest))
"""


@pytest.fixture
def run(tmp_path):
    """Starts a supervisor of such programs; ends it, and them, with the test."""
    started = []
    (tmp_path / "fake.py").write_text(FAKE)

    def start(plan, *flags, processes=2, **environment):
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        command = [sys.executable, "-m", "jaxtrain", "supervise", f"--processes={processes}",
                   "--max_backoff=0.05", *flags, "--program", sys.executable, str(tmp_path / "fake.py"), "--",
                   "--config=x.py", f"--workdir={tmp_path}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process):
    err = process.communicate(timeout=LIMIT)[1]
    return process.returncode, err


def kinds(workdir):
    return [event["kind"] for event in events(workdir)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_all_reach_the_end(run, tmp_path):
    plan = {"0": ["say hello", "exit 0"], "1": ["say not on the terminal", "tell JAXTRAIN_SECRET_FILE"]}
    code, err = ended(run(plan))
    assert code == 0 and err == "hello\n"
    assert (tmp_path / "logs/1/process-0.log").read_text() == "hello\n"
    assert (tmp_path / "logs/1/process-1.log").read_text() == f"not on the terminal\n{tmp_path / 'secret'}\n"
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("code", [exit_codes.MISTAKE, exit_codes.STOPPED, exit_codes.INTERRUPTED])
def test_what_is_not_started_again(run, tmp_path, code):
    status, err = ended(run({"else": [f"say because of {code}", f"exit {code}"]}))
    assert status == code and kinds(tmp_path) == ["attempt", "ended"]
    (first,) = (line for line in err.splitlines() if line.startswith("supervise: "))
    assert first.startswith("supervise: first to fail: process ")
    assert first.endswith(f"(exit status {code}): because of {code}") == (code != exit_codes.INTERRUPTED)


@pytest.mark.slow
def test_a_crash_starts_all_again(run, tmp_path):
    """Processes that do not die by themselves are ended and report where they are; the time without steps is told."""
    plan = {"1:0": ["stacks", "deaf", "step 1", "step 2", "await never"], "1:1": ["await ready-1-0", "raise a cable"],
            "2:0": ["step 3"]}
    code, err = ended(run(plan))
    assert code == 0
    assert "supervise: process 1 crashed (exit status 1): RuntimeError: a cable; starting again; logs: " in err
    assert "Current thread" in (tmp_path / "logs/1/process-0.log").read_text()
    assert kinds(tmp_path) == ["attempt", "restart", "attempt"] or kinds(tmp_path)[-1] == "recovered"
    assert not alive((tmp_path / "pid-1-0").read_text())


def test_recovered(run, tmp_path):
    plan = {"1:0": ["step 1", "await never"], "1:1": ["await ready-1-0", "kill 9"], "2:0": ["step 2", "await on"]}
    process = run(plan)
    wait_for(lambda: "recovered" in kinds(tmp_path))
    (tmp_path / "on").touch()
    code, err = ended(process)
    assert code == 0 and "s: process 1 was killed by SIGKILL; all processes train again" in err
    (recovered,) = [event for event in events(tmp_path) if event["kind"] == "recovered"]
    assert recovered["step"] == 2 and recovered["seconds"] > 0


@pytest.mark.slow
def test_a_crash_loop_is_given_up(run, tmp_path):
    """The cause is shown: not who died first of it, nor who died last."""
    plan = {"1": ["meet 2", "raise Gloo all-reduce failed: Connection closed by peer"],
            "2": ["meet 1", "outlive 1", "raise the disk is gone"], "else": ["await never"]}
    code, err = ended(run(plan, "--max_restarts=2", processes=3))
    assert code == exit_codes.STOPPED
    assert kinds(tmp_path) == ["attempt", "restart"] * 3 + ["gave_up"]
    end = err[err.index("gave up: 3 attempts in a row without a new step"):]
    assert "first to fail: process 2 crashed (exit status 1): RuntimeError: the disk is gone" in end
    assert f"the end of {tmp_path}/logs/3/process-2.log:" in end and "Traceback (most recent call last)" in end


def test_progress_makes_a_loop_none(run, tmp_path):
    plan = {f"{n}:0": [f"step {n}", "exit 1"] for n in range(1, 5)}
    code, _ = ended(run({**plan, "5:0": ["exit 0"]}, "--max_restarts=1", processes=1))
    assert code == 0 and kinds(tmp_path).count("restart") == 4


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, exit_codes.SAVED),
                                            (signal.SIGINT, exit_codes.INTERRUPTED)])
def test_a_signal_is_passed_on(run, tmp_path, number, status):
    process = run({"else": ["save", "await never"]})
    wait_for(lambda: all((tmp_path / f"ready-1-{rank}").exists() for rank in range(2)))
    process.send_signal(number)
    code, _ = ended(process)
    assert code == status and kinds(tmp_path) == ["attempt"]
    assert [(tmp_path / f"logs/1/process-{rank}.log").read_text() for rank in range(2)] == ["saved\n"] * 2


def test_a_second_interrupt_ends_at_once(run, tmp_path):
    process = run({"else": ["deaf", "await never"], "0": ["save", "await never"]})
    wait_for(lambda: all((tmp_path / f"ready-1-{rank}").exists() for rank in range(2)))
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: "saved" in (tmp_path / "logs/1/process-0.log").read_text())
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == exit_codes.SAVED  # what the first signal asked for
    assert not alive((tmp_path / "pid-1-1").read_text())


def test_two_in_one_folder(run, tmp_path):
    first = run({"else": ["save", "await never"]}, processes=1)
    wait_for((tmp_path / "ready-1-0").exists)
    code, err = ended(run({}))
    assert code == exit_codes.MISTAKE and f"--workdir: another supervisor works in {tmp_path}; end that one" in err
    assert first.poll() is None


def test_preempted_processes_are_started_again(run, tmp_path):
    code, _ = ended(run({"1:0": ["exit 75"], "1:1": ["exit 75"], "2:0": ["exit 76"], "2:1": ["exit 76"]}))
    assert code == 0 and kinds(tmp_path) == ["attempt", "restart", "attempt", "restart", "attempt"]


@pytest.mark.slow
def test_the_silent_are_ended(run, tmp_path):
    process = run({"1:0": ["await never"], "1:1": ["await never"]}, "--silent=5")
    wait_for((tmp_path / "ready-1-1").exists)
    os.kill(int((tmp_path / "pid-1-1").read_text()), signal.SIGSTOP)
    code, err = ended(process)
    assert code == 0 and "process 1 gave no sign of life; starting again" in err


@pytest.mark.slow
def test_the_silent_are_blamed_where_their_peers_notice_first(run, tmp_path):
    process = run({"1:0": ["await go", "exit 76"], "1:1": ["await never"]}, "--max_restarts=0")
    wait_for(lambda: all((tmp_path / f"ready-1-{rank}").exists() for rank in range(2)))
    os.kill(int((tmp_path / "pid-1-1").read_text()), signal.SIGSTOP)
    time.sleep(supervise._MUTE + 2)
    (tmp_path / "go").touch()
    code, err = ended(process)
    assert code == exit_codes.STOPPED and "first to fail: process 1 gave no sign of life" in err
    assert "SIGKILL" not in err


@pytest.mark.slow
def test_who_writes_down_a_hang_may_end_later(run, tmp_path):
    process = run({"1:0": ["meet 1", "exit 76"],
                   "1:1": ["meet 0", "outlive 0", "await go", "say all is written", "exit 76"]})
    wait_for((tmp_path / "ready-1-1").exists)
    time.sleep(2 * restart_policy.STACKS)
    (tmp_path / "go").touch()
    code, _ = ended(process)
    assert code == 0 and "all is written" in (tmp_path / "logs" / "1" / "process-1.log").read_text()


@pytest.mark.parametrize("jumped, said, why", [
    (7200.0, "F1122 the JAX distributed service detected fatal errors", "the wall clock was set by +7200 s, and JAX"),
    (7200.0, "ValueError: it is 3", "process 0 was killed by SIGABRT"),
    (0.0, "F1122 the JAX distributed service detected fatal errors", "process 0 was killed by SIGABRT"),
])
def test_a_clock_that_was_set_is_the_cause_where_no_other_is_known(tmp_path, jumped, said, why):
    (tmp_path / "log").write_text(f"{said}\n")
    child = SimpleNamespace(code=-6, log=tmp_path / "log", died=1.0, rank=0, cut_off=False,
                            words=lambda: "process 0 was killed by SIGABRT")
    assert supervise.End([child], None, None, "", jumped).why.startswith(why)


def test_a_full_disk_is_waited_for(tmp_path, monkeypatch, capsys):
    """Another start would fail for it, and some of those end the run for good."""
    free = iter([0, 0, 1 << 30])
    monkeypatch.setattr(supervise.shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free)))
    supervisor = supervise.Supervisor(supervise.Settings(), ["--config=x"], tmp_path)
    with supervisor.listening():
        assert supervisor._room()
    assert capsys.readouterr().err == f"supervise: {tmp_path} has too little free space for a start; waiting for more\n"


def test_nobody_is_left_behind(run, tmp_path):
    """All processes end, even stopped ones, when the supervisor is killed."""
    process = run({"0": ["await never"], "1": ["mute", "deaf", "await never"]})
    wait_for(lambda: all((tmp_path / f"ready-1-{rank}").exists() for rank in range(2)))
    pids = [int((tmp_path / f"pid-1-{rank}").read_text()) for rank in range(2)]
    os.kill(pids[1], signal.SIGSTOP)
    process.kill()
    wait_for(lambda: not any(map(alive, pids)))


def test_the_heartbeat_alone_ends_a_process(tmp_path):
    """Without prctl, processes end when the other end of the socket is gone."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(child_processes, "die_with_parent", lambda: None)
        child = child_processes.start([sys.executable, "-c", "from jaxtrain.distributed import heartbeat; import time; "
                                "heartbeat.hold(); print(1, flush=True); time.sleep(1000)"], 0, 0, tmp_path / "log",
                               {**os.environ, "PYTHONPATH": str(ROOT)})
        stack.callback(child.kill)
        wait_for(lambda: (tmp_path / "log").read_text())
        heard = child.heard
        wait_for(lambda: child.look() or child.heard > heard)
        child.line.close()
        assert child.process.wait(LIMIT) == -signal.SIGKILL


def test_what_a_process_started_ends_with_it(run, tmp_path):
    assert ended(run({"else": ["child", "exit 0"]}, processes=1))[0] == 0
    wait_for(lambda: not alive((tmp_path / "logs/1/process-0.log").read_text().strip()))  # it was sent SIGKILL


@pytest.mark.parametrize("environment, processes, expected", [
    ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2, ["0,1", "2,3"]),
    ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 2, ["GPU-a", "GPU-b"]),
    ({"CUDA_VISIBLE_DEVICES": "0,1"}, 1, [None]),
    ({"CUDA_VISIBLE_DEVICES": "0,1,2", "JAX_PLATFORMS": "cpu"}, 2, [None, None]),
    ({"CUDA_VISIBLE_DEVICES": ""}, 2, [None, None]),
])
def test_accelerators_are_shared_out(environment, processes, expected):
    found = child_processes.shares(environment, processes)
    assert [share.get("CUDA_VISIBLE_DEVICES") for share in found] == expected


def test_accelerators_that_do_not_divide():
    with pytest.raises(UserError, match="--processes: 2 processes cannot share 3 GPUs evenly; choose a divisor of 3"):
        child_processes.shares({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2)


@pytest.mark.parametrize("words, message", [
    (["--processes=0"], "--processes: 0 is not a valid number"),
    (["--processes=2", "--min_processes=3"], "--min_processes: 3 is not between 1 and --processes=2"),
    (["--nodes=2"], "--coordinator: --nodes=2 has none"),
    (["--nodes=2", "--node_rank=2"], "--node_rank: 2 is not below"),
    (["--nodes=2", "--coordinator=a:1", "--processes=2", "--min_processes=1"], "cannot change its size"),
    (["--silent=-1"], "--silent: -1.0 is negative"),
    (["--", "--workdir=x"], "CONFIG: it is missing"),
    (["--", "--config=x.py", "--process_id=1"], "--process_id: the supervisor gives it"),
    (["--config=x.py"], "--config=x.py: the config and the flags of the run come after --; write jaxtrain supervise "
     "--processes=N -- --config=x.py\n"),
    (["x.py:a", "--processes=2", "--workdir=w", "--", "--adopt"], "x.py:a: the config and the flags of the run come "
     "after --; write jaxtrain supervise --processes=N -- x.py:a --workdir=w --adopt\n"),
    (["--processes", "2", "x.py"], "x.py: the config and the flags of the run come after --; write "),
    (["--process=2", "--", "x.py"], "--process=2: there is no such flag; did you mean '--processes'?"),
])
def test_mistakes(words, message, capsys):
    assert supervise_command.main(words) == exit_codes.MISTAKE
    assert message in capsys.readouterr().err


def test_the_parent_is_light():
    code = "import sys, jaxtrain.supervise; sys.exit(sum(name in sys.modules for name in ('jax', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0


@pytest.mark.parametrize("code, words", [
    (-9, "was killed by SIGKILL"), (137, "was killed by SIGKILL"), (134, "was killed by SIGABRT"),
    (1, "crashed (exit status 1)"), (76, "gave up, to be started again (exit status 76)"),
    (130, "was stopped by Ctrl-C (exit status 130)"), (255, "crashed (exit status 255)"),
    (-34, "was killed by SIGRTMIN"), (-40, "was killed by signal 40")])
def test_statuses_in_words(code, words):
    assert exit_codes.words(code) == words
