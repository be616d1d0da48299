"""Load the environment that `rl.environment` names: of a file, of another package, or of another framework."""

import importlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.base.annotations import JsonObject
from jaxtrain.base.plug_ins import options_of
from jaxtrain.base.user_files import defined_in
from jaxtrain.config.part_tables import CONVERSATIONS
from jaxtrain.errors import UserError
from jaxtrain.tuning.environments.protocol import KEY, Made

if TYPE_CHECKING:
    from jaxtrain.config.schema import Config
    from jaxtrain.tuning.environments.protocol import Environment

# Prefix -> the adapter of another framework, which is given what follows the prefix.
ADAPTERS = {"verifiers": "jaxtrain.tuning.environments.verifiers_adapter:adapted",
            "openenv": "jaxtrain.tuning.environments.openenv_adapter:adapted"}
WAYS = "write FILE.py:CLASS, a URL, or " + " or ".join(f"{prefix}:NAME" for prefix in ADAPTERS)


def check(named: str) -> None:
    """Refuse what names nothing, before a process is started for it."""
    prefix, _, rest = named.partition(":")
    if prefix in ADAPTERS:
        if not rest:
            raise UserError(KEY, f"{named!r} names no environment", f"write {prefix}:NAME")
    elif ":" not in named and not named.endswith(".py"):
        CONVERSATIONS.check(named)
    elif not (file := named.rpartition(":")[0]).endswith(".py"):
        raise UserError(KEY, f"{named!r} names no class of a file", WAYS)
    elif not Path(file).is_file():
        raise UserError(KEY, f"there is no file {file}", "check the name")


def environment_of(config: "Config") -> "Environment":
    """Return the environment that a config names, which the run asks."""
    from jaxtrain.tuning.environments.served import Served
    from jaxtrain.tuning.environments.worker_pool import WorkerPool
    from jaxtrain.tuning.http_service import timeout_of

    c, timeout_s = config.rl, timeout_of(config)
    masks = c.environment_errors == "mask"
    if "://" in c.environment and c.environment.partition(":")[0] not in ADAPTERS:
        return Served(c.environment, timeout_s, masks)
    check(c.environment)
    options = config.plug_ins.get(c.environment)
    return WorkerPool(c.environment, {} if options is None else asdict(options), c.environment_workers, timeout_s,
                      int(c.environment_memory_gib * 2**30), c.environment_python, masks)


def load(named: str, options: JsonObject) -> Made:
    """Return what makes an environment for one conversation. The worker calls it, and not the run."""
    prefix, _, rest = named.partition(":")
    if prefix in ADAPTERS:
        module, _, function = ADAPTERS[prefix].partition(":")
        return getattr(importlib.import_module(module), function)(rest)
    if ":" not in named:
        part = CONVERSATIONS.load(named)
        section = options_of(part)
        return part if section is None else lambda: CONVERSATIONS.made(named, section(**options))
    sys.path.insert(0, str(Path(named.rpartition(":")[0]).resolve().parent))  # for what lies beside it
    return defined_in(named, KEY, "class", WAYS)
