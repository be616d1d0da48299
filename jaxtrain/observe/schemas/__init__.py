"""JSON Schemas (2020-12) of the files that a run writes: metrics.jsonl, events.jsonl and run.json."""

import json
from importlib import resources

from jaxtrain.base.annotations import JsonObject

# The file that each describes; of .jsonl, each line.
FILES = {"metrics": "metrics.jsonl", "events": "events.jsonl", "run": "run.json"}


def schema(name: str) -> JsonObject:
    """Return the schema of this name, one of FILES."""
    return json.loads(resources.files(__name__).joinpath(f"{name}.schema.json").read_text())
