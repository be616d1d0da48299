"""OpenTelemetry traces of a run: a span for each of its phases, and one trace for all starts of the run.

`observe.traces=otlp` sends them where the environment says (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS),
`file` appends them to WORKDIR/traces.jsonl. Process 0 has them. They are sent on a thread of their own, and what cannot
be sent is lost: the run goes on.
"""

import contextlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError, install_extra, say
from jaxtrain.files import atomic_files, bounded_files
from jaxtrain.redaction import redacted

_NAMES = {"checkpoint": "save", "eval": "evaluate"}  # phases of the ledger that are called otherwise here
_LAST_S = 5.0  # seconds at the end of the run in which the last spans are sent


class Traces:
    """The spans of one start of a run; without a tracer it does nothing."""

    def __init__(self, tracer: Any = None, step: Callable[[], int] = lambda: 0, began: float = 0.0):
        """`step`: how many steps are complete; `began`: when the run started, in seconds since 1970."""
        self._tracer, self._step = tracer, step
        self._since, self._setup = int(1e9 * began), "start"
        self._root: Any = None

    @contextlib.contextmanager
    def span(self, name: str, since: int | None = None, **attributes: str | int | float | bool) -> Iterator[Any]:
        """A span over this block, which ends with how many steps are complete, and with the error that ended it."""
        if self._tracer is None:
            yield None
            return
        from opentelemetry import trace

        parent = trace.set_span_in_context(self._root) if self._root is not None else None
        span = self._tracer.start_span(_NAMES.get(name, name), parent, attributes=redacted(attributes),
                                       start_time=since)
        try:
            yield span
        except BaseException as error:  # its text may have secrets, its traceback paths
            span.set_attribute("ended_by", type(error).__name__)
            raise
        finally:
            span.set_attribute("step", self._step())
            span.end()

    @contextlib.contextmanager
    def run(self, stopped: tuple[type[BaseException], ...], **attributes: str | int | float | bool) -> Iterator[None]:
        """The span of this start of the run, above all others; `stopped`: how a run ends that was asked to."""
        with self.span("run", self._since or None, **attributes) as self._root:
            ended = "failed"
            try:
                yield
                ended = "finished"
            except stopped:
                ended = "stopped"
                raise
            finally:
                if self._root is not None:
                    self._root.set_attribute("ended", ended)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A span over the steps; one before it says how long the start, or the rollback before them, has taken."""
        with self.span(self._setup, self._since or None):
            pass
        try:
            with self.span("train"):
                yield
        finally:
            self._setup, self._since = "rollback", time.time_ns()


@contextlib.contextmanager
def opened(kind: str, workdir: Path, step: Callable[[], int], began: float, first: bool,
           exporter: Any = None) -> Iterator[Traces]:
    """Yield the traces of a run, and send the last ones at its end.

    Args:
        kind: the key observe.traces; "": nothing is traced.
        first: whether this is the process that has them.
        exporter: a `SpanExporter` in place of the one of `kind`.

    Raises:
        UserError: OpenTelemetry is not installed.
    """
    if not kind:
        yield Traces()
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    except ImportError:
        raise UserError("observe.traces", "OpenTelemetry is not installed", install_extra("otel")) from None
    if not first:
        yield Traces()
        return
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())  # one warning is enough, not a line a second
    ids, number = RandomIdGenerator(), int(_trace_id(workdir), 16)
    ids.generate_trace_id = lambda: number  # pyrefly: ignore[bad-assignment]
    try:
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown"):  # OTEL_SERVICE_NAME names no other
            resource = resource.merge(Resource({"service.name": "jaxtrain"}))
        provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
        target: Any = _Warned(exporter or (_Lines(workdir / "traces.jsonl") if kind == "file" else OTLPSpanExporter()))
        provider.add_span_processor(BatchSpanProcessor(target))
    except Exception as error:  # its text may have a header's secret
        raise UserError("observe.traces", f"OpenTelemetry refuses its settings ({type(error).__name__})",
                        "look at the environment's variables OTEL_...") from None
    try:
        yield Traces(provider.get_tracer("jaxtrain"), step, began)
    finally:
        ending = threading.Thread(target=provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(_LAST_S)


def _trace_id(workdir: Path) -> str:
    """Return the id of the trace that all starts of the run in this workdir share."""
    path = workdir / "trace_id"
    with contextlib.suppress(OSError, ValueError):
        if re.fullmatch(r"[0-9a-f]{32}", found := bounded_files.read(path, 64).decode().strip()):
            return found
    made = secrets.token_hex(16)
    with contextlib.suppress(OSError):
        atomic_files.write(path, made + "\n")
    return made


class _Lines:
    """An exporter that appends a line of JSON for each span."""

    def __init__(self, path: Path):
        self._path = path

    def export(self, spans: Sequence[Any]) -> Any:
        with open(self._path, "a") as file:
            file.write("".join(f"{span.to_json(indent=None)}\n" for span in spans))

    def shutdown(self) -> None:
        pass


class _Warned:
    """An exporter that warns once if another one cannot export spans, and raises nothing."""

    def __init__(self, exporter: Any):
        self._exporter, self._said = exporter, False

    def export(self, spans: Sequence[Any]) -> Any:
        try:
            result = self._exporter.export(spans)
            why = "" if result is None or result.name == "SUCCESS" else "the endpoint did not take them"
        except Exception as error:
            result, why = None, f"{type(error).__name__}"
        if why and not self._said:
            self._said = True
            say(f"warning: observe.traces: spans are lost ({why}); the run continues")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
