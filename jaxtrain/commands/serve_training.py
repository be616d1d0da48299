"""Serve the Tinker API: clients train adapters of a model here, and sample.

    jaxtrain serve_training FOLDER
    jaxtrain serve_training FOLDER --name=Qwen/Qwen3-0.6B --output=runs/served --port=8400
    jaxtrain serve_training WORKDIR --keys=keys.txt --host=0.0.0.0 --config.mesh.fsdp=8

Loads a trained or published model once, and prints the address for TINKER_BASE_URL. Several clients may each train
adapters of their own beside it. States that clients save are in --output, and can be loaded after a restart. Without
--keys only programs of this machine are answered. Ends at Ctrl-C or SIGTERM, after the work in progress.
"""

import argparse
import os
import signal
import threading
from pathlib import Path

from jaxtrain.commands.flags import command, overrides_of, parser_of
from jaxtrain.errors import UserError, say, tell

_KEYS = ("mesh.", "train.precision", "train.remat", "train.unroll", "train.frozen_dtype", "train.loss_chunks",
         "lora.quantize")


@command()
def main(argv: list[str] | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    flags, overrides = parse(argv)
    stop = threading.Event()

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # the second one does not wait
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    from jaxtrain.compile_cache import enable_compilation_cache
    from jaxtrain.config.hub_names import model_folder
    from jaxtrain.serving.http_server import Server
    from jaxtrain.serving.keys import Keys
    from jaxtrain.serving.lora_engine import Engine
    from jaxtrain.serving.service import Limits, Service

    keys = Keys.read(flags.keys) if flags.keys else Keys()
    folder = model_folder(flags.folder)
    output = Path(flags.output or Path("runs") / f"served-{Path(folder).resolve().name}")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--output", f"{output} cannot be made ({error.strerror})", "name another folder") from None
    enable_compilation_cache()
    engine = Engine.load(folder, overrides, flags.batch_tokens)
    limits = Limits(models=flags.models, rank=flags.max_rank, samplers=flags.samplers, queue=flags.queue,
                    queue_bytes=flags.queue_mib * 2**20, batch=flags.sample_batch)
    name = flags.name or (flags.folder.removeprefix("hf:") if flags.folder.startswith("hf:") else
                          os.path.abspath(folder))
    service = Service(engine, output, name, tokenizer=flags.tokenizer or _tokenizer(folder), alpha=flags.lora_alpha,
                      limits=limits)
    with Server(service, flags.host, flags.port, keys=keys, most_bytes=flags.request_mib * 2**20) as server:
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        say(f"{name} is served; saved states are in {output}; press Ctrl-C to stop")
        tell(f"TINKER_BASE_URL={server.url}", flush=True)
        stop.wait()
        say("stopping after the work in progress")
        service.close()
        server.shutdown()


def _tokenizer(folder: str) -> str:
    """Return where clients of this machine find the tokenizer, if the folder has one that transformers reads."""
    return os.path.abspath(folder) if (Path(folder) / "tokenizer.json").is_file() else ""


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the parsed flags and the dotted config overrides."""
    parser = parser_of("serve_training", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="the workdir of a run, a folder in Hugging Face's format, or "
                        "hf:ORG/NAME on the Hugging Face Hub")
    parser.add_argument("--output", metavar="DIR", help="folder of saved states; default: runs/served-NAME")
    parser.add_argument("--name", help="the base model's name for clients, such as Qwen/Qwen3-0.6B; default: that on "
                        "the hub, or the folder's path")
    parser.add_argument("--tokenizer", help="the tokenizer that clients are told to load; default: the folder, if it "
                        "has a tokenizer.json")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than this machine's own need "
                        "--keys; default: 127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; default: any free one")
    parser.add_argument("--keys", metavar="FILE", help="file of keys that clients may use, one a line, each beginning "
                        "with tml-")
    parser.add_argument("--lora_alpha", type=float, default=32.0, help="new adapters are multiplied by this over their "
                        "rank; default: 32")
    parser.add_argument("--batch_tokens", type=int, default=16384, help="the most tokens that a training batch is "
                        "computed with at once; default: 16384")
    parser.add_argument("--sample_batch", type=int, default=64, help="the most sequences that are generated at once; "
                        "default: 64")
    parser.add_argument("--models", type=int, default=8, help="the most models in training; default: 8")
    parser.add_argument("--max_rank", type=int, default=128, help="the highest rank of adapters; default: 128")
    parser.add_argument("--samplers", type=int, default=32, help="the most samplers whose adapters are in memory; "
                        "default: 32")
    parser.add_argument("--queue", type=int, default=1024, help="the most calls that wait; default: 1024")
    parser.add_argument("--queue_mib", type=int, default=1024, help="the most memory of calls and answers; default: "
                        "1024 MiB")
    parser.add_argument("--request_mib", type=int, default=32, help="the largest request; default: 32 MiB")
    parser.group("limits", "models", "max_rank", "samplers", "queue", "queue_mib", "request_mib")
    flags, rest = parser.parse_known_args(argv)
    overrides = overrides_of(rest, vars(flags))
    for name in ("batch_tokens", "sample_batch", "models", "max_rank", "samplers", "queue", "queue_mib",
                 "request_mib", "lora_alpha"):
        if not 0 < getattr(flags, name) < 2**31:
            raise UserError(f"--{name}", f"{getattr(flags, name)} is out of range", "give 1 or more")
    if not 0 <= flags.port < 2**16:
        raise UserError("--port", f"{flags.port} is not a port", "give 0 to 65535")
    if other := next((key for key in overrides if not key.startswith(_KEYS)), None):
        raise UserError(f"--config.{other}", "clients say how they train",
                        f"change one of {', '.join(_KEYS)}, or leave it out")
    return flags, overrides
