"""Lines of code by room, without blank lines, comments and docstrings, and the two paths that have a budget.

    python tools/release/count_lines.py

The learning path is the files with functions that a plain pretraining run (`configs/gpt.py`) executes: model, sharding,
step, config, data and loop. The survival path keeps a run alive and watched. `tests/test_architecture.py` holds both to
their budgets.
"""

import ast
import functools
import io
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "jaxtrain"
LEARNING = """
    __init__ main commands/train errors redaction builder run/__init__ run/identity run/shapes run/model_loss
    run/made_of_sections run/validation run/rule_checks extensions/__init__
    config/schema config/family config/decoder_config config/model_config config/field_checks config/load
    config/sections/tuning_keys config/sections/observe_keys config/sections/diloco_keys
    config/sections/compression_keys config/sections/sparsity_keys
    sharding/axis_rules sharding/mesh_context sharding/activations sharding/mesh sharding/products
    sharding/contractions
    models/make_model models/decoder models/layers models/attention/self_attention models/gpt2 models/trained_parameters
    kernels/functions kernels/loss_head/cross_entropy kernels/attention/__init__ kernels/attention/xla_attention
    objectives/objective objectives/next_token
    train_step/state train_step/gradients train_step/hooks train_step/settings
    train_step/step train_step/sharded_step train_step/optimizers/__init__ train_step/precision
    train_step/optimizers/matrices train_step/optimizers/mup train_step/partition train_step/report
    train_step/optimizers/optimizer_parts train_step/optimizers/learning_rates train_step/optimizers/from_optax
    config/part_tables
    data/__init__ data/tokenizers/tokenizer data/corpus/corpus data/corpus/text_cache
    data/corpus/text_source files/atomic_files data/loading/batch_source
    data/loading/batch_spec data/loading/batches data/loading/configured
    data/loading/grain_datasets/prefetch data/loading/grain_datasets/batch_dataset
    data/loading/loader data/loading/shuffle data/packing/packed_rows data/loading/placement
    trainer/loop trainer/session trainer/resume trainer/saver trainer/evaluate trainer/reporting trainer/observers
    trainer/extended
"""
SURVIVAL = """
    checkpoint/manager checkpoint/restore checkpoint/verify checkpoint/shared_verification checkpoint/fingerprint
    sharding/bit_sums checkpoint/trees checkpoint/retention checkpoint/step_folders checkpoint/save_policy
    checkpoint/orbax/* resilience/* resilience/corruption/* trainer/rollback trainer/shutdown
    trainer/capture trainer/out_of_memory observe/device_memory extensions/anomaly_history
    distributed/processes distributed/launch_environment distributed/coordination distributed/peers
    distributed/exit_codes distributed/heartbeat distributed/authentication distributed/lines distributed/run_lock
    observe/ledger observe/events observe/metrics observe/flops run/runinfo observe/progress
    data/loading/skipped_batches files/bounded_files
"""


@functools.cache
def code_lines(path: Path) -> int:
    """Return how many lines of a file hold code."""
    source = path.read_text()
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and ast.get_docstring(node, clean=False) is not None):
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in blank:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - skipped)


def path_lines(names: str) -> dict[str, int]:
    """Return the lines of each file that these names, or patterns, stand for."""
    files = [file for name in names.split() for file in sorted(ROOT.glob(f"{name}.py")) or [ROOT / f"{name}.py"]]
    return {str(file.relative_to(ROOT)): code_lines(file) for file in files}


def rooms() -> dict[str, int]:
    """Return the lines of each folder, subfolders included; the top's own files are one room."""
    found: dict[str, int] = defaultdict(int)
    for file in sorted(ROOT.rglob("*.py")):
        inside = file.relative_to(ROOT).parts
        found[inside[0] if len(inside) > 1 else "(top)"] += code_lines(file)
    return dict(found)


if __name__ == "__main__":
    for room, count in rooms().items():
        print(f"{count:6}  {room}")
    print(f"{sum(rooms().values()):6}  in all")
    for title, names in (("learning path", LEARNING), ("survival path", SURVIVAL)):
        counted = path_lines(names)
        print(f"\n{sum(counted.values()):6}  {title}")
        for file, count in counted.items():
            print(f"{count:6}    {file}")
