"""Whether the weights in a folder have an output projection, of which a config.json alone does not say enough.

transformers shares the embedding table's weights with it where the config.json of a multimodal model says so, or does
not say, but not if the files have an output projection that differs. That is so with Mistral Small 3.
"""

import contextlib
from pathlib import Path

from jaxtrain.files import bounded_files

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_LIMIT = 2**25  # bytes of an index, or of a header


def has_own_head(folder: Path) -> bool:
    """Return whether there is one; a folder whose files cannot be read has none, and its weights are refused later."""
    names: set[str] = set()
    with contextlib.suppress(OSError, ValueError):
        if (folder / _INDEX).is_file():
            names = {*bounded_files.read_json(folder / _INDEX, {"weight_map": {str: str}}, _LIMIT)["weight_map"]}
        else:
            with bounded_files.opened(folder / _SINGLE) as file:
                length = int.from_bytes(file.read(8), "little")
                names = {*bounded_files.parsed(file.read(length))} if length <= _LIMIT else set()
    return any(name.endswith("lm_head.weight") for name in names)
