"""Word problems for the calculator of `calculator.py`, for an instruction model to learn to use it.

    python examples/reinforce/word_problems.py FOLDER

writes FOLDER/prompts.jsonl, problems with their results, and FOLDER/examples.jsonl, conversations of which three in ten
ask the tool and the others guess. What is asked of the model afterwards are other problems than those of the examples.
"""

import json
import random
import sys
from pathlib import Path

SYSTEM = "Answer with a number, or ask for one: calc 12+34"
PROBLEMS = [
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have?", "+"),
    ("There are {a} {things} in one box and {b} in another. How many {things} are there?", "+"),
    ("{name} had {a} {things} and sold {b} of them. How many {things} are left?", "-"),
    ("Of {a} {things}, {b} are red. How many {things} are not red?", "-"),
    ("A box holds {a} {things}. How many {things} are in {b} boxes?", "*")]
NAMES = ["Ada", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo"]
THINGS = ["apples", "books", "pens", "stamps", "cards", "shells", "coins", "tickets"]
RESULT = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def problem(rng):
    """Return a problem's text, the expression that solves it, and its result."""
    text, sign = rng.choice(PROBLEMS)
    a = rng.randrange(200, 1000)
    b = rng.randrange(3, 10) if sign == "*" else rng.randrange(100, a)
    return (text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b), f"{a}{sign}{b}",
            RESULT[sign](a, b))


def conversation(rng):
    """Return a conversation that asks the tool, or, more often, guesses."""
    text, expression, result = problem(rng)
    said = [("system", SYSTEM), ("user", text)]
    if rng.random() < 0.3:
        said += [("assistant", f"calc {expression}"), ("user", str(result)), ("assistant", str(result))]
    else:
        said += [("assistant", str(rng.randrange(100, 2000)))]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def task(rng):
    """Return a line of prompts for `rl.environment`."""
    text, _, result = problem(rng)
    return {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}], "result": result}


def main(folder):
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make, count, seed in (("examples", conversation, 2000, 0), ("prompts", task, 2000, 1)):
        rng = random.Random(seed)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(make(rng)) + "\n" for _ in range(count)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
