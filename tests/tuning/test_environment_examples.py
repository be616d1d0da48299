"""The environments of examples/reinforce, played by hand."""

import importlib.util
import random
import re
from pathlib import Path

import pytest

from jaxtrain.tuning.environments.protocol import Asked
from jaxtrain.tuning.environments.worker_pool import WorkerPool

EXAMPLES = Path(__file__).parents[2] / "examples/reinforce"
PAGE = Path(__file__).parents[2] / "docs/environments.md"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_calculator():
    module = loaded("calculator")
    one = module.Calculator()
    one.reset({"result": 63}, 0)
    assert one.step("calc 50+13") == ("63", 0.0, False) and one.step("63") == ("", 1.0, True)
    assert one.step("62") == ("", 0.0, True)
    hostile = ["__import__('os')", "9**9**9", "1+", "(" * 99, "1.5+1", "'a'*9", "9" * 99 + "*" + "9" * 99]
    assert [module.calculated(text) for text in hostile] == ["error"] * len(hostile)
    assert module.calculated("2*(3-5)") == "-4"


def test_the_guessing_game():
    module = loaded("guess_number")
    one = module.GuessTheNumber()
    assert one.reset({}, 7) == "1 to 16?"
    assert one.step("x") == ("a number", 0.0, False)
    assert one.step("0") == ("more", 0.0, False) and one.step("99") == ("less", 0.0, False)
    assert one.step(str(one.number)) == ("", pytest.approx(0.7), True)
    messages = module.played(random.Random(0))
    assert messages[0]["role"] == "user" and messages[-1]["role"] == "assistant"


@pytest.mark.parametrize(("answer", "said", "reward"), [
    ("```python\ndef double(x):\n    return 2 * x\n```", "", 1.0),
    ("def double(x):\n    return x", "AssertionError", 0.0),
    ("x = [0] * 2**40", "MemoryError", 0.0),
    ("open('a', 'w').write('x' * 2**24)", "OSError: [Errno 27] File too large", 0.0),
    ("import os\nos.kill(os.getpid(), 11)", "it ends with status -11", 0.0),
    ("raise SystemExit", "it ends before the tests do", 0.0),
    ("import os\nos._exit(0)", "it ends before the tests do", 0.0),
    ("def", "SyntaxError: invalid syntax", 0.0)])
def test_code_that_must_pass_tests(answer, said, reward):
    one = loaded("code_tests").CodeTests()
    one.reset({"tests": "assert double(2) == 4"}, 0)
    assert one.step(answer) == (said, reward, not said)
    if said:
        assert one.step("def double(x): return x + x") == ("", 0.8, True)


@pytest.mark.slow  # by the limit of five seconds of processor time
def test_code_without_an_end(monkeypatch):
    module = loaded("code_tests")
    monkeypatch.setattr(module, "SECONDS", 1)
    assert module.failure_of("while True: pass") == "it takes too long"
    assert module.failure_of("import time\ntime.sleep(100)") == "it takes too long"


def test_the_documented_one(tmp_path):
    source, = re.findall(r"^```python\n# guess\.py\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (tmp_path / "guess.py").write_text(source)
    pool = WorkerPool(f"{tmp_path}/guess.py:Guess", {}, 1, 60.0, 0)
    number = next(n for n in range(1, 17) if pool.turns([Asked(f"{n}", {}, 3, [f"{n}"])])[0].done)
    said = [pool.turns([Asked("a", {}, 3, ["-", f"{number + 1}", f"{number}"][:many])])[0] for many in range(4)]
    assert [turn.observation for turn in said] == ["Which number from 1 to 16?", "more", "less", ""]
    assert [turn.reward for turn in said] == [0, 0, 0, 1]
    pool.end()


def test_word_problems():
    module, calculator = loaded("word_problems"), loaded("calculator")
    rng = random.Random(0)
    for _ in range(200):
        text, expression, result = module.problem(rng)
        assert calculator.calculated(expression) == f"{result}"
        numbers = re.findall(r"\d+", text)
        assert numbers == re.findall(r"\d+", expression) and "{" not in text and result >= 0
    talks = [module.conversation(rng)["messages"] for _ in range(400)]
    asked = [talk for talk in talks if len(talk) == 5]
    assert 0.2 < len(asked) / len(talks) < 0.4
    assert all(talk[2]["content"].startswith("calc ") and talk[3]["content"] == talk[4]["content"] for talk in asked)
    assert module.task(rng)["prompt"][0] == {"role": "system", "content": module.SYSTEM}
