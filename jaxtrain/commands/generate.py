"""Generate text from prompts with a trained or published model.

    jaxtrain generate WORKDIR --prompt="def main(" --prompt="import " --max_new_tokens=100
    jaxtrain generate WORKDIR --prompts=prompts.jsonl --temperature=0 --json
    jaxtrain generate FOLDER --system="Answer in one word." --prompt="Which planet do we live on?"
    jaxtrain generate FOLDER --messages=conversation.json
    jaxtrain generate hf:ORG/NAME --chat --prompt="Which planet do we live on?"
    jaxtrain generate FOLDER --adapters=formal=FOLDER,brief=FOLDER --adapter=brief --prompt="Dear"

Loads WORKDIR/config.json, WORKDIR/tokenizer and the parameters of the newest verified checkpoint, without
the optimizer state. Prompts are divided among all local devices; --config.mesh.tensor=N splits a model that one cannot
hold. For a published model, or a run that started from one, sampling settings and end tokens come from
generation_config.json, unless flags set them.
"""

import argparse
import io
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jaxtrain.commands.flags import add_json, command, folders_by_name, overrides_of, parser_of, tell_json
from jaxtrain.errors import UserError, nearest, say, tell_text
from jaxtrain.files.bounded_files import LARGE, parsed, read, user_json
from jaxtrain.hub.chat_messages import EXAMPLE, Messages, chat_of, read_messages

if TYPE_CHECKING:
    from jaxtrain.hub.sampling import Sampling

Prompt = str | Messages


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 2 means a user error, reported in one line."""
    flags, overrides = parse(argv)
    texts, names = _prompts(flags)
    from jaxtrain.config.hub_names import model_folder

    flags.workdir = model_folder(flags.workdir)
    from jaxtrain.hub.folders import generation_config
    from jaxtrain.hub.generate import check, generate
    from jaxtrain.hub.trained_model import load_model, sections_of
    from jaxtrain.hub.trained_tokenizer import tokenizer_of

    config = sections_of(flags.workdir, text=True)
    how = _sampling(flags)
    check([""] * len(texts), flags.max_new_tokens, flags.stop, flags.batch_size, flags.seed)
    words, ends = tokenizer_of(flags.workdir), [] if flags.ignore_end else generation_config.ends_of(flags.workdir)
    prompts: list[Any] = list(texts)
    if flags.chat or any(not isinstance(text, str) for text in texts):
        chat = chat_of(flags.workdir, config, words, flags.chat_template)
        prompts = [chat.prompt(messages) if (messages := _messages(flags, text)) else text for text in texts]
        ends = [*ends, *chat.ends()]
    run, state = load_model(flags.workdir, overrides, step=flags.step, averaged=flags.ema, adapters=flags.adapters)
    found = generate(run, state, prompts, **asdict(how), max_new_tokens=flags.max_new_tokens, seed=flags.seed,
                     stop=[*flags.stop, *ends], ignore_end=flags.ignore_end, batch_size=flags.batch_size,
                     logprobs=flags.logprobs, tokenizer=words, adapters=names if any(names) else None)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not have every character
        sys.stdout.reconfigure(errors="backslashreplace")
    for prompt, name, one in zip(texts, names, found, strict=True):
        if flags.json:
            said = {"prompt" if isinstance(prompt, str) else "messages": prompt}
            said |= {} if flags.adapters is None else {"adapter": name}
            tell_json(said | asdict(one))
        else:
            text = (prompt if isinstance(prompt, str) and not flags.chat else "") + one.text
            tell_text(text, end="\n" if len(found) == 1 else "\n---\n")


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the parsed flags and the dotted config overrides."""
    parser = parser_of("generate", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="the workdir of a run, a folder in Hugging Face's "
                        "format, or hf:ORG/NAME on the Hugging Face Hub")
    parser.add_argument("--prompt", action="append", default=[], help="a text to continue; can be repeated")
    parser.add_argument("--prompts", metavar="FILE",
                        help='JSON lines: texts, or objects with a "prompt" or with "messages"')
    parser.add_argument("--messages", metavar="JSON", action="append", default=[],
                        help=f"list of messages to answer with the chat template: a JSON file, or JSON such as "
                             f"'{EXAMPLE}'; can be repeated")
    parser.add_argument("--system", help="system message before each prompt, which then counts as the user's message")
    parser.add_argument("--adapters", metavar="NAME=FOLDER,...",
                        help="adapters in PEFT's format; each prompt may name one as its \"adapter\"")
    parser.add_argument("--adapter", metavar="NAME", help="adapter for prompts that name none")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest verified one")
    parser.add_argument("--ema", action="store_true", help="use the moving average of the weights (train.ema_decay)")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="maximum number of new tokens; default: 128")
    parser.add_argument("--temperature", type=float, help="0: greedy; default: that of "
                        "generation_config.json, or 1")
    parser.add_argument("--top_k", type=int,
                        help="sample from this many most probable tokens; default: generation_config.json's, or all")
    parser.add_argument("--top_p", type=float, help="sample from the fewest tokens whose probabilities sum to this; "
                        "default: generation_config.json's, or 1")
    parser.add_argument("--min_p", type=float, help="drop tokens less probable than this share of the most "
                        "probable one; default: generation_config.json's, or 0")
    parser.add_argument("--repetition_penalty", type=float,
                        help="above 1: make tokens that the text already has less likely; "
                        "default: generation_config.json's, or 1")
    parser.add_argument("--stop", action="append", default=[], help="stop before this text; can be repeated")
    parser.add_argument("--ignore_end", action="store_true", help="do not stop at the end-of-document token")
    parser.add_argument("--seed", type=int, default=0, help="random seed; default: 0")
    parser.add_argument("--batch_size", type=int, default=64, help="prompts per batch; default: 64")
    parser.add_argument("--chat", action="store_true", help="treat each prompt as a user's message, and answer it")
    parser.add_argument("--chat_template", default="", help="a Jinja file, plain or chatml; default: the run's own")
    add_json(parser, "print JSON lines, with tokens and the reason why each text ended")
    parser.add_argument("--logprobs", action="store_true",
                        help="with --json: also print the log probability of each token")
    parser.group("sampling", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop",
                 "ignore_end", "seed")
    parser.group("adapters", "adapters", "adapter")
    flags, rest = parser.parse_known_args(argv)
    flags.adapters = None if flags.adapters is None else folders_by_name(flags.adapters)
    flags.chat = flags.chat or flags.system is not None
    overrides = overrides_of(rest, vars(flags))
    known = ("mesh.", "train.precision", *([] if flags.adapters is None else ["lora.quantize"]))
    if other := next((key for key in overrides if not key.startswith(known)), None):
        raise UserError(f"--config.{other}", "the model is as it was trained",
                        "change --config.mesh.KEY or --config.train.precision, or leave it out")
    return flags, overrides


