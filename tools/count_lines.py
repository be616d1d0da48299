"""Lines of the core, by file: what a plain pretraining run executes. Blank lines and comments count.

    python tools/count_lines.py
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent / "jaxtrain"
OUTSIDE = {"standalone.py", "observe/tensorboard.py"}  # imported only by those who ask for it


def core() -> dict[str, int]:
    files = sorted(path for path in ROOT.rglob("*.py") if str(path.relative_to(ROOT)) not in OUTSIDE)
    return {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}


if __name__ == "__main__":
    lines = core()
    for file, count in lines.items():
        print(f"{count:5}  jaxtrain/{file}")
    print(f"{sum(lines.values()):5}  in all")
