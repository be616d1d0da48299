"""A trained model on the devices that are here, from a run's workdir or a published folder, whatever trained it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain import builder
from jaxtrain.checkpoint import restore
from jaxtrain.config import published_config
from jaxtrain.config.load import make_config
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import user_json
from jaxtrain.hub import published_weights
from jaxtrain.run import Run

Sections = dict[str, Any]


def sections_of(folder: str | Path) -> Sections:
    """Return the sections of the config in a workdir, or that which a published folder amounts to."""
    path = Path(folder) / published_config.FILE
    found = user_json(path, dict, "WORKDIR", "give the workdir of a run")
    if found is None:
        raise UserError("WORKDIR", f"{folder} has no {path.name}", "give the workdir of a run")
    if not isinstance(found.get("model"), dict):
        return published_config.starting_config(str(folder))
    if wrong := next((name for name, section in found.items() if not isinstance(section, dict)), None):
        raise UserError("WORKDIR", f"{path} is not the config of a run: {wrong} is no section", "give a run's workdir")
    return found


def model_of(sections: Sections, overrides: Mapping[str, Any], spread: str) -> Run:
    """Return a run of which only the model counts, on all devices along the axis `spread`, unless overrides say more.

    How the model was trained need not fit the devices here.
    """
    mesh, devices = sections.get("mesh", {}), jax.device_count()
    kept: Sections = {"model": sections["model"], "lora": sections.get("lora", {})}
    scores = sections.get("preference", {}).get("loss") == "reward"  # it has a reward head
    longest = make_config(kept | {"data": {"seq_len": 1}}).model.max_seq_len
    kept |= {"mesh": {key: mesh[key] for key in ("rules", "overrides") if key in mesh},
             "train": {"precision": sections.get("train", {}).get("precision", "auto")},
             "preference": {"loss": "reward"} if scores else {},
             "data": {"global_batch_size": devices, "seq_len": longest - longest % devices or longest,
                      "packing": "pairs" if scores else "concat"}}
    along = {} if any(key.startswith("mesh.") for key in overrides) else {"mesh.data": 1, f"mesh.{spread}": devices}
    return builder.build(make_config(kept, along | dict(overrides)))


def spread_model(sections: Sections) -> Run:
    """Return the model, sharded over all devices here where its dimensions divide over them."""
    try:
        return model_of(sections, {}, spread="fsdp")
    except UserError:
        return model_of(sections, {}, spread="data")


def load(folder: str | Path, run: Run, step: int | None = None) -> tuple[Any, tuple[int, str] | None]:
    """Return all parameters, and the step and fingerprint of the checkpoint that they are from; None: published ones.
    """
    if not (Path(folder) / "checkpoints").is_dir() and step is None and "model_type" in (
            user_json(Path(folder) / published_config.FILE, dict, "WORKDIR", "give the workdir of a run") or {}):
        return published_weights.load(folder, run.config.model, run.abstract_model), None
    found = restore.find_good(folder, step)
    if found is None:
        raise UserError("--step", f"{folder} has no checkpoint of step {step} that was found good",
                        f"see those that it has: jaxtrain checkpoint list {folder}")
    return restore.load_params(folder, run.abstract_model, found[0]), found
