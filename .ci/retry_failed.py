"""Run each test that failed once more, alone, and record what then passes: it is flaky; at most two tests may be.

`python .ci/retry_failed.py STATUS FLAKY_FILE [PYTEST_ARGUMENT...]`, where pytest has just ended with STATUS. The names
are appended to FLAKY_FILE, which the tiers share. Each of them is a bug of the test, to be corrected.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST_FLAKY = 2  # in all tiers
MOST_RETRIED = 10  # more failures than this have a cause that a second run does not remove
FAILED = 1  # pytest's exit status when tests ran and some failed
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(status: int, flaky_file: Path, arguments: list[str]) -> int:
    """Return 0 if every failed test passes now and no more than MOST_FLAKY tests needed that; otherwise `status`."""
    failed = list(json.loads(LAST_FAILED.read_text())) if status == FAILED and LAST_FAILED.is_file() else []
    if not 0 < len(failed) <= MOST_RETRIED:
        return status
    with flaky_file.open("a+") as file:
        for test in failed:
            print(f"+ once more, alone: {test}", flush=True)
            if subprocess.run([sys.executable, "-m", "pytest", *arguments, test]).returncode:
                return status
            file.write(f"{test}\n")
        file.seek(0)
        return 0 if len(file.readlines()) <= MOST_FLAKY else status


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
