"""Monitor runs in the terminal: loss, throughput, time left, events and processes.

    jaxtrain top WORKDIR
    jaxtrain top ROOT
    jaxtrain top WORKDIR WORKDIR --once

One run is shown in detail, several as a table; a folder stands for all runs in it. Updated every second; q or
Ctrl-C quits. If the output is not a terminal, the current state is printed once.

Everything is read from the workdirs, so runs may be on other machines, or have ended.
"""

import contextlib

from jaxtrain.commands.flags import add_json, command, parser_of, tell_json
from jaxtrain.runs.top import Watch, draw, facts, frame


@command()
def main(argv: list[str] | None = None) -> None:
    """Draw until q or Ctrl-C."""
    parser = parser_of("top", __doc__)
    parser.add_argument("places", nargs="+", metavar="WORKDIR", help="workdir of a run, or a folder with workdirs")
    parser.add_argument("--once", action="store_true", help="print the current state once and exit")
    add_json(parser, "print the current state once, as a JSON object for each run")
    flags = parser.parse_args(argv)
    watch = Watch(flags.places)
    if flags.json:
        tell_json(*map(facts, watch.runs.values()))
        return
    from rich.console import Console

    console = Console()
    if flags.once or not console.is_terminal:
        console.print(frame(watch, console.width, max(console.height, 40)))
        return
    with contextlib.suppress(KeyboardInterrupt):
        draw(watch, console)