def _sampling(flags: argparse.Namespace) -> "Sampling":
    """Return how tokens are chosen: by the flags, else by generation_config.json; says what of that is not applied."""
    from jaxtrain.hub.folders import generation_config
    from jaxtrain.hub.sampling import Sampling

    said = generation_config.said_of(flags.workdir)
    given = {key: getattr(flags, key) for key in Sampling.__dataclass_fields__}
    if ignored := generation_config.not_applied(said):
        say(f"warning: generation_config.json asks for {', '.join(ignored)}, which is not applied")
    how = generation_config.sampling_of(said, given)
    if said is not None and given["temperature"] is None and how.temperature == 0:
        say("each token is the most probable one, as the model's generation_config.json asks for; "
            "--temperature=1 samples")
    return how


def _messages(flags: argparse.Namespace, prompt: Prompt) -> Messages:
    """Return the messages that a prompt stands for; []: it is a text to continue."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if flags.chat else []
    begins = prompt and prompt[0]["role"] != "system" and flags.system is not None
    return [{"role": "system", "content": flags.system}, *prompt] if begins else prompt


def _given_messages(given: str) -> Messages:
    """Return the messages of a --messages flag: a file, or JSON itself."""
    key, where = "--messages", given
    if given.lstrip().startswith(("[", "{")):
        where = "this" if len(given) > 60 else given
        try:
            said = parsed(given, object)
        except ValueError as error:
            raise UserError(key, f"{where} is not JSON ({error})", f"write {EXAMPLE}, in single quotes in a shell, or "
                            "give a file") from error
    elif (said := user_json(given, object, key, f"write {EXAMPLE}", LARGE)) is None:
        raise UserError(key, f"there is no file {given}", f"give a JSON file with a list of messages, or {EXAMPLE}")
    return read_messages(said, key, where)


def _prompts(flags: argparse.Namespace) -> tuple[list[Prompt], list[str | None]]:
    """Return the prompts, and the name of the adapters of each."""
    _check_name(flags, flags.adapter, "--adapter")
    ignored = False
    texts: list[Prompt] = list(flags.prompt)
    texts += map(_given_messages, flags.messages)
    names: list[str | None] = [flags.adapter] * len(texts)
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
            if isinstance(text, list) or (isinstance(one, dict) and text is None and "messages" in one):
                text = read_messages(one if text is None else text, "--prompts", f"line {number} of {flags.prompts}")
            if flags.adapters is None:  # a field like any other
                name, ignored = None, ignored or name is not None
            if not isinstance(name, str | None):
                raise UserError("--prompts", f"the adapter in line {number} of {flags.prompts} is not a name",
                                'write lines such as {"prompt": "def ", "adapter": "brief"}')
            if not isinstance(text, str | list):
                raise UserError("--prompts", f"line {number} of {flags.prompts} is neither a text nor has a prompt",
                                'write lines such as {"prompt": "def "}')
            _check_name(flags, name, f"line {number} of {flags.prompts}")
            texts.append(text)
            names.append(name or flags.adapter)
    if not texts:
        raise UserError("--prompt", "there is no prompt", "give --prompt=TEXT, --prompts=FILE or --messages=JSON")
    if ignored:
        say(f"warning: {flags.prompts} names adapters, which are ignored: there are no --adapters")
    return texts, names


def _check_name(flags: argparse.Namespace, name: str | None, where: str) -> None:
    """Refuse a name that none of the adapters has."""
    if name and name not in (flags.adapters or {}):
        raise UserError("--adapters", f"there is none of the name {name!r}, which {where} names",
                        nearest(name, flags.adapters) if flags.adapters else "give --adapters=NAME=FOLDER")
