"""Continue prompts, or answer them, with what a run has trained.

    jaxtrain generate WORKDIR --prompt="def main(" --prompt="import " --max_new_tokens=100
    jaxtrain generate WORKDIR --prompts=prompts.jsonl --temperature=0 --json
    jaxtrain generate FOLDER --adapters=formal=FOLDER,brief=FOLDER --adapter=brief --prompt="Dear"

Reads WORKDIR/config.json, WORKDIR/tokenizer and the parameters of the newest checkpoint that was found good, without
the optimizer's state. All devices here share the prompts; --config.mesh.tensor=N splits a model that one of them cannot
hold.
"""

import argparse
import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.errors import UserError, nearest, say
from jaxtrain.files.bounded_files import LARGE, parsed, read, user_json
from jaxtrain.flags import command, overrides_of, parser_of
from jaxtrain.redaction import printable

if TYPE_CHECKING:
    from jaxtrain.data.chat.templates import Chat
    from jaxtrain.data.tokenizers.tokenizer import Tokenizer


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 2 means a user error, reported in one line."""
    flags, overrides = parse(argv)
    texts, names = _prompts(flags)
    from jaxtrain.hub.generate import check, generate
    from jaxtrain.hub.sampling import Sampling
    from jaxtrain.hub.trained_model import load_model, sections_of
    from jaxtrain.hub.trained_tokenizer import tokenizer_of

    config = sections_of(flags.workdir, text=True)

    how = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.min_p, flags.repetition_penalty)
    check(texts, flags.max_new_tokens, flags.stop, flags.batch_size, flags.seed)
    words = tokenizer_of(flags.workdir)
    prompts, ends = answered(
        flags.workdir, config, words, flags.chat_template, texts) if flags.chat else (texts, [])
    run, state = load_model(flags.workdir, overrides, step=flags.step, averaged=flags.ema, adapters=flags.adapters)
    found = generate(run, state, prompts, **asdict(how), max_new_tokens=flags.max_new_tokens, seed=flags.seed,
                     stop=[*flags.stop, *ends], ignore_end=flags.ignore_end, batch_size=flags.batch_size,
                     logprobs=flags.logprobs, tokenizer=words, adapters=names if any(names) else None)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not have every character
        sys.stdout.reconfigure(errors="backslashreplace")
    for prompt, name, one in zip(texts, names, found, strict=True):
        if flags.json:
            said = {"prompt": prompt} | ({} if flags.adapters is None else {"adapter": name})
            print(json.dumps(said | asdict(one), ensure_ascii=False))
        else:
            text = one.text if flags.chat else prompt + one.text
            print(printable(text) if sys.stdout.isatty() else text, end="\n" if len(found) == 1 else "\n---\n")


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the parsed flags and the dotted config overrides."""
    parser = parser_of("generate", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="the folder of a run, or a published one")
    parser.add_argument("--prompt", action="append", default=[], help="a text to continue; can be given several times")
    parser.add_argument("--prompts", metavar="FILE", help='JSON lines: texts, or objects with a "prompt"')
    parser.add_argument("--adapters", metavar="NAME=FOLDER,...",
                        help="folders in PEFT's format, of which each prompt may name one as its \"adapter\"")
    parser.add_argument("--adapter", metavar="NAME", help="adapter for all prompts that name none")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest good one")
    parser.add_argument("--ema", action="store_true", help="use the moving average of the weights (train.ema_decay)")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="default: 128")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the most probable token; default: 1")
    parser.add_argument("--top_k", type=int, default=0, help="choose among so many most probable tokens; default: all")
    parser.add_argument("--top_p", type=float, default=1.0,
                        help="choose among the fewest tokens that together are at least so probable; default: 1")
    parser.add_argument("--min_p", type=float, default=0.0,
                        help="leave out tokens less probable than this share of the most probable one; default: 0")
    parser.add_argument("--repetition_penalty", type=float, default=1.0,
                        help="above 1: tokens that are there already become less likely; default: 1")
    parser.add_argument("--stop", action="append", default=[], help="a text to stop before; can be given several times")
    parser.add_argument("--ignore_end", action="store_true", help="go on behind the end of a document")
    parser.add_argument("--seed", type=int, default=0, help="another number gives other texts; default: 0")
    parser.add_argument("--batch_size", type=int, default=64, help="prompts continued at once; default: 64")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message, and is answered")
    parser.add_argument("--chat_template", default="", help="a file, plain or chatml; default: that of the run's data")
    parser.add_argument("--json", action="store_true", help="print JSON lines, with tokens and why each text ended")
    parser.add_argument("--logprobs", action="store_true", help="with --json: the log-probability of each token")
    flags, rest = parser.parse_known_args(argv)
    flags.adapters = None if flags.adapters is None else named(flags.adapters)
    overrides = overrides_of(rest, vars(flags))
    known = ("mesh.", "train.precision", *([] if flags.adapters is None else ["lora.quantize"]))
    if other := next((key for key in overrides if not key.startswith(known)), None):
        raise UserError(f"--config.{other}", "the model is as it was trained",
                        "change --config.mesh.KEY or --config.train.precision, or leave it out")
    return flags, overrides


