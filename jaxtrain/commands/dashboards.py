"""Write dashboards for Grafana and alert rules for Prometheus.

    jaxtrain dashboards --output=deploy

FOLDER/grafana/*.json are imported into Grafana; FOLDER/prometheus/alerts.yml goes to the rule_files of Prometheus.
"""

from pathlib import Path

from jaxtrain.commands.flags import command, parser_of
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.observe.prometheus.dashboards import files


@command()
def main(argv: list[str] | None = None) -> None:
    """Write the files, and print their paths."""
    parser = parser_of("dashboards", __doc__)
    parser.add_argument("--output", required=True, help="folder for the files; files of these names are replaced")
    folder = Path(parser.parse_args(argv).output)
    for name, content in files().items():
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            atomic_files.write(folder / name, content)
        except OSError as error:
            raise UserError("--output", f"{error.filename or folder / name} cannot be written ({error.strerror})",
                            "give another folder") from None
        print(folder / name)
