"""List, compare, tag and reproduce runs, and delete what they no longer need.

    jaxtrain runs list ROOT --sort=loss
    jaxtrain runs show WORKDIR
    jaxtrain runs compare WORKDIR WORKDIR
    jaxtrain runs tag WORKDIR baseline
    jaxtrain runs gc ROOT --keep=1
    jaxtrain runs reproduce WORKDIR

ROOT is a folder, or the URL of one in object storage with mirrors of checkpoints or workdirs that
were copied there.

Exit status 0; 1: `reproduce` found a difference, or `gc` could not delete something; 2: a user error, in one line.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from jaxtrain.base import exit_statuses
from jaxtrain.commands.flags import Parser, add_dry_run, add_json, add_subcommand, command, parser_of, tell_json
from jaxtrain.errors import UserError, say, tell
from jaxtrain.observe.schemas import FILES, schema
from jaxtrain.pages.plain_text import age, aligned, in_bytes, plain
from jaxtrain.runs import tags

SORTS = ("time", "name", "step", "loss", "eval_loss", "goodput", "cost", "size")
STATES = ("running", "finished", "stopped", "failed", "silent", "new", "damaged", "mirror")


@command()
def main(argv: list[str] | None) -> None:
    """Parse the flags and do it."""
    flags = parser().parse_args(argv)
    {"list": _list, "show": _show, "compare": _compare, "tag": _tag, "gc": _gc, "reproduce": _reproduce,
     "schema": _schema}[flags.what](flags)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("runs", __doc__)
    commands = made.add_subparsers(dest="what", required=True, metavar="COMMAND", parser_class=Parser)
    lines = {"list [ROOT]": "list the runs in a folder or at a URL, the newest first",
             "show WORKDIR": "show everything about a run",
             "compare WORKDIR WORKDIR": "show how runs differ: config, loss, throughput, goodput and cost",
             "tag WORKDIR NAME": "tag a run: `list --tag` finds tagged runs, and `gc` keeps them",
             "gc [ROOT]": "show what can be deleted from runs that have ended; --delete deletes it",
             "reproduce WORKDIR": "compare a run's code, packages and data with those here, and print the command to "
                                  "train it again",
             "schema NAME": "print the JSON Schema of a file that every run writes"}
    subs = {words.partition(" ")[0]: add_subcommand(commands, "runs", words, line) for words, line in lines.items()}
    for name in ("list", "gc"):
        subs[name].add_argument("root", nargs="?", default="runs", metavar="ROOT", help="default: runs")
        subs[name].add_argument("--depth", type=int, default=4, help="depth of folders below ROOT to search")
    for name in ("show", "tag", "reproduce"):
        subs[name].add_argument("workdir", metavar="WORKDIR", help="workdir of the run")
    lists, compares, tagging, frees, again = (
        subs[name] for name in ("list", "compare", "tag", "gc", "reproduce"))
    lists.add_argument("--state", action="extend", type=lambda text: text.split(","), default=[], metavar="STATE,...",
                       help=f"only runs in these states: {', '.join(STATES)}")
    lists.add_argument("--tag", action="append", default=[], help="only runs with this tag; repeat it for several tags")
    lists.add_argument("--sort", choices=SORTS, default="time",
                       help="sort by this: losses and names ascending, everything else descending")
    subs["schema"].add_argument("name", metavar="NAME", choices=[*FILES], help=", ".join(
        f"{name}: {'a line of ' * file.endswith('l')}{file}" for name, file in FILES.items()))
    for each in (lists, subs["show"], compares, frees, tagging, again):
        add_json(each)
    add_dry_run(frees, "show what would be deleted, as without --delete")
    compares.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="two or more")
    tagging.add_argument("names", nargs="+", metavar="NAME", help="letters, digits, dots, dashes and underscores")
    tagging.add_argument("--remove", action="store_true", help="remove these tags")
    frees.add_argument("--keep", type=int, default=1, metavar="N",
                       help="good checkpoints that a finished run keeps, besides those that its config keeps forever")
    frees.add_argument("--tagged", action="store_true", help="include tagged runs, which are kept otherwise")
    frees.add_argument("--delete", action="store_true", help="delete the files; without this flag nothing is changed")
    again.add_argument("--workdir", dest="into", metavar="DIR", help="workdir of the new run; default: WORKDIR-again")
    again.add_argument("--checkout", metavar="DIR", help="make a git worktree of the run's commit there")
    again.add_argument("--no_data", action="store_true", help="do not compare the data")
    return made


def _list(flags: argparse.Namespace) -> None:
    from jaxtrain.runs import run_index

    if unknown := sorted(set(flags.state) - set(STATES)):
        raise UserError("--state", f"there is no state {unknown[0]!r}", f"known: {', '.join(STATES)}")
    found = [one for one in run_index.summaries(flags.root, flags.depth)
             if (not flags.state or one.state in flags.state) and set(flags.tag) <= set(one.tags)]
    if flags.sort == "name":
        found.sort(key=lambda one: one.place)
    else:
        sign = 1 if flags.sort in ("loss", "eval_loss") else -1
        value = {one.place: getattr(one, flags.sort) for one in found}
        found.sort(key=lambda one: (value[one.place] is None, sign * (value[one.place] or 0)))
    if flags.json:
        tell_json(*map(dataclasses.asdict, found))
        return
    if not found:
        say(f"no matching runs under {flags.root}")
        return
    tell("\n".join(listed(found, flags.root)))


def listed(found: Sequence[Any], root: str) -> list[str]:
    """Return a line for each run, below a head; columns that say nothing of any run are left out."""

    def row(one: Any) -> dict[str, str]:
        name = one.place.removeprefix(root.rstrip("/")).lstrip("/") or one.place
        step = "" if one.step is None and one.last_step is None else (
            f"{one.step or 0}/{one.last_step}" if one.last_step else f"{one.step}")
        return {"RUN": plain(name), "STATE": one.state, "STEP": step, "LOSS": _decimal(one.loss),
                "EVAL": _decimal(one.eval_loss), "GOODPUT": "" if one.goodput is None else f"{one.goodput:.1%}",
                "COST": "" if one.cost is None else f"${one.cost:,.2f}", "SIZE": in_bytes(one.size),
                "AGE": age(time.time() - one.time) if one.time else "",
                "CONFIG": plain(one.config), "HASH": plain(one.config_hash[:8]), "COMMIT": plain(short(one.commit)),
                "TAGS": plain(", ".join(one.tags)), "NOTE": plain(one.problem)}

    rows = [row(one) for one in found]
    said = [name for name in rows[0] if any(row[name] for row in rows)]
    lines = aligned([said, *([row[name] for name in said] for row in rows)])
    if any(one.state == "mirror" for one in found):
        lines.append("mirror: only checkpoints are there; the figures are those of the newest one, and what became of "
                     "the run afterwards, its cost and its events are in its workdir")
    return lines


def _show(flags: argparse.Namespace) -> None:
    from jaxtrain.runs.comparison import described, facts

    if flags.json:
        tell_json(described(flags.workdir))
        return
    said = facts(flags.workdir)
    width = max(map(len, said))
    tell("\n".join(f"{name:<{width}}  {plain(value)}" for name, value in said.items()))


def _compare(flags: argparse.Namespace) -> None:
    from jaxtrain.runs.comparison import compared, table

    if len(flags.workdirs) < 2:
        raise UserError("WORKDIR", "one run cannot be compared", "give two or more workdirs")
    if flags.json:
        tell_json(*compared(flags.workdirs))
        return
    head, *rows = table(flags.workdirs)
    tell("\n".join(aligned([[plain(cell) for cell in row] for row in (head, *rows)])))


def _tag(flags: argparse.Namespace) -> None:
    now = tags.change(flags.workdir, flags.names, flags.remove)
    tell_json({"workdir": flags.workdir, "tags": [*now]}) if flags.json else tell(", ".join(now) or "no tags")


def _gc(flags: argparse.Namespace) -> None:
    from jaxtrain.runs import run_garbage
    if flags.keep < 1:
        raise UserError("--keep", f"{flags.keep} would leave a run without a checkpoint", "give 1 or more")
    if flags.delete and flags.dry_run:
        raise UserError("--dry_run", "--delete deletes", "leave one of them out")
    found = run_garbage.below(flags.root, flags.depth, flags.keep, flags.tagged)
    for place, reason in found.spared:
        say(plain(f"{place}: kept: {reason}"))
    rows = [[plain(one.path), in_bytes(one.size), one.reason] for one in found.garbage]
    if flags.json:
        tell_json(*({"path": one.path, "size": one.size, "reason": one.reason} for one in found.garbage))
    elif rows:
        tell("\n".join(aligned([["PATH", "SIZE", "WHY"], *rows])))
    total, report = sum(one.size for one in found.garbage), say if flags.json else tell
    if not flags.delete:
        report(f"{in_bytes(total)} can be freed; nothing was deleted" + "; --delete does it" * bool(rows))
        return
    freed, failed = run_garbage.delete(found, flags.keep, flags.tagged)
    report(f"{in_bytes(freed)} were freed")
    for line in failed:
        say(plain(line))
    if failed:
        raise SystemExit(exit_statuses.NO)


def _reproduce(flags: argparse.Namespace) -> None:
    from jaxtrain.runs import reproduction

    found = reproduction.compared(flags.workdir, with_data=not flags.no_data)
    if flags.json:
        tell_json({"differences": [dict(zip(("what", "then", "here", "do"), row, strict=True))
                                   for row in found.differences],
                   "commands": reproduction.commands(found, flags.into, flags.checkout)})
    elif found.differences:
        tell("\n".join(aligned([["WHAT", "THEN", "HERE", "WHAT TO DO"],
                                 *([plain(cell) for cell in row] for row in found.differences)])), end="\n\n")
    else:
        tell("nothing that the run recorded is different here\n")
    if not flags.json:
        tell("\n".join(map(plain, reproduction.commands(found, flags.into, flags.checkout))))
    if found.differences:
        raise SystemExit(exit_statuses.NO)


def _schema(flags: argparse.Namespace) -> None:
    tell(json.dumps(schema(flags.name), indent=2))


def short(commit: str) -> str:
    """Return the first digits of a commit, and whether its checkout was edited."""
    return commit[:8] + "-dirty" * commit.endswith("-dirty")


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
