"""Find the step and the operation at which two runs part.

    jaxtrain bisect runs/before runs/after
    jaxtrain bisect configs/gpt.py:tiny runs/after --steps=50
    jaxtrain bisect configs/gpt.py:tiny configs/gpt.py:tiny --code_b=../jaxtrain-of-yesterday

Each is the workdir of a run, or a config. Steps are made again from the checkpoints before them. Looks for the cause in
initial values, batches, operations of the step (compared in float64), the mesh, and the record, and says so if rounding
explains all. Exit status 0: the runs are the same, or differ by rounding; 1: a cause was found; 2: the command line is
wrong.
"""

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.base import exit_statuses
from jaxtrain.commands.flags import Parser, add_json, command, parser_of, tell_json
from jaxtrain.errors import UserError, say, tell

if TYPE_CHECKING:
    from jaxtrain.bisection.sides import Side

MOST = 64  # virtual devices


def parser() -> Parser:
    """Return the parser of the command line."""
    made = parser_of("bisect", __doc__)
    made.add_argument("a", metavar="RUN_A", help="workdir of a run, or a config")
    made.add_argument("b", metavar="RUN_B", help="another one")
    made.add_argument("--steps", type=int, default=20,
                      help="how many steps to make where one of them is a config; default: 20")
    for letter in "ab":
        made.add_argument(f"--code_{letter}", default="", metavar="CHECKOUT",
                          help=f"make the steps of RUN_{letter.upper()} with the code of this checkout")
        made.add_argument(f"--python_{letter}", default="", metavar="PYTHON",
                          help="and with this Python, such as VENV/bin/python of another version of JAX")
    add_json(made, "print what was found as JSON")
    return made


@command()
def main(argv: list[str] | None = None) -> None:
    """Compare two runs; exit with 1 where a cause was found."""
    flags = parser().parse_args(argv)
    _use_devices([flags.a, flags.b])
    from jaxtrain.bisection.bisect import ROUNDING, SAME, bisect_sides

    a = _side(flags.a, flags.a if flags.a != flags.b else "A", flags.code_a, flags.python_a, "a")
    b = _side(flags.b, flags.b if flags.a != flags.b else "B", flags.code_b, flags.python_b, "b")
    found = bisect_sides(a, b, flags.steps, say)
    tell_json(found.as_json()) if flags.json else tell(found)
    if found.cause not in (SAME, ROUNDING):
        raise SystemExit(exit_statuses.NO)


def _side(source: str, name: str, code: str, python: str, letter: str) -> "Side":
    from jaxtrain.bisection.sides import Side
    from jaxtrain.config.load import load_config

    side = Side.of(source if Path(source).is_dir() else load_config(source), name, {})
    if not (code or python):
        return side
    from jaxtrain.bisection.other_code import ElsewhereSide

    return ElsewhereSide(name, side.config, recorded=side.recorded, source=source, code=code, python=python,
                         letter=letter)


def _use_devices(names: list[str]) -> None:
    """Have as many virtual devices as the larger mesh needs, unless there are others. It comes before JAX starts."""
    if os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
        return
    count = 8
    for name in names:
        if (record := Path(name) / "run.json").is_file():
            try:
                count = max(count, math.prod(json.loads(record.read_text())["mesh"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue  # which whoever reads the run refuses
    if count > MOST:
        raise UserError("RUN_B", f"a mesh has {count} devices, more than {MOST} virtual ones",
                        "set JAX_PLATFORMS and run this where such devices are")
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (f"{os.environ.get('XLA_FLAGS', '')} "
                               f"--xla_force_host_platform_device_count={count}").strip()
