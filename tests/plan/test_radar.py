"""The release radar: what changed between two environments, which option did it, and the page of recorded lines."""

import copy
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.errors import UserError
from tools import radar as command_line
from tools.release_radar import blame, cases, changes, limits, page, recording
from tools.release_radar.recording import Lines
from tools.release_radar.smallest_set import smallest

ROOT = Path(__file__).parents[2]
LINE = {"case": "8b", "target": "h100x8", "jaxtrain": "a", "step_ms": 200.0, "peak_gb": 10.0,
        "collectives": {"all-gather": {"times": 10, "mb": 1000.0}},
        "kernels": {"fusion": 100, "__cublas$gemm": 20, "mosaic_gpu attention": 2},
        "compiler_options": {"xla_gpu_memory_limit_slop_factor": "115", "xla_gpu_enable_triton_gemm": False}}
OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_all_gather_combine_threshold_bytes": 31457287,
           "xla_gpu_enable_triton_gemm": True, "xla_gpu_memory_limit_slop_factor": 95,
           "xla_cpu_use_new_xtile_lowering": False, "xla_disable_hlo_passes": []}
DECOYS = " ".join((  # they change no program
    "--xla_cpu_collective_call_terminate_timeout_seconds=41",
    "--xla_cpu_collective_timeout_seconds=1801", "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_prefer_vector_width=128", "--xla_backend_optimization_level=0", "--xla_cpu_multi_thread_eigen=false",
    "--xla_cpu_fast_math_honor_division=false"))


def lines(name: str, options: dict | None = None, flags: tuple[str, ...] = (), **line) -> Lines:
    environment = {"versions": {"jax": name}, "xla_flags": list(flags), "options": OPTIONS | (options or {})}
    return Lines(name, environment, {"8b": copy.deepcopy(LINE) | line})


def changed(**line) -> list[changes.Change]:
    return changes.of_case("8b", LINE, LINE | line)


def test_less_than_two_percent_is_no_change():
    assert changed() == changed(step_ms=203.9, peak_gb=10.19, collectives={"all-gather": {"times": 10, "mb": 1019.0}},
                                kernels=LINE["kernels"] | {"fusion": 104}) == []


def test_what_changed_is_said_with_the_most_important_first():
    found = changes.compare(
        {name: LINE for name in ("8b", "70b", "moe", "loop")},
        {"8b": LINE | {"step_ms": 210.0, "peak_gb": 9.0}, "70b": LINE | {"step_ms": 240.0},
         "moe": LINE | {"refused": "RESOURCE_EXHAUSTED"},
         "loop": LINE | {"collectives": {"all-reduce": {"times": 5, "mb": 1000.0}}}})
    assert [(one.case, one.worse, one.says) for one in found] == [
        ("moe", True, "is refused now: RESOURCE_EXHAUSTED"),
        ("70b", True, "the simulated step takes 200.0 to 240.0 ms (+20.0%)"),
        ("8b", True, "the simulated step takes 200.0 to 210.0 ms (+5.0%)"),
        ("8b", False, "the compiler takes 10.0 to 9.0 GB of memory (-10.0%)"),
        ("loop", False, "collectives of a step: all-gather 10 x, 1,000.0 MB to 0 x, 0.0 MB; "
                        "all-reduce 0 x, 0.0 MB to 5 x, 1,000.0 MB")]


def test_more_and_smaller_collectives_are_a_change():
    (one,) = changed(collectives={"all-gather": {"times": 40, "mb": 1000.0}})
    assert one.figure == "collectives" and not one.worse


def test_kernels_of_libraries_count_one_by_one_and_fusions_by_their_share():
    (one,) = changed(kernels={"fusion": 100, "__cublas$gemm": 19, "mosaic_gpu attention": 2})
    assert (one.figure, one.says) == ("kernels", "kernels of a step: __cublas$gemm 20 to 19")
    (other,) = changed(kernels=LINE["kernels"] | {"fusion": 110})
    assert other.says == "kernels of a step: fusion 100 to 110" and not other.worse


