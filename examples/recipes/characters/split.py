"""Split a text into its first nine tenths, to train on, and the rest, to evaluate on, as nanoGPT does.

    python examples/recipes/characters/split.py INPUT.txt FOLDER
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    text, folder = Path(sys.argv[1]).read_text(), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    cut = len(text) * 9 // 10
    (folder / "train.txt").write_text(text[:cut])
    (folder / "val.txt").write_text(text[cut:])
