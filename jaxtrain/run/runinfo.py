"""The identity of a run in its workdir: config.json and run.json, and the refusal to continue it as another one."""

import dataclasses
import json
import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Set
from pathlib import Path
from typing import Any

import jax

from jaxtrain.base.annotations import Json, JsonMapping, JsonObject
from jaxtrain.config import data_stages
from jaxtrain.config.schema import Config, DataConfig, hash_of
from jaxtrain.config.sections.earlier_keys import as_named_now
from jaxtrain.errors import UserError, nearest
from jaxtrain.files import atomic_files, bounded_files
from jaxtrain.files.bounded_files import Form
from jaxtrain.observe.own_parts import difference
from jaxtrain.observe.versions import git_commit, version_of

# What a resumed run may change: where and how fast the same mathematics is done, and what is told about it.
_FREE: dict[str, Set[str] | None] = {
    "mesh": None, "pipeline": None, "checkpoint": None, "resilience": None, "observe": None,
    "evaluation": None,  # all of their keys
    # The same text elsewhere is the same data: the manifest's hash tells. Rows that are not lost stay where they were.
    "data": {"cache_dir", "cache_bytes", "corrupt", "prefetch", "source", "workers"},
    "optimizer": {"zero_stage", "offload"},
    "rl": {"reward_timeout_s", "sampler", "sampler_timeout_s", "sampler_folder"},
    "diloco": {"meeting", "keys", "max_age", "snapshot_every"},
    "train": {"accumulation", "precision", "attention", "remat", "unroll", "loss_chunks", "loss_kernel", "log_every",
              "eval_every", "eval_batches", "patience", "sample_tokens", "progress", "check_memory", "expert_exchange",
              "grouped_matmul", "recurrent_kernel", "expert_buffer", "deterministic", "compiler_options",
              "init_from", "init_encoder_from"},  # what has a checkpoint of its own goes on from that
}
# What a resumed run may change where `--may_change` names it: it shapes the steps to come, not the state.
MAY_CHANGE = frozenset(
    [f"optimizer.{key}" for key in ("learning_rate", "schedule", "warmup_steps", "decay_fraction", "final_fraction",
                                    "weight_decay", "clip_norm", "b1", "b2", "momentum", "eps")]
    + ["train.steps", "train.z_loss", "train.ema_decay"])
# What a resumed run may change where it makes no difference to the steps that are done: data.stages tells which.
_STAGED = {"mixture", "stages", "seq_len", "global_batch_size"}
_RUN = {  # what is read of run.json
    "run?": str, "adopted?": [(str, int)], "init_from?": dict, "data_manifests?": {str: str},
    "data_manifest_hash?": str | None,
    "own_parts?": {"optimizer?": {"state": str, "update": {str: str}}},
    "data_changes?": [dict], "config_changes?": [dict],
}
PACKAGES = {name: name for name in ("jax", "jaxlib", "flax", "optax", "grain", "numpy")} | {"orbax": "orbax-checkpoint"}


class OtherRun(UserError):
    """A workdir holds a run of another config, of other parts or of other data."""