def named(text: str) -> dict[str, str]:
    """Return the folders by name in NAME=FOLDER,NAME=FOLDER."""
    pairs = [one.partition("=") for one in text.split(",")]
    if not all(name and folder for name, _, folder in pairs) or len({name for name, *_ in pairs}) < len(pairs):
        raise UserError("--adapters", f"{text!r} is not a list of different names with folders",
                        "write NAME=FOLDER,NAME=FOLDER")
    return {name: folder for name, _, folder in pairs}


def answered(folder: str | Path, config: dict[str, Any], words: "Tokenizer", template: str,
             texts: list[str]) -> tuple[list[Any], list[int]]:
    """Return the tokens of conversations that begin with these messages, and the tokens that end an answer."""
    chat = chat_of(folder, config, words, template)
    return [chat.prompt([{"role": "user", "content": text}]) for text in texts], chat.ends()


def chat_of(folder: str | Path, config: dict[str, Any], words: "Tokenizer", template: str) -> "Chat":
    """Return the chat template of a run's data, or the one that is asked for."""
    from jaxtrain.data.chat.templates import Chat

    kept: dict[str, Any] = {} if template else kept_template(folder, config)
    chat = Chat(words, template or kept.get("template") or "")
    chat.variables |= kept.get("special_tokens", {})
    return chat


def kept_template(folder: str | Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return what a run has kept of its data's chat template, or the data's manifest says of it; {}: there is none."""
    from jaxtrain.data.corpus.open import read_manifest
    from jaxtrain.data.tokenizers.tokenizer_folder import CHAT

    if kept := user_json(Path(folder) / "tokenizer" / CHAT, dict, "WORKDIR", "copy it again from the run"):
        return kept
    source = Path(config.get("data", {}).get("source", ""))
    return read_manifest(source).get("chat") or {} if (source / "manifest.json").is_file() else {}


def _prompts(flags: argparse.Namespace) -> tuple[list[str], list[str | None]]:
    """Return the prompts, and the name of the adapters of each."""
    _check_name(flags, flags.adapter, "--adapter")
    ignored = False
    texts, names = list(flags.prompt), [flags.adapter] * len(flags.prompt)
    if flags.prompts:
        try:
            lines = read(flags.prompts, LARGE).decode().split("\n")  # a JSON string may hold other line ends
        except (OSError, UnicodeDecodeError) as error:
            raise UserError("--prompts", f"{flags.prompts} cannot be read ({error})",
                            "give a file of JSON lines") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                one = parsed(line, object)
            except ValueError:
                one = None
            text, name = (one.get("prompt"), one.get("adapter")) if isinstance(one, dict) else (one, None)
            if flags.adapters is None:  # a field like any other
                name, ignored = None, ignored or name is not None
            if not isinstance(name, str | None):
                raise UserError("--prompts", f"the adapter in line {number} of {flags.prompts} is not a name",
                                'write lines such as {"prompt": "def ", "adapter": "brief"}')
            if not isinstance(text, str):
                raise UserError("--prompts", f"line {number} of {flags.prompts} is neither a text nor has a prompt",
                                'write lines such as {"prompt": "def "}')
            _check_name(flags, name, f"line {number} of {flags.prompts}")
            texts.append(text)
            names.append(name or flags.adapter)
    if not texts:
        raise UserError("--prompt", "there is no prompt", "give --prompt=TEXT or --prompts=FILE")
    if ignored:
        say(f"warning: {flags.prompts} names adapters, and the model answers alone: there are no --adapters")
    return texts, names


def _check_name(flags: argparse.Namespace, name: str | None, where: str) -> None:
    """Refuse a name that none of the adapters has."""
    if name and name not in (flags.adapters or {}):
        raise UserError("--adapters", f"there is none of the name {name!r}, which {where} names",
                        nearest(name, flags.adapters) if flags.adapters else "give --adapters=NAME=FOLDER")


if __name__ == "__main__":
    sys.exit(main())
