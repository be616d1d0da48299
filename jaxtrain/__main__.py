"""The `jaxtrain` command, as `python -m jaxtrain`."""

from jaxtrain.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
