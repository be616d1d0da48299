"""Sums of two digits: a verifiable task for `rl.reward`, and text to begin with that is right at times.

    python examples/reinforce/addition.py FOLDER

writes FOLDER/prompts.jsonl, all sums with their result, and FOLDER/examples.jsonl, of whose answers four in ten are
right.
"""

import json
import random
import sys
from pathlib import Path


def reward(answer, record):
    """Return 1 for the right sum, else 0."""
    return float(answer == str(record["sum"]))


def main(folder):
    rng, digits = random.Random(0), range(10)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [{"prompt": f"{a}+{b}=", "sum": a + b} for a in digits for b in digits]
    drawn = [rng.choice(prompts) for _ in range(4000)]
    examples = [{"prompt": one["prompt"], "completion": str(one["sum"] if rng.random() < 0.4 else rng.randrange(19))}
                for one in drawn]
    for name, records in (("prompts", prompts), ("examples", examples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