def make_workdir(workdir: str | Path) -> None:
    """Make `workdir` if need be; raise a `UserError` if it, or what is in it, cannot be written, now or in a save."""
    folder = workdir = Path(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for path, is_right, kind in ((workdir / "metrics.jsonl", Path.is_file, "file"),
                                     (workdir / "checkpoints", Path.is_dir, "folder")):
            if path.exists() and not is_right(path):
                raise UserError("--workdir", f"{path} is not a {kind}", "move it away")
        for folder in (workdir, workdir / "checkpoints"):
            if os.path.lexists(folder):
                tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritable(folder, error) from None


def recorded_parts(workdir: str | Path, saved: JsonMapping | None = None) -> JsonObject | None:
    """Return how run.json describes those parts of the workdir's run that are its user's own; None: it is not known.

    `saved`: what a checkpoint of the run says, which counts where run.json was lost.
    """
    return (_read(Path(workdir) / "run.json", _RUN) or saved or {}).get("own_parts")


def identity(workdir: str | Path, saved: JsonMapping,
             adopt: bool = False) -> tuple[JsonObject, JsonMapping]:
    """Return the identity of the workdir's run: its random id, and the checkpoints of other runs that it adopted.

    Args:
        saved: what the checkpoint to go on from says of its run; {}: there is none.
        adopt: go on from the checkpoint of another run.

    Returns:
        the identity, for run.json and every checkpoint; and `saved`, or {} if it describes another run.

    Raises:
        UserError: the checkpoint belongs to another run.
    """
    workdir = Path(workdir)
    recorded = _read(workdir / "run.json", _RUN) if saved or (workdir / "config.json").exists() else {}
    own = recorded or ({} if adopt else saved)
    known: dict[str, Any] = {"run": own.get("run") or secrets.token_hex(8), "adopted": own.get("adopted", []),
                             **{key: own[key] for key in ("init_from",) if key in own}}
    theirs = [saved.get("run"), saved.get("step")]
    if not saved or theirs[0] == known["run"]:
        return known, saved
    if theirs not in known["adopted"]:
        if not adopt:
            raise UserError("checkpoint", f"step {theirs[1]} in {workdir} belongs to another run than run.json there "
                            f"(id {theirs[0]} instead of {known['run']})",
                            "move it away, or give --adopt to resume from it anyway")
        known["adopted"] = [*known["adopted"], theirs]
    return known, {}


def check_workdir(workdir: str | Path, config: Config, manifests: Mapping[str, str] | None = None,
                  done: int = 0, *, parts: JsonMapping | None = None,
                  keys: JsonMapping | None = None, saved: JsonMapping | None = None,
                  may_change: Collection[str] = ()) -> list[JsonObject]:
    """Make `workdir` if need be and raise a `UserError` if it cannot be written or holds a run of other mathematics.

    Args:
        manifests: the hash of each source's data, if known yet.
        done: steps that the workdir's newest checkpoint has.
        parts: the description of those parts of the run that are its user's own (`own_parts.py`); None: not known yet.
        keys: the part of the config that counts for this run, as `config.json` has it; None: all of it.
        saved: what the newest checkpoint says of the run, which counts where run.json or config.json was lost.
        may_change: keys such as "train.steps", whose values may differ from now on.

    Returns:
        what changed, on purpose, between the `done` steps and those to come.
    """
    may_change = {"train.steps" if key == "train.epochs" else key for key in may_change}  # which epochs become
    if unknown := sorted(may_change - MAY_CHANGE):
        raise UserError("--may_change", f"{unknown[0]} cannot change in a run", nearest(unknown[0], MAY_CHANGE))
    workdir = Path(workdir)
    make_workdir(workdir)
    started, recorded = _read(workdir / "config.json", {str: dict}), _read(workdir / "run.json", _RUN)
    if saved and not (started and recorded):
        started, recorded = saved.get("config", started), recorded or saved
    started = as_named_now(started)
    current = config.to_dict() if keys is None else keys
    changed, allowed = changes_of(workdir, started, current, config, done, may_change, "optimizer" in (parts or {}))
    before = recorded_parts(workdir, saved)  # None: a workdir of an earlier commit does not tell
    if parts is not None and before is not None and (other := difference(before, parts)):
        raise OtherRun("--workdir", f"{workdir} holds a run {other}",
                       "give another --workdir, or go on with what it was begun with")
    if started:
        then = recorded.get("data_manifests") or {"": recorded.get("data_manifest_hash")}
        _check_data(workdir, started, config, then, manifests or then, done, changed)
    return changed + allowed if started else []


def changes_of(workdir: Path, started: JsonMapping, current: JsonMapping, config: Config, done: int,
               may_change: Collection[str], own_optimizer: bool) -> tuple[list[JsonObject], list[JsonObject]]:
    """Return the keys that differ from those of config.json: of data that is to come, and those that `may_change`.

    Raises:
        UserError: another key differs, and makes a difference.
    """
    changed, allowed, refused = [], [], []
    for section, values in current.items():
        for key, value in values.items():
            before = _before(started, config, section, key, value)
            if (section, key) == ("data", "mixture") and _without_places(before) == _without_places(value):
                continue  # the same sources elsewhere: their manifests tell
            same = before == value or (section == "compression" and {f"{before}", f"{value}"} == {"", "exact"})
            if same or ("float16" not in (before, value) and _free(section, key, config, own_optimizer)):
                continue
            name = f"{section}.{key}"
            if name == "optimizer.warmup_steps" and config.optimizer.schedule == "constant" and max(
                    before, value) <= done:
                continue  # it is over by both
            change = {"step": done, "key": name, "before": before, "after": value}
            if section == "data" and key in _STAGED and done:
                changed.append(change)
            elif name == "train.ema_decay" and not value:
                raise UserError(name, f"the run in {workdir} keeps an average of its weights, which cannot be changed",
                                f"set it to {before}, or begin another run with train.init_from")
            elif name in may_change:
                allowed.append(change)
            else:
                refused.append(change)
    if refused:
        first = min(refused, key=lambda change: change["key"] in MAY_CHANGE)
        name, before = first["key"], f"{first['before']}"[:200]  # config.json may have been damaged
        keys_to_allow = ",".join(change["key"] for change in [*allowed, *refused])
        allow = f"add --may_change={keys_to_allow} to continue it so, or " * (name in MAY_CHANGE)
        raise OtherRun("--workdir", f"{workdir} holds a run with {name}={before}, this config has {first['after']}",
                       f"{allow}give another --workdir or --config.{name}={before}")
    return changed, allowed


def _before(started: JsonMapping, config: Config, section: str, key: str, value: object) -> Json:
    """Return what config.json says of a key; the key's default if it is of a time before the key existed."""
    if section not in started:
        return value
    if key in started[section]:
        return started[section][key]
    now = getattr(config, section)
    others = {each.name: getattr(now, each.name) for each in dataclasses.fields(now) if each.name != key}
    try:
        return getattr(type(now)(**others), key)
    except (TypeError, UserError):  # it has no default
        return value


def _check_data(workdir: Path, started: JsonMapping, config: Config, then: JsonMapping,
                now: JsonMapping, done: int, changed: list[JsonObject]) -> None:
    """Raise a `UserError` if the steps that are done would have had other data.

    Args:
        then: the hash of each source's data as run.json has it; `now`: as it is.
        changed: the keys of data that differ.
    """
    try:
        past = _history(DataConfig(**started["data"]), then, done)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError("--workdir", f"{workdir}/config.json has no section 'data' of a run ({error})",
                        "give another --workdir") from None
    wanted = _history(config.data, now, done)
    if changed and past | {"sources": None} != wanted | {"sources": None}:
        unit = [stage[:3] + stage[4:] for stage in past["stages"]] == [
            stage[:3] + stage[4:] for stage in wanted["stages"]]
        raise OtherRun("--workdir", f"{workdir} holds a run whose first {done} steps had other data: "
                       f"{changed[0]['key']} was {changed[0]['before']}", "give the stage that has longer rows "
                       "new_epoch=true" if unit else "put it back, and let what is to change "
                       f"begin in data.stages with from_step={done} or later")
    if changed and {name: limit for name, (_, limit) in past["sources"].items()} != {
            name: limit for name, (_, limit) in wanted["sources"].items()}:
        raise OtherRun("--workdir", f"{workdir} holds a run with other data.mixture epochs of sources that it used",
                       "put them back: when a source drops out is fixed at its start")
    if other := [name for name in then if name in now and then[name] and now[name] != then[name]
                 and (not done or name in past["sources"])]:
        raise OtherRun("--workdir", f"{workdir} holds a run on other data: manifest {then[other[0]]}, now "
                       f"{now[other[0]]}", "give another --workdir or bring the data back")


def write_run_files(workdir: str | Path, config: Config, *, mesh_sizes: Mapping[str, int], device_kind: str,
                    data_manifest_hash: str | None, manifests: Mapping[str, str] | None = None, done: int = 0,
                    parts: JsonMapping | None = None, keys: JsonMapping | None = None,
                    saved: JsonMapping | None = None, known: JsonMapping | None = None,
                    may_change: Collection[str] = (), compiler_options: Mapping[str, str | bool] | None = None,
                    commit: Callable[[], str | None] | None = None) -> JsonObject:
    """Check `workdir` as `check_workdir` does, then (in process 0) write `config.json` and `run.json` into it.

    `known`: the identity of the run. `commit`: returns the commit of the code; git is asked by default.

    Returns:
        what `run.json` says of this run.
    """
    workdir = Path(workdir)
    manifests = manifests or ({"": data_manifest_hash} if data_manifest_hash else {})
    changes = check_workdir(workdir, config, manifests, done, parts=parts or {}, keys=keys, saved=saved,
                            may_change=may_change)
    written = config.to_dict() if keys is None else dict(keys)
    run = {
        **(known or {}),
        "config_hash": hash_of(written),
        "git_commit": (commit or git_commit)(), "jaxtrain": version_of("jaxtrain"),
        "packages": {name: version_of(package) for name, package in PACKAGES.items()},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "mesh": dict(mesh_sizes),
        "device_kind": device_kind,
        "process_count": jax.process_count(),
        "data_manifest_hash": data_manifest_hash,
        "data_manifests": dict(manifests),
        "own_parts": dict(parts or {}),
        "compiler_options": dict(compiler_options or {}),
    }
    if jax.process_index() != 0:
        return run
    try:
        recorded = _read(workdir / "run.json", _RUN)
        for kind, of_data in (("data_changes", True), ("config_changes", False)):
            earlier = recorded.get(kind, [])
            now = [change for change in changes if change["key"].startswith("data.") == of_data]
            if every := earlier + [change for change in now if change not in earlier]:
                run[kind] = every
        _write(workdir / "run.json", run)  # first: a kill here must not lose what changed
        _write(workdir / "config.json", written)
    except OSError as error:
        raise _unwritable(workdir, error) from None
    return run


def nothing_trained(workdir: str | Path) -> bool:
    """Return whether no step of the run in `workdir` is recorded, nor was one that a rollback took back."""
    logs = (Path(workdir) / name for name in ("metrics.jsonl", "metrics.rolled_back.jsonl"))
    return not any(log.exists() and log.stat().st_size for log in logs)


def withdraw_run_files(workdir: str | Path) -> None:
    """Remove what a start has written of a run that has trained nothing, so that it may begin with another config."""
    if jax.process_index() == 0 and nothing_trained(workdir):
        shutil.rmtree(Path(workdir) / "tokenizer", ignore_errors=True)
        for name in ("config.json", "run.json"):
            (Path(workdir) / name).unlink(missing_ok=True)


def _without_places(mixture: Json) -> Json:
    """A mixture without where its sources lie."""
    return {name: {key: value for key, value in entry.items() if key != "source"} if isinstance(entry, dict) else entry
            for name, entry in mixture.items()} if isinstance(mixture, dict) else mixture


def _history(data: DataConfig, manifests: Mapping[str, str], done: int) -> Json:
    return json.loads(json.dumps(data_stages.history(data, manifests, done)))


def _free(section: str, key: str, config: Config, own_optimizer: bool) -> bool:
    if (section, key) == ("train", "steps"):  # every schedule but this one is a function of the last step
        return own_optimizer or config.optimizer.schedule == "constant"  # an optimizer of one's own is compared itself
    if section in config.observe.trackers:  # a tracker's options, like all that is told of a run
        return True
    free = _FREE.get(section, frozenset())
    return free is None or key in free


def _read(path: Path, form: Form) -> JsonObject:
    return bounded_files.user_json(path, form, "--workdir", "give another --workdir") or {}


def _write(path: Path, content: JsonObject) -> None:
    atomic_files.write(path, json.dumps(content, indent=2) + "\n")


def _unwritable(workdir: Path, error: OSError) -> UserError:
    return UserError("--workdir", f"{workdir} cannot be written ({error.strerror})", "give a folder that can be")
