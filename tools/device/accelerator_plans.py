"""Plan the fastest way to train each size on a card, for tools/device/accelerator.py.

    python -m tools.device.accelerator_plans --results=results/h200.jsonl --target=h200

writes it beside the results before there is a card, on which a minute of planning would be one of ten.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.bench import records

if TYPE_CHECKING:
    from tools.device.accelerator_blocks import Session

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {"124M": "configs/gpt.py:124m", "1B": "configs/llama3_1b.py", "8B": "configs/llama3_8b.py",
           "Qwen3-30B": "configs/qwen3_30b_a3b.py", "Mixtral": "configs/mixtral_8x7b.py"}
ONE = {"mesh.data": 1, "mesh.fsdp": 1, "train.accumulation": 1, "optimizer.warmup_steps": 0}
ROWS = {"124M": (32, 64), "1B": (4, 8, 16), "8B": (2, 4, 8, 16)}


def best(session: "Session", size: str) -> list[dict[str, Any]]:
    """The keys that the planner predicts to be fastest on this card, or those in a file beside the results."""
    return of_target(session.results, size, device_name(session))


def of_target(results: Path, size: str, target: str) -> list[dict[str, Any]]:
    """The fastest keys for a card, from a file beside the results, which this writes if it is not there."""
    kept = results.with_suffix(f".{size}.{target}.json")
    if not kept.exists():
        asked = subprocess.run([sys.executable, "-c", _PLAN, size, target], cwd=ROOT,
                               env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
        check(asked.returncode == 0, f"the planner failed: {records.reason(asked.stderr)}")
        kept.write_text(asked.stdout.splitlines()[-1])
    return json.loads(kept.read_text())


_PLAN = "import json, sys; from tools.device.accelerator_plans import plan; print(json.dumps(plan(*sys.argv[1:])))"


def plan(size: str, target: str) -> list[dict[str, Any]]:
    """Return, without using a device, the fastest of several batches and, where Adam does not fit, optimizers.

    Some memory is left over: what a prediction may be short of, and what is lost between arrays.
    """
    import jaxtrain as jt
    from jaxtrain.plan import search, targets

    length = {} if size == "124M" else {"data.seq_len": 4096}
    found = []
    small = {"optimizer.moment_dtype": "bfloat16"}  # where the state takes most of the memory, it may be the faster one
    for optimizer in ({}, *[small] * (size == "8B"), {"optimizer.name": "adafactor"}):
        if found and "optimizer.name" in optimizer:
            break
        for rows in ROWS[size]:
            keys = {"data.global_batch_size": rows, **length, **optimizer}
            config = jt.load_config(CONFIGS[size], {**ONE, **keys})
            found += [(choice.estimate.tokens_per_second, {**keys, **choice.overrides})
                      for choice in search.search(config, targets.TARGETS[target], 1).fitting
                      if not choice.overrides.get("optimizer.offload")  # slow while it is fetched every step
                      and choice.estimate.bytes < 0.93 * choice.estimate.target.room]
    check(bool(found), f"nothing of {CONFIGS[size]} fits {target}")
    return [{key: value for key, value in keys.items() if not key.startswith(("mesh.", "pipeline."))}
            for _, keys in sorted(found, key=lambda one: -one[0])[:3]]


def device_name(session: "Session") -> str:
    """Return the planner's target that this card is. A rehearsal plans for an H100."""
    if session.rehearse:
        return "h100"
    from jaxtrain.plan import targets

    names = [name for name, target in targets.TARGETS.items()
             if re.fullmatch(target.device_kind, session.about["device"])]
    check(bool(names), f"the planner does not know {session.about['device']}")
    return names[0]


def check(right: bool, why: str) -> None:
    """Fail in one line."""
    if not right:
        raise SystemExit(why)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, required=True, help="the file that the measurements will go to")
    parser.add_argument("--target", required=True, help="the card, by the planner's name, such as h200")
    flags = parser.parse_args()
    for size in ROWS:
        print(size, of_target(flags.results.resolve(), size, flags.target), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
