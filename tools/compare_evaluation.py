"""Compare our evaluation of a published folder with the harness's own, which computes with transformers.

    python tools/compare_evaluation.py FOLDER --include=TASKS --tasks=NAME,...

Needs torch, transformers and lm_eval. Prints the largest difference between log-probabilities, and how many
choices and continuations are others.
"""

import argparse

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from jaxtrain.hub import trained_model
from jaxtrain.hub.generate_texts import with_params
from jaxtrain.hub.harness_model import HarnessModel
from jaxtrain.hub.trained_tokenizer import tokenizer_of


def ours(folder):
    run = trained_model.model_of(trained_model.sections_of(folder), {"train.precision": "float32"}, spread="data")
    return HarnessModel(run, with_params(run, trained_model.load(folder, run)[0]), tokenizer_of(folder))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--include")
    parser.add_argument("--tasks", required=True)
    flags = parser.parse_args()
    manager, found = TaskManager(include_path=flags.include), []
    for model in (ours(flags.folder), HFLM(pretrained=flags.folder, dtype="float32", device="cpu", batch_size=8)):
        results = simple_evaluate(model, tasks=flags.tasks.split(","), task_manager=manager, bootstrap_iters=0,
                                  log_samples=True)
        found.append(results["samples"])
    for task, samples in found[0].items():
        pairs = list(zip(samples, found[1][task], strict=True))
        answers = [(one["resps"], other["resps"]) for one, other in pairs]
        flat = [(mine[0], theirs[0]) for one, other in answers for mine, theirs in zip(one, other, strict=True)]
        if isinstance(flat[0][0], str):
            print(f"{task}: {sum(a != b for a, b in flat)} of {len(flat)} continuations differ")
            continue
        numbers = [tuple(x[0] if isinstance(x, tuple) else x for x in pair) for pair in flat]
        greedy = sum(a[1] != b[1] for a, b in flat if isinstance(a, tuple))
        choices = sum(max(range(len(one)), key=lambda i, one=one: one[i][0][0])
                      != max(range(len(other)), key=lambda i, other=other: other[i][0][0])
                      for one, other in answers if isinstance(one[0][0], tuple))
        print(f"{task}: log-probabilities of {len(numbers)} texts differ by at most "
              f"{max(abs(a - b) for a, b in numbers):.1e}; {choices} choices and {greedy} greedy marks differ")


if __name__ == "__main__":
    main()
