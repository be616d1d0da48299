"""Ask models every sum that none of them was tuned on, and print how many answers are formed as JSON and right.

    python examples/recipes/instructions/asked.py NAME=WORKDIR ...
"""

import runpy
import sys
from pathlib import Path

SUMS = runpy.run_path(f"{Path(__file__).parents[2]}/sft/sums_as_json.py")

if __name__ == "__main__":
    for name, workdir in (word.split("=", 1) for word in sys.argv[1:]):
        formed, right = SUMS["shares"](workdir)
        print(f"{name}: {100 * formed:.1f} % formed, {100 * right:.1f} % right")
