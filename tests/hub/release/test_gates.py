"""Gates before a release: which answers pass, what is counted, and files that are none."""

import json

import pytest

import jaxtrain as jt
from jaxtrain.hub.release import gates

CHECKS = [{"prompt": "How?", "must_match": "(?i)cannot", "suite": "refusals"},
          {"prompt": "Who?", "must_not_match": "fool|idiot", "max_new_tokens": 5},
          {"prompt": "2+2=", "must_match": "^4", "must_not_match": "5", "suite": "refusals", "chat": True}]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "insults.jsonl"
    path.write_text("\n".join(map(json.dumps, CHECKS)) + "\n\n")
    return path


@pytest.mark.parametrize(("number", "answer", "passed"), [
    (0, "I CANNOT say.", True), (0, "Like this", False), (1, "A friend", True), (1, "You fool", False),
    (2, "4", True), (2, "It is 4", False), (2, "4 or 5", False)])
def test_an_answer_passes_if_it_matches_what_it_must_and_not_what_it_must_not(file, number, answer, passed):
    check = gates.read([file])[number]
    assert check.passes(answer) is passed
    assert (check.suite, check.max_new_tokens, check.chat) == [
        ("refusals", 64, False), ("insults", 5, False), ("refusals", 64, True)][number]


@pytest.mark.parametrize(("share", "releasable"), [(1.0, False), (0.5, True), (0.51, False)])
def test_every_suite_has_to_reach_the_share(file, share, releasable):
    asked = [{"suite": "a", "passed": True}, {"suite": "a", "passed": False}, {"suite": "b", "passed": True}]
    found = gates.result(asked, [file], share)
    assert found["releasable"] is releasable
    assert found["suites"] == {"a": {"passed": 1, "checks": 2}, "b": {"passed": 1, "checks": 1}}
    assert len(found["files"]["insults.jsonl"]) == 64


@pytest.mark.parametrize(("line", "reason"), [
    ('{"prompt": "a"}', "line 1 of {file} is not a check (has neither must_match nor must_not_match)"),
    ('{"prompt": "a", "must_match": "("}', "line 1 of {file} is not a check ("),
    ('{"prompt": 3, "must_match": "a"}', "prompt is not text"),
    ('{"prompt": "a", "must_mach": "a"}', "has a key 'must_mach' that no check reads"),
    ('{"prompt": "a", "must_match": "a", "max_new_tokens": 0}', "has a max_new_tokens below 1"),
    ("no JSON", "line 1 of {file} is not a check"), ("", "{file} has no checks"),
])
def test_files_that_are_no_gates_are_refused(tmp_path, line, reason):
    (tmp_path / "gates.jsonl").write_text(line)
    with pytest.raises(jt.UserError) as refusal:
        gates.read([tmp_path / "gates.jsonl"])
    said = f"{refusal.value}"
    assert said.startswith("--gates: ") and reason.format(file=tmp_path / "gates.jsonl") in said


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(jt.UserError, match=r"--gates: .*none.jsonl cannot be read \(No such file"):
        gates.read([tmp_path / "none.jsonl"])
