"""Every published type: logits, loss and all gradients as transformers computes them, and the same bytes back.

Each case is tested on meshes of 8 devices, the first drawn by its name; every third of them in the slow tier, which has
all kinds of attention, experts and mixers between them.
"""

import zlib

import pytest

from jaxtrain.config.family import config_of
from jaxtrain.hf.hf_config import model_section
from tests.hub import model_table, published, published_models
from tests.hub.cases import CASES
from tests.tiers import exhaustive, slow

QUICK = ("llama_head_dim",)  # on one device
SAMPLED = tuple(CASES)[::3]
WITHOUT_STAGES = ({"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2})
WITH_EXPERTS = ({"expert": 4, "tensor": 2}, {"fsdp": 2, "expert": 2, "tensor": 2})
OTHERS = ({"fsdp": 2, "context": 2, "tensor": 2}, {"stage": 2, "fsdp": 2, "tensor": 2})


def meshes(name: str, folder) -> list[dict[str, int]]:
    """Return the meshes that a case is proved on, the first one by its name."""
    model = config_of(model_section(published.write(folder, published.truth(name))))
    first = [mesh for mesh in (WITH_EXPERTS if model.experts.num else WITHOUT_STAGES)
             if model.experts.num % mesh.get("expert", 1) == 0]
    turn = zlib.crc32(name.encode()) % len(first)
    return [*first[turn:], *first[:turn], *OTHERS]


def check(found: published_models.Errors) -> None:
    assert found.loss < 1e-5 and found.gradients < 1e-4, found
    assert found.logits is None or found.logits < 1e-5, found
    assert not found.other_bytes, found


@pytest.mark.parametrize(("name", "nth"), [
    *((name, None) for name in QUICK), *slow(*((name, 0) for name in SAMPLED)),
    *slow(*((name, -1 - n % 2) for n, name in enumerate(SAMPLED) if n % 4 == 1)),
    *exhaustive(*((name, n) for name in CASES for n in (0, 1, -1, -2) if n or name not in SAMPLED))])
def test_logits_and_all_gradients_are_those_of_transformers_and_bytes_the_same(name, nth, tmp_path):
    mesh = {} if nth is None else meshes(name, tmp_path / "shape")[nth]
    found = published_models.errors(name, tmp_path, mesh)
    model_table.record(name, mesh, found)
    check(found)


def test_the_page_of_model_types_has_every_type_within_the_limits():
    """The page was made by a test run (tests/hub/model_table.py)."""
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in model_table.DOCS.read_text().splitlines()
            if line.startswith("| `")]
    assert {row[0] for row in rows} == {kind for kind, _ in CASES.values()}
    for kind, _, _, logits, loss, gradients, other_bytes, axes in rows:
        assert float(logits) < 1e-5 and float(loss) < 1e-5 and float(gradients) < 1e-4, kind
        assert other_bytes == "0" and "tensor" in axes, kind
