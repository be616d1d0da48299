"""Count what tests replace with `monkeypatch.setattr`, by kind; with names of kinds, list these.

    python tools/release/count_patches.py
    python tools/release/count_patches.py private collaborator
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {"os", "sys", "time", "shutil", "socket", "jax", "lax", "importlib", "fcntl"}  # as modules of ours see them
MACHINE = {"platform", "compute_capability", "here", "device_memory", "device_peak", "present", "gpus", "version_of",
           "read", "git_commit", "provenance", "_cuda_version", "_layers_apart"}
LOCAL = {"?Vault": "helper", "?machine": "helper", "?tpu": "environment", "?type(tmp_path)": "environment"}
KINDS = {
    "environment": "the standard library, JAX or another package",
    "constant": "a constant of jaxtrain: a size, a limit, a pause",
    "machine": "what jaxtrain learns of the machine: its devices, memory, programs and versions",
    "helper": "the tests' own helpers",
    "private": "a private function, class or method of jaxtrain",
    "collaborator": "a public function or method of jaxtrain that another one calls"}


def places(path: Path):
    """Yield the line, the owner and the name of what each call replaces."""
    tree = ast.parse(path.read_text())
    names = {}
    for node in ast.walk(tree):
        for one in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names[one.asname or one.name.partition(".")[0]] = prefix + (one.name if one.asname or prefix else
                                                                        one.name.partition(".")[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            owner, name = node.args[0], getattr(node.args[1], "value", "")
            if isinstance(owner, ast.Constant):
                owner, _, name = owner.value.rpartition(".")
            else:
                first, *rest = ast.unparse(owner).split(".")
                owner = ".".join([names.get(first, f"?{first}"), *rest])
            yield node.lineno, owner, f"{name}"


def kind(owner: str, name: str) -> str:
    """Return the kind of what is replaced."""
    parts = owner.split(".")
    if owner in LOCAL:
        return LOCAL[owner]
    if parts[0] in ("tests", "tools"):
        return "helper"
    if not owner.startswith(("jaxtrain", "?")) or OUTSIDE.intersection((*parts, name)):
        return "environment"
    if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name):
        return "constant"
    if name in MACHINE and not (name == "read" and parts[-1] == "inputs") and "storage" not in parts:
        return "machine"
    private = any(re.match("_[^_]", part) for part in (*parts, name))
    return "private" if private else "collaborator"


def main(shown: list[str]) -> None:
    """Print the counts."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for line, owner, name in places(path):
            found[kind(owner, name)].append(f"{path.relative_to(ROOT)}:{line}: {owner}.{name}")
    for one, what in KINDS.items():
        print(f"{len(found[one]):4} {one}: {what}")
        if one in shown:
            print(*found[one], sep="\n")
    print(f"{sum(map(len, found.values())):4} in all")


if __name__ == "__main__":
    main(sys.argv[1:])
