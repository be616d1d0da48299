"""The certificate of `jaxtrain prove`: that this code, with this config, gives on meshes the numbers of one device.

It lies in a file named by two hashes: that of the code (jaxtrain's, and the modules of the user's own parts), and that
of the part of the config which decides what is computed, without what a proof varies itself, such as the mesh.
"""

import contextlib
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from jaxtrain.base.annotations import JsonObject
from jaxtrain.config.schema import AXES, hash_of
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files
from jaxtrain.run import Run, identity

FOLDER = "proofs"
_FORM = {"code": str, "config": str, "proven": bool, "worst": float, "layouts": [dict]}
# What does not decide which numbers a step computes from a state and a batch, or what every proof varies; None: all.
_APART: dict[str, set[str] | None] = {
    "checkpoint": None, "resilience": None, "observe": None, "evaluation": None, "pipeline": None,
    "mesh": {*AXES, "auto", "hsdp", "context_strategy"},
    "data": {"source", "tokenizer", "cache_dir", "cache_bytes", "corrupt", "prefetch", "workers", "seed", "seq_len",
             "global_batch_size", "mixture", "stages", "packing", "buckets"},
    "optimizer": {"zero_stage", "offload"},
    "train": {"steps", "epochs", "seed", "init_from", "init_encoder_from", "accumulation", "remat", "unroll",
              "loss_chunks", "check_memory", "log_every", "eval_every", "eval_batches", "patience", "sample_tokens",
              "progress", "deterministic", "compiler_options"},
}


def hashes_of(run: Run) -> tuple[str, str]:
    """Return the hash of the code that a run consists of, and that of its config."""
    decides = {section: {key: value for key, value in keys.items() if key not in (_APART.get(section) or ())}
               for section, keys in identity.settings(run).items() if _APART.get(section, ()) is not None}
    return _code_hash(_parts_of(run)), hash_of(decides)


def name_of(code: str, config: str) -> str:
    """Return the name of the file for these hashes."""
    return f"{code}-{config}.json"


def write(certificate: JsonObject, folder: str | Path) -> Path:
    """Write a certificate into a folder under its name, and return the path."""
    path = Path(folder) / name_of(certificate["code"], certificate["config"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(path, json.dumps(certificate, indent=2) + "\n")
    except OSError as error:
        raise UserError("--output", f"{folder} cannot be written ({error.strerror})", "give a folder that can be"
                        ) from None
    return path


def found(run: Run, folder: str | Path = FOLDER) -> JsonObject | None:
    """Return the certificate of a run's code and config; None: there is none in the folder."""
    path = Path(folder) / name_of(*hashes_of(run))
    if not path.exists():
        return None
    return bounded_files.user_json(path, _FORM, "--require_proof", "run jaxtrain prove again")


def for_run(run: Run, required: str | Path = "") -> JsonObject:
    """Return what run.json says of a run's certificate, by "proof"; nothing, if there is none. Every process calls it.

    `required`: the folder that must have one, or the run is refused; "": a run without one is trained as well.
    """
    return exchange(None, lambda _: _in_this_process(run, required))


def _in_this_process(run: Run, required: str | Path) -> JsonObject:
    if not required:
        with contextlib.suppress(UserError):  # a damaged one is none
            if (certificate := found(run)) and certificate["proven"]:
                return {"proof": summary(certificate)}
        return {}
    certificate = found(run, required)
    if certificate is None:
        there = len(list(Path(required).glob("*.json")))
        raise UserError("--require_proof", f"{required} has no certificate of this code and config"
                        f"{f', only {there} of others' if there else ''}",
                        "run jaxtrain prove with the same config, or train without the flag")
    if not certificate["proven"]:
        raise UserError("--require_proof", f"this code and config were refuted: {certificate.get('failure', '')}",
                        "correct that, and run jaxtrain prove again")
    return {"proof": summary(certificate)}


def summary(certificate: JsonObject) -> JsonObject:
    """Return what run.json says of a certificate."""
    kept = ("code", "config", "worst", "steps", "precision", "date")
    return {key: certificate[key] for key in kept if key in certificate} | {"layouts": len(certificate["layouts"])}


# --------------------------------------------------------------------------------------------------------- the code
def _parts_of(run: Run) -> list[object]:
    own = [] if run.own is None else [run.own.train_step.own.function, run.own.initial]
    return [*own, run.objective, run.sharded.settings.optimizer.update, *run.extensions, *run.config.plug_ins.values()]


def _code_hash(parts: Sequence[object]) -> str:
    """Return the hash of jaxtrain's code, and of the modules that hold these parts and what they import of the user's.
    """
    root = Path(__file__).parents[1]
    files = {path for path in root.rglob("*.py") if "__pycache__" not in path.parts}
    contents = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    own = sorted(hashlib.sha256(text.encode()).hexdigest() for text in _own_sources(parts))
    return hashlib.sha256("\n".join([*contents, "", *own]).encode()).hexdigest()[:16]


def _own_sources(parts: Sequence[object]) -> Iterator[str]:
    """Yield the source of the user's modules that parts come from; of a notebook, that of the part itself."""
    left = [sys.modules[name] for part in parts if (name := _module_of(part)) in sys.modules]
    seen: set[str] = set()
    while left:
        module = left.pop()
        file = getattr(module, "__file__", None)
        if module.__name__ in seen or not _is_users(file):
            continue
        seen.add(module.__name__)
        yield Path(f"{file}").read_text(errors="replace")
        for value in list(vars(module).values()):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(name, str) and name in sys.modules:
                left.append(sys.modules[name])
    for part in parts:
        if _module_of(part) == "__main__" and getattr(sys.modules["__main__"], "__file__", None) is None:
            try:
                yield inspect.getsource(part if inspect.isroutine(part) else type(part))
            except (OSError, TypeError):
                yield f"{part!r}"


def _module_of(part: object) -> str:
    part = inspect.unwrap(part) if inspect.isroutine(part) else part
    while hasattr(part, "func"):  # functools.partial
        part = part.func
    return getattr(part if inspect.isroutine(part) or isinstance(part, type) else type(part), "__module__", "") or ""


def _is_users(file: str | None) -> bool:
    """Return whether a file is neither of jaxtrain nor of an installed package or of Python itself."""
    if not file or not file.endswith(".py") or "site-packages" in file or "dist-packages" in file:
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(root) for root in (Path(__file__).parents[1], Path(inspect.__file__).parent))
