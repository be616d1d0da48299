"""Write pairs of answers to sums, of which the one as JSON is preferred to the plain number.

    python examples/recipes/instructions/pairs.py FOLDER    # that examples/sft/sums_as_json.py wrote
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    records = [json.loads(line) for line in (folder / "json.jsonl").read_text().splitlines()]
    (folder / "pairs.jsonl").write_text("".join(json.dumps({
        "prompt": one["prompt"], "chosen": one["completion"], "rejected": f"{json.loads(one['completion'])['sum']}"})
        + "\n" for one in records))
