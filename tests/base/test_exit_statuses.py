"""The exit statuses have one place, and the tables of the documentation are made of it."""

import re
from pathlib import Path

from jaxtrain.base import exit_statuses
from jaxtrain.commands import COMMANDS
from jaxtrain.distributed import exit_codes

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_tables():
    page = (ROOT / "docs/operations.md").read_text()
    assert exit_statuses.tables() in page, f"write this into docs/operations.md:\n{exit_statuses.tables()}"


def test_every_status_has_a_meaning():
    named = {value for name, value in vars(exit_statuses).items() if name.isupper() and isinstance(value, int)}
    assert named == exit_statuses.MEANINGS.keys() and len(named) == 8
    for code in exit_codes.FINAL:
        assert "exit status" in exit_codes.words(code)
    assert exit_codes.words(exit_statuses.TERMINATED) == "was killed by SIGTERM"


def test_commands_take_them_from_there():
    """No command ends with a number of its own, and those that can say no are those that the page names."""
    folder = ROOT / "jaxtrain/commands"
    sources = {name: (folder / f"{name}.py").read_text() for name in [*COMMANDS, "flags"]}
    numbers = re.compile(r"(?:SystemExit|sys\.exit|os\._exit|exit_process)\(\d|return \d+$", re.M)
    assert {name: found for name, source in sources.items() if (found := numbers.findall(source))} == {}
    noes = {name for name, source in sources.items() if "exit_statuses.NO" in source} - {"flags", "train"}
    assert noes == exit_statuses.NOES.keys(), "flags and train mean a crash"
