"""Serve a model as the sampler of a run on this machine.

    jaxtrain serve_sampler FOLDER --port=8000
    jaxtrain serve_sampler FOLDER --batch_size=256 --config.mesh.fsdp=4

Loads a trained or published model on devices of its own, and prints the address for rl.sampler. A run sends it the
weights of each step, as it does to vLLM. Only programs of this machine are answered. Ends at Ctrl-C or SIGTERM.
"""

import signal
import threading

from jaxtrain.commands.flags import command, overrides_of, parser_of
from jaxtrain.errors import UserError, say, tell

_KEYS = ("mesh.", "train.precision")


@command()
def main(argv: list[str] | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    parser = parser_of("serve_sampler", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="the workdir of a run, a folder in Hugging Face's format, or "
                        "hf:ORG/NAME on the Hugging Face Hub")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; default: any free one")
    parser.add_argument("--batch_size", type=int, default=64, help="the most answers that are generated at once; "
                        "default: 64")
    flags, rest = parser.parse_known_args(argv)
    overrides = overrides_of(rest, vars(flags))
    if other := next((key for key in overrides if not key.startswith(_KEYS)), None):
        raise UserError(f"--config.{other}", "the run that is sampled for says it", f"change one of {', '.join(_KEYS)}")
    if not 1 <= flags.batch_size <= 2**16:
        raise UserError("--batch_size", f"{flags.batch_size} is out of range", "give 1 to 65536")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: (signal.signal(number, signal.SIG_DFL), stop.set()))
    from jaxtrain.compile_cache import enable_compilation_cache
    from jaxtrain.hub.trained_model import load_model
    from jaxtrain.tuning.samplers.sampler_server import SamplerServer
    from jaxtrain.tuning.samplers.served_model import ServedModel

    enable_compilation_cache()
    run, state = load_model(flags.folder, overrides)
    model = ServedModel(run, state, flags.folder, flags.batch_size)
    with SamplerServer(model, flags.port) as server:
        threading.Thread(target=server.serve_forever, args=(0.1,), name="http", daemon=True).start()
        say(f"{flags.folder} is served; press Ctrl-C to stop")
        tell(f"rl.sampler={server.url}", flush=True)
        stop.wait()
        server.shutdown()
        model.close()
