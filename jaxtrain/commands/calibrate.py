"""Measure the speed of this machine's devices, for the planner.

    jaxtrain calibrate --output=FILE
    jaxtrain calibrate --output=FILE --quick
    jaxtrain plan --config=configs/llama3_8b.py --target=h100x8 --targets=FILE

All devices work at the same time, as in training, where they share power and memory. Every measurement is one compiled
loop, long enough that starting it does not count, and the median of several runs: linear layers forward and backward in
bfloat16 and float32 (at jaxtrain's precision, "highest"), attention forward and backward, an elementwise operation for
the bandwidth of memory, and all-reduce and all-gather over all devices of this machine.

The target keeps the data sheet's peak in its first dtype, its bandwidth of memory and its links to other machines; the
efficiencies are the shares of them that were reached. A figure without an efficiency of its own (float32, the nearest
link) is written such that the planner's product of the two is what was measured. A CPU has no data sheet: there the
best measurement is the peak. Not measured: links to other machines and to the hosts, and how much communication
overlaps with computation. The efficiency of attention counts only where attention is a kernel: elsewhere the planner
counts its matmuls. All measurements, one a line, are written next to the file, with the ending .rows.jsonl.

Exit status 0; 2: a user error, reported in one line.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from jaxtrain.commands.flags import add_json, command, parser_of, tell_json
from jaxtrain.errors import UserError, say, tell


@command()
def main(argv: list[str] | None) -> None:
    """Measure, print each figure as it comes, and write the target."""
    flags = parser().parse_args(argv)
    file = Path(flags.output or "")
    if not flags.dry_run and (not flags.output or not file.absolute().parent.is_dir() or file.is_dir()):
        raise UserError("--output", f"{flags.output} cannot be written" if flags.output else "it is missing",
                        "name a file in a folder that exists")
    import jax  # for which --help does not wait

    from jaxtrain.plan import targets
    from jaxtrain.plan.calibrate import device_rates as rates

    devices = jax.local_devices()
    target = targets.here(devices)
    dtype = "float32" if target.platform == "cpu" else "bfloat16"
    rows = rates.planned(rates.sizes_for(target, flags.quick), dtype, len(devices))
    if flags.dry_run:
        if flags.json:
            tell_json(*map(asdict, rows))
        else:
            tell(f"{len(devices)} x {target.name}, for at most about {flags.timeout:g} s:", *rows, sep="\n")
        return
    skipped = 0
    for row, error in rates.measured(rows, devices, target, flags.timeout, flags.quick):
        skipped += not (row.seconds or error)
        if error:
            say(f"{row} left out: {error}")
        elif row.seconds:
            tell_json({**asdict(row), "rate": row.rate}) if flags.json else tell(row, flush=True)
    if skipped:
        say(f"{skipped} measurements were left out after {flags.timeout:g} s; --timeout allows more")
    if len(devices) == 1:
        say("one device has no links to measure: those of the data sheet stay")
    if not any(row.seconds for row in rows if row.what == "llm" and row.dtype == dtype):
        raise UserError("--output", "no matmul could be measured, so nothing is written", "see the errors above")
    keys = rates.calibrated(target, dtype, rows)
    file.write_text(json.dumps({target.name: keys}, indent=2) + "\n")
    lines = [json.dumps({**asdict(row), "rate": row.rate}) for row in rows if row.seconds]
    file.with_suffix(".rows.jsonl").write_text("\n".join(lines) + "\n")
    report = say if flags.json else tell
    report(json.dumps(keys["efficiency"]))
    report(f"written to {flags.output}: jaxtrain plan --targets={flags.output} "
           f"--target={target.name}x{len(devices)} --config=...")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("calibrate", __doc__)
    made.add_argument("--output", metavar="FILE", help="the file to write, for --targets of jaxtrain plan and bench")
    made.add_argument("--quick", action="store_true", help="small shapes, for CPUs: a few seconds")
    made.add_argument("--dry_run", action="store_true", help="only print what would be measured")
    add_json(made, "print a JSON object for each measurement")
    made.add_argument("--timeout", type=float, default=150, metavar="SECONDS",
                      help="start no further measurement after so long")
    return made
