"""A calculator as a tool, for `rl.environment`: sums of two numbers, for a model that has seen the tool used.

    python examples/reinforce/calculator.py FOLDER

writes FOLDER/prompts.jsonl, tasks with their results, and FOLDER/examples.jsonl, conversations of whose answers three
in ten ask the tool and the others guess.
"""

import ast
import json
import operator
import random
import sys
from pathlib import Path

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator:
    """One conversation: "calc EXPRESSION" asks the tool, and any other answer is final."""

    def reset(self, record, seed):
        """Begin with the record's prompt."""
        self.right = str(record["result"])

    def step(self, answer):
        """Return what is said to an answer, its reward, and whether the conversation is over."""
        if answer.startswith("calc "):
            return calculated(answer.removeprefix("calc ")), 0.0, False
        return "", float(answer.strip() == self.right), True


def calculated(text):
    """Return the value of an expression of whole numbers, as text."""
    try:
        return str(_value(ast.parse(text[:100], mode="eval").body))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return "error"


def _value(node):
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if max(abs(left), abs(right)) > 10**20:
            raise ValueError("too large")
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("not a sum")


def main(folder):
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10, 60) for b in range(10, 40)]
    prompts = [{"prompt": [{"role": "user", "content": f"{a}+{b}"}], "result": a + b} for a, b in pairs]

    def conversation(a, b):
        said = [("user", f"{a}+{b}")]
        if rng.random() < 0.3:
            said += [("assistant", f"calc {a}+{b}"), ("user", str(a + b)), ("assistant", str(a + b))]
        else:
            said += [("assistant", str(rng.randrange(20, 99)))]
        return {"messages": [{"role": role, "content": content} for role, content in said]}
    examples = [conversation(*rng.choice(pairs)) for _ in range(6000)]
    for name, records in (("prompts", prompts), ("examples", examples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
