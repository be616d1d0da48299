"""Start a run with the programs of a folder, in place of compiling them."""

import json
import time
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxtrain.errors import UserError
from jaxtrain.precompiled import executables, programs, requirements, signed_folder
from jaxtrain.run import Run


def load(run: Run, folder: str | Path) -> str:
    """Put the programs of a folder into a run, and return what to say of that.

    Raises:
        UserError: the folder is not signed with the run's secret, or was compiled for something else.
    """
    assert isinstance(run.mesh, Mesh)
    began, folder, devices = time.perf_counter(), Path(folder), list(run.mesh.devices.flat)
    wanted, manifest = programs.wanted(run, run.mesh), signed_folder.read(folder)
    if other := requirements.difference(manifest["made_for"], requirements.of(run, devices)):
        raise UserError("--compiled", f"{folder} was compiled {other}", signed_folder.AGAIN)
    entries = {(entry["name"], json.dumps(entry["batch"])): entry for entry in manifest["programs"]}
    for one in wanted:
        if (entry := entries.get((one.name, json.dumps(one.shape)))) is None:
            raise UserError("--compiled", f"{folder} has no {one.title}", signed_folder.AGAIN)
        content = signed_folder.content(folder, entry)
        try:
            one.use(executables.loaded(content, devices))
        except jax.errors.JaxRuntimeError as error:
            raise UserError("--compiled", f"{folder / entry['file']} cannot run on these devices "
                            f"({f'{error}'.splitlines()[0]})", signed_folder.AGAIN) from error
    said = f"loaded {len(wanted)} compiled programs from {folder} in {time.perf_counter() - began:.2f} s"
    if (flags := requirements.xla_flags()) != manifest["xla_flags"]:
        said += (f"; warning: they were compiled with XLA's flags {' '.join(manifest['xla_flags']) or '(none)'}, and "
                 f"{' '.join(flags) or '(none)'} count for other programs alone")
    return said
