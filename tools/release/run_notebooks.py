"""Run the notebooks of examples/ from top to bottom in a new kernel, and save what they show.

    python tools/release/run_notebooks.py                  # all of them
    python tools/release/run_notebooks.py text_to_model
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


MOST = 100_000  # characters of an output


def drop_scripts(data: dict[str, str]) -> None:
    """Remove from an output what is too large to be shipped, such as Plotly's script; its text stays."""
    if len(data.get("text/html", "")) > MOST:
        del data["text/html"]


def main(names: list[str]) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        if not names or path.stem in names:
            notebook = nbformat.read(path, as_version=4)
            NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(EXAMPLES)}}).execute()
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)  # the time of day
                for output in cell.get("outputs", []):
                    drop_scripts(output.get("data", {}))
            nbformat.write(notebook, path)
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
