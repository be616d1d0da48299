"""Sums, answered as plain numbers and as JSON: fine-tuning that teaches a model a format, measured.

    python examples/sft/sums_as_json.py FOLDER            # writes the records
    python examples/sft/sums_as_json.py measure WORKDIR   # asks a run every sum that it was not tuned on

FOLDER/numbers.jsonl is for a model to begin with: sums of two numbers below twenty, answered as numbers, and
differences and products, answered as JSON. FOLDER/json.jsonl has two in three of the sums with answers such as
{"sum": 7}; the others are those that `measure` asks.
"""

import json
import random
import sys
from pathlib import Path


def sums():
    """All prompts with their results; the first two thirds are tuned on."""
    found = [(f"{a}+{b}=", a + b) for a in range(20) for b in range(20)]
    random.Random(0).shuffle(found)
    return found


def write(folder):
    folder.mkdir(parents=True, exist_ok=True)
    both = sums()
    others = [one for a in range(20) for b in range(20) for one in (
        (f"{a}-{b}=", json.dumps({"minus": a - b})), (f"{a}*{b}=", json.dumps({"times": a * b})))]
    files = {"numbers": [(prompt, f"{result}") for prompt, result in both] * 10 + others * 5,
             "json": [(prompt, json.dumps({"sum": result})) for prompt, result in both[:len(both) * 2 // 3]] * 10}
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(
            json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in records))


def shares(workdir):
    """The share of answers that have the format, and of those with the right sum."""
    import jaxtrain as jt

    run, state = jt.load_model(workdir)
    asked = sums()[len(sums()) * 2 // 3:]
    answers = jt.generate(run, state, [prompt for prompt, _ in asked], max_new_tokens=16, temperature=0,
                          batch_size=len(asked), tokenizer=workdir)
    values = [value_of(answer.text) for answer in answers]
    formed = sum(value is not None for value in values)
    right = sum(value == result for value, (_, result) in zip(values, asked, strict=True))
    return formed / len(asked), right / len(asked)


def measure(workdir):
    formed, right = shares(workdir)
    print(f"of {len(sums()[len(sums()) * 2 // 3:])} answers {formed:.0%} have the format, {right:.0%} the right sum")


def value_of(text):
    """The sum in an answer, or None where it is not exactly the format."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found["sum"] if isinstance(found, dict) and list(found) == ["sum"] else None


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(sys.argv[2])
    else:
        write(Path(sys.argv[1]))
