"""Draw hostile config.json files and headers of safetensors files: each is read, or refused in one sentence.

    python -m tests.config.fuzz_published --cases=500 --seed=7

Counts what ends otherwise: a traceback, more than a few seconds, memory that grows by more than a gigabyte, and wrong
success: a config.json with a value of a type that its key does not have, or a header that does not describe its file.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.hf import defaults
from jaxtrain.hub.weights import safetensors_files
from tests.config import families

SLOW, GROWTH = 10, 2**30  # seconds, bytes
# Values that are wrong for some keys, and right for others.
ODD: tuple[Any, ...] = (
    None, "x", "", "7", -1, 0, 1, 1.5, float("nan"), float("inf"), -0.0, [], {}, [1], ["a"], [[]], {"a": 1}, True,
    False, 10**9, 2**31, 2**63, 10**30, -10**18, 1e308, "\x1b[31m", "x" * 10_000, [0] * 10_000, {"rope_type": "yarn"},
    {"rope_type": ["linear"]}, {"rope_type": "linear", "factor": "a"}, {"rope_type": "linear", "factor": 0},
    {"type": "yarn", "factor": 1e308}, {"full_attention": 3}, {"rope_type": "llama3", "factor": 2.0})
SHAPES = ("num_hidden_layers", "n_layer", "hidden_size", "vocab_size", "encoder_layers", "num_experts", "layer_types")


def config(rng: np.random.Generator, folder: Path) -> tuple[dict[str, Any], str]:
    """Return a config.json of which one key has an odd value, and which; without that it can be read."""
    kind = families.KINDS[rng.integers(len(families.KINDS))]
    given = families.drawn(kind, rng, small=True)
    while isinstance(families.section(given, folder), str):
        given = families.drawn(kind, rng, small=True)
    inside, half = given, ""
    if kind in ("gemma3", "siglip", "clip") and rng.random() < 0.8:
        half = "text_config" if kind == "gemma3" or rng.random() < 0.5 else "vision_config"
        inside = given.setdefault(half, {})
    of = {"": kind, "text_config": "gemma3_text" if kind == "gemma3" else f"{kind}_text_model",
          "vision_config": f"{kind}_vision_model"}[half]
    keys = [*defaults.table()[of]["keys"], *inside, "rope_scaling", "rope_parameters", "rope_theta",
            "head_dim", "layer_types", "quantization_config", "architectures", "model_type"]
    key = SHAPES[rng.integers(len(SHAPES))] if rng.random() < 0.2 else keys[rng.integers(len(keys))]
    inside[key] = ODD[rng.integers(len(ODD))]
    return given, f"{half}.{key}".lstrip(".")


def of_wrong_type(given: dict[str, Any], key: str) -> bool:
    """Return whether the class of transformers would not take this value for this key."""
    half, _, name = key.rpartition(".")
    kind = given["model_type"]
    if not isinstance(kind, str) or kind not in families.KINDS:
        return True
    of = f"gemma3_{half[:4]}" if kind == "gemma3" and half else f"{kind}_{half.split('_')[0]}_model" if half else kind
    declared = defaults.table()[of]["keys"]
    value = (given[half] if half else given)[name]
    return name in declared and bool(defaults.misfit(value, declared[name]["type"]))


def header(rng: np.random.Generator) -> tuple[bytes, bool]:
    """Return the content of a safetensors file, and whether it is a right one."""
    def one_of(*several: Any) -> Any:
        return several[rng.integers(len(several))]

    names, at, entries = [f"t{n}" for n in range(rng.integers(1, 4))], 0, {}
    for name in names:
        shape = [int(n) for n in rng.integers(1, 4, rng.integers(1, 3))]
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * int(np.prod(shape))]}
        at = entries[name]["data_offsets"][1]
    text, how = json.dumps(entries), rng.integers(12)
    hurt = entries[one_of(*names)]
    if how == 0:
        hurt["shape"] = one_of([2**62, 2**62], [-1], [1] * 40, [10**100], [1.5], "x", None, [[1]], [True])
    if how == 1:
        hurt["data_offsets"] = one_of([0, 10**30], [-4, 0], [1], [0, 1, 2], "x", None, [0.0, 4.0], [8, 0], [0, 0])
    if how == 2:
        hurt["dtype"] = one_of("F64", "BF16", 3, None, ["F32"], {})
    if how == 3:
        entries[one_of("__metadata__", "x")] = one_of(3, [1], {"a": 1}, "x", {"a": {}})
    if how in range(4):
        text = json.dumps(entries)
    if how == 4:
        text = text[:-1] + ", " + json.dumps(names[0]) + ": " + json.dumps(entries[names[0]]) + "}"
    if how == 5:
        text = one_of("[" * 10**6, '{"a":' * 10**5, "{" + " " * 10**6, '{"a":[' + "[]," * 10**6 + "1]}", "null", "3",
                      '{"t":{"dtype":"F32","shape":[' + "1," * 10**6 + '1],"data_offsets":[0,4]}}')
    if how == 6:
        text = text[:rng.integers(len(text))]
    if how == 7:
        text = "".join(chr(rng.integers(128)) for _ in range(rng.integers(2, 60)))
    length = one_of(0, 1, 2**63, 2**64 - 1, len(text) + at + 1, 10**8) if how == 8 else len(text)
    right = how >= 9
    return int(length).to_bytes(8, "little") + text.encode() + b"\0" * at, right


def outcome(read: Any) -> str:
    """Return "read", "refused", or what is wrong with the end of reading."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read()
        end = "read"
    except UserError as error:
        said = f"{error}"
        end = "refused" if "\n" not in said and len(said) < 1000 else f"not one sentence: {said[:200]!r}"
    except Exception as error:
        end = f"traceback: {type(error).__name__} {f'{error}'[:200]}"
    if time.monotonic() - began > SLOW:
        end = f"slow: {time.monotonic() - began:.0f} s"
    if (grown := 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)) > GROWTH:
        end = f"grown by {grown / 2**30:.1f} GB"
    return end


def config_outcome(rng: np.random.Generator, folder: Path) -> tuple[str, str]:
    """Return how reading a drawn config.json ends, and what it was."""
    given, key = config(rng, folder)
    (folder / "config.json").write_text(json.dumps(given))
    end = outcome(lambda: jt.load_config(f"hf:{folder}"))
    if end == "read" and of_wrong_type(given, key):
        end = "wrong success"
    return end, f"{key} of {json.dumps(given)[:600]}"


def header_outcome(rng: np.random.Generator, folder: Path) -> tuple[str, str]:
    """Return how reading a drawn safetensors file ends, and what it was."""
    content, right = header(rng)
    (folder / safetensors_files.SINGLE).write_bytes(content)
    end = outcome(lambda: [tensor.view() for tensor in safetensors_files.tensors_of(folder).values()])
    if right != (end == "read") and end in ("read", "refused"):
        end = "wrong success" if end == "read" else "a right file is refused"
    return end, f"{content[:300]!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="draws of each kind of file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bad = 0
    for what, draw in (("config.json", config_outcome), ("safetensors", header_outcome)):
        ends: dict[str, int] = {}
        for n in range(args.cases):
            with tempfile.TemporaryDirectory() as folder:
                end, case = draw(np.random.default_rng([args.seed, n]), Path(folder))
            ends[end] = ends.get(end, 0) + 1
            if end not in ("read", "refused"):
                bad += 1
                print(f"{what}, case {n}: {end}: {case}")
        print(what, ends)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