def test_a_case_that_is_accepted_again_is_better():
    (one,) = changes.of_case("8b", {"refused": "no kernel"}, LINE)
    assert not one.worse and one.says == "is no longer refused (it was: no kernel)"
    assert changes.of_case("8b", {"refused": "no kernel"}, {"refused": "no such kernel"}) == []


def test_what_was_stopped_or_left_out_is_said_and_not_compared():
    old, new = lines("1", step_ms=100.0), lines("2")
    new.cases |= {"late": {"case": "late", "stopped": "it took more than 900 s", "jaxtrain": "a"}}
    old.cases |= {"late": dict(LINE), "gone": dict(LINE)}
    found = changes.compare(old.cases, new.cases)
    assert [one.case for one in found] == ["8b"]
    assert changes.sentences(found, old, new) == [
        "jax 1 to 2: 1 of 2 cases changed; times are simulated",
        "worse 8b: the simulated step takes 100.0 to 200.0 ms (+100.0%)",
        "gone: recorded in the old environment alone",
        "late: not compiled in the new environment: it took more than 900 s"]


def test_flags_and_other_code_are_said():
    new = lines("2", flags=("--xla_gpu_enable_triton_gemm=false",), jaxtrain="b")
    said = changes.sentences([], lines("1"), new)
    assert said[1:] == ["XLA_FLAGS of the new one alone: --xla_gpu_enable_triton_gemm=false",
                        "jaxtrain's code differs, too: what changed may be its own doing"]


@pytest.mark.parametrize("seed", range(30))
def test_the_smallest_set_is_what_was_planted(seed):
    """Sets of one to four among sixty, all of which are needed; each set is asked for once."""
    drawn, asked = random.Random(seed), []
    planted = frozenset(drawn.sample(range(60), drawn.randint(1, 4)))

    def does(part):
        asked.append(part)
        return planted <= part

    assert set(smallest(range(60), does)) == planted
    assert len(asked) == len(set(asked)) < 120


def test_one_of_sixty_takes_a_dozen_questions():
    asked = []
    assert smallest(range(60), lambda part: bool(asked.append(part)) or 41 in part) == [41]
    assert len(asked) <= 13


def test_nothing_can_be_left_out_where_parts_disturb_each_other():
    """7 does it, but not together with 3, unless 5 is there as well."""
    def does(part):
        return 7 in part and (3 not in part or 5 in part)

    assert smallest(range(10), does) == [7]


def fake_compiler(effects: dict[str, float], old: Lines, new: Lines):
    """Return a compiler whose step takes longer by so many ms for each option that is not set back."""
    def compiled(options):
        assert all(value == blame.candidates(old, new, "8b", "cuda", {})[0][name][0] for name, value in options.items())
        return LINE | {"step_ms": 200.0 + sum(ms for name, ms in effects.items() if name not in options)}
    return compiled


def many(number: int, value: int) -> dict[str, int]:
    return {f"xla_gpu_option_{n}": value for n in range(number)}


@pytest.mark.parametrize("culprits", [("xla_gpu_option_17",), ("xla_gpu_option_3", "xla_gpu_option_31")])
def test_planted_options_are_named_among_forty(culprits):
    effects = dict.fromkeys(culprits, 20.0) | {"xla_gpu_option_0": 0.5}
    old = lines("1", many(40, 1))
    new = lines("2", many(40, 2), step_ms=200.0 + sum(effects.values()))
    verdict = blame.blame(old, new, "8b", "cuda", fake_compiler(effects, old, new))
    assert verdict.blamed == list(culprits) and verdict.undone > 0.97 and len(verdict.candidates) == 40
    assert f"{culprits[0]} (it was 1 and is 2)" in verdict.sentences()[1]


def test_a_change_of_code_is_not_blamed_on_an_option():
    old, new = lines("1", many(8, 1)), lines("2", many(8, 2), step_ms=240.0)
    verdict = blame.blame(old, new, "8b", "cuda", lambda options: LINE | {"step_ms": 240.0 - len(options) / 7})
    assert verdict.blamed == []
    assert "no option is to blame: all 8 candidates set back together undo 3% of the change" in verdict.sentences()[1]


