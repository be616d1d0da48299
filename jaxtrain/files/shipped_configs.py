"""The configs that come with jaxtrain, found by name: `gpt` or `gpt:tiny`, wherever jaxtrain is installed."""

import ast
from pathlib import Path


def folder() -> Path:
    """Return the folder of the configs: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"  # where pyproject.toml puts them in a wheel
    return inside if inside.is_dir() else package.with_name("configs")


def names() -> list[str]:
    """Return the names of all shipped configs, sorted."""
    return sorted(file.stem for file in folder().glob("*.py"))


def is_named(text: str) -> bool:
    """Return whether a text is the name of a shipped config, with or without a variant."""
    name = text.partition(":")[0]
    return "/" not in name and name in names()


def found(text: str) -> tuple[Path, str] | None:
    """Return the file and the variant that NAME or NAME:VARIANT means; None: there is no such config.

    A file NAME.py of the user's comes before a shipped config.
    """
    name, _, variant = text.partition(":")
    own = Path(f"{name}.py")
    if own.is_file():
        return own, variant
    return (folder() / own, variant) if is_named(text) else None


def about(name: str) -> str:
    """Return the first line of what a shipped config says of itself."""
    return (ast.get_docstring(ast.parse((folder() / f"{name}.py").read_text())) or "").partition("\n")[0]
