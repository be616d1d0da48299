"""Coordinate islands: serve their updates, make certificates, show the state.

    jaxtrain islands keys --output=DIR --islands=4
    jaxtrain islands serve --folder=DIR --address=HOST:PORT --keys=DIR --islands=4 --quorum=3
    jaxtrain islands serve --folder=DIR --store=s3://BUCKET/islands --islands=4
    jaxtrain islands status --folder=DIR

The coordinator may be killed at any time: the same command, on the same folder, continues.

Exit status 0; 2: a user error, in one line; 130: stopped by Ctrl-C.
"""

import argparse
import contextlib
import dataclasses
import sys
import threading
import time
from pathlib import Path

from jaxtrain.errors import UserError, say, tell
from jaxtrain.commands.flags import Parser, add_subcommand, command, parser_of
from jaxtrain.islands.coordinator import MODES, Coordinator, Policy
from jaxtrain.islands.folder_meeting import Bridge
from jaxtrain.islands.network import certificates
from jaxtrain.islands.network.meeting_server import MeetingServer
from jaxtrain.islands.outer_log import OuterLog, read_journal
from jaxtrain.pages.plain_text import age, aligned

_TICK_S = 0.1


@command()
def main(argv: list[str] | None) -> None:
    """Parse the flags and do it."""
    flags = parser().parse_args(argv)
    {"keys": _keys, "serve": _serve, "status": _status}[flags.what](flags)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("islands", __doc__)
    commands = made.add_subparsers(dest="what", required=True, metavar="COMMAND", parser_class=Parser)
    keys = add_subcommand(commands, "islands", "keys --output=DIR --islands=4",
                          "make certificates for the coordinator and for each island, or for further islands")
    keys.add_argument("--output", required=True, metavar="DIR",
                      help="folder for the certificates; private keys have mode 0600")
    keys.add_argument("--islands", type=int, required=True, help="number of islands, which are numbered from 0")
    keys.add_argument("--days", type=int, default=3650, help="validity of new certificates in days; default: 3650")
    serve = add_subcommand(commands, "islands", "serve --folder=DIR --address=0.0.0.0:7000 --keys=DIR --islands=4",
                           "start the coordinator: collect the islands' updates in a log, and serve it")
    serve.add_argument("--folder", required=True, metavar="DIR",
                       help="folder of the log, on a disk that survives this process")
    serve.add_argument("--address", metavar="HOST:PORT", help="TCP address that islands connect to")
    serve.add_argument("--keys", metavar="DIR", help="certificates of the coordinator, for --address")
    serve.add_argument("--store", metavar="DIR", help="folder or URL for islands that cannot reach the port")
    serve.add_argument("--store_every", type=float, default=1.0, metavar="SECONDS",
                       help="seconds between checks of --store; default: 1")
    serve.add_argument("--mode", choices=MODES, default="sync",
                       help="sync: one outer update from all islands together; async: one from each island; default: "
                            "sync")
    for field in dataclasses.fields(Policy)[1:]:
        serve.add_argument(f"--{field.name}", type=type(field.default), default=field.default,
                           help=f"{_MEANINGS[field.name]}; default: {field.default}")
    serve.add_argument("--largest", type=int, default=2**36, metavar="BYTES",
                       help="maximum size of an update in bytes; default: 2**36")
    status = add_subcommand(commands, "islands", "status --folder=DIR", "show the state of a coordinator's log")
    status.add_argument("--folder", required=True, metavar="DIR", help="the folder of the coordinator")
    return made


_MEANINGS = {
    "islands": "number of islands that the first round waits for",
    "quorum": "fewest updates with which a round completes after its timeout",
    "timeout": "seconds that a round waits for missing islands after its first update",
    "lease": "seconds without a heartbeat after which a round no longer waits for an island",
    "oldest": "async: refuse updates that are more than this many outer updates old"}


def _keys(flags: argparse.Namespace) -> None:
    if flags.islands < 1 or flags.days < 1:
        raise UserError("islands keys", "--islands and --days are numbers from 1 on", "give such numbers")
    made = certificates.make(flags.output, range(flags.islands), flags.days)
    tell(f"made in {flags.output}: {', '.join(made)}" if made else f"{flags.output} has all of them")
    tell(f"give island N the files ca.pem, island-N.pem and island-N.key, and keep {flags.output}/ca.key to yourself")


def _serve(flags: argparse.Namespace) -> None:
    if not flags.address and not flags.store:
        raise UserError("islands serve", "islands cannot reach it", "give --address=HOST:PORT, --store=DIR or both")
    if flags.address and not flags.keys:
        raise UserError("--keys", "it is missing", "make certificates by jaxtrain islands keys and give their folder")
    tls = certificates.context(flags.keys, certificates.COORDINATOR) if flags.address else None
    names = [field.name for field in dataclasses.fields(Policy)]
    log = OuterLog(flags.folder, Policy(**{name: getattr(flags, name) for name in names}))
    ways = []
    if flags.store:
        threading.Thread(target=_carry, args=(log, flags.store, flags.store_every, flags.largest),
                         daemon=True).start()
        ways.append(flags.store)
    if tls:
        server = MeetingServer(log, flags.address, tls, flags.largest)
        threading.Thread(target=server.accept, name="islands", daemon=True).start()
        ways.append(f"{flags.address.rpartition(':')[0]}:{server.port}")
    say(f"the log in {flags.folder} has {log.position} entries; islands reach it at {' and '.join(ways)}")
    while not log.failed:
        with contextlib.suppress(OSError):
            log.tick()
        time.sleep(_TICK_S)
    raise UserError("--folder", log.failed, "make room, then start it again")


def _carry(log: OuterLog, store: str, every: float, largest: int) -> None:
    """Carry offers and entries between the log and a store; a store that is out of reach is tried again."""
    bridge, said = Bridge(log, store, largest), ""
    while not log.failed:
        try:
            bridge.look()
            said = ""
        except (UserError, OSError, ValueError, LookupError) as error:
            if not said:
                said = f"{store}: {error}; trying again"
                say(said)
        time.sleep(every)


def _status(flags: argparse.Namespace) -> None:
    path = Path(flags.folder) / "journal.jsonl"
    if not path.exists():
        raise UserError("--folder", f"{flags.folder} has no log of islands", "give the folder of islands serve")
    records, _ = read_journal(path)
    log = Coordinator(Policy(), records)
    times = [record["time"] for record in records if "entry" in record]
    tell(f"{log.position} entries" + (f", the last {age(time.time() - times[-1])} ago" if times else ""))
    if log.open:
        tell(f"open: entry {log.position + 1}, with offers of islands {', '.join(map(str, sorted(log.open)))}")
    rows = [(f"{island}", f"{log.counts[island, 'entries']}", f"{log.counts[island, 'steps']:,}",
             f"{log.counts[island, 'tokens']:,}", f"{log.counts[island, 'refused']}",
             f"{log.newest[island]}{' (left)' if island in log.left else ''}") for island in sorted(log.newest)]
    if rows:
        tell("\n".join(aligned([("island", "entries", "steps", "tokens", "refused", "last entry"), *rows])))


if __name__ == "__main__":
    sys.exit(main())
