"""Compile a run's programs ahead of time, for other machines too.

    jaxtrain compile configs/gpt.py:tiny --output=compiled
    jaxtrain compile configs/llama3_8b.py --target=h100x64 --output=compiled
    jaxtrain train configs/gpt.py:tiny --compiled=compiled

The folder is signed with the run's secret: JAXTRAIN_SECRET_FILE, or WORKDIR/secret, which is made if there is none.
Exit status 0; 2: a user error, reported in one line.
"""

import os
from pathlib import Path

from jaxtrain.commands.flags import (
    add_config,
    add_json,
    add_overwrite,
    command,
    need_config,
    overrides_of,
    parser_of,
    tell_json,
    workdir_of,
)
from jaxtrain.errors import UserError, say, tell
from jaxtrain.pages.plain_text import in_bytes


@command()
def main(argv: list[str] | None = None) -> None:
    """Parse the flags and compile."""
    parser = parser_of("compile", __doc__)
    add_config(parser)
    parser.add_argument("--output", "--to", required=True, metavar="FOLDER", help="a new folder for the programs")
    parser.add_argument("--target", default="",
                        help="type and number of devices, such as h100x64 or v5px16; default: this machine's devices")
    parser.add_argument("--workdir", help="folder of the run, whose secret signs the programs; default: as for "
                                          "jaxtrain train")
    add_json(parser, "print a JSON object for each program")
    add_overwrite(parser, "compiled programs there")
    flags, words = parser.parse_known_args(argv)
    overrides = overrides_of(words, vars(flags))
    need_config(flags)
    if flags.target:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a described target needs no device, and none is searched for
    import jax

    from jaxtrain.distributed import authentication
    from jaxtrain.precompiled import compiling

    jax.config.update("jax_enable_compilation_cache", False)  # what a cache gives may not be serialized again
    target, devices = compiling.devices_of(flags.target)
    config = compiling.config_on(devices, flags.config, overrides)
    if not os.environ.keys() & {"JAXTRAIN_SECRET", "JAXTRAIN_SECRET_FILE"}:
        workdir = workdir_of(flags)
        authentication.make_secret(workdir / "secret")
        authentication.find_secret(workdir)
        if "JAXTRAIN_SECRET_FILE" not in os.environ:
            raise UserError("--workdir", f"{workdir}/secret can be read by others", f"chmod 600 {workdir}/secret")
        say(f"signed with {workdir}/secret, which the run needs in its workdir, or in JAXTRAIN_SECRET_FILE")

    def made(title: str, seconds: float, size: int) -> None:
        if flags.json:
            tell_json({"program": title, "seconds": seconds, "bytes": size})
        else:
            tell(f"{title}: {seconds:.1f} s, {in_bytes(size)}", flush=True)

    compiling.compile_into(Path(flags.output), config, target, devices, overwrite=flags.overwrite, tell=made)
    (say if flags.json else tell)(f"start the run with --compiled={flags.output}")
