"""The table of refusals: each row refuses its example, lets the nearest combination pass, and stands in the docs."""

from pathlib import Path

import pytest

import jaxtrain as jt
from jaxtrain import validation

DOCS = Path(__file__).parent.parent / "docs/parallelism.md"


def build(**overrides):
    """The tiny GPT on an abstract mesh of as many devices as it asks for."""
    config = jt.load_config("configs/gpt.py:tiny", {"mesh.data": 1} | overrides)
    m = config.mesh
    return jt.build(config, devices=m.data * m.fsdp * m.stage * m.context * m.expert * m.tensor)


@pytest.mark.parametrize("row", validation.TABLE, ids=lambda row: row.combination)
def test_each_row_refuses_its_example(row):
    with pytest.raises(jt.UserError) as refusal:
        build(**row.example)
    axis = row.key.replace("AXIS", "tensor")
    assert refusal.value.key == axis and validation.explains(refusal.value), str(refusal.value)

@pytest.mark.slow
@pytest.mark.parametrize("row", validation.TABLE, ids=lambda row: row.combination)
def test_the_nearest_combination_that_works_lowers(row):
    build(**(row.example | row.instead)).lower()


def test_the_docs_have_the_table():
    assert validation.table() in DOCS.read_text(), f"docs/parallelism.md must have this table:\n{validation.table()}"
