"""Copy a corpus to object storage for training.

    jaxtrain publish corpora/stored --output=memory://bucket/stored
    jaxtrain publish corpora/own --output=s3://BUCKET/own

Every object is read back and compared. The manifest is written last; until then there is no valid corpus. If it is
interrupted, run the same command again: complete objects are not sent again.
"""

import sys

from jaxtrain.commands.flags import add_dry_run, command, parser_of
from jaxtrain.data.publish import planned, publish
from jaxtrain.errors import tell
from jaxtrain.files.work_progress import Line
from jaxtrain.pages.plain_text import in_bytes
from jaxtrain.redaction import redacted


@command("stopped; run the same command to continue")
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 0: the corpus is complete; 2: a user error, reported in one line."""
    parser = parser_of("publish", __doc__)
    parser.add_argument("corpus", metavar="CORPUS", help="folder of a corpus made by jaxtrain prepare")
    parser.add_argument("--output", required=True, metavar="URL",
                        help="URL to copy to; pass it to a run as --config.data.source")
    add_dry_run(parser, "check the corpus and the URL, say what would be copied, and stop")
    flags = parser.parse_args(argv)
    if flags.dry_run:
        folder, wanted, there = planned(flags.corpus, flags.output)
        size = sum((folder / name).stat().st_size for name in (*wanted, "manifest.json"))
        tell(f"{redacted(flags.output)}: {len(wanted) + 1} files of {in_bytes(size)}, of which {len(there)} are there")
        return
    with Line(sys.stderr) as say:
        sent = publish(flags.corpus, flags.output, say)
    tell(f"{redacted(flags.output)}: complete; {sent} files were sent")
