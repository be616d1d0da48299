"""Write a run's model as a folder in Hugging Face's format.

    jaxtrain export WORKDIR --to=FOLDER
    jaxtrain export WORKDIR --to=FOLDER --step=500 --dtype=float32

Transformers and inference servers read it. The folder appears when it is whole: config.json, the weights as
safetensors, the run's tokenizer where it is of a kind that others read, and export.json, which says of which run and
step it is, with the SHA-256 of every file.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError, say
from jaxtrain.flags import add_process_flags, command, parser_of

RECORD = "export.json"


@command()
def main(argv: list[str] | None = None) -> None:
    """Parse the flags and export."""
    parser = parser_of("export", __doc__)
    parser.add_argument("workdir", help="of the run")
    parser.add_argument("--to", required=True, help="the folder to make; it must not be there yet")
    parser.add_argument("--step", type=int, help="of the checkpoint; by default the newest good one")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    parser.add_argument("--file_gb", type=float, default=4.0, help="the largest file of weights, in 10^9 bytes")
    add_process_flags(parser)
    flags = parser.parse_args(argv)
    if not 0 <= flags.file_gb < 1e6:
        raise UserError("--file_gb", f"{flags.file_gb} is no size of a file", "give one such as 4")
    from jaxtrain.distributed import processes

    processes.initialize(flags.coordinator, flags.num_processes, flags.process_id)
    step = export(flags.workdir, flags.to, flags.step, dtype=flags.dtype, file_bytes=int(flags.file_gb * 1e9))
    say(f"{flags.to} has the model of step {step} of {flags.workdir}")


def export(workdir: str | Path, to: str | Path, step: int | None = None, *, dtype: str = "bfloat16",
           file_bytes: int = 4 * 10**9) -> int:
    """Write the model of a workdir's checkpoint into the folder `to`, and return the step. Every process calls it."""
    import jax

    from jaxtrain.config.published_config import FILE, config_json
    from jaxtrain.distributed.coordination import exchange
    from jaxtrain.files import atomic_files
    from jaxtrain.hub import published_weights, trained_model
    from jaxtrain.models import lora

    workdir, to = Path(workdir), Path(to)
    if to.exists():
        raise UserError("--to", f"{to} is there already", "name a folder that is not")
    run = trained_model.spread_model(trained_model.sections_of(workdir))
    described = config_json(run.config.model, run.config.preference.reward_head) | {"dtype": dtype}
    params, found = trained_model.load(workdir, run, step)
    if found is None:
        raise UserError("WORKDIR", f"{workdir} is a published folder already", "give the workdir of a run")
    partial, first = to.with_name(f"{to.name}.partial"), jax.process_index() == 0
    exchange(None, lambda _: _make(partial))  # it is there for all processes
    published_weights.save(params, run.config.model, partial, jax.numpy.dtype(dtype), file_bytes,
                           lora.scale(run.config.lora))
    exchange(None)  # all files are written
    if first:
        _write_tokenizer(workdir, partial, described)
        if run.config.preference.reward_head and "eos_token_id" in described:
            described["pad_token_id"] = described["eos_token_id"]  # rewards are read at the last token that is none
        atomic_files.write_json(partial / FILE, described)
        record = {"workdir": workdir.absolute().name, "step": found[0], "parameters": found[1],
                  "sha256": {file.name: atomic_files.file_digest(file) for file in sorted(partial.iterdir())}}
        atomic_files.write_json(partial / RECORD, record)
        os.rename(partial, to)
        atomic_files.sync(to.absolute().parent)
    exchange(None)
    return found[0]


def _make(folder: Path) -> None:
    """Make a folder anew, which an export that was stopped may have left."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError("--to", f"{folder} cannot be made ({error.strerror})", "give a folder that can be") from error


def _write_tokenizer(workdir: Path, folder: Path, described: dict[str, Any]) -> None:
    """Copy the run's tokenizer and chat template, and say which tokens begin and end a text."""
    from jaxtrain.data.tokenizers import published_tokens, tokenizer_folder
    from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
    from jaxtrain.data.tokenizers.tokenizer_folder import record_of

    kept = workdir / "tokenizer"
    if not kept.is_dir():
        say("the workdir has no tokenizer; the folder has none either")
        return
    tokenizer = load_tokenizer(f"{kept}")
    record, ids = record_of(tokenizer), {"eos_token_id": tokenizer.eod, "bos_token_id": tokenizer.bos}
    described |= ids
    chat = _write_template(workdir, folder, tokenizer)
    ids = ids | ({"eos_token_id": chat} if chat else {})  # an answer ends with its turn, too
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=1))
    if record["file"] not in ("tokenizer.json", "tokenizer.model"):
        say(f"transformers has no tokenizer of the kind {tokenizer.name!r}; the folder has one for jaxtrain only")
        tokenizer_folder.save(tokenizer, folder)
        return
    content = (kept / record["file"]).read_bytes()
    if tokenizer.bos is not None and record["file"] == "tokenizer.json":  # so that others put it in front of texts too
        content = published_tokens.beginning_with(content, record["bos"], tokenizer.bos)
    (folder / record["file"]).write_bytes(content)
    named = {"eos_token": record["eod"] or None, "bos_token": record["bos"] or None,
             "add_bos_token": bool(record["bos"])}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"} if record["file"].endswith(".json") else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | kind, indent=1))


def _write_template(workdir: Path, folder: Path, tokenizer: Any) -> list[int]:
    """Write the chat template of the run's data, if it has one; return the tokens that end an answer, or []."""
    from jaxtrain.hub import generate_texts, trained_model

    sections = trained_model.sections_of(workdir)
    kept = generate_texts.kept_template(workdir, sections)
    if not kept.get("template"):
        return []
    (folder / "chat_template.jinja").write_text(kept["template"])
    return generate_texts.chat_of(workdir, sections, tokenizer, "").ends()


if __name__ == "__main__":
    raise SystemExit(main())
