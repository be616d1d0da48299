"""`python -m jaxtrain.supervise`: start processes as one run, and restart them when one dies or hangs."""

import sys

from jaxtrain.launch.supervisor.supervisor import main

if __name__ == "__main__":
    sys.exit(main())
