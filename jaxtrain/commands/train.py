"""Train a config, or resume its run.

    jaxtrain train configs/gpt.py:tiny --workdir=runs/first
    jaxtrain train configs/gpt.py --config.data.source=README.md --workdir=runs/mine
    jaxtrain train configs/gpt.py --config.train.steps=50 --print_config=diff

The same command resumes a stopped run. Exit status 0: the last step was reached, or train.patience ended the run; 2: a
user error, in one line; 75: saved and stopped on request; 76: failed, restart it; 77: a limit was reached; 130: Ctrl-C.
"""

import argparse
import gc
import json
import os
import sys

from jaxtrain.base import exit_statuses
from jaxtrain.commands.flags import (
    add_config,
    add_process_flags,
    discard_output,
    exit_process,
    need_config,
    overrides_of,
    parser_of,
    warn_in_one_line,
    workdir_of,
)
from jaxtrain.distributed import exit_codes, heartbeat
from jaxtrain.doctor.xla_flags import check_xla_flags
from jaxtrain.errors import UserError, say, tell
from jaxtrain.redaction import hide_in_tracebacks, redacted


def main(argv: list[str] | None = None) -> int:
    """Parse flags, connect processes, load the config and train; `base/exit_statuses.py` lists the exit statuses.
    """
    heartbeat.hold()
    hide_in_tracebacks()
    try:
        flags, overrides = training_flags(sys.argv[1:] if argv is None else argv)
        from jaxtrain.trainer.shutdown import before_the_loop

        with before_the_loop():
            return exit_process(run(flags, overrides))
    except exit_codes.RunExit as end:
        say(end)
        return exit_process(end.code, end if end.alone else None)
    except UserError as mistake:
        say(mistake)
        return exit_process(exit_codes.MISTAKE, mistake)
    except KeyboardInterrupt as stop:
        say("stopped at once; what was saved before is kept")
        return exit_process(exit_codes.INTERRUPTED, stop)
    except Exception as error:
        exit_process(exit_statuses.NO, error)  # returns in a single-process run
        raise


def training_flags(argv: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the flags of `jaxtrain train`, and the dotted config overrides."""
    parser = parser_of("train", __doc__)
    add_config(parser)
    parser.add_argument("--workdir",
                        help="folder for metrics, checkpoints and the resolved config; default: runs/ and the "
                             "name of the config, such as runs/gpt-tiny")
    parser.add_argument("--print_config", nargs="?", const="all", choices=("all", "diff"),
                        help="print the resolved config (or what the overrides changed in it) and stop")
    parser.add_argument("--may_change", type=lambda text: text.split(","), action="extend", default=[],
                        metavar="KEY,...",
                        help="keys, such as train.steps or optimizer.learning_rate, that may differ from those that "
                             "the run in the workdir was started with; the change is recorded in run.json")
    parser.add_argument("--adopt", action="store_true",
                        help="resume from the newest checkpoint in the workdir even if it belongs to another run")
    parser.add_argument("--require_proof", nargs="?", const="proofs", default="", metavar="FOLDER",
                        help="refuse to train without a certificate of jaxtrain prove for this code and config in the "
                             "folder; default: proofs")
    parser.add_argument("--compiled", metavar="FOLDER",
                        help="start with the programs that jaxtrain compile wrote, in place of compiling them")
    add_process_flags(parser)
    parser.group("resuming a run", "may_change", "adopt")
    flags, rest = parser.parse_known_args(argv)
    overrides = overrides_of(rest, vars(flags))
    need_config(flags)
    return flags, overrides


def run(flags: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Do what the flags ask for; returns the exit status."""
    check_xla_flags()
    if "JAXTRAIN_STARTS_FILE" in os.environ:  # set by what starts jobs again
        from jaxtrain.launch.restarts import idle_starts

        idle_starts.check(workdir_of(flags))
    from jaxtrain import compile_cache
    from jaxtrain.config import load
    from jaxtrain.distributed import authentication, processes
    from jaxtrain.plan.targets import claim_memory

    warn_in_one_line()
    claim_memory()
    compile_cache.enable_compilation_cache()
    authentication.find_secret(workdir_of(flags))
    processes.initialize(flags.coordinator, flags.num_processes, flags.process_id)
    _need_devices()
    resolved = load.load_config(flags.config, overrides)
    processes.agree(resolved)
    if flags.print_config:
        shown = resolved.to_dict() if flags.print_config == "all" else {
            key: value for key, (value, _) in load.diff(resolved, load.load_config(flags.config)).items()}
        try:
            tell(json.dumps(shown, indent=2), flush=True)
        except BrokenPipeError:  # as with `| head`
            discard_output()
        return exit_codes.DONE
    from jaxtrain.trainer.loop import train

    if not gc.isenabled():  # as main.py leaves it; what another caller has left may be garbage
        gc.freeze()  # nor later
        gc.set_threshold(10_000)  # objects: each time JAX does something as well, which takes longer
        gc.enable()
    if resolved.mesh.auto or resolved.mesh.hsdp:  # now, so that an elastic run changes a mesh of known sizes
        from jaxtrain.plan import preflight
        from jaxtrain.sharding.mesh import training_devices

        resolved = preflight.resolve(resolved, training_devices(resolved.rl.sampler_devices))
    if resolved.resilience.elastic:
        from jaxtrain.plan import elastic

        resolved = elastic.here(resolved, workdir_of(flags))
    train(resolved, workdir_of(flags), may_change=flags.may_change, adopt=flags.adopt,
          config_name=redacted(flags.config), require_proof=flags.require_proof, compiled=flags.compiled)
    return exit_codes.DONE


def _need_devices() -> None:
    """Refuse a JAX_PLATFORMS whose devices are not here, before a config asks for devices."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # a missing plugin is an assertion
        wanted = os.environ.get("JAX_PLATFORMS", "")
        why = f" ({f'{error}'.splitlines()[0][:200]})" if f"{error}" else ""
        raise UserError("JAX_PLATFORMS", f"{wanted!r} names devices that JAX cannot use here{why}",
                        "unset it, or install that platform: pip install 'jax[cuda13]' or 'jax[tpu]'") from error
