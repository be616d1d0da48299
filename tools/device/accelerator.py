"""Measure everything that matters on an accelerator that is at hand for half an hour, the most important first.

    python tools/device/accelerator.py --results=results/h100.jsonl [--blocks=alive,truth] [--minutes=28]
    python tools/device/accelerator.py --rehearse

Each block is a process of its own with a time limit, so that one which hangs or crashes costs only itself. Those that
check numbers and time nothing share the device and run side by side. The first ten minutes are for whole steps, and for
PyTorch and tokamax beside them; accelerator_plans.py plans those before there is a card. Results are appended to one
file as they come; what has a result there at this commit on this device is skipped, so that several half hours add up.
`--rehearse` runs every block with toy sizes on any device. For a machine without a package index see
accelerator_wheels.sh. JAXTRAIN_COMMIT says which commit a copy is. Exit status 0: all blocks that were asked for have a
result; 1: not all.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxtrain.bench import records, tables  # noqa: E402
from jaxtrain.commands.flags import Parser, command  # noqa: E402
from jaxtrain.errors import UserError, nearest, say  # noqa: E402
from tools.device.accelerator_blocks import BLOCKS, Block, Session  # noqa: E402

LEAST = 15  # seconds: with less left, no block is begun
RUNNING: set[int] = set()  # the processes of blocks
ENDED = threading.Event()
REHEARSAL = 400.0  # seconds of a block at most: a slow machine is not a typo


@command()
def main(argv: list[str] | None) -> None:
    """Run the blocks, each in a process of its own, and print tables of the results."""
    flags = parser().parse_args(argv)
    blocks = chosen(flags.child or flags.blocks)
    results = Path(flags.results or Path(tempfile.mkdtemp(prefix="accelerator-")) / "results.jsonl").resolve()
    if flags.child:
        work(blocks[0], Session(results, blocks[0].name, flags.rehearse, json.loads(flags.about)), flags.reason)
        return
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, end_all)
    records.writable(results, "--results")
    end = time.monotonic() + 60 * flags.minutes
    here = records.about_elsewhere("python tools/device/accelerator.py")
    here |= {"rehearsal": True} if flags.rehearse else {}
    say(f"{here['devices']} x {here['device']}, commit {tables.short(here['commit'])}, results in {results}")
    missing = 0

    def measure(block: Block, shared: bool = False) -> bool:
        left = end - time.monotonic()
        if left < LEAST:
            say(f"{block.name}: left out, the time is up")
            return False
        began = time.monotonic()
        status = run(block, results, flags.rehearse, min(left, REHEARSAL if flags.rehearse else block.seconds), here,
                     shared)
        took = time.monotonic() - began
        records.append(results, {**here, "what": "block", "label": "session", "name": block.name, "status": status,
                                 "seconds": took})
        say(f"{block.name}: {status} after {took:.0f} s")
        return status == "done"

    if not flags.again:
        for block in [block for block in blocks if done(results, block.name, here)]:
            say(f"{block.name}: has a result at this commit")
            blocks.remove(block)
    for timed, these in itertools.groupby(blocks, lambda block: block.timed):
        together = list(these)
        with ThreadPoolExecutor(1 if timed or flags.rehearse else len(together)) as pool:
            shared = not timed and len(together) > 1
            missing += list(pool.map(partial(measure, shared=shared), together)).count(False)
    mine = [line for line in records.read(results) if same(line, here)] if results.exists() else []
    for (what, label), lines in tables.grouped(mine).items():
        print(f"\n### {label}: {what}\n\n{tables.TABLES[what](lines)}", end="")
    if missing:
        raise SystemExit(1)


def run(block: Block, results: Path, rehearse: bool, seconds: float, here: records.Record, shared: bool) -> str:
    """Run a block in a process of its own, by this same program; returns "done", or why it is not.

    `shared`: other processes use the device at the same time, so none takes all of its memory at the start.
    """
    with tempfile.TemporaryDirectory(prefix="accelerator-") as folder:
        reason = Path(folder) / "reason"
        command = [sys.executable, str(Path(sys.argv[0]).resolve()), f"--child={block.name}", f"--results={results}",
                   f"--reason={reason}", f"--about={json.dumps(here)}", *["--rehearse"] * rehearse]
        # A group of its own: at the limit all that the block has started is ended with it.
        process = subprocess.Popen(command, cwd=ROOT, env=environment(shared), process_group=0)
        RUNNING.add(process.pid)
        if ENDED.is_set():  # in between
            end_group(process.pid)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"took longer than {seconds:.0f} s"
        finally:
            end_group(process.pid)
            process.wait()
            RUNNING.discard(process.pid)
        if status == 0:
            return "done"
        return reason.read_text() if reason.exists() else f"ended with status {status}"


def end_group(leader: int) -> None:
    """End a block's process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def end_all(number: int, _: object) -> None:
    """End this program and the blocks that run: their threads wait for them, and the program's exit for the threads."""
    ENDED.set()
    for leader in tuple(RUNNING):
        end_group(leader)
    sys.exit(128 + number)


def work(block: Block, session: Session, reason: str) -> None:
    """Run a block in this process, and write into the file `reason` why it failed, if it did."""
    try:
        block.run(session)
        if session.failures:
            raise SystemExit(f"{len(session.failures)} measurements failed: {'; '.join(session.failures)}")
    except BaseException as error:
        kind = "" if isinstance(error, SystemExit | UserError) else f"{type(error).__name__}: "
        Path(reason).write_text(f"{kind}{error}"[:500])
        raise


def environment(shared: bool) -> dict[str, str]:
    """Return the environment of processes that are started, with jaxtrain on its path and a share of the memory."""
    share = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if shared else {}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **share, "PYTHONPATH": path}


def same(line: records.Record, here: records.Record) -> bool:
    """Whether a line was measured at this commit on such devices, and is not a rehearsal for what is."""
    return all(line.get(key) == here.get(key) for key in ("commit", "device", "devices", "rehearsal"))


def done(results: Path, name: str, here: records.Record) -> bool:
    """Whether a block has a result at this commit on this device. Edited files are not a commit."""
    if not results.exists() or not here["commit"] or here["commit"].endswith("-dirty"):
        return False
    return any(line["what"] == "block" and (line["name"], line["status"]) == (name, "done") and same(line, here)
               for line in records.read(results))


def chosen(names: str) -> list[Block]:
    """The blocks of these names, in the order in which they matter."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in BLOCKS:
            raise UserError("--blocks", f"there is no block {name!r}", nearest(name, BLOCKS))
    return [block for name, block in BLOCKS.items() if name in wanted or not wanted]


def parser() -> argparse.ArgumentParser:
    made = Parser(__doc__, prog="python tools/device/accelerator.py")
    made.add_argument("--results", metavar="FILE", help="to append to; default: a new file")
    made.add_argument("--blocks", default="", metavar="NAME,...", help=f"only these of {', '.join(BLOCKS)}")
    made.add_argument("--minutes", type=float, default=28, help="in all; default 28")
    made.add_argument("--rehearse", action="store_true", help="toy sizes: every block in less than three minutes")
    made.add_argument("--again", action="store_true", help="measure again what has a result at this commit")
    for own in ("--child", "--reason", "--about"):  # for the process of a block
        made.add_argument(own, default="", help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    sys.exit(main())
