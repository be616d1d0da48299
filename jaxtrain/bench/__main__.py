"""`python -m jaxtrain.bench`: measure a config's training speed on this machine, and where the time goes."""

import signal
import sys

if __name__ == "__main__":
    from jaxtrain.base.exit_statuses import TERMINATED

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that its processes and files are removed
    from jaxtrain.commands.bench import main

    sys.exit(main())
