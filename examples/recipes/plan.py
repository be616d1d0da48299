"""Record what `jaxtrain plan` predicts of the recipes for accelerators: time, memory and dollars on each target.

    python -m examples.recipes.plan NAME     # writes examples/recipes/NAME/plan.jsonl
"""

import json
import sys

from examples.recipes.run import RECIPES, call, provenance, read_recipe


def line_of(one, about):
    """Return the prediction of the fastest layout on a target as a line."""
    printed = call(f"jaxtrain plan --config={one['config']} --target={one['target']} --tokens={one['tokens']:.0f} "
                   "--top=1 --json", {})
    best = next(found for text in printed.splitlines() if text.startswith("{") and (found := json.loads(text)))
    return {"target": one["target"], "tokens": one["tokens"], "mesh": best["mesh"], "remat": best["remat"],
            "accumulation": best["accumulation"], "step_seconds": best["seconds"],
            "step_seconds_interval": best["seconds_interval"], "mfu": best["mfu"], "gigabytes": best["bytes"] / 1e9,
            "hours": best["days"] * 24, "dollars": best["cost"], **about}


def main(arguments=None):
    """Plan the recipe that is named."""
    name, = sys.argv[1:] if arguments is None else arguments
    about = provenance(["jaxtrain", "configs", f"examples/recipes/{name}/config.py"])
    del about["machine"]  # the prediction does not depend on it
    lines = [json.dumps(line_of(one, about)) + "\n" for one in read_recipe(name)["plan"]]
    (RECIPES / name / "plan.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
