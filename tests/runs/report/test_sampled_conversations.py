"""The page of conversations: all roles and rewards are there, hostile text stays text, and a large run has a bound."""

import json
import re

import pytest

from jaxtrain.commands.report import main
from jaxtrain.runs.report import sampled_conversations as conversations
from jaxtrain.runs.report.report_page import ReportPage
from tests.runs.report.recorded import recorded

HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x00\x1b[31m\ud800"
TURNS = [{"role": "system", "content": "Use tools.", "tokens": 0}, {"role": "user", "content": HOSTILE, "tokens": 9},
         {"role": "assistant", "content": "<tool_call>{}</tool_call>", "tokens": 7, "reward": 0.0,
          "finish_reason": "stop"},
         {"role": "tool", "content": "84", "tokens": 2},
         {"role": "assistant", "content": "84", "tokens": 1, "reward": 0.75, "finish_reason": "length"}]
TALK = {"prompt": "", "reward": 0.75, "scores": {"environment": 0.75, "brevity": 0.5}, "text": "84", "tokens": [1] * 19,
        "finish_reason": "length", "turns": TURNS}
ANSWER = {"prompt": [{"role": "user", "content": "1+1="}], "text": "2", "tokens": [1, 2], "finish_reason": "stop"}


def answers(workdir, step, *lines):
    (workdir / "rollouts").mkdir(exist_ok=True)
    (workdir / "rollouts" / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path):
    workdir = tmp_path / "run<b>"
    recorded(workdir)
    return workdir


def test_turns_have_roles_rewards_and_ends_and_no_text_is_markup(run):
    answers(run, 1, TALK, ANSWER)
    answers(run, 12, ANSWER | {"reward": -1}, {"turns": [5, {"role": "<i>"}], "reward": float("nan")}, {"prompt": None})
    page = ReportPage([run]).conversations("report.html")
    seen = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    assert page.count("<script") == 1 and "<img" not in page and "run<b>" not in page and "<i>" not in page
    assert '<a href="report.html">' in seen and "u202e" in seen and "\\ud800" in seen and "\x1b" not in page
    assert [*re.findall(r'<div class="turn (\w+)">', seen)][:5] == ["system", "user", "assistant", "tool", "assistant"]
    assert "· reward 0.75 · environment 0.75 · brevity 0.5 · 8 tokens · 2 turns · cut off" in seen
    assert "· 7 tokens</span>" in seen and "· 1 token · reward 0.75 · cut off</span>" in seen
    assert seen.count('data-step="') == 2 and "mean reward 0.75, from 0.75 to 0.75" in seen and "· reward -1 · " in seen
    assert "not rewarded yet" in seen and "2 answers" in seen
    page.encode()


def test_a_large_run_has_a_page_of_a_bounded_size(run):
    long = TALK | {"turns": [{"role": "assistant", "content": "x" * 10**4, "tokens": 1, "reward": 0.0}] * 50}
    for step in range(1, 200):
        answers(run, step, *[long] * (20 if step > 196 else 1))
    found = conversations.steps(run)
    assert len(found) == conversations.STEPS and (found[0].number, found[-1].number) == (1, 199)
    last = found[-1].answers[0]
    assert len(last.turns) == conversations.TURNS and last.more == 10 and "[… 8,000 characters …]" in last.turns[0].text
    assert len(found[-1].answers) + found[-1].more == 20
    size = len(ReportPage([run]).conversations())
    assert 10**6 < size < 2 * conversations.ROOM


def test_the_report_links_the_page_if_there_is_one(run, tmp_path, capsys):
    main([f"{run}"])
    assert not (run / "report-conversations.html").exists()
    assert "conversations.html" not in (run / "report.html").read_text()
    answers(run, 1, TALK)
    main([f"{run}", f"--output={tmp_path}/my page.html"])
    assert '<a href="my%20page-conversations.html">' in (tmp_path / "my page.html").read_text()
    assert '<a href="my%20page.html">' in (tmp_path / "my page-conversations.html").read_text()
