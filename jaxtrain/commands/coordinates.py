"""Check whether activations grow with width: the coordinate check of muP.

    jaxtrain coordinates --config=FILE --widths=64,128,256,512
    jaxtrain coordinates --config=FILE --config.model.mup_base.embed_dim=64 --config.model.mup_base.num_heads=4

Trains the config for some steps at several widths, on one device and at a constant learning rate, and prints how large
the activations of each layer are (the mean of their absolute values, on one batch) and how much they have changed
since the start. A size that grows as width to the power of s has the slope s. For one learning rate to suit all
widths, no slope of a change may be far above 0.

Exit status 0; 1: something grows with width; 2: a user error, reported in one line.
"""

import argparse
from pathlib import Path

from jaxtrain.base import exit_statuses
from jaxtrain.bench.coordinates import GROWS, measured, page, slopes_of, table, wider
from jaxtrain.commands.flags import add_config, add_json, command, need_config, overrides_of, parser_of, tell_json
from jaxtrain.errors import UserError


@command()
def main(argv: list[str] | None) -> None:
    """Measure, print the table, and exit with status 1 if something grows."""
    flags, words = parser().parse_known_args(argv)
    overrides = overrides_of(words, vars(flags))
    need_config(flags)
    if flags.steps < 1:
        raise UserError("--steps", f"{flags.steps} is too few", "give 1 or more")
    try:
        widths = sorted({int(word) for word in flags.widths.split(",")})
    except ValueError:
        raise UserError("--widths", f"{flags.widths!r} are not widths", "write 64,128,256") from None
    if len(widths) < 2 or widths[0] < 1:
        raise UserError("--widths", f"{flags.widths!r} are not two widths or more", "write 64,128,256")
    if flags.output and not Path(flags.output).absolute().parent.is_dir():
        raise UserError("--output", f"there is no folder {Path(flags.output).parent}", "make it first")
    from jaxtrain.config.load import load_config  # imports JAX, for which --help does not wait

    load_config(flags.config, overrides)  # reports mistakes in it
    configs = [load_config(flags.config, overrides | wider(load_config(flags.config, overrides), width, flags.grow))
               for width in widths]
    found = {width: measured(config, flags.steps) for width, config in zip(widths, configs, strict=True)}
    slopes = slopes_of(found)
    growing = [name for name, both in slopes.items() if both["change"] > GROWS]
    if flags.output:
        Path(flags.output).write_text(page(found, flags.config, flags.steps))
    if flags.json:
        tell_json({"config": flags.config, "steps": flags.steps, "mup_base": configs[0].model.mup_base,
                   "sizes": found, "slopes": slopes, "growing": growing})
    else:
        print(table(found, slopes, flags.steps))
    if growing:
        raise SystemExit(exit_statuses.NO)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("coordinates", __doc__)
    add_config(made)
    made.add_argument("--widths", default="64,128,256,512",
                      help="values of model.embed_dim; other widths grow in proportion")
    made.add_argument("--steps", type=int, default=4, help="number of training steps; default: 4")
    made.add_argument("--grow", choices=("heads", "head_dim"), default="heads",
                      help="whether wider models have more attention heads or wider ones; default: heads")
    add_json(made, "print all numbers as JSON")
    made.add_argument("--output", metavar="FILE", help="also write a page with charts")
    return made
