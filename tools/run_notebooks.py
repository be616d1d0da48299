"""Run the notebooks of examples/ from top to bottom in a new kernel, and save what they show.

    python tools/run_notebooks.py                  # all of them
    python tools/run_notebooks.py text_to_model
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def main(names: list[str]) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        if not names or path.stem in names:
            notebook = nbformat.read(path, as_version=4)
            NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(EXAMPLES)}}).execute()
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)  # the time of day
            nbformat.write(notebook, path)
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
