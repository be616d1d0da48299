"""The datasheet of a corpus in the Croissant 1.0 format, from the manifest's facts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.corpus.corpus import SPLITS
from jaxtrain.data.corpus.open import read_manifest
from jaxtrain.data.formats.inputs import extra
from jaxtrain.data.prepare.provenance import LISTS, described
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import misfit

# What a datasheet tells of a manifest, besides what every reader of a corpus needs.
_STEP = {"step": str, "seen": int, "changed": int, "removed": {str: int}}
_FORM = {"options": {"describe?": [str]}, "licences?": {str: int}, "steps?": [_STEP],
         "inputs": [[{"name": str, "start": int, "size": int}]], "tokenizer": {"name": str, "vocab_size": int},
         "splits": {split: {"documents": int, "tokens": int} for split in SPLITS}}


def datasheet(folder: Path, describe: Sequence[str] = ()) -> JsonObject:
    """Return the JSON-LD datasheet of the corpus in a folder, validated by mlcroissant."""
    mlc = extra("mlcroissant", "a datasheet", "croissant", "croissant")
    manifest = read_manifest(folder)
    if wrong := misfit(manifest, _FORM):
        raise UserError("CORPUS", f"{folder}/manifest.json cannot be read ({wrong})", "prepare the corpus again")
    told = described(manifest["options"].get("describe", ())) | described(describe)
    fields: dict[str, Any] = {key: [value] if key in LISTS else value for key, value in told.items()}
    if creator := fields.pop("creator", ""):
        fields["creators"] = [mlc.Organization(name=creator)]
    try:
        return mlc.Metadata(**{
            "name": folder.resolve().name, "description": _description(manifest), "version": "1.0.0",
            "license": [licence for licence in manifest.get("licences") or () if licence != "not told"] or None,
            "data_preprocessing_protocol": _protocol(manifest), "distribution": _files(mlc, folder, manifest),
            "data_collection_raw_data": _sources(manifest)} | fields).to_json()
    except mlc.ValidationError as error:
        raise UserError("--describe", f"the datasheet does not validate ({error})", "change the description") from error


def _description(manifest: JsonObject) -> str:
    counts = ", ".join(f"{manifest['splits'][split]['documents']:,} documents with "
                       f"{manifest['splits'][split]['tokens']:,} tokens ({split})" for split in SPLITS)
    return f"Text as tokens ({manifest['tokenizer']['name']}, {manifest['tokenizer']['vocab_size']:,} ids): {counts}."


def _protocol(manifest: JsonObject) -> list[str]:
    """Return one sentence per processing step."""
    said = []
    for step in manifest.get("steps", ()):
        removed = ", ".join(f"{count:,} ({reason})" for reason, count in step["removed"].items()) or "none"
        said.append(f"{step['step']}: of {step['seen']:,} documents dropped {removed}; changed {step['changed']:,}.")
    return [*said, f"Tokenised with {manifest['tokenizer']['name']}, {manifest['tokenizer']['fingerprint']}."]


def _sources(manifest: JsonObject) -> str:
    pieces = [piece for task in manifest["inputs"] for piece in task]
    hashed = atomic_files.digest([[piece["name"], piece["start"], piece.get("sha256")] for piece in pieces])
    return (f"{len({piece['name'] for piece in pieces}):,} files, {sum(piece['size'] for piece in pieces):,} bytes; "
            f"manifest.json names each with its sha256, and all together have the sha256 {hashed}.")


def _files(mlc: Any, folder: Path, manifest: JsonObject) -> list[Any]:
    """Return the manifest and every file that it names, as Croissant file objects."""
    hashes = {name: sha256 for split in SPLITS for shard in manifest["splits"][split]["shards"]
              for name, sha256 in shard["sha256"].items()}
    try:
        for name in filter(None, ("manifest.json", manifest["tokenizer"]["file"])):
            hashes[name] = atomic_files.file_digest(folder / name)
        sizes = {name: (folder / name).stat().st_size for name in hashes}
    except OSError as error:
        raise UserError("CORPUS", f"{error.filename} cannot be read ({error.strerror})", "prepare the corpus again"
                        ) from error
    return [mlc.FileObject(id=name, name=name, content_url=name, content_size=f"{sizes[name]} B",
                           encoding_formats=[f"application/{'json' if name.endswith('.json') else 'octet-stream'}"],
                           sha256=sha256) for name, sha256 in sorted(hashes.items())]
