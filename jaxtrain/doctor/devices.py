"""Compare the devices that JAX finds with those that the machine has."""

import re
from collections.abc import Mapping, Sequence

from jaxtrain.doctor.child import Outcome
from jaxtrain.doctor.finding import Finding, fail, note, ok, size, warn
from jaxtrain.doctor.xla_flags import FIX, unknown_flags

CHECK = "devices"
_CUDA_PLUGIN = "pip install 'jax[cuda13]', or 'jax[cuda12]' where the driver is older than 580"
_CUDA_SAYS = r"Unable to load|CUDA_ERROR|cuInit|cuDNN|INSUFFICIENT_DRIVER|driver version"
# CUDA's messages when it does not start, and what fixes it.
_CUDA = (
    (r"SYSTEM_NOT_READY|system not yet initialized",
     "start nvidia-fabricmanager, of the driver's version: GPUs behind NVSwitch wait for it"),
    (r"SYSTEM_DRIVER_MISMATCH", "the driver and its kernel module differ: reboot, or restart containers"),
    (r"INSUFFICIENT_DRIVER|driver version is insufficient", "update the driver, or pip install 'jax[cuda12]'"),
    (r"CUDA_ERROR_UNKNOWN", "modprobe nvidia_uvm (needed after the host was suspended), or reboot"),
    (r"CUDA_ERROR_NO_DEVICE|no CUDA-capable device", "see CUDA_VISIBLE_DEVICES; in a container, docker run --gpus all"),
    (r"DEVICE_UNAVAILABLE", "another process has the GPU to itself: end it, or nvidia-smi -c DEFAULT"),
    (r"Unable to load|cuDNN|lib(cu|nv)\w+\.so", "unset LD_LIBRARY_PATH; pip install --force-reinstall 'jax[cuda13]'"),
)


def devices(outcome: Outcome, environ: Mapping[str, str], cuda: Sequence[int], nvidia: bool) -> list[Finding]:
    """Return findings about the devices that the probe found.

    Args:
        outcome: of the probe.
        environ: the environment of JAX.
        cuda: the CUDA versions for which a plugin is installed.
        nvidia: whether there is an NVIDIA GPU.
    """
    seen = outcome.measured.get("devices")
    if not seen:
        return failed(outcome, environ)
    platform, kinds = seen[0]["platform"], sorted({device["kind"] for device in seen})
    limits = [device["memory"] for device in seen if device.get("memory")]
    memory = f", {size(min(limits))} each for JAX" if limits else ""
    found = []
    wanted = environ.get("JAX_PLATFORMS", "")
    tpus = outcome.measured.get("tpu_chips", 0)
    there = "an NVIDIA GPU" if nvidia else f"{tpus} TPU chips" if tpus else ""
    if platform == "cpu" and there and wanted:
        found.append(warn(CHECK, f"JAX_PLATFORMS={wanted} makes JAX use the CPU, but there is {there}",
                          "unset JAX_PLATFORMS"))
    elif platform == "cpu" and nvidia:
        plugin, why = "does not work here" if cuda else "is not installed", _because(outcome.stderr, _CUDA_SAYS)
        fix = next((fix for sign, fix in _CUDA if re.search(sign, outcome.stderr)), _CUDA_PLUGIN)
        found.append(fail(CHECK, f"there is an NVIDIA GPU, and JAX uses the CPU: its CUDA plugin {plugin}{why}",
                          fix if cuda else _CUDA_PLUGIN))
    elif platform == "cpu" and tpus:
        why = _because(outcome.stderr, "TPU|tpu") if outcome.measured.get("libtpu") else ": libtpu is not installed"
        found.append(fail(CHECK, f"there are {tpus} TPU chips, and JAX uses the CPU{why}",
                          "pip install 'jax[tpu]'; if it is installed, end the process that holds the TPU"))
    else:
        found.append(ok(CHECK, f"{len(seen)} x {platform} ({', '.join(kinds)}){memory}"))
    if platform == "cpu" and cuda and not nvidia:
        found.append(note(CHECK, f"a plugin for CUDA {cuda[-1]} is installed, and no GPU is there",
                          "ask for one (docker run --gpus all, sbatch --gres=gpu:8), unless this host has none"))
    if platform == "cpu" and len(seen) > 1:
        found.append(note(CHECK, f"{len(seen)} CPU devices share the processor's cores",
                          "right for trying meshes; for speed leave out --xla_force_host_platform_device_count"))
    return found


def failed(outcome: Outcome, environ: Mapping[str, str]) -> list[Finding]:
    """Return findings for a JAX that did not get as far as its devices."""
    text = outcome.stderr
    if unknown := unknown_flags(text):
        return [fail("XLA_FLAGS", f"this jaxlib does not know {', '.join(unknown)} and ends every program", FIX)]
    error = outcome.measured.get("error", "") or next(
        (line for line in reversed(text.splitlines()) if re.match(r"\w*(Error|Exception)\b", line)), "")
    why = " ".join(f"{outcome.end}: {error}{_because(text, _CUDA_SAYS)}".split()).strip(": ")[:400]
    wanted = environ.get("JAX_PLATFORMS")
    if "took longer" in outcome.end and "jax" not in outcome.measured:
        return [fail(CHECK, f"importing JAX {outcome.end}",
                     "run this again; if that is no faster, put the Python environment on a local disk")]
    if "took longer" in outcome.end:
        return [fail(CHECK, f"JAX hangs while it searches for devices ({why})",
                     "on a TPU slice start this on all hosts at once; else see the driver's messages in dmesg")]
    if "libtpu" in error and "in use" in error:
        return [fail(CHECK, f"another process holds the TPU ({why})", "end it; the message names it")]
    if wanted and wanted != "cpu" and error and "ImportError" not in error and "No module" not in error:
        return [fail(CHECK, f"JAX_PLATFORMS={wanted} names devices that cannot be used ({why})",
                     "unset JAX_PLATFORMS, or install what it names: pip install 'jax[cuda13]' or 'jax[tpu]'")]
    if "No module named" in error or "ImportError" in error:
        return [fail(CHECK, f"JAX cannot be imported ({why})", "pip install --force-reinstall jax jaxlib")]
    return [fail(CHECK, f"JAX does not start ({why})", "python -c 'import jax; print(jax.devices())' shows all of it")]


def _because(stderr: str, sign: str) -> str:
    """Return the last message on stderr that matches, in brackets."""
    lines = [line for line in stderr.splitlines() if re.search(sign, line)]
    return f" ({' '.join(lines[-1].split())[-200:]})" if lines else ""
