"""Train a config, or resume its run.

`python -m jaxtrain.main --config=configs/gpt.py[:variant] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]`, which is
`jaxtrain train`; `cli.py` has its flags.
"""

import argparse
import json
import signal
import sys
import warnings

from jaxtrain.cli import training_flags, workdir_of
from jaxtrain.errors import UserError, say
from jaxtrain.resilience import exits, lifeline


def main(argv: list[str] | None = None) -> int:
    """Flags, processes, config, train. `resilience/exits.py` tells what the exit status means."""
    lifeline.hold()
    try:
        flags, overrides = training_flags(sys.argv[1:] if argv is None else argv)
        from jaxtrain.resilience.interrupt import before_the_loop

        with before_the_loop():
            return left(run(flags, overrides))
    except exits.Ended as end:  # in all processes alike
        say(end)
        return left(end.code)
    except UserError as mistake:
        say(mistake)
        return left(exits.MISTAKE, mistake)
    except KeyboardInterrupt as stop:
        say("stopped at once; what was saved before is kept")
        return left(exits.INTERRUPTED, stop)
    except Exception as error:
        left(1, error)  # returns where no other process waits for this one
        raise


def left(status: int, error: BaseException | None = None) -> int:
    """Take leave of the other processes, if there are any: as agreed, or alone with an error."""
    distributed = sys.modules.get("jaxtrain.distributed")
    if distributed is None:  # it did not come to that
        return status
    return distributed.leave(status) if error is None else distributed.fail(status, error)


def run(flags: argparse.Namespace, overrides: dict[str, str]) -> int:
    """What the flags ask for."""
    from jaxtrain import cache, config_file, distributed
    from jaxtrain.plan.targets import claim_memory

    # For whoever watches a run the line of code that warns is of no use.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    claim_memory()
    cache.enable_compilation_cache()
    distributed.initialize(flags.coordinator, flags.num_processes, flags.process_id)
    resolved = config_file.load_config(flags.config, overrides)
    distributed.agree(resolved)
    if flags.print_config:
        shown = resolved.to_dict()
        if flags.print_config == "diff":
            changes = config_file.diff(resolved, config_file.load_config(flags.config))
            shown = {key: value for key, (value, _) in changes.items()}
        print(json.dumps(shown, indent=2))
        return exits.DONE
    from jaxtrain.train import train

    if resolved.mesh.auto:
        import jax

        from jaxtrain.plan import here

        resolved = here.resolve(resolved, jax.devices())
    if resolved.resilience.elastic:
        from jaxtrain.resilience import elastic

        resolved = elastic.here(resolved, workdir_of(flags))
    train(resolved, workdir_of(flags))
    return exits.DONE


if __name__ == "__main__":
    status = main()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # how it ended is said; a signal that comes now changes nothing
    sys.exit(status)