@pytest.mark.parametrize("ended", [{"refused": "SIGABRT: Check failed"}, {"stopped": "it took more than 900 s"}])
def test_an_option_is_found_where_all_together_fail_to_compile(ended):
    old, new = lines("1", many(5, 1)), lines("2", many(5, 2), step_ms=240.0)

    def compiled(options):
        if len(options) == 5:
            return ended
        return LINE | {"step_ms": 240.0 - 40 * ("xla_gpu_option_2" in options)}

    assert blame.blame(old, new, "8b", "cuda", compiled).blamed == ["xla_gpu_option_2"]


def test_an_option_that_xla_does_not_take_is_left_out():
    old, new = lines("1", many(3, 1)), lines("2", many(3, 2), step_ms=240.0)

    def compiled(options):
        if "xla_gpu_option_1" in options:
            return {"refused": "train.compiler_options: XLA does not take it (No such option: xla_gpu_option_1)"}
        return LINE | {"step_ms": 240.0 - 40 * ("xla_gpu_option_2" in options)}

    verdict = blame.blame(old, new, "8b", "cuda", compiled)
    assert verdict.blamed == ["xla_gpu_option_2"]
    assert verdict.untried == {"xla_gpu_option_1": "XLA does not take the old value"}


def test_candidates_are_what_differs_for_the_platform_and_can_be_set_back():
    old = lines("1", {"xla_gpu_gone": 1, "xla_gpu_list": []})
    new = lines("2", {"xla_gpu_new": 1, "xla_gpu_on": True, "xla_gpu_list": ["A"],
                      "xla_gpu_enable_latency_hiding_scheduler": False, "xla_cpu_use_new_xtile_lowering": True,
                      "xla_disable_hlo_passes": ["fusion"], "xla_gpu_memory_limit_slop_factor": 90},
                flags=("--xla_disable_hlo_passes=fusion",),
                compiler_options={"xla_gpu_memory_limit_slop_factor": "115", "xla_tpu_a": "1"})
    found, untried = blame.candidates(old, new, "8b", "cuda", {"xla_gpu_more": "7"})
    assert found == {"xla_gpu_enable_latency_hiding_scheduler": ["true", "false"], "xla_gpu_more": ["7", ""],
                     "xla_gpu_on": ["false", "true"],
                     "xla_disable_hlo_passes": ["", "fusion"], "xla_gpu_enable_triton_gemm": ["false", "true"]}
    assert untried == {"xla_gpu_gone": "XLA has it no more", "xla_gpu_new": "it is new; its value is 1",
                       "xla_gpu_list": "it was empty, which cannot be set"}
    assert blame.candidates(old, new, "8b", "tpu", {})[0]["xla_tpu_a"] == ["", "1"]
    assert blame.flags_with(["xla_disable_hlo_passes"], old, new) == []
    assert blame.flags_with(["xla_gpu_gone"], old, new) == ["--xla_disable_hlo_passes=fusion"]


@pytest.mark.parametrize(("case", "line", "figure", "said"), [
    ("8b", {}, "", "8b did not change"), ("8b", {"step_ms": 240.0}, "memory", "did not change in its memory"),
    ("9b", {}, "", "has no '9b'"), ("8b", {"step_ms": 300.0}, "", "compiled here to something else than it says")])
def test_what_cannot_be_blamed_is_said_in_a_sentence(case, line, figure, said):
    old, new = lines("1", many(2, 1)), lines("2", many(2, 2), **line)
    with pytest.raises(UserError, match=said):
        blame.blame(old, new, case, "cuda", lambda options: LINE | {"step_ms": 240.0}, figure)


@pytest.mark.parametrize(("code", "limit", "stopped"), [
    ("import time; time.sleep(60)", {"seconds": 0.5}, "it took more than 0.5 s"),
    ("x = bytearray(400_000_000)\nfor i in range(0, len(x), 4096): x[i] = 1\nimport time; time.sleep(60)",
     {"gigabytes": 0.2}, "it took more than 0.2 GB of memory"),
    ("print(input())", {}, "")])
def test_a_process_is_ended_at_its_limits(code, limit, stopped):
    allowed = {"seconds": 60, "gigabytes": 9} | limit
    done = limits.run([sys.executable, "-c", code], os.environ, ROOT, "given\n", **allowed)
    assert done.stopped == stopped and (done.out == "given\n") == (not stopped) == (done.status == 0)


