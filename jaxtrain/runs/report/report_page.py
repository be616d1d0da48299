"""Make the page of one or several runs, which needs no network: tables and charts in a template, and Plotly packed."""

import base64
import functools
import gzip
import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jaxtrain.errors import UserError, install_extra
from jaxtrain.pages.page_parts import html_table
from jaxtrain.pages.style import STYLE
from jaxtrain.runs.recorded_run import RecordedRun
from jaxtrain.runs.report import figures, goodput_figure, run_facts, sampled_conversations, seed_statistics
from jaxtrain.runs.report.goodput_figure import clock
from jaxtrain.runs.report.run_curves import AXES, CHARTS, RunCurves, charts, names

_HERE = Path(__file__).parent
_PALETTE = len(figures.COLOURS)


class ReportPage:
    """The page of some runs, made anew from what their folders hold each time that it is asked for."""

    def __init__(self, workdirs: Sequence[str | Path]):
        """Read the runs.

        Raises:
            UserError: a folder is not one of a run, or a package is missing.
        """
        figures.graph_objects()
        self._template = _template()
        folders = list(dict.fromkeys(map(Path, workdirs)))
        self.runs = [RunCurves(RecordedRun(folder), name) for folder, name in zip(folders, names(folders), strict=True)]

    def look(self) -> None:
        """Read what was added to the folders."""
        for one in self.runs:
            one.run.look()
        self.runs = [RunCurves(one.run, one.name) for one in self.runs]

    def conversations(self, report: str = "") -> str:
        """Return the page of what the model of the one run said; "" if it has said nothing. `report`: of a link."""
        run = self.runs[0].run
        if not (there := self.written()):
            return ""
        return _template("conversations_page.html").render(
            title=f"Conversations of {self.runs[0].name}", style=STYLE, made=clock(time.time()), report=report,
            css=(_HERE / "conversations_page.css").read_text(), script=(_HERE / "conversations_page.js").read_text(),
            workdir=run.workdir, count=len(there), steps=sampled_conversations.steps(run.workdir))

    def written(self) -> list[Path]:
        """Return the files of what the model of the one run said."""
        return sampled_conversations.files(self.runs[0].run.workdir) if len(self.runs) == 1 else []

    def render(self, *, live: bool = False, bare: bool = False, conversations: str = "") -> str:
        """Return the page.

        Args:
            conversations: where the page of what the model said is, for a link.
            live: it asks the server that sent it for what is new.
            bare: without Plotly and scripts, for a page that has them.
        """
        runs, single = self.runs, self.runs[0].run if len(self.runs) == 1 else None
        groups = seed_statistics.groups(runs) if not single else []
        shown = charts(runs)
        usual = [chart for chart in shown if chart in CHARTS or chart.name == "memory"]
        drawn = {chart.name: figures.figure(chart, runs, [group for group in groups if len(group.runs) > 1])
                 for chart in shown}
        drawn["timeline"] = goodput_figure.figure(runs)
        data = {name: json.loads(figure.to_json()) for name, figure in drawn.items()}
        return self._template.render(
            title=f"{'Run' if single else f'{len(runs)} runs'}: {', '.join(one.name for one in runs)}", style=STYLE,
            conversations=conversations,
            css=(_HERE / "report_page.css").read_text(), script="" if bare else (_HERE / "report_page.js").read_text(),
            plotly="" if bare else _plotly(), live=live, axes=AXES, palette=_PALETTE, runs=runs, single=single,
            facts=run_facts, groups=groups, usual=usual, others=[chart for chart in shown if chart not in usual],
            rows=len({row for trace in data["timeline"]["data"] for row in trace["y"]}), made=clock(time.time()),
            points=figures.POINTS, data=data)


@functools.cache
def _plotly() -> str:
    """Return plotly.js packed by gzip, as base64: two fifths of its size, and no text that could end a script."""
    source = importlib.import_module("plotly.offline").get_plotlyjs()
    return base64.b64encode(gzip.compress(source.encode(), mtime=0)).decode()


def _template(name: str = "report_page.html") -> Any:
    """Return the template, which escapes whatever is put into it."""
    try:
        jinja2 = importlib.import_module("jinja2")
    except ImportError:
        raise UserError("report", "the package jinja2 is not installed", install_extra("report")) from None
    room = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
                              loader=jinja2.FileSystemLoader(_HERE))
    room.globals["table"] = lambda made, words=1: jinja2.utils.markupsafe.Markup(html_table(made[0], made[1], words))
    return room.get_template(name)


def write(page: ReportPage, file: Path) -> Path:
    """Write the page into a file at once, and beside it that of conversations, if there are any; return the first."""
    beside = file.with_name(f"{file.stem}-conversations.html") if page.written() else None
    _write(file, page.render(conversations=quote(beside.name) if beside else ""))
    if beside:
        _write(beside, page.conversations(report=quote(file.name)))
    return file


def _write(file: Path, content: str) -> None:
    from jaxtrain.files import atomic_files

    try:
        with atomic_files.written(file, durable=False) as out:
            out.write(content.encode())
    except OSError as error:
        raise UserError("--output", f"{file} cannot be written ({error.strerror})", "give --output=FILE") from None
