"""`python -m jaxtrain.data.prepare`: tokenise text, once, into a corpus that runs read."""

import sys

from jaxtrain.data.prepare.prepare import main

if __name__ == "__main__":
    sys.exit(main())