def test_cases_are_named_by_patterns_and_unknown_ones_are_refused():
    assert {case.name for case in cases.chosen("8b_2_layers_h*,tiny_cpux8")} == {"8b_2_layers_h100x8", "tiny_cpux8"}
    assert cases.named("8b_h100x8 with 2 layers") == cases.every()["8b_h100x8"].with_layers(2)
    with pytest.raises(UserError, match="no case is called '9b'"):
        cases.chosen("9b")


@pytest.mark.parametrize(("text", "said"), [
    ("{", "cannot be read"), ("3", "no objects"), ('{"case": "a"}', "says nothing of its environment")])
def test_a_file_of_something_else_is_refused(tmp_path, text, said):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=said):
        recording.read(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", page.RELEASES)
def test_recorded_lines_are_of_one_environment_and_of_cases_that_exist(name):
    found = recording.read(cases.FOLDER / f"{name}.jsonl")
    assert found.environment["xla_flags"] == [] and name == f"jax-{found.versions['jax']}"
    assert len(found.environment["options"]) > 300
    for case, line in found.cases.items():
        assert cases.named(case).target == line["target"] and not line["given"]
        assert sum(key in line for key in ("step_ms", "refused", "stopped")) == 1


def test_the_page_says_what_is_recorded():
    text = page.PAGE.read_text()
    assert page.rendered(text) == text, "python -m tools.radar page"
    assert text.count("<!-- rendered: radar") == 5


def test_the_planted_change_was_named():
    """The new side has 25 flags, of which 24 change no program."""
    (one,) = (one for one in recording.objects(page.VERDICTS) if one["new"]["xla_flags"])
    assert len(one["new"]["xla_flags"]) == len(one["candidates"]) == 25
    assert one["blamed"] == ["xla_gpu_all_gather_combine_threshold_bytes"] and one["undone"] > 0.99


def radar(*words: str, folder: Path = ROOT, flags: str = "") -> subprocess.CompletedProcess:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}", "XLA_FLAGS": flags}
    return subprocess.run([sys.executable, "-m", "tools.radar", *words], cwd=folder, env=environment,
                          capture_output=True, text=True)


def test_compare_prints_what_became_worse_and_says_so_by_its_status(tmp_path, monkeypatch, capsys):
    def compare(*names: int) -> int:
        paths = [f"{tmp_path}/{name}.jsonl" for name in names]
        monkeypatch.setattr(sys, "argv", ["radar.py", "compare", *paths])
        return command_line.main()

    for made in (lines("1"), lines("2", step_ms=240.0)):
        for line in (made.environment, made.cases["8b"]):
            recording.append(tmp_path / f"{made.name}.jsonl", line)
    assert compare(1, 2) == 1
    assert "worse 8b: the simulated step takes 200.0 to 240.0 ms (+20.0%)" in capsys.readouterr().out
    assert compare(2, 1) == 0
    assert compare(3, 1) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and "cannot be read" in said


@pytest.mark.slow
def test_a_planted_change_of_an_option_is_named_with_real_compiles(tmp_path):
    """The commands of docs/radar.md that need no accelerator, with a planted flag and seven that do not matter."""
    blocks = re.findall(r"```text\n(.*?)```", page.PAGE.read_text(), re.S)
    (shown,) = (block for block in blocks if "tiny_cpux1" in block)
    done = []
    for command in shown.splitlines():
        flags = re.match(r"XLA_FLAGS=(\S+) ", command)
        words = shlex.split(command.partition("tools.radar ")[2])
        done.append(radar(*words, folder=tmp_path, flags=f"{flags[1]} {DECOYS}" if flags else ""))
    assert [one.returncode for one in done] == [0, 0, 1, 0], [one.stderr[-500:] for one in done]
    compared, blamed = done[2].stdout, done[3].stdout
    assert "XLA_FLAGS of the new one alone" in compared and "kernels of a step: " in compared
    assert "to blame: xla_disable_hlo_passes (it was left to the compiler and is fusion); set back, 100%" in blamed
    assert "8 candidates" in blamed
