"""`python -m jaxtrain.data.prepare_sequences`: prepare audio clips or tables of events as sequences."""

import sys

from jaxtrain.data.prepare_sequences.prepare_sequences import main

if __name__ == "__main__":
    sys.exit(main())
