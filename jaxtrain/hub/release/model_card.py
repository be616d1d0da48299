"""The card of a published model: README.md with the metadata that hubs read, and what the run's records say.

The metadata are described at https://huggingface.co/docs/hub/model-cards. Nothing in it is estimated: what no record
has is left out, or said to be missing.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.data.corpus.open import read_manifest
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import json_lines, user_json
from jaxtrain.pages.proof_summary import in_words

FILE = "README.md"
# Keys whose values are names of files, which tell of the machine and mean nothing elsewhere.
_PLACES = ("data.source", "data.mixture", "data.cache_dir", "data.tokenizer", "data.stages", "train.init_from",
           "train.init_encoder_from", "rl.prompts", "rl.reward", "rl.environment")
_FIX = "bring the run's records back"


def card(workdir: Path, sections: JsonMapping, name: str, licence: str, record: JsonMapping,
         has_tokenizer: bool) -> str:
    """Return the text of the card.

    Args:
        workdir: of the run.
        sections: of the run's config.
        name: of the model.
        licence: of the model; "": none is stated.
        record: what export.json will say.
        has_tokenizer: whether the folder has one that transformers reads.
    """
    run = user_json(workdir / "run.json", dict, "WORKDIR", _FIX) or {}
    metrics = list(json_lines(workdir / "metrics.jsonl"))
    data = list(_corpora(sections))
    parts = [
        _metadata(licence, data, run, sections), f"# {name}", _origin(sections, run, record),
        _use(sections, has_tokenizer), _training(run, metrics, record), _data(data),
        _evaluation(workdir, metrics, record), _gates(record), _configuration(sections),
        f"## Licence\n\n{licence or 'No licence is stated.'}"]
    return "\n\n".join(parts) + "\n"


def base_model(origin: JsonMapping) -> str:
    """Return the name of the published model that all began with, by what run.json says of it; "" if it was none.

    Adapters and runs are not models that a hub knows: what counts is what these began with.
    """
    if isinstance(base := origin.get("base") or origin.get("began_with"), Mapping):
        return base_model(base)
    return published_name(origin["folder"]) if origin.get("folder") else ""


def published_name(folder: str | Path) -> str:
    """Return the name of a published model: ORG/NAME where its folder is one of the hub's cache, else the folder's."""
    path = Path(folder)
    cached = next((part for part in path.parts if part.startswith("models--")), "")
    return cached.removeprefix("models--").replace("--", "/") if cached and "snapshots" in path.parts else path.name


def derived_card(name: str, record: JsonMapping, sources: Sequence[str] = ()) -> str:
    """Return the card of a model that was computed from others.

    Args:
        name: of the model.
        record: what export.json says of how it was made.
        sources: the names of the published models among the others.
    """
    base = f"base_model: {json.dumps(sources[0] if len(sources) == 1 else list(sources))}\n" if sources else ""
    made = json.dumps(record, indent=1, ensure_ascii=False)
    metadata = f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [jaxtrain, merge]\n{base}---"
    return "\n\n".join([
        metadata, f"# {name}",
        f"Computed from other models by jaxtrain, tensor by tensor:\n\n```json\n{made}\n```",
        "What these were trained on, how they were evaluated and under which licences they are is in their own cards; "
        "this model itself was not evaluated.\n"])


def _is_reward_model(sections: JsonMapping) -> bool:
    return sections.get("preference", {}).get("loss") == "reward"


def _kind(sections: JsonMapping) -> tuple[str, str, str]:
    """Return what the hub calls a model's task, how the end of its class in transformers reads, and what it is."""
    name = sections.get("model", {}).get("name")
    if name in ("siglip", "clip"):
        return "zero-shot-image-classification", "", "pair of encoders of images and texts"
    if name == "whisper":
        return "automatic-speech-recognition", "ForSpeechSeq2Seq", "model of speech"
    if _is_reward_model(sections):
        return "text-classification", "ForSequenceClassification", "reward model"
    return "text-generation", "ForCausalLM", "language model"


def _metadata(licence: str, data: Iterable[JsonMapping], run: JsonMapping,
              sections: JsonMapping) -> str:
    task, _, _ = _kind(sections)
    lines = ["library_name: transformers", f"pipeline_tag: {task}", "tags: [jaxtrain]"]
    lines += [f"license: {json.dumps(licence)}"] if licence else []
    if base := base_model(run.get("init_from") or {}):
        lines.append(f"base_model: {json.dumps(base)}")
    names = [one["name"] for one in data]
    return "\n".join(["---", *lines, *([f"datasets: {json.dumps(names)}"] if names else []), "---"])


def _origin(sections: JsonMapping, run: JsonMapping, record: JsonMapping) -> str:
    model = sections.get("model", {})
    began = run.get("init_from") or {}
    source = base_model(began) or Path(began.get("workdir") or "").name
    _, _, kind = _kind(sections)
    weights = "the moving average of the weights" if record.get("averaged") else "the weights"
    text = (f"A {model.get('name')} {kind}: {model.get('num_layers')} layers of width "
            f"{model.get('embed_dim')}, a vocabulary of {model.get('vocab_size'):,}, texts of up to "
            f"{model.get('text_len', model.get('max_seq_len')):,} tokens. It was trained with jaxtrain; these are "
            f"{weights} of step {record['step']:,}")
    return f"{text}{f', begun with {source}' if source else ''}."


