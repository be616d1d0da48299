"""Compare our evaluation of a published folder with the harness's own, which computes with transformers.

    python tools/release/compare_evaluation.py FOLDER --write=theirs.json    (where torch, transformers and lm_eval are)
    python tools/release/compare_evaluation.py FOLDER --read=theirs.json     (where jaxtrain and lm_eval are)

Both ask the tasks of --include, in float32 on CPUs; those whose names begin with compare_chat through the model's chat
template. The second prints, for each task, the largest differences between log-probabilities and between the metrics of
the table, and how many choices and continuations are others.
"""

import argparse
import json
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager


def theirs(folder, length):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=8, max_length=length)


def ours(folder, length, chat):
    from jaxtrain.hub import chat_messages, trained_model
    from jaxtrain.hub.harness_model import HarnessModel
    from jaxtrain.hub.trained_tokenizer import tokenizer_of

    sections, words = trained_model.sections_of(folder), tokenizer_of(folder)
    sections["model"]["max_seq_len"] = length
    run = trained_model.model_of(sections, {"train.precision": "float32"}, spread="data")
    template = chat_messages.chat_of(folder, sections, words, "") if chat else None
    state = trained_model.with_params(run, trained_model.load(folder, run)[0])
    return HarnessModel(run, state, words, chat=template, folder=folder, batch_size=8)


def evaluated(flags, made):
    """Return each task's answers and metrics."""
    manager, found = TaskManager(include_path=flags.include, include_defaults=False), {}
    names = flags.tasks.split(",") if flags.tasks else sorted(path.stem for path in Path(flags.include).glob("*.yaml"))
    names = [name if name.startswith("compare_") else f"compare_{name}" for name in names]
    for chat in (False, True):
        if asked := [name for name in names if name.startswith("compare_chat") == chat]:
            results = simple_evaluate(made(chat), tasks=asked, task_manager=manager, bootstrap_iters=0,
                                      log_samples=True, apply_chat_template=chat, fewshot_as_multiturn=chat)
            found |= {task: {"answers": [one["resps"] for one in samples], "metrics": {
                key: value for key, value in results["results"][task].items() if isinstance(value, float)}}
                for task, samples in results["samples"].items()}
    return json.loads(json.dumps(found, default=str))


def told(task, mine, other):
    """Return a line that says how the answers to one task differ."""
    metrics = max(abs(mine["metrics"][key] - value) / max(1e-9, abs(value)) for key, value in other["metrics"].items())
    pairs = list(zip(mine["answers"], other["answers"], strict=True))
    flat = [(a[0], b[0]) for one, two in pairs for a, b in zip(one, two, strict=True)]
    start = f"{task}: metrics differ by at most {metrics:.1e} of them; "
    if isinstance(flat[0][0], str) and not isinstance(flat[0][1], list) and not _number(flat[0][0]):
        return f"{start}{sum(a != b for a, b in flat)} of {len(flat)} continuations differ"
    numbers = [tuple(float(x[0] if isinstance(x, list) else x) for x in pair) for pair in flat]
    greedy = sum(a[1] != b[1] for a, b in flat if isinstance(a, list))
    best = [[max(range(len(each)), key=lambda n, each=each: float(each[n][0][0])) for each in pair]
            for pair in pairs if isinstance(pair[0][0][0], list)]
    return (f"{start}log-probabilities of {len(numbers)} texts by at most "
            f"{max(abs(a - b) / max(1, abs(b)) for a, b in numbers):.1e} of them; {sum(a != b for a, b in best)} "
            f"choices and {greedy} greedy marks differ")


def _number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--include", default="tools/release/evaluation_tasks")
    parser.add_argument("--tasks", help="default: all of --include")
    parser.add_argument("--max_length", type=int, default=512, help="longest text of the model, for short windows")
    parser.add_argument("--write", help="ask the harness's own model, and write its answers")
    parser.add_argument("--read", help="ask ours, and compare with what was written")
    flags = parser.parse_args()
    if flags.write:
        model = theirs(flags.folder, flags.max_length)
        Path(flags.write).write_text(json.dumps(evaluated(flags, lambda chat: model)))
    if flags.read:
        wanted = json.loads(Path(flags.read).read_text())
        for task, mine in evaluated(flags, lambda chat: ours(flags.folder, flags.max_length, chat)).items():
            print(told(task, mine, wanted[task]))


if __name__ == "__main__":
    main()
