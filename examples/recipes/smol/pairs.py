"""Write pairs of answers to word problems: to ask the calculator is preferred to guessing.

    python examples/recipes/smol/pairs.py FOLDER    # writes FOLDER/pairs.jsonl
"""

import json
import random
import runpy
import sys
from pathlib import Path

PROBLEMS = runpy.run_path(f"{Path(__file__).parents[2]}/reinforce/word_problems.py")


def pair(rng):
    """Return a prompt with its preferred and its rejected answer."""
    text, expression, _ = PROBLEMS["problem"](rng)
    return {"prompt": [{"role": "system", "content": PROBLEMS["SYSTEM"]}, {"role": "user", "content": text}],
            "chosen": [{"role": "assistant", "content": f"calc {expression}"}],
            "rejected": [{"role": "assistant", "content": f"{rng.randrange(100, 2000)}"}]}


if __name__ == "__main__":
    rng = random.Random(2)
    Path(sys.argv[1], "pairs.jsonl").write_text("".join(json.dumps(pair(rng)) + "\n" for _ in range(500)))
