"""The coordinator's process: it serves its log to islands, and shows its state."""

import contextlib
import threading
import time
from pathlib import Path

from jaxtrain.base.annotations import JsonObject
from jaxtrain.diloco.coordinator import Coordinator, Policy
from jaxtrain.diloco.folder_meeting import Bridge
from jaxtrain.diloco.network import certificates
from jaxtrain.diloco.network.meeting_server import MeetingServer
from jaxtrain.diloco.outer_log import OuterLog, read_journal
from jaxtrain.errors import UserError, say
from jaxtrain.pages.plain_text import age, aligned

_TICK_S = 0.1
_COUNTED = "entries", "steps", "tokens", "refused"  # of each island


def serve(folder: str, policy: Policy, address: str | None = None, keys: str | None = None, store: str | None = None,
          store_every: float = 1.0, largest: int = 2**36) -> None:
    """Serve the log in a folder to islands until it cannot be written.

    Args:
        folder: of the log, on a disk that survives this process.
        policy: what completes a round, and who is waited for.
        address: HOST:PORT that islands connect to, with the certificates in `keys`.
        store: a folder or URL for islands that cannot reach the port, looked at every `store_every` seconds.
        largest: the most bytes of an update.
    """
    if not address and not store:
        raise UserError("diloco serve", "islands cannot reach it", "give --address=HOST:PORT, --store=DIR or both")
    if address and not keys:
        raise UserError("--keys", "it is missing", "make certificates by jaxtrain diloco keys and give their folder")
    tls = certificates.context(keys, certificates.COORDINATOR) if keys and address else None
    log = OuterLog(folder, policy)
    ways = []
    if store:
        threading.Thread(target=_carry, args=(log, store, store_every, largest), daemon=True).start()
        ways.append(store)
    if tls and address:
        server = MeetingServer(log, address, tls, largest)
        threading.Thread(target=server.accept, name="islands", daemon=True).start()
        ways.append(f"{address.rpartition(':')[0]}:{server.port}")
    say(f"the log in {folder} has {log.position} entries; islands reach it at {' and '.join(ways)}")
    while not log.failed:
        with contextlib.suppress(OSError):
            log.tick()
        time.sleep(_TICK_S)
    raise UserError("--workdir", log.failed, "make room, then start it again")


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


def status(folder: str) -> JsonObject:
    """Return the state of the log in a folder."""
    path = Path(folder) / "journal.jsonl"
    if not path.exists():
        raise UserError("WORKDIR", f"{folder} has no log of islands", "give the --workdir of diloco serve")
    records, _ = read_journal(path)
    log = Coordinator(Policy(), records)
    times = [record["time"] for record in records if "entry" in record]
    return {"entries": log.position, "last_time": times[-1] if times else None, "open": sorted(log.open),
            "islands": [{"island": island, **{key: log.counts[island, key] for key in _COUNTED},
                         "last_entry": log.newest[island], "left": island in log.left}
                        for island in sorted(log.newest)]}


def shown(found: JsonObject) -> str:
    """Return the state of a log as text."""
    last = found["last_time"]
    lines = [f"{found['entries']} entries" + (f", the last {age(time.time() - last)} ago" if last is not None else "")]
    if found["open"]:
        lines.append(f"open: entry {found['entries'] + 1}, with offers of islands {', '.join(map(str, found['open']))}")
    rows = [(f"{one['island']}", f"{one['entries']}", f"{one['steps']:,}", f"{one['tokens']:,}", f"{one['refused']}",
             f"{one['last_entry']}{' (left)' if one['left'] else ''}") for one in found["islands"]]
    if rows:
        lines += aligned([("island", "entries", "steps", "tokens", "refused", "last entry"), *rows])
    return "\n".join(lines)
