"""Write docs/model_types.md, the table of published model types, from what a test run measured.

    MODEL_ERRORS=errors.jsonl pytest -m slow tests/hub/weights/test_published_models.py
    python -m tests.hub.model_table errors.jsonl > docs/model_types.md
"""

import json
import os
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from jaxtrain.hf.hf_config import types
from tests.hub import published
from tests.hub.cases import CASES
from tests.hub.published_models import Errors

VARIABLE = "MODEL_ERRORS"  # the file that a test run adds its lines to
DOCS = Path(__file__).parents[2] / "docs" / "model_types.md"
_HEAD = """# Model types

The published model types that jaxtrain reads and writes, as a test run measured them: a tiny model of each type with
random weights, whose folder transformers {version} wrote. Its logits, its loss and the gradient of every tensor are
compared with transformers in float64, and all tensors are written again. jaxtrain computes in float32 on 8 virtual
devices. An error of logits is relative to the largest one; that of gradients is the worst tensor's, of its norm and
two projections, relative to its norm (or to a hundredth of the largest norm). What is refused is in [hub.md](hub.md);
how to add a type is in [models.md](models.md).

| model type | class of transformers | cases | logits | loss | gradients | tensors with other bytes | mesh axes |
|---|---|---|---|---|---|---|---|
"""


def record(name: str, mesh: dict[str, int], found: Errors) -> None:
    """Add a line to the file that the environment names, if it names one."""
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as file:
            file.write(json.dumps({"name": name, "mesh": mesh} | asdict(found)) + "\n")


def table(lines: list[dict]) -> str:
    """Return the page."""
    by_type = defaultdict(list)
    for line in lines:
        if line["name"] in CASES:
            by_type[CASES[line["name"]][0]].append(line)
    version = published.truth(next(iter(CASES)))["made_by"]["transformers"]
    rows = [_row(kind, by_type[kind]) for kind in dict.fromkeys(kind for kind, _ in CASES.values()) if kind in by_type]
    return _HEAD.format(version=version) + "".join(f"{row}\n" for row in rows)


def _row(kind: str, lines: list[dict]) -> str:
    known = types()[kind]
    architecture = next(iter(known.values())).architecture
    axes = [axis for axis in ("data", "fsdp", "tensor", "expert", "stage", "context")
            if any(line["mesh"].get(axis, 1) > 1 for line in lines)]
    worst = [max((line[key] for line in lines if line[key] is not None), default=None)
             for key in ("logits", "loss", "gradients")]
    errors = ("not measured" if each is None else f"{each:.1e}" for each in worst)
    return (f"| `{kind}` | `{architecture}` | {len({line['name'] for line in lines})} | {' | '.join(errors)} | "
            f"{sum(len(line['other_bytes']) for line in lines)} | {', '.join(axes)} |")


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]), end="")
