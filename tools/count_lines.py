"""Lines of the core, by file: what a plain pretraining run executes. Blank lines and comments count.

    python tools/count_lines.py

Plain: a dense decoder over data, fsdp and tensor, on text as it is, with all that protects it by default. What only
other runs need is counted apart.
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent / "jaxtrain"
# Of data/, what reads text or one corpus.
DATA = {"__init__", "batches", "cache", "corpus", "files", "loader", "order", "packing", "source", "stages",
        "tokenizer"}
APART = {
    "on demand": ("standalone.py", "own_run.py", "offload.py", "observe/tensorboard.py", "models/ahead.py", "doctor/"),
    "planning": ("plan/",),
    "stages": ("parallel/pipeline.py", "parallel/stage.py", "parallel/deferred.py", "parallel/placement.py",
               "parallel/schedules/"),
    "long sequences": ("parallel/context.py", "parallel/tiles.py"),
    "preparing data": tuple(f"data/{path.name}" for path in (ROOT / "data").glob("*.py") if path.stem not in DATA),
    "faults on demand": ("supervise.py", "resilience/blame.py", "resilience/children.py", "resilience/elastic.py",
                         "resilience/staff.py", "resilience/steps.py", "resilience/replays.py", "storage.py",
                         "checkpoint/__main__.py", "checkpoint/inspect.py", "checkpoint/mirror.py",
                         "checkpoint/partners.py", "checkpoint/pieces.py", "checkpoint/snapshots.py"),
    "experts": ("parallel/experts.py", "parallel/rows.py", "models/moe.py", "models/router.py", "models/mla.py",
                "models/deepseek_v3.py"),
}


def lines() -> dict[str, dict[str, int]]:
    """Part -> file -> lines."""
    found = {part: {} for part in ("core", *APART)}
    for path in sorted(ROOT.rglob("*.py")):
        file = str(path.relative_to(ROOT))
        part = next((part for part, starts in APART.items() if file.startswith(starts)), "core")
        found[part][file] = len(path.read_text().splitlines())
    return found


if __name__ == "__main__":
    for part, files in lines().items():
        for file, count in files.items():
            print(f"{count:5}  jaxtrain/{file}")
        print(f"{sum(files.values()):5}  in all: {part}\n")
