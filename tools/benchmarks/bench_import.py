"""The memory of a host while a published model is loaded, beyond what the parameters take where they rest.

    python tools/benchmarks/bench_import.py --config=configs/llama3_70b.py --layers=2 --devices=8

Makes a folder with the tensors of a config, of so many layers, in a file of zeros that takes no room on the disk; loads
it in bfloat16 onto virtual devices of a CPU, sharded over all of them; and prints one line of JSON: the most memory
that was in use meanwhile, without the parameters themselves and without pages of the file, which the system drops when
it needs room.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path


def main() -> None:
    """Make the folder, load it and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/llama3_70b.py")
    for name, default in (("layers", 2), ("devices", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={flags.devices}"}
    import jax
    import numpy as np

    import jaxtrain as jt
    from jaxtrain.hub.weights import published_weights
    from jaxtrain.models.lora import without_adapters
    from jaxtrain.run import abstract_model

    run = jt.build(jt.load_config(flags.config, {
        "model.num_layers": flags.layers, "lora.rank": 1, "train.frozen_dtype": "bfloat16", "mesh.fsdp": flags.devices,
        "mesh.data": 1, "mesh.tensor": 1, "data.global_batch_size": flags.devices, "train.accumulation": 1}))
    wanted = without_adapters(abstract_model(run))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(wanted))
    with tempfile.TemporaryDirectory() as folder:
        write_zeros(Path(folder), run.config.model, wanted)
        warm = jax.device_put(np.zeros(8), run.mesh.devices.flat[0])
        before, peak, ended = in_use(), [0], threading.Event()

        def watch() -> None:
            while not ended.is_set():
                peak[0] = max(peak[0], in_use())
                time.sleep(0.002)

        watcher, start = threading.Thread(target=watch), time.time()
        watcher.start()
        params = jax.block_until_ready(published_weights.load(folder, run.config.model, wanted))
        seconds = time.time() - start
        ended.set()
        watcher.join()
    print(json.dumps({"config": flags.config, "layers": flags.layers, "devices": flags.devices, "jax": jax.__version__,
                      "parameters_gb": round(size / 1e9, 2), "beyond_gb": round((peak[0] - before - size) / 1e9, 3),
                      "seconds": round(seconds, 1)}))
    del params, warm


def in_use() -> int:
    """Return the bytes of this process's memory that belong to no file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def write_zeros(folder: Path, model, wanted) -> None:
    """Write a safetensors file with the tensors of a model, as a header and a hole."""
    import math

    from jaxtrain.checkpoint.trees import flatten
    from jaxtrain.config.family import entries
    from jaxtrain.hub.weights import published_weights, safetensors_files

    header, at = {}, 0
    flat = flatten(wanted)
    for entry in entries(model):
        shape = published_weights.published_shape(entry, flat[entry.ours].shape)
        for name, _ in published_weights.names(entry, flat[entry.ours].shape):
            if name not in header:
                end = at + 2 * math.prod(shape)
                header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
                at = end
    text = json.dumps(header).encode()
    with open(folder / safetensors_files.SINGLE, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


if __name__ == "__main__":
    main()
