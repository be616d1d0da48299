"""Run a job's script on this machine, and write how it ended: what the local engine starts."""

import signal
import subprocess
import sys
from pathlib import Path

ENDED = "ended"  # the file with the exit status


def main(folder: Path, script: str) -> int:
    """Run the script in a folder to its end; SIGTERM goes on to it."""
    running: list[subprocess.Popen] = []
    stops: list[int] = []

    def stop(number, _):
        stops.append(number)
        for process in running:
            process.terminate()

    signal.signal(signal.SIGTERM, stop)  # before there is anything to stop
    running.append(process := subprocess.Popen(["bash", str(folder / script)]))
    if stops:
        process.terminate()
    status = process.wait()
    partial = folder / f"{ENDED}.partial"
    partial.write_text(f"{status}")
    partial.replace(folder / ENDED)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
