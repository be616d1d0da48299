"""Coordinate islands: serve their updates, make certificates, show the state.

    jaxtrain diloco keys --output=DIR --islands=4
    jaxtrain diloco serve --workdir=DIR --address=HOST:PORT --keys=DIR --islands=4 --quorum=3
    jaxtrain diloco serve --workdir=DIR --store=s3://BUCKET/islands --islands=4
    jaxtrain diloco status WORKDIR

The coordinator may be killed at any time: the same command, on the same workdir, continues.

Exit status 0; 2: a user error, in one line; 130: stopped by Ctrl-C.
"""

import argparse
import dataclasses

from jaxtrain.commands.flags import Parser, add_json, add_subcommand, command, parser_of, tell_json
from jaxtrain.diloco.coordinator import MODES, Policy
from jaxtrain.diloco.network import certificates
from jaxtrain.diloco.network.serving import serve, shown, status
from jaxtrain.errors import UserError, tell


@command()
def main(argv: list[str] | None) -> None:
    """Parse the flags and do it."""
    flags = parser().parse_args(argv)
    if flags.what == "keys":
        _make_keys(flags.output, flags.islands, flags.days)
    elif flags.what == "serve":
        policy = Policy(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(Policy)})
        serve(flags.workdir, policy, flags.address, flags.keys, flags.store, flags.store_every, flags.largest)
    else:
        found = status(flags.workdir)
        tell_json(found) if flags.json else tell(shown(found))


def _make_keys(output: str, islands: int, days: int) -> None:
    """Make the certificates that are missing in a folder."""
    if islands < 1 or days < 1:
        raise UserError("diloco keys", "--islands and --days are numbers from 1 on", "give such numbers")
    made = certificates.make(output, range(islands), days)
    tell(f"made in {output}: {', '.join(made)}" if made else f"{output} has all of them")
    tell(f"give island N the files ca.pem, island-N.pem and island-N.key, and keep {output}/ca.key to yourself")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("diloco", __doc__)
    commands = made.add_subparsers(dest="what", required=True, metavar="COMMAND", parser_class=Parser)
    keys = add_subcommand(commands, "diloco", "keys --output=DIR --islands=4",
                          "make certificates for the coordinator and for each island, or for further islands")
    keys.add_argument("--output", required=True, metavar="DIR",
                      help="folder for the certificates; private keys have mode 0600")
    keys.add_argument("--islands", type=int, required=True, help="number of islands, which are numbered from 0")
    keys.add_argument("--days", type=int, default=3650, help="validity of new certificates in days; default: 3650")
    serve = add_subcommand(commands, "diloco", "serve --workdir=DIR --address=0.0.0.0:7000 --keys=DIR --islands=4",
                           "start the coordinator: collect the islands' updates in a log, and serve it")
    serve.add_argument("--workdir", required=True, metavar="DIR",
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
    status = add_subcommand(commands, "diloco", "status WORKDIR", "show the state of a coordinator's log")
    status.add_argument("workdir", metavar="WORKDIR", help="the workdir of the coordinator")
    add_json(status, "print the state as a JSON object")
    return made


_MEANINGS = {
    "islands": "number of islands that the first round waits for",
    "quorum": "fewest updates with which a round completes after its timeout",
    "timeout": "seconds that a round waits for missing islands after its first update",
    "lease": "seconds without a heartbeat after which a round no longer waits for an island",
    "oldest": "async: refuse updates that are more than this many outer updates old"}
