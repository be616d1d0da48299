"""`python -m jaxtrain.supervise`, as job files of earlier runs start it: the command `jaxtrain supervise`."""

import sys

from jaxtrain.commands.supervise import main

if __name__ == "__main__":
    sys.exit(main())
