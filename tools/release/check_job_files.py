"""Check the files that jobs are rendered to, and those beside them, against the schemas and parsers of others.

    python tools/release/check_job_files.py FOLDER ...

FOLDER has CustomResourceDefinitions as YAML: of JobSet and Kueue (config/components/crd/bases in their repositories)
and of the Prometheus operator. Kubernetes' own kinds are checked by kubernetes-validate, tasks by SkyPilot and dstack;
what is not installed is said, and its files are not checked. A field that a schema does not know is an error.
"""

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "launch" / "golden"
BESIDE = ("examples/launch/teams.yaml", "deploy/prometheus/service-monitor.yaml")
RELEASE = "1.33"  # of Kubernetes
NEEDED = {"kubernetes": "apiVersion", "skypilot": "run", "dstack": "type"}  # a golden file without it is a refusal


class Loader(yaml.SafeLoader):
    """Reads = as the text that it is in CRDs."""


Loader.add_constructor("tag:yaml.org,2002:value", lambda loader, node: node.value)


def main(folders: list[str]) -> None:
    """Print a line for each document; the exit status is 1 if one is wrong."""
    schemas = dict(schemas_in(map(Path, folders)))
    wrong = 0
    for name, document in documents():
        try:
            said = checked(document, schemas, name)
        except Exception as error:  # of whatever parser
            said, wrong = f"WRONG: {' '.join(f'{error}'.split())[:300]}", wrong + 1
        print(f"{name} {document.get('kind', '')}: {said}")
    raise SystemExit(bool(wrong))


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the documents; a golden file may hold a refusal instead."""
    golden = (path for kind in NEEDED for path in sorted(GOLDEN.glob(f"{kind}-*.txt")))
    for path in (*golden, *(ROOT / name for name in BESIDE)):
        for document in yaml.safe_load_all(path.read_text()):
            if isinstance(document, dict) and NEEDED.get(path.name.partition("-")[0], "apiVersion") in document:
                yield path.name, document


def schemas_in(folders: Iterator[Path]) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Yield the schema of each version of each kind in these folders."""
    for path in (path for folder in folders for path in sorted(folder.glob("**/*.yaml"))):
        for found in yaml.load_all(path.read_text(), Loader):
            if isinstance(found, dict) and found.get("kind") == "CustomResourceDefinition":
                spec = found["spec"]
                for version in spec["versions"]:
                    yield (f"{spec['group']}/{version['name']}", spec["names"]["kind"]), closed(
                        version["schema"]["openAPIV3Schema"])


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of Kubernetes as one of JSON that takes no unknown fields."""
    schema = copy.deepcopy(schema)
    schema["properties"]["metadata"] = {"type": "object"}

    def close(part: Any) -> None:
        if isinstance(part, dict):
            if "properties" in part and not part.get("x-kubernetes-preserve-unknown-fields"):
                part.setdefault("additionalProperties", False)
            if part.get("x-kubernetes-int-or-string"):
                part.pop("type", None)
        for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            close(inner)

    close(schema)
    return schema


def checked(document: dict[str, Any], schemas: dict[tuple[str, str], dict[str, Any]], name: str) -> str:
    """Return by what a document was checked, or why it was not; raises what the check raises."""
    if name.startswith("skypilot") or name.startswith("dstack"):
        return by_skypilot(document) if name.startswith("skypilot") else by_dstack(document)
    version, kind = document["apiVersion"], document["kind"]
    if schema := schemas.get((version, kind)):
        from jsonschema import Draft7Validator

        Draft7Validator(schema).validate(document)
        if kind != "JobSet":
            return f"ok by the schema of {version}"
        jobs = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}} | one["template"]
                for one in document["spec"]["replicatedJobs"]]
        return f"ok by the schema of {version}; its Job: {', '.join(map(by_kubernetes, jobs))}"
    return f"not checked: no schema of {version} {kind} was given" if "." in version else by_kubernetes(document)


def by_kubernetes(document: dict[str, Any]) -> str:
    """Check one of Kubernetes' own kinds."""
    if not installed("kubernetes_validate"):
        return "not checked: pip install kubernetes-validate"
    import kubernetes_validate

    kubernetes_validate.validate(document, RELEASE, strict=True)
    return f"ok by Kubernetes {RELEASE}"


def by_skypilot(document: dict[str, Any]) -> str:
    """Check a task of SkyPilot; buckets, which it would look up, by its schema only."""
    if not installed("sky"):
        return "not checked: pip install skypilot"
    import sky
    from jsonschema import Draft7Validator
    from sky.utils import schemas

    Draft7Validator(schemas.get_task_schema()).validate(document)
    secrets = [(name, "x") for name in document.get("secrets", {})]
    sky.Task.from_yaml_config({key: value for key, value in document.items() if key != "file_mounts"},
                              secrets_overrides=secrets or None)
    return f"ok by SkyPilot {sky.__version__}"


def by_dstack(document: dict[str, Any]) -> str:
    """Check a task of dstack."""
    if not installed("dstack"):
        return "not checked: pip install dstack"
    from dstack._internal.core.models.configurations import parse_run_configuration
    from dstack.version import __version__

    parse_run_configuration(document)
    return f"ok by dstack {__version__}"


def installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


if __name__ == "__main__":
    main(sys.argv[1:])
