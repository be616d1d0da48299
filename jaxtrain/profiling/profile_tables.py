"""The tables of a profile in Markdown: where the time of a step goes, and the kernels that take longest."""

from collections.abc import Iterable, Sequence

from jaxtrain.base.annotations import Json, JsonMapping, JsonObject


def profiles(lines: Sequence[JsonMapping]) -> str:
    """Return the table of where the time of a step goes, with a column per measurement."""
    kinds = dict.fromkeys(kind for line in lines for kind in line["profile"]["kinds_ms"])
    hidden = dict.fromkeys(kind for line in lines for kind in line["profile"]["hidden_ms"])
    rows = [[kind, *(_share(line["profile"], line["profile"]["kinds_ms"].get(kind, 0.0)) for line in lines)]
            for kind in kinds]
    rows += [[f"hidden: {kind}", *(number(line["profile"]["hidden_ms"].get(kind), ",.2f") for line in lines)]
             for kind in hidden]
    waits = dict.fromkeys(why for line in lines for why in line["profile"].get("gaps_ms", ()))
    rows += [[f"of the gaps: {why or 'other'}",
              *(number(line["profile"]["gaps_ms"].get(why), ",.2f") for line in lines)] for why in waits]
    total = ["sum", *(f"{sum(line['profile']['kinds_ms'].values()):,.2f}" for line in lines)]
    clock = ["by the clock", *(f"{line['profile']['wall_ms']:,.2f}" for line in lines)]
    return markdown(["ms a step", *(line["name"] for line in lines)], [*rows, total, clock])


def kernels(profile: JsonObject) -> str:
    """Return the table of the kernels that take longest, and where in the model they come from."""
    rows = [[kernel["name"], kernel["kind"], kernel["path"][-48:], kernel["result"][:32], f"{kernel['runs']:g}",
             f"{kernel['ms']:.3f}", f"{kernel['share']:.1%}", number(kernel.get("flops_per_s"), ",.3g", 1e-12),
             number(kernel.get("bytes_per_s"), ",.3g", 1e-9), number(kernel.get("roofline"), ".0%")]
            for kernel in profile["kernels"]]
    share = sum(kernel["share"] for kernel in profile["kernels"])
    return markdown(["kernel", "kind", "from", "result", "runs a step", "ms", "share", "TFLOP/s", "GB/s",
                     "of the roofline"], rows) + f"\nThe {len(rows)} that take longest: {share:.0%} of the step.\n"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "".join(f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in line)} |\n" for line in lines)


def number(value: Json, form: str = ",.1f", scale: float = 1.0, unit: str = "") -> str:
    """Format a figure, or a dash for a missing one."""
    return "–" if value is None else f"{value * scale:{form}}{unit}"


def _share(profile: JsonObject, milliseconds: float) -> str:
    return f"{milliseconds:,.2f} ({milliseconds / profile['step_ms']:.0%})" if milliseconds else ""
