"""A program that tests launch in place of a run: it saves when told to stop, and ends as the file `end` says.

`end-ATTEMPT-RANK` says it to one process alone. A negative number is a signal that kills it. Each process writes
`began-ATTEMPT-RANK`, and `saved-ATTEMPT-RANK` when it saves, into the folder that it is given.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path


def main(workdir: Path) -> int:
    """Wait for the end, and return what it says."""
    me, end = os.environ["JAX_PROCESS_ID"], workdir / "end"
    attempt = len(list(workdir.glob(f"began-*-{me}")))

    def save(*_):
        (workdir / f"saved-{attempt}-{me}").touch()
        sys.exit(75)

    signal.signal(signal.SIGTERM, save)
    whole = workdir / f"partial-{me}"
    whole.write_text(f"{os.environ['JAX_NUM_PROCESSES']} {os.environ['JAX_COORDINATOR_ADDRESS']} {os.getpid()}")
    whole.rename(workdir / f"began-{attempt}-{me}")
    print(f"attempt {attempt}", flush=True)
    own = workdir / f"end-{attempt}-{me}"
    while not (said := "".join(path.read_text() for path in (own, end) if path.exists())):
        time.sleep(0.05)
    if (status := int(said)) < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
