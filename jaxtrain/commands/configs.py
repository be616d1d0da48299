"""List the configs that come with jaxtrain, or print one.

    jaxtrain configs
    jaxtrain configs gpt > mine.py

Each is a name that every command takes in place of a path, as in `jaxtrain train gpt:tiny`; what is behind the colon
is a variant, and the file says which there are.
"""

from pathlib import Path

from jaxtrain.commands.flags import add_json, command, parser_of, tell_json
from jaxtrain.errors import UserError, nearest, tell
from jaxtrain.files import shipped_configs


@command()
def main(argv: list[str] | None = None) -> None:
    """Print the table of configs, or the file of one."""
    parser = parser_of("configs", __doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this config, which is a Python file")
    add_json(parser, "print a JSON object for each config: name, file, about; with NAME also text")
    flags = parser.parse_args(argv)
    if flags.name:
        if flags.name not in shipped_configs.names():
            raise UserError("NAME", f"no config of the name {flags.name!r} comes with jaxtrain",
                            nearest(flags.name, shipped_configs.names()))
        facts = _facts(flags.name)
        text = Path(facts["file"]).read_text()
        tell_json({**facts, "text": text}) if flags.json else tell(text, end="")
        return
    rows = [_facts(name) for name in shipped_configs.names()]
    if flags.json:
        tell_json(*rows)
    else:
        width = max(len(row["name"]) for row in rows)
        tell("\n".join(f"{row['name']:<{width}}  {row['about']}" for row in rows))


def _facts(name: str) -> dict[str, str]:
    return {"name": name, "file": str(shipped_configs.folder() / f"{name}.py"), "about": shipped_configs.about(name)}
