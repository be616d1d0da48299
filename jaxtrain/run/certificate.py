"""The certificate of `jaxtrain prove`: that this code, with this config, gives on meshes the numbers of one device.

It lies in a file named by two hashes: that of the code (jaxtrain's, and the modules of the user's own parts), and that
of what decides what is computed: the config, without what a proof varies itself, such as the mesh, and the settings of
the user's own parts, such as the learning rate of an optimizer.
"""

import contextlib
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import jax

from jaxtrain.base.annotations import JsonObject
from jaxtrain.config.schema import AXES, hash_of
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files, shipped_configs
from jaxtrain.observe.own_parts import describe
from jaxtrain.observe.versions import version_of
from jaxtrain.run import Run, identity

FOLDER = "proofs"
PRECISION, LAYOUTS, STEPS = "float32", 10, 2  # the least that `--require_proof` takes; a second step shows the state
_FORM = {"code": str, "config": str, "proven": bool, "worst": float, "layouts": [dict], "steps": int, "precision": str,
         "versions": dict, "refuted?": {"layout": str, "keys": dict, "step": int}}
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
    return _code_hash(_parts_of(run)), hash_of(decides | {"own parts": _settings_of_parts(run)})


def name_of(code: str, config: str) -> str:
    """Return the name of the file for these hashes."""
    return f"{code}-{config}.json"


def write(certificate: JsonObject, folder: str | Path) -> Path:
    """Write a certificate into a folder under its name, and return the path.

    A refutation stays until its layout was run again: layouts are drawn, and others may not show the error.
    """
    path = Path(folder) / name_of(certificate["code"], certificate["config"])
    earlier = _refutation(path)
    if earlier is not None and earlier["layout"] not in [one["layout"] for one in certificate["layouts"]]:
        raise UserError("--output", f"{path} says that this code and config were refuted on {earlier['layout']}, which "
                        "could not be run again here", "give as many devices as that layout has, or remove the file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(path, json.dumps(certificate, indent=2) + "\n")
    except OSError as error:
        raise UserError("--output", f"{folder} cannot be written ({error.strerror})", "give a folder that can be"
                        ) from None
    return path


def refuted(code: str, config: str, folder: str | Path) -> JsonObject:
    """Return the keys of the layout that refuted these hashes in a folder, and the step; {}: nothing did."""
    found = _refutation(Path(folder) / name_of(code, config)) or {}
    return found if "keys" in found else {}


def found(run: Run, folder: str | Path = FOLDER) -> JsonObject | None:
    """Return the certificate of a run's code and config; None: there is none in the folder."""
    return _read(Path(folder) / name_of(*hashes_of(run)))


def _read(path: Path) -> JsonObject | None:
    return bounded_files.user_json(path, _FORM, "--require_proof", "run jaxtrain prove again")


def _refutation(path: Path) -> JsonObject | None:
    """Return what a file says of a refutation; None: there is none, or nothing that can be read."""
    with contextlib.suppress(UserError):
        if (certificate := _read(path)) and not certificate["proven"]:
            return certificate.get("refuted", {"layout": "another layout"})
    return None


def for_run(run: Run, required: str | Path = "") -> JsonObject:
    """Return what run.json says of a run's certificate, by "proof"; nothing, if there is none. Every process calls it.

    `required`: the folder that must have one, or the run is refused; "": a run without one is trained as well.
    """
    return exchange(None, lambda _: _in_this_process(run, required))


def _in_this_process(run: Run, required: str | Path) -> JsonObject:
    if not required:
        with contextlib.suppress(UserError):  # a damaged one is none
            if (certificate := found(run)) and certificate["proven"] and not _other_versions(certificate):
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
    if other := _other_versions(certificate):
        raise UserError("--require_proof", other, "run jaxtrain prove again with these")
    layouts, steps, precision = len(certificate["layouts"]), certificate["steps"], certificate["precision"]
    if layouts < LAYOUTS or steps < STEPS or precision != PRECISION:
        raise UserError("--require_proof", f"the certificate is of {layouts} layouts and {steps} "
                        f"step{'s' * (steps != 1)} in {precision}, and at least {LAYOUTS} layouts and {STEPS} steps in "
                        f"{PRECISION} are required",
                        "run jaxtrain prove again without --meshes, --steps and --precision")
    return {"proof": summary(certificate)}


def _other_versions(certificate: JsonObject) -> str:
    """Return in words how the versions that compile a step differ from those of the proof; "": they are the same."""
    def of(versions: JsonObject) -> str:
        return " and ".join(f"{name} {versions.get(name)}" for name in ("jax", "jaxlib"))
    then, now = of(certificate["versions"]), of({name: version_of(name) for name in ("jax", "jaxlib")})
    return "" if then == now else f"the certificate is of {then}, and this run has {now}"


def summary(certificate: JsonObject) -> JsonObject:
    """Return what run.json says of a certificate."""
    kept = ("code", "config", "worst", "steps", "precision", "date")
    return {key: certificate[key] for key in kept if key in certificate} | {"layouts": len(certificate["layouts"])}


# ------------------------------------------------------------------------------------------- the user's own parts
def _settings_of_parts(run: Run) -> JsonObject:
    """Return the settings of parts that the config does not name, which are alike on every mesh and machine."""
    found = identity.but_optimizer_and_data(run, {})
    if run.own is not None:
        found["parameters"] = [f"{leaf.dtype}{leaf.shape}" for leaf in jax.tree.leaves(run.abstract.all_params)]
    if run.sharded.settings.schedule is None:
        found["optimizer"] = _settings_of_optimizer(run)
    return found


def _settings_of_optimizer(run: Run) -> JsonObject:
    """Return the description of a user's optimizer, traced for one CPU device, or else of its function."""
    try:
        found = identity.optimizer_on_one_device(run)
    except Exception:  # it needs to know more of the devices than there is to know
        return describe(run.sharded.settings.optimizer.update)
    return {"state": found["state"], "update": [*found["update"].values()]}


# --------------------------------------------------------------------------------------------------------- the code
def _parts_of(run: Run) -> list[object]:
    own = [] if run.own is None else [run.own.train_step.own.function, run.own.initial]
    return [*own, run.objective, run.sharded.settings.optimizer.update, *run.extensions, *run.config.plug_ins.values()]


def _code_hash(parts: Sequence[object]) -> str:
    """Return the hash of jaxtrain's code, and of the modules that hold these parts and what they import of the user's.
    """
    root = Path(__file__).parents[1]
    files = {path for path in root.rglob("*.py") if "__pycache__" not in path.parts
             and not path.is_relative_to(shipped_configs.folder())}  # which only a wheel has in the package
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
