"""docs/keys.md is what the schema says, of every key."""

import re
from pathlib import Path

from jaxtrain.config.key_reference import reference
from jaxtrain.config.schema import Config
from tests.wording import unclear

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"


def test_the_page_is_the_schemas():
    assert "`*" not in reference()
    assert PAGE.read_text() == reference(), "run python -m jaxtrain.config.key_reference > docs/keys.md"


def test_it_has_every_key_with_a_description():
    rows = [line.split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    keys = {row[0].strip("|` ") for row in rows}
    assert keys >= {f"{section}.{key}" for section, values in Config().to_dict().items() for key in values}
    assert [row[0] for row in rows if not row[2].strip("| ")] == []
    assert any("One of `'gpipe'`, `'1f1b'`" in row[2] for row in rows)
    assert {"model.categories", "model.pixel_mean", "model.prefix"} <= keys, "whose defaults are lists and mappings"


def test_descriptions_are_whole_and_in_the_words_of_the_field():
    rows = [line.split(" | ", 2) for line in reference().splitlines() if line.startswith("| `")]
    assert unclear("\n".join(f"{key}: {text}" for key, _, text in rows)) == []
    assert [key for key, _, text in rows if re.search(r"\bpictures?\b|, \|$|^(?:of|and|but) ", text)] == []
