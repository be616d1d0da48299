"""Compare the planner's step times with results that others have published.

    python -m tools.benchmarks.bench_published

Every row (docs/measurements/published/, read by published_rows.py) is somebody's run, written as a jaxtrain config of
the same shapes, batch and layout. So an error holds three things: the time model's, that of an assumption about their
run, and that their program is not ours. Predicted is what jaxtrain's own code would do there: attention is cuDNN's
kernel on GPUs and splash attention on TPUs, kernels like theirs.

Rows are divided before anything is fitted to them: `fitted` are those that the constants of jaxtrain/plan/cost/rates.py
were fitted to, whole steps of jaxtrain's own on one H200 among them. Of the others a hash of what the planner is asked
says whether a later fit may use them (`open`) or not (`held out`).

Predictions are read from docs/measurements/predictions/published.jsonl, so the command takes a second. `--update`
predicts what is not recorded yet, and with `--again` what is (seconds to a minute a row; no accelerator is needed),
and writes the record and the tables of docs/planner-published.md. `--rows=v6e` takes rows whose name contains it,
`--parts` says where time goes.
"""

import argparse
import sys
import time

from tools.benchmarks import published_predictions as predictions
from tools.benchmarks import published_tables as tables
from tools.benchmarks.published_predictions import Answer
from tools.benchmarks.published_rows import rows


def main() -> int:
    """Print the errors of recorded predictions by half, source, target and release; or record them anew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="", help="those whose name contains this")
    parser.add_argument("--parts", action="store_true", help="every row, and where its predicted time goes")
    parser.add_argument("--update", action="store_true", help="predict what is not recorded, and write the tables")
    parser.add_argument("--again", action="store_true", help="with --update: predict what is recorded, too")
    flags = parser.parse_args()
    if flags.update:
        update(flags.rows, flags.again)
    found = [one for one in predictions.answers() if flags.rows in one.row.name]
    if flags.parts:
        for one in found:
            print(_parts(one))
    for kind in tables.GROUPS:
        print(f"\n{tables.by(kind, found)}")
    print(f"\n{len(found)} rows, of {sum(bool(one.refused) for one in found)} of them nothing is predicted")
    return 0


def update(wanted: str, again: bool) -> None:
    """Predict rows and record that, one after another, so that nothing is lost if this is interrupted."""
    known = predictions.recorded()
    asked = {row.question: row for row in rows() if wanted in row.name and (again or row.question not in known)}
    for count, row in enumerate(asked.values(), 1):
        began = time.perf_counter()
        known[row.question] = predictions.predict(row)
        predictions.write(known)
        print(f"{count}/{len(asked)} {time.perf_counter() - began:.1f} s {_parts(Answer(row, known[row.question]))}",
              flush=True)
    if tables.PAGE.exists():
        tables.PAGE.write_text(tables.rendered(tables.PAGE.read_text(), predictions.answers()))


def _parts(one: Answer) -> str:
    if one.refused:
        return f"{one.row.name}: {one.refused}"
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in one.line["parts"].items())
    return (f"{one.row.name} ({one.row.half}): {one.published:,.0f} published, {one.predicted:,.0f} predicted "
            f"({one.error:+.1%}); {one.line['seconds']:.3g} s: {parts}; {one.line['gb']} GB")


if __name__ == "__main__":
    sys.exit(main())
