"""Write the adapters of a run as files, show those in a folder, and keep versions of them."""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError, say
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import user_json
from jaxtrain.hf.hf_config import FILE
from jaxtrain.hub import export as exports
from jaxtrain.hub import initial_params, trained_model
from jaxtrain.hub.adapters import adapter_files
from jaxtrain.hub.weights import safetensors_files

PARTIAL = ".partial"  # at the end of the name of a folder that is not whole yet


def export(workdir: Path, to: Path, step: int | None = None, *, base: str = "", dtype: str = "float32",
           averaged: bool = False, overwrite: bool = False) -> int:
    """Write the adapters of a workdir's checkpoint, and return its step. Every process calls it.

    Args:
        workdir: of the run.
        to: the folder to make.
        step: of the checkpoint; None: the newest good one.
        base: the name or folder of the model that they are for; "": that of the folder that the run began with.
        dtype: of the adapters.
        averaged: write their moving average.
        overwrite: replace earlier ones in the folder.
    """
    sections = trained_model.sections_of(workdir)
    exports.check_is_new(to, overwrite)
    _check_exported(workdir, sections)
    run = trained_model.spread_model(sections)
    params, found = trained_model.load(workdir, run, step, averaged)
    if found is None:
        raise UserError("WORKDIR", f"{workdir} is a published folder already", "give the workdir of a run")
    partial = to.with_name(f"{to.name}.partial")
    base = base or _base_of(sections)
    base = f"{Path(base).resolve()}" if base and Path(base).is_dir() else base  # wherever the adapters are copied to
    with exports.nothing_left(partial):
        exchange(None, lambda _: exports.make_folder(partial))
        adapter_files.save(params, run.config.model, run.config.lora, partial, base, np.dtype(dtype))
        if jax.process_index() == 0:
            exports.finish(partial, to, {"workdir": workdir.absolute().name, "step": found[0], "parameters": found[1],
                                        "averaged": averaged}, overwrite)
            if not base:
                say(f"{to / adapter_files.CONFIG} names no model: give its folder or name with --base")
        exchange(None)
    return found[0]


def _base_of(sections: dict) -> str:
    """Return the published folder that a run began with, or whose adapters it began with; "" if it was another run."""
    if not (source := sections.get("train", {}).get("init_from")):
        return ""
    began, _ = initial_params.source_and_step(source)
    if adapter_files.is_adapter_folder(began):
        began = adapter_files.base_of(began)
    return f"{began}" if (began / FILE).is_file() and not (began / "checkpoints").is_dir() else ""


def _check_exported(workdir: Path, sections: dict) -> None:
    if not sections.get("lora", {}).get("rank"):
        raise UserError("WORKDIR", f"{workdir} has no adapters (lora.rank=0)", "write the model: jaxtrain export")
    if sections["lora"].get("experts"):
        raise UserError("WORKDIR", f"{workdir} has adapters of experts, for which PEFT has no format of its own",
                        "write the whole model: jaxtrain export")
    if sections.get("preference", {}).get("loss") == "reward":
        raise UserError("WORKDIR", f"{workdir} has a reward model, whose head is not an adapter",
                        "write the whole model: jaxtrain export")
    if sections.get("train", {}).get("trainable"):
        raise UserError("WORKDIR", f"{workdir} has trained more than adapters (train.trainable)",
                        "write the whole model: jaxtrain export")


def listed(folder: Path) -> list[dict[str, Any]]:
    """Return what is known of each folder of adapters in this one; "problem": why it cannot be used here."""
    if not folder.is_dir():
        raise UserError("FOLDER", f"{folder} is not a folder", "give one with adapters")
    found: list[dict[str, Any]] = []
    for path in sorted(file.parent for file in folder.rglob(adapter_files.CONFIG) if file.parent.suffix != PARTIAL):
        try:
            said = adapter_files.described(path)
        except UserError as refusal:
            found.append({"folder": f"{path}", "problem": refusal.reason})
            continue
        record = user_json(path / exports.RECORD, dict, f"{path}", "add it again") or {}
        found.append({
            "folder": f"{path}", "rank": said["r"], "alpha": said["lora_alpha"],
            "rank_stabilized": bool(said.get("use_rslora")), "model": said.get("base_model_name_or_path") or "",
            "size": sum(file.stat().st_size for file in path.glob("*.safetensors")),
            **{key: record[key] for key in ("workdir", "step") if {"step", "workdir"} <= record.keys()}})
    return found


def shown(one: dict[str, Any]) -> str:
    """Return a line about adapters: where, rank, what they are multiplied by, model, origin."""
    if "problem" in one:
        return f"{one['folder']}  cannot be used here: {one['problem']}"
    scale = f"alpha {one['alpha']:g}{', rank-stabilized' * one['rank_stabilized']}"
    return "  ".join([one["folder"], f"rank {one['rank']}", scale, f"{one['size'] / 1e6:.1f} MB",
                      f"for {one['model'] or 'a model not named'}",
                      *([f"step {one['step']} of {one['workdir']}"] if "step" in one else [])])


def add(store: Path, folder: Path, name: str) -> Path:
    """Copy adapters to the next version of a name, and return its folder."""
    said = adapter_files.described(folder)
    safetensors_files.tensors_of(folder, adapter_files.WEIGHTS)
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError("--name", f"{name!r} is not a plain name", "use letters, digits and - _ .")
    place = store / name
    partial = place / f"{os.getpid()}{PARTIAL}"
    with exports.nothing_left(partial):
        shutil.rmtree(partial, ignore_errors=True)  # of a process that had this number and was killed
        shutil.copytree(folder, partial)
        base = folder / f"{said.get('base_model_name_or_path') or ''}"
        if base != folder and base.is_dir():  # relative to where they were
            _rename_base(partial, said, f"{base.resolve()}")
        return _as_next_version(partial, place)


def _as_next_version(partial: Path, place: Path) -> Path:
    """Give a whole folder the number after the highest in this place."""
    while True:
        there = [int(path.name) for path in place.iterdir() if path.name.isdecimal()]
        to = place / f"{max(there, default=0) + 1}"
        try:
            os.rename(partial, to)
            break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # which say that another process was faster
                raise
    atomic_files.sync(place)
    return to


def _rename_base(folder: Path, said: dict, base: str) -> None:
    """Write another name of the model that adapters are for, and its hash where there is a record."""
    file = folder / adapter_files.CONFIG
    atomic_files.write_json(file, said | {"base_model_name_or_path": base})
    if record := user_json(folder / exports.RECORD, {"sha256": dict}, f"{folder}", "export it again"):
        record["sha256"][file.name] = atomic_files.file_digest(file)
        atomic_files.write_json(folder / exports.RECORD, record)
