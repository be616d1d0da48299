"""Install a wheel into an empty environment outside of the checkout, and run commands there as a user would.

    python tools/release/check_wheel.py WHEEL --constraints=constraints.txt --sbom=FILE

Every command's --help is shown, and a small model is trained, watched, exported and published from a folder of its
own. Packages come from the index that pip is set to; nothing of the checkout is on the path. Each line has the seconds
that a command took, with the start of Python.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL = ["--config.train.steps=4", "--config.train.eval_every=2", "--config.checkpoint.every=2"]
# Each is run in the same folder, in this order; all of them end with status 0.
COMMANDS = [
    ["configs"],
    ["train", "gpt:tiny", "--workdir=runs/a", *SMALL],
    ["train", "--config=gpt:tiny", "--workdir=runs/a", *SMALL],  # again: it is done
    ["train", "gpt:tiny", "--workdir=runs/b", *SMALL, "--config.train.seed=1"],
    ["train", "llama3_8b", "--print_config=diff", "--config.train.steps=3000"],
    ["prepare", "--input=text", "--output=corpus"],
    ["inspect", "gpt:tiny", "--config.data.source=corpus", "--step=0", "--row=0"],
    ["runs", "list", "runs"],
    ["runs", "compare", "runs/a", "runs/b"],
    ["checkpoint", "verify", "runs/a"],
    ["goodput", "runs/a"],
    ["top", "runs/a", "--once"],
    ["generate", "runs/a", "--prompt=def", "--max_new_tokens=4"],
    ["export", "runs/a", "--output=published"],
    ["merge", "published", "published", "--output=merged", "--method=average"],
    ["train", "finetune:lora:published", "--workdir=runs/c", "--config.data.source=corpus", *SMALL,
     "--config.data.packing=concat", "--config.data.global_batch_size=4"],
    ["plan", "gpt:124m", "--target=h100x8", "--top=2"],
    ["schedules", "--stages=2", "--microbatches=4"],
    ["dashboards", "--output=dashboards"],
]
HELPS = """
from jaxtrain.cli import main
from jaxtrain.commands import COMMANDS
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit as ended:
        assert not ended.code, name
"""


def check(python: Path, folder: Path, environment: dict[str, str]) -> None:
    """Run all commands in a folder with a Python that has the wheel; a failure ends all with what it printed."""
    (folder / "text").write_text("a line of a text that is long enough to train on\n" * 2000)
    where = run([f"{python}", "-c", "import jaxtrain; print(jaxtrain.__file__)"], folder, environment).strip()
    print(f"jaxtrain is {where}")
    run([f"{python}", "-c", HELPS], folder, environment)
    for words in COMMANDS:
        begun = time.monotonic()
        run([f"{python}", "-m", "jaxtrain", *words], folder, environment)
        print(f"{time.monotonic() - begun:6.1f} s  jaxtrain {' '.join(words)}", flush=True)


def run(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Return what a command prints; raises SystemExit with that, and its stderr, if it fails."""
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        said = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        raise SystemExit(f"{' '.join(words)}: exit status {done.returncode}\n{said}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--sbom", type=Path, help="write here what the environment consists of, in CycloneDX's format; "
                                                  "needs the package cyclonedx-bom")
    parser.add_argument("--constraints", type=Path, help="versions of packages, as pip reads them")
    flags = parser.parse_args()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory(prefix="jaxtrain-wheel-") as folder:
        empty = Path(folder, "environment")
        subprocess.run([sys.executable, "-m", "venv", empty], check=True)
        given = [f"--constraint={flags.constraints.absolute()}"] if flags.constraints else []
        begun = time.monotonic()
        run([f"{empty}/bin/python", "-m", "pip", "install", "--quiet", *given, f"{flags.wheel.absolute()}"],
            Path(folder), environment)
        print(f"{time.monotonic() - begun:6.1f} s  pip install {flags.wheel.name}")
        if flags.sbom:
            flags.sbom.parent.mkdir(parents=True, exist_ok=True)
            run([sys.executable, "-m", "cyclonedx_py", "environment", f"{empty}/bin/python", "--output-reproducible",
                 "--output-format=JSON", f"--output-file={flags.sbom.absolute()}"], Path(folder), environment)
        check(empty / "bin/python", Path(folder), environment | {"JAXTRAIN_CACHE": f"{folder}/cache"})


if __name__ == "__main__":
    main()