def _use(sections: JsonMapping, has_tokenizer: bool) -> str:
    _, kind, _ = _kind(sections)
    lines = ["from transformers import AutoTokenizer", "", 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")'] if (
        has_tokenizer) else []
    code = "\n".join([f"from transformers import AutoModel{kind}", *lines[:1], "",
                      f'model = AutoModel{kind}.from_pretrained("FOLDER")', *lines[2:]])
    none = "" if has_tokenizer else (
        "\n\nThe folder has no tokenizer that transformers reads, but one for `jaxtrain generate FOLDER`.")
    return f"## Use\n\n```python\n{code}\n```{none}"


def _training(run: JsonMapping, metrics: Iterable[JsonMapping], record: JsonMapping) -> str:
    tokens = [line["tokens"] for line in metrics if "tokens" in line and line.get("step", 0) <= record["step"]]
    mesh = ", ".join(f"{axis} {size}" for axis, size in run.get("mesh", {}).items() if size != 1)
    packages = run.get("packages", {})
    rows = {"tokens": f"{tokens[-1]:,}" if tokens else "", "devices": run.get("device_kind"),
            "mesh": mesh or "one device", "config": run.get("config_hash"), "commit": run.get("git_commit"),
            "JAX": packages.get("jax"), "proof": in_words(run["proof"]) if isinstance(run.get("proof"), dict) else "",
            "parameters' fingerprint": record.get("parameters")}
    return "## Training\n\n" + _table(("", ""), [(key, value) for key, value in rows.items() if value])


def _corpora(sections: JsonMapping) -> Iterable[JsonObject]:
    """Yield what the manifests of the run's data say, of those that are here."""
    data = sections.get("data", {})
    sources = {**(data.get("mixture") or {})} or {data.get("source", ""): 1}
    sources = [(entry or {}).get("source", name) if isinstance(entry, Mapping) else name
               for name, entry in sources.items()]
    for source in sources:
        if not (Path(source) / "manifest.json").is_file():
            continue
        try:
            manifest = read_manifest(source)
        except UserError:  # one of another kind
            continue
        told = dict(word.split("=", 1) for word in manifest.get("options", {}).get("describe", ()))
        yield {"name": told.get("name", Path(source).name), "url": told.get("url", ""),
               "licences": ", ".join(manifest.get("licences") or ()) or "not told", "sha256": manifest["sha256"],
               "tokens": manifest["splits"]["train"]["tokens"],
               "steps": ", ".join(step["step"] for step in manifest.get("steps", ()))}


def _data(data: list[JsonObject]) -> str:
    rows = [(one["name"], f"{one['tokens']:,}", one["licences"], one["steps"], one["url"], f"`{one['sha256'][:16]}`")
            for one in data]
    table = _table(("corpus", "tokens", "licences of documents", "cleaning", "from", "manifest"), rows)
    return f"## Data\n\n{table if rows else 'No manifest of the data is here.'}"


def _evaluation(workdir: Path, metrics: Iterable[JsonMapping], record: JsonMapping) -> str:
    averaged = bool(record.get("averaged"))
    rows = [("held-out text", key.removeprefix("eval_"), f"{value:.4f}") for line in metrics
            if line.get("step") == record["step"] for key, value in line.items()
            if key.startswith("eval_") and isinstance(value, float) and averaged == (key == "eval_loss_ema")]
    file = workdir / "evaluations" / f"{record['step']}{'-ema' * averaged}.json"
    found = user_json(file, {"results?": {str: dict}}, "WORKDIR", _FIX)
    for task, scores in ((found or {}).get("results") or {}).items():
        rows += [(task, key.partition(",")[0], f"{value:.4f}") for key, value in scores.items()
                 if isinstance(value, float) and "stderr" not in key]
    return f"## Evaluation\n\n{_table(('task', 'metric', 'value'), rows) if rows else 'This step was not evaluated.'}"


def _gates(record: JsonMapping) -> str:
    gates = record.get("gates")
    if not gates:
        return "## Gates\n\nNo gates were set: whether the model is safe to use was not tested."
    rows = [(suite, f"{counts['passed']} of {counts['checks']}") for suite, counts in gates["suites"].items()]
    verdict = "passed" if gates["releasable"] else "**not passed**: this model is not to be released"
    table = _table(("suite", "passed"), rows)
    return f"## Gates\n\nOf every suite {gates['share']:.0%} had to pass: {verdict}.\n\n{table}"


def _configuration(sections: JsonMapping) -> str:
    told = ("model", "data", "optimizer", "train", "lora", "preference", "rl")
    kept = {name: {key: value for key, value in sections[name].items() if f"{name}.{key}" not in _PLACES}
            for name in told if sections.get(name)}
    return f"## Configuration\n\n```json\n{json.dumps(kept, indent=1, default=str)}\n```"


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(f"{cell}".replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])
