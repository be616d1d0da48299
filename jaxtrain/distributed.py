"""Several processes as one run: from flags, from the environment, or from the cluster JAX finds itself in."""

import os

import jax

from jaxtrain.errors import UserError

_CLUSTERS = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE")


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Join the other processes, if there are any to join; call it before anything touches a device.

    Flags win over JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. With none of them, under a launcher
    that JAX knows (Slurm, Open MPI), JAX reads them from it; otherwise the run is this process alone.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    num_processes = _number("num_processes", num_processes, "JAX_NUM_PROCESSES")
    process_id = _number("process_id", process_id, "JAX_PROCESS_ID")
    if coordinator is None and num_processes is None and process_id is None:
        if any(name in os.environ for name in _CLUSTERS) and int(os.environ.get("SLURM_NTASKS", "2")) > 1:
            jax.distributed.initialize()
        return
    if coordinator is None or num_processes is None or process_id is None:
        raise UserError("--coordinator", "several processes need --coordinator, --num_processes and --process_id",
                        "give all three (or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID)")
    if not 0 <= process_id < num_processes:
        raise UserError("--process_id", f"{process_id} is not below --num_processes={num_processes}",
                        "number them from 0")
    if num_processes > 1:
        jax.distributed.initialize(coordinator, num_processes, process_id)


def _number(flag: str, value: int | None, variable: str) -> int | None:
    text = os.environ.get(variable)
    if value is None and text is not None:
        if not text.isdecimal():
            raise UserError(variable, f"{text!r} is not a whole number", f"set it as you would --{flag}")
        return int(text)
    return value
