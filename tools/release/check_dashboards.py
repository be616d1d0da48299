"""Check the dashboards in deploy/grafana against the types that Grafana publishes.

    python tools/release/check_dashboards.py

Needs node and npm, which fetch `@grafana/schema` and TypeScript into a temporary folder. TypeScript finds what is
missing, misspelt or of a wrong type in a dashboard, in a panel, and in the options of graphs and numbers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
# Grafana's types have enumerations where its JSON has their values.
HEAD = """\
import type { Dashboard, Panel, RowPanel } from '@grafana/schema';
import type { Options as Graph, FieldConfig as Custom } from 'RAW/timeseries/panelcfg/x/types.gen';
import type { Options as Stat } from 'RAW/stat/panelcfg/x/types.gen';
type Plain<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T
  : T extends Array<infer U> ? Plain<U>[] : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
""".replace("RAW", "./node_modules/@grafana/schema/dist/types/raw/composable")
TYPES = {"row": "RowPanel", "stat": "Panel", "timeseries": "Panel"}


def source(dashboards: list[dict]) -> str:
    """TypeScript in which every part of the dashboards is declared to be of Grafana's type."""
    declared = []
    for content in dashboards:
        for panel in content["panels"]:
            declared.append((TYPES[panel["type"]], panel))
            if panel["type"] == "timeseries":
                declared += [("Graph", panel["options"]), ("Custom", panel["fieldConfig"]["defaults"]["custom"])]
            elif panel["type"] == "stat":
                declared.append(("Stat", panel["options"]))
        declared.append(("Dashboard", content | {"panels": []}))
    return HEAD + "\n".join(f"export const part{n}: Plain<{kind}> = {json.dumps(part)};"
                            for n, (kind, part) in enumerate(declared))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schema", default="13.2.3", help="the version of @grafana/schema")
    flags = parser.parse_args()
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "check.ts").write_text(source(found))
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", f"@grafana/schema@{flags.schema}",
                        "typescript"], cwd=folder, check=True)
        done = subprocess.run(["npx", "tsc", "--noEmit", "--skipLibCheck", "--strict", "--moduleResolution", "bundler",
                               "--module", "esnext", "--target", "esnext", "check.ts"], cwd=folder)
    print(f"{len(found)} dashboards, {sum(len(one['panels']) for one in found)} panels: "
          f"{'as Grafana has them' if done.returncode == 0 else 'wrong'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
