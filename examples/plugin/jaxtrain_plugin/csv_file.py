"""A tracker: some metrics of a run as a table that a spreadsheet reads."""

import csv
from dataclasses import dataclass, field

import jaxtrain as jt


@dataclass
class CSVFile(jt.Tracker):
    """CSVFile: metrics in a file of the workdir."""

    file: str = "metrics.csv"
    columns: list[str] = field(default_factory=lambda: ["step", "loss", "learning_rate"])  # the metrics

    def begin(self, run, since):
        """Begin the file, or go on with it; None: the lines come once."""
        self.path = run.workdir / self.file
        if not self.path.exists():
            self.path.write_text(",".join(self.columns) + "\n")

    def log(self, lines):
        """Add the lines of metrics.jsonl that have all columns."""
        whole = [line for line in lines if line.keys() >= set(self.columns)]  # those of evaluations have not
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows([line[name] for name in self.columns] for line in whole)
