"""The model of a workdir, laid out on the devices that are here, whatever mesh trained it."""

from pathlib import Path

import jax

from jaxtrain import builder
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import AXES
from jaxtrain.errors import UserError
from jaxtrain.run import Run

_ALONE = {f"mesh.{axis}": 1 for axis in AXES} | {"optimizer.zero_stage": 0, "optimizer.offload": False,
                                                 "train.accumulation": 1, "pipeline.microbatches": 0}


def model_of_workdir(workdir: str | Path) -> Run:
    """Return a run of the workdir's config, whose parameters are sharded over all devices here if that is possible."""
    file = Path(workdir) / "config.json"
    if not file.is_file():
        raise UserError("WORKDIR", f"{workdir} has no config.json", "give the workdir of a run")
    devices = jax.device_count()
    try:
        return builder.build(load_config(file, _ALONE | {"mesh.fsdp": devices, "data.global_batch_size": devices}))
    except UserError:
        if devices == 1:
            raise
        config = load_config(file, _ALONE | {"mesh.data": devices, "data.global_batch_size": devices})
        return builder.build(config)
