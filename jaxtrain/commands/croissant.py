"""Write the datasheet of a corpus in the Croissant 1.0 format.

    jaxtrain croissant corpora/told --describe date_published=2026-01-31

Its facts come from the manifest; add what the manifest cannot know with --describe, to `jaxtrain prepare` or here.
"""

import json
from pathlib import Path

from jaxtrain.commands.flags import command, parser_of
from jaxtrain.data.croissant import datasheet
from jaxtrain.errors import UserError, tell
from jaxtrain.files import atomic_files


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 2 means a user error, reported in one line."""
    parser = parser_of("croissant", __doc__)
    parser.add_argument("corpus", metavar="CORPUS", help="folder of a corpus made by jaxtrain prepare")
    parser.add_argument("--output", default="", help="default: croissant.json in the folder")
    parser.add_argument("--describe", nargs="+", default=[], metavar="KEY=VALUE",
                        help="further entries of the datasheet")
    flags = parser.parse_args(argv)
    folder = Path(flags.corpus).expanduser()
    path = Path(flags.output).expanduser() if flags.output else folder / "croissant.json"
    sheet = datasheet(folder, flags.describe)
    try:
        with atomic_files.written(path) as file:
            file.write((json.dumps(sheet, indent=1, ensure_ascii=False, default=str) + "\n").encode())
    except OSError as error:
        raise UserError("--output", f"{path} cannot be written ({error.strerror})", "name another file") from error
    tell(path)
