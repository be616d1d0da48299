"""Train a config, or resume its run: `python -m jaxtrain.main` is `jaxtrain train`, and the process of every run."""

# ruff: noqa: E402
import gc
import os
import signal


def _stop_at_once(*_):
    os.write(2, b"stopped outside of the loop; run the same command again to resume\n")
    os._exit(75)  # exit_codes.SAVED


if __name__ == "__main__":  # before other imports; and for a second signal while the first one ends the run
    signal.signal(signal.SIGTERM, _stop_at_once)
    gc.disable()  # until all is imported: no module is garbage, and to look for some takes a sixth of the imports

import sys

from jaxtrain.commands.train import main

if __name__ == "__main__":
    status = main()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the outcome is settled; a late signal must not change it
    sys.exit(status)
