"""Prove that a config gives the numbers of one device on any mesh.

    jaxtrain prove configs/gpt.py:tiny
    jaxtrain prove configs/gpt.py:tiny --meshes=60 --steps=5 --config.optimizer.name=muon

Runs a few steps on meshes of eight virtual CPU devices that are drawn at random, and compares the loss, every gradient,
its norm, the clipping and the update with a run on one device. The first wrong one is shown on the smallest mesh that
has it. Writes a certificate, which `jaxtrain train --require_proof` asks for. Exit status 0: proven; 1: a layout has
other numbers; 2: the command line is wrong.
"""

from jaxtrain.base import exit_statuses
from jaxtrain.commands.flags import (
    Parser,
    add_config,
    add_json,
    command,
    need_config,
    overrides_of,
    parser_of,
    tell_json,
)
from jaxtrain.errors import UserError, say, tell
from jaxtrain.proof.virtual_devices import use_virtual_devices


def parser() -> Parser:
    """Return the parser of the command line."""
    made = parser_of("prove", __doc__)
    add_config(made)
    made.add_argument("--meshes", type=int, default=20, help="how many layouts are drawn; default: 20")
    made.add_argument("--steps", type=int, default=3, help="how many steps are made on each; default: 3")
    made.add_argument("--seed", type=int, default=0, help="seed of the draws; default: 0")
    made.add_argument("--precision", default="float32",
                      help="dtype to compute in, which may be that of the config; default: float32, which shows what "
                           "coarser dtypes hide, and of which alone there is a certificate")
    made.add_argument("--output", default="proofs", metavar="FOLDER",
                      help="folder to write the certificate into, under a name of hashes; default: proofs")
    add_json(made, "print the certificate as JSON in place of the summary")
    return made


@command()
def main(argv: list[str] | None = None) -> None:
    """Prove a config; exit with 1 where a layout has other numbers."""
    flags, rest = parser().parse_known_args(argv)
    overrides = overrides_of(rest, vars(flags))
    need_config(flags)
    for name in ("meshes", "steps"):
        if getattr(flags, name) < 1:
            raise UserError(f"--{name}", f"{getattr(flags, name)} is too few", "give 1 or more")
    use_virtual_devices(8)  # before anything starts JAX

    from jaxtrain import compile_cache
    from jaxtrain.config.load import load_config
    from jaxtrain.config.schema import PRECISIONS
    from jaxtrain.errors import nearest
    from jaxtrain.proof.prove import prove

    if flags.precision not in PRECISIONS:
        raise UserError("--precision", f"{flags.precision} is not a precision", nearest(flags.precision, PRECISIONS))
    compile_cache.enable_compilation_cache()
    proof = prove(load_config(flags.config, overrides), meshes=flags.meshes, steps=flags.steps, seed=flags.seed,
                  precision=flags.precision, output=flags.output, report=say, config_name=flags.config)
    tell_json(proof.certificate) if flags.json else tell(f"{proof}\n{proof.path or ''}".rstrip())
    if not proof.proven:
        raise SystemExit(exit_statuses.NO)
