"""Write a report of one or several runs as an HTML page, or serve it while they train.

    jaxtrain report WORKDIR
    jaxtrain report WORKDIR WORKDIR --output=seeds.html
    jaxtrain report WORKDIR --live

The page shows curves, where the time went, events, checkpoints, samples and the config, and works offline. With
several runs, curves are overlaid, and runs that differ only in seeds get a mean and a confidence interval.
"""

from pathlib import Path

from jaxtrain.commands.flags import command, parser_of
from jaxtrain.errors import UserError, tell

_NAME = "report.html"


@command()
def main(argv: list[str] | None = None) -> None:
    """Write the page, or serve it until Ctrl-C."""
    parser = parser_of("report", __doc__)
    parser.add_argument("workdirs", metavar="WORKDIR", nargs="+", action="store", help="the workdir of a run")
    parser.add_argument("--output", metavar="FILE", help=f"file for the page; default: {_NAME} in the workdir, or, "
                                                         "for several runs, in the current folder")
    parser.add_argument("--live", action="store_true", help="serve the page on this machine alone (127.0.0.1), and "
                                                            "renew it while runs go on, until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="port of --live; default: any free one")
    flags = parser.parse_args(argv)
    if flags.live and flags.output:
        raise UserError("--output", "--live writes no file", "leave one of them out")
    if flags.port and not flags.live:
        raise UserError("--port", "it is read with --live only", "add --live")
    from jaxtrain.runs.report.report_page import ReportPage, write

    page = ReportPage(flags.workdirs)
    if flags.live:
        from jaxtrain.runs.report import live_page

        live_page.serve(page, flags.port)
    else:
        tell(write(page, Path(flags.output or (Path(flags.workdirs[0], _NAME) if len(page.runs) == 1 else _NAME))))
