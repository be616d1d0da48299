"""Draw the pictures of the documentation: what `jt.show` draws, and the report of a run as a browser shows it.

    python tools/release/draw_pictures.py mesh
    python tools/release/draw_pictures.py report runs/gpt     # a finished run; needs the extra `report` and chromium
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import jaxtrain as jt
from jaxtrain.commands import report

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
WIDTH, HEIGHT = 1000, 960  # pixels of a page that are shown


def draw_mesh(path: Path) -> None:
    """Draw eight devices on three axes."""
    jt.show(jt.make_mesh(data=2, fsdp=2, tensor=2, devices=8)).save(path)


def draw_page(page: Path, path: Path) -> None:
    """Write the top of a page as a PNG."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                        f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=10000",
                        f"--screenshot={path}", page.as_uri()], check=True, timeout=120, stderr=subprocess.DEVNULL)


def main(words: list[str]) -> None:
    """Draw the pictures that are named."""
    match words:
        case ["mesh"]:
            draw_mesh(IMAGES / "mesh.svg")
        case ["report", workdir]:
            with tempfile.TemporaryDirectory() as folder:
                page = Path(folder) / "report.html"
                if status := report.main([workdir, f"--output={page}"]):
                    sys.exit(status)
                draw_page(page, IMAGES / "report.png")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
