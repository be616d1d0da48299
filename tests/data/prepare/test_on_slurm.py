"""The script for Slurm: its parts, at once or not at all, end in the bytes of one run."""

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from jaxtrain.commands.prepare import main
from jaxtrain.data.prepare.prepare import Options, prepare, prepare_part
from tests.launch.slurm.cluster import Cluster, missing

ROOT = Path(__file__).parents[3]
OPTIONS = ["--task_bytes=3000", "--eval_fraction=0.1"]


def write(path: Path, documents: int = 200) -> Path:
    texts = [f"document {i % 150}: " + "some words " * (i % 150 % 13) for i in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def rendered(tmp_path: Path, *flags: str) -> Path:
    script = tmp_path / "a script.sh"
    source = write(tmp_path / "it's.jsonl")
    assert main([f"--input={source}", f"--output={tmp_path / 'out'}", *OPTIONS, "--engine=slurm", "--parts", "3",
                 f"--script={script}", *flags]) == 0
    subprocess.run(["bash", "-n", script], check=True)
    return script


def job(script: Path, *words: str, part: int | None = None) -> subprocess.Popen:
    """Start a job of the script as Slurm does."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SLURM_CPUS_PER_TASK": "1"}
    if part is not None:
        environment["SLURM_ARRAY_TASK_ID"] = str(part)
    return subprocess.Popen(["bash", script, "run", *words], env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def end(*jobs: subprocess.Popen) -> list[str]:
    said = [job.communicate(timeout=60) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), said
    return [out + err for out, err in said]


def wanted(tmp_path: Path, deduplicate: bool = False) -> dict[str, str]:
    options = Options(eval_fraction=0.1, task_bytes=3000, deduplicate=deduplicate)
    return files(prepare([str(tmp_path / "it's.jsonl")], tmp_path / "want", options).path)


@pytest.mark.slow
def test_parts_twice_at_once_and_one_never_give_the_bytes_of_one_run(tmp_path):
    script = rendered(tmp_path)
    end(*(job(script, part=part) for part in (0, 0, 2)))
    ledgers = {path.name for path in (tmp_path / "out/unfinished").glob("*.json")}
    assert ledgers == {f"{number:05}.json" for number in range(7) if number % 3 != 1}
    assert not (tmp_path / "out/manifest.json").exists()
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")}
    said, = end(job(script))  # part 1 never ran
    assert "documents" in said and files(tmp_path / "out") == wanted(tmp_path)
    assert len(times) == 10 and times.items() <= {path: path.stat().st_mtime_ns for path in times}.items()
    end(job(script, part=1))  # late, and nothing to do
    assert files(tmp_path / "out") == wanted(tmp_path)


@pytest.mark.slow
def test_with_deduplication_parts_are_compared_before_they_become_tokens(tmp_path):
    script, stage = rendered(tmp_path, "--deduplicate"), "--stage=duplicates"
    early = job(script, part=0)
    assert "duplicates have not been searched yet; run --stage=duplicates first" in early.communicate(timeout=60)[1]
    assert early.returncode == 2
    end(job(script, stage, part=0), job(script, stage, part=2))
    keys = tmp_path / "out/unfinished"
    made = {path: path.stat().st_mtime_ns for path in keys.glob("*.keys.npy")}
    end(job(script, stage))
    now = {path: path.stat().st_mtime_ns for path in keys.glob("*.keys.npy")}
    assert (len(made), len(now)) == (5, 7) and made.items() <= now.items()
    end(job(script, part=1), job(script, part=2))
    end(job(script))
    assert files(tmp_path / "out") == wanted(tmp_path, deduplicate=True)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["left_out"] == {"equal to another": 50}


def test_a_part_that_comes_too_late_says_nothing(tmp_path, monkeypatch):
    """All was finished by somebody else while it was at its task: on a file system without locks."""
    monkeypatch.setattr("jaxtrain.data.prepare.job.fcntl", None)
    source, options = [str(write(tmp_path / "it's.jsonl"))], Options(eval_fraction=0.1, task_bytes=3000)

    def late(line):
        if line.startswith("tokens: 0 of"):
            prepare(source, tmp_path / "out", options)

    prepare_part(source, tmp_path / "out", options, "0/7", say=late)
    monkeypatch.undo()
    assert files(tmp_path / "out") == wanted(tmp_path)


@pytest.mark.parametrize("deduplicate", [False, True])
def test_each_stage_waits_for_the_one_before(tmp_path, deduplicate):
    """A program named sbatch keeps what it is given."""
    script = rendered(tmp_path, *["--deduplicate"] * deduplicate)
    (tmp_path / "sbatch").write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/calls\n'
                                     f'echo "$(wc -l < {tmp_path}/calls);cluster"\n')
    (tmp_path / "sbatch").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script, "--partition=cpu"], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    calls = [line.split(" --partition=cpu ")[1].replace(str(script), "S")
             for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == (["--array=0-2 S run --stage=duplicates", "--dependency=afterany:1 S run --stage=duplicates",
                      "--dependency=afterok:2 --array=0-2 S run", "--dependency=afterany:3 S run"] if deduplicate else
                     ["--array=0-2 S run", "--dependency=afterany:1 S run"])
    (tmp_path / "sbatch").write_text("#!/bin/bash\nexit 1\n")
    assert subprocess.run(["bash", script], env=environment, capture_output=True).returncode == 1


def test_without_a_file_the_script_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a b.jsonl", "c.jsonl"):
        write(tmp_path / name)
    flags = ["--input", "a b.jsonl", "c.jsonl", "--engine", "slurm", "--output=out", "--workers=3", "--eod", ""]
    assert main(flags) == 0
    script = capsys.readouterr().out
    assert "--cpus-per-task=3" in script and "--array=0-0" in script  # no more parts than tasks
    assert f"  cd {tmp_path}\n" in script
    assert " jaxtrain prepare --input 'a b.jsonl' c.jsonl --output=out --eod '' \\\n" in script
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("flags", "words"), [
    (["--part=3/3"], "--part: '3/3' is not one of 3 parts"), (["--part=x"], "--part: 'x' is not one of 16 parts"),
    (["--stage=duplicates"], "--deduplicate only"), (["--parts=2"], "--parts: --engine=local has no such flag"),
    (["--engine=slurm", "--part=0/2"], "assigns the parts"), (["--engine=slurm", "--parts=-1"], "--parts: -1 is not a"),
    (["--engine=slurm", "--script=/no/such/folder/a"], "cannot be written"),
    (["--engine=slurm", "--input=none"], "none does not exist")])
def test_a_mistake_is_one_line(tmp_path, capsys, flags, words):
    assert main([f"--input={write(tmp_path / 'a.jsonl')}", f"--output={tmp_path / 'out'}", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


# ----------------------------------------------------------------------------------------------------- a real Slurm

@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    """Two nodes on this machine."""
    with Cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        yield


def submitted(tmp_path: Path, script: Path) -> str:
    """Everything, to the end -> what the job that finishes said."""
    done = subprocess.run(["bash", script, f"--output={tmp_path}/log-%j"], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    last = done.stdout.split("; job ")[1].split()[0]
    for _ in range(600):
        states = subprocess.run(["squeue", "-h", "-j", last, "-o", "%T"], text=True, capture_output=True).stdout
        if not states.strip():
            return (tmp_path / f"log-{last}").read_text()
        time.sleep(0.1)
    pytest.fail(f"job {last} is {states}")


@pytest.mark.skipif(bool(missing()), reason="apt-get install --no-install-recommends slurm-wlm munge")
@pytest.mark.parametrize("flags", [
    pytest.param([], id="plain", marks=pytest.mark.exhaustive),  # the others have its jobs, too
    pytest.param(["--deduplicate"], id="deduplicated", marks=pytest.mark.slow),
    pytest.param(["broken"], id="broken", marks=pytest.mark.slow)])
def test_a_real_slurm_gives_the_bytes_of_one_run(tmp_path, slurm, monkeypatch, flags):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = rendered(tmp_path, *[flag for flag in flags if flag != "broken"], "--workers=1")
    if "broken" in flags:  # jobs of the array die, and the last one does all
        text = script.read_text().replace("shift\n", "shift; [ -z \"${SLURM_ARRAY_TASK_ID:-}\" ] || exit 1\n")
        script.write_text(text)
    said = submitted(tmp_path, script)
    assert "documents by tokens" in said
    assert files(tmp_path / "out") == wanted(tmp_path, "--deduplicate" in flags)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason="apt-get install --no-install-recommends slurm-wlm munge")
def test_a_mistake_in_the_input_is_told_by_the_last_job_of_a_real_slurm(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = rendered(tmp_path, "--deduplicate", "--workers=1")
    with open(tmp_path / "it's.jsonl", "a") as file:
        file.write("{")
    said = submitted(tmp_path, script)
    assert "is not a JSON object" in said and said.count("\n") == 1
    assert not (tmp_path / "out/manifest.json").exists()
