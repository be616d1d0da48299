"""A trained model on the devices that are here, whatever trained it: of a run's workdir, or of a published folder.

A published folder has a model in Hugging Face's format, or adapters in PEFT's and the name of the model they are for.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxtrain import builder
from jaxtrain.base import arguments
from jaxtrain.base.annotations import JsonMapping
from jaxtrain.checkpoint import restore
from jaxtrain.config import hub_names
from jaxtrain.config.family import config_class, config_of, family, names
from jaxtrain.config.load import make_config
from jaxtrain.config.schema import ROWS
from jaxtrain.config.sections.earlier_keys import as_named_now
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import user_json
from jaxtrain.hf import defaults, hf_config
from jaxtrain.hub.adapters import adapter_files, stacked_adapters
from jaxtrain.hub.adapters.stacked_adapters import Folders
from jaxtrain.hub.weights import published_weights
from jaxtrain.models import lora
from jaxtrain.run import Run, abstract_model
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Params, TrainState

Sections = dict[str, Any]


def sections_of(folder: str | Path, text: bool = False, published: bool = True) -> Sections:
    """Return the sections of the config in a workdir, or that which a published folder amounts to.

    `text`: refuse a run whose model is not a decoder of text. `published`: and one that cannot be published either.
    """
    arguments.is_path("WORKDIR", folder, "give the workdir of a run")
    folder = hub_names.model_folder(f"{folder}")
    path = Path(folder) / hf_config.FILE
    if not Path(folder).is_dir():
        raise _no_folder(Path(folder))
    found = as_named_now(user_json(path, dict, "WORKDIR", "give the workdir of a run"))
    if found is None and adapter_files.is_adapter_folder(folder):
        sections = hf_config.starting_config(f"{adapter_files.base_of(folder)}")
        return sections | {"lora": adapter_files.keys(folder, config_of(sections["model"]))}
    if found is None:
        packed = next(iter(sorted(Path(folder).glob("*.gguf"))), None)
        raise hub_names.in_gguf(packed, "WORKDIR") if packed else UserError(
            "WORKDIR", f"{folder} has no {path.name}", "give the workdir of a run, or a published folder")
    if not isinstance(found.get("model"), dict):
        return hf_config.starting_config(str(folder))
    if wrong := next((name for name, section in found.items() if not isinstance(section, dict)), None):
        raise UserError("WORKDIR", f"{path} is not the config of a run: {wrong} is not a section",
                        "give a run's workdir")
    name = found["model"].setdefault("name", "gpt2")
    if not isinstance(name, str) or name not in names():
        raise UserError("WORKDIR", f"{path} is not the config of a run: model.name={defaults.shown(name)} is "
                        "not a model that jaxtrain has", "give a run's workdir")
    if not config_class(name).text and (text or (published and not family(name).hf)):
        raise UserError("WORKDIR", f"it trained {name}, which is not a decoder of text",
                        "its run evaluates it: see metrics.jsonl")
    return found


def _no_folder(path: Path) -> UserError:
    """Return the error about a model that is named by what is no folder."""
    if path.suffix.lower() == ".gguf":
        return hub_names.in_gguf(path, "WORKDIR")
    if path.exists():
        return UserError("WORKDIR", f"{path} is a file", f"give the folder that it is in: {path.parent}")
    if hub_names.is_name(f"{path}"):
        return UserError("WORKDIR", f"there is no folder {path}",
                         f"write hf:{path} for a model on the Hugging Face Hub")
    return UserError("WORKDIR", f"there is no folder {path}", "give the workdir of a run, or a published folder")


def model_of(sections: Sections, overrides: JsonMapping, spread: str, count: int = 0, platform: str = "") -> Run:
    """Return a run of which only the model counts, on all devices along the axis `spread`, unless overrides say more.

    How the model was trained need not fit the devices here. `count`: that of devices which are not here, of `platform`.
    """
    mesh, devices = sections.get("mesh", {}), count or jax.device_count()
    scores = sections.get("preference", {}).get("loss") == "reward"  # it has a reward head
    kept: Sections = {"model": sections["model"], "lora": sections.get("lora", {}),
                      "preference": {"loss": "reward"} if scores else {}}
    model = config_class(sections["model"].get("name", "gpt2"))
    packing = "pairs" if scores else "concat" if model.text else ROWS[model.rows_of][0]
    longest = make_config(kept | {"data": {"seq_len": 1, "packing": packing}}).model.longest_row
    kept |= {"mesh": {key: mesh[key] for key in ("rules", "overrides") if key in mesh},
             "train": {"precision": sections.get("train", {}).get("precision", "auto")},
             "data": {"global_batch_size": devices, "seq_len": longest - longest % devices or longest,
                      "packing": packing}}
    along = {} if any(key.startswith("mesh.") for key in overrides) else {"mesh.data": 1, f"mesh.{spread}": devices}
    return builder.build(make_config(kept, along | dict(overrides)), devices=count or None, platform=platform)


def spread_model(sections: Sections, count: int = 0, platform: str = "") -> Run:
    """Return the model, sharded over all devices, as `model_of` takes them, where its dimensions divide over them."""
    try:
        return model_of(sections, {}, "fsdp", count, platform)
    except UserError:
        return model_of(sections, {}, "data", count, platform)


def load(folder: str | Path, run: Run, step: int | None = None, averaged: bool = False,
         abstract: Params = None) -> tuple[Params, tuple[int, str] | None]:
    """Return all parameters, and the step and fingerprint of the checkpoint that they are from; None: published ones.

    Args:
        folder: the workdir of a run, a published folder, or adapters in PEFT's format.
        run: with the model.
        step: of the checkpoint; None: the newest good one.
        averaged: of a run's trained parameters, their moving average.
        abstract: which parameters, with their dtypes and shardings; None: all of the model.
    """
    abstract = abstract_model(run) if abstract is None else abstract
    if step is not None and step < 0:
        raise UserError("--step", f"{step} is not a step", "leave it out for the newest good checkpoint, or see those "
                        f"that there are: jaxtrain checkpoint list {folder}")
    if step is None and adapter_files.is_adapter_folder(folder):
        _refuse_average(folder, averaged)
        return adapter_files.load_with_base(folder, run.config.model, run.config.lora, abstract), None
    if not (Path(folder) / "checkpoints").is_dir() and step is None and "model_type" in (
            user_json(Path(folder) / hf_config.FILE, dict, "WORKDIR", "give the workdir of a run") or {}):
        _refuse_average(folder, averaged)
        return published_weights.load(folder, run.config.model, abstract), None
    found = restore.find_good(folder, step)
    if found is None:
        raise UserError("--step", f"{folder} has no checkpoint of step {step} that was found good",
                        f"see those that it has: jaxtrain checkpoint list {folder}")
    return restore.load_params(folder, abstract, found[0], averaged), found


def _refuse_average(folder: str | Path, averaged: bool) -> None:
    if averaged:
        raise UserError("--ema", f"{folder} is a published folder, with one set of weights", "leave it out")


def load_model(folder: str | Path, overrides: JsonMapping | None = None, *, step: int | None = None,
               averaged: bool = False, adapters: Folders | None = None) -> tuple[Run, TrainState]:
    """Return a run for the devices here and a state with a trained model's parameters, as `jt.generate` takes them.

    Args:
        folder: the workdir of a run, a published folder, adapters in PEFT's format, or the name of a model on the
            Hugging Face Hub, hf:ORG/NAME.
        overrides: keys of `mesh` and `train.precision`; by default all devices share the rows. With `adapters`, also
            `lora.quantize`.
        step: of a run's checkpoint; None: the newest good one.
        averaged: of a run that keeps it, the moving average of the weights.
        adapters: folders in PEFT's format by the names of the adapters, of which each prompt may use one.

    Raises:
        UserError: the checkpoint is not there or not good, or the model does not fit the mesh.
    """
    return load_with_origin(folder, overrides, step, averaged, adapters)[:2]


def load_with_origin(folder: str | Path, overrides: JsonMapping | None = None, step: int | None = None,
                     averaged: bool = False, adapters: Folders | None = None
                     ) -> tuple[Run, TrainState, tuple[int, str] | None]:
    """Return what `load_model` does, and the step and fingerprint of the checkpoint; None: a published model."""
    arguments.is_path("WORKDIR", folder, "give the workdir of a run")
    folder = hub_names.model_folder(f"{folder}")
    sections, overrides = sections_of(folder, published=False), dict(overrides or {})
    if adapters is not None:
        if sections.get("lora", {}).get("rank"):
            raise UserError("adapters", f"the model in {folder} has adapters already", "give the model they are for")
        for one in adapters.values():
            adapter_files.warn_of_other_base(one, folder)
        model = config_of(sections["model"])
        sections |= {"lora": stacked_adapters.keys(adapters, model, overrides.pop("lora.quantize", ""))}
    run = model_of(sections, overrides, spread="data")
    kept = None if adapters is None else lora.without_adapters(abstract_model(run))
    params, found = load(folder, run, step, averaged, kept)
    return run, with_params(run, params) if adapters is None else _adapted(run, params, adapters), found


def with_adapters(run: Run, state: TrainState, adapters: Folders) -> tuple[Run, TrainState]:
    """Return the model with these adapters instead of its current ones; all other weights are the same arrays.

    Args:
        run: the run that `jt.load_model` returned with `adapters`.
        state: the state of that run.
        adapters: folders in PEFT's format by the names of the adapters, including those to keep.
    """
    c = run.config
    section = stacked_adapters.keys(adapters, c.model, c.lora.quantize)
    new = builder.build(replace(c, lora=LoraConfig(**section)), mesh=run.mesh)
    return new, _adapted(new, lora.without_adapters(state.all_params), adapters)


def _adapted(run: Run, base: Any, adapters: Folders) -> TrainState:
    """Return the state of a run with stacked adapters."""
    found, choices = stacked_adapters.load(adapters, run, base)
    state = with_params(run, partition.merge(base, found))
    return replace(state, extras=state.extras | {stacked_adapters.NAME: choices})


def with_params(run: Run, params: Params) -> TrainState:
    """Return a state around loaded parameters, without an optimizer's state."""
    trained = partition.like(params, run.abstract.params)
    return replace(run.abstract, params=trained, frozen=partition.without(params, trained))
