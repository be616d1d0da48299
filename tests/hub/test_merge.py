"""Merged models: the formulas, the folder that is written, its memory, and what is refused."""

import json
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.commands import merge as merge_command
from jaxtrain.hub import export, initial_params, merge
from jaxtrain.hub.weights import safetensors_files
from jaxtrain.hub.weights.safetensors_files import SINGLE, tensors_of
from tests.hub import published
from tests.numerics import reference

CASE = "llama_head_dim"


def variant(folder: Path, seed: int, name: str = CASE, dtype=np.float32, **config) -> Path:
    """A model of a case, moved away from its weights by what follows from a seed; 0: not at all."""
    case = published.truth(name)
    published.write(folder, case | {"config": case["config"] | config})
    rng = np.random.default_rng(seed)
    changed = {name: tensor.view() + np.float32(0.1 * bool(seed)) * rng.standard_normal(tensor.shape).astype("float32")
               for name, tensor in tensors_of(folder).items()}
    written(folder, {name: tensor.astype(dtype) for name, tensor in changed.items()})
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "README.md").write_text("about this one")
    (folder / export.RECORD).write_text("{}")
    return folder


def written(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    safetensors_files.write(folder / SINGLE, {name: tensor.shape for name, tensor in tensors.items()},
                            {name: tensor.dtype for name, tensor in tensors.items()}, iter(tensors.values()))


def values(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(tensor.view(), np.float64) for name, tensor in tensors_of(folder).items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [variant(folder / f"{seed}", seed) for seed in range(4)]


def merged(models, to: Path, *flags: str) -> dict[str, np.ndarray]:
    assert merge_command.main([*map(str, models), f"--output={to}", *flags]) == 0
    return values(to)


def plain_ties(base, models, density, scale):
    """Return the merge by the paper's algorithm 1, element by element."""
    changes = []
    for model in models:
        change = (model - base).ravel()
        kept = sorted(range(change.size), key=lambda n: -abs(change[n]))[:max(1, round(density * change.size))]
        changes.append([change[n] if n in set(kept) else 0.0 for n in range(change.size)])
    found = []
    for each in zip(*changes, strict=True):
        sign = np.sign(sum(each))
        agreeing = [x for x in each if x * sign > 0]
        found.append(sum(agreeing) / len(agreeing) if agreeing else 0.0)
    return base + scale * np.reshape(found, base.shape)


def test_the_mean_is_the_weighted_one(models, tmp_path):
    each = [values(folder) for folder in models[:3]]
    for flags, weights in (((), (1, 1, 1)), (("--weights=1,2,5",), (1, 2, 5))):
        found = merged(models[:3], tmp_path / f"{weights[2]}", *flags)
        for name, tensor in found.items():
            want = sum(w * model[name] for w, model in zip(weights, each, strict=True)) / sum(weights)
            np.testing.assert_allclose(tensor, want, atol=1e-6, err_msg=name)


def test_slerp_goes_along_the_arc(models, tmp_path):
    one, two = (values(folder) for folder in models[1:3])
    shares = (("--weights=0.7,0.3", 0.3), ("--weights=3,1", 0.25))
    for flag, share in shares:
        found = merged(models[1:3], tmp_path / f"{share}", "--method=slerp", flag)
        for name, tensor in found.items():
            a, b = one[name].ravel(), two[name].ravel()
            angle = np.arccos(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
            want = (np.sin((1 - share) * angle) * a + np.sin(share * angle) * b) / np.sin(angle)
            assert name.endswith("norm.weight") or angle > 0.1, "hardly an arc"
            np.testing.assert_allclose(tensor.ravel(), want, atol=2e-6, err_msg=name)


def test_slerp_of_what_has_no_arc_is_straight():
    a = np.array([[1.0, 2.0, 3.0]], np.float32)
    for b in (a + np.float32(1e-4), 3 * a, -a, 0 * a):
        np.testing.assert_allclose(merge.slerp([a, b], [0.75, 0.25]), 0.75 * a + 0.25 * b, atol=1e-6)
    at_right_angles = merge.slerp([np.float32([1, 0]), np.float32([0, 1])], [0.5, 0.5])
    np.testing.assert_allclose(at_right_angles, [0.5**0.5] * 2, rtol=1e-6)  # not 0.5 each


@pytest.mark.parametrize(("flags", "density", "scale"), [((), 0.2, 1.0), (("--density=0.5", "--scale=0.6"), 0.5, 0.6)])
def test_ties_is_the_algorithm_of_its_paper(models, tmp_path, flags, density, scale):
    found = merged(models[1:], tmp_path / "out", "--method=ties", f"--base={models[0]}", *flags)
    base, *each = (values(folder) for folder in models)
    for name, tensor in found.items():
        want = plain_ties(base[name].astype(np.float32), [model[name].astype(np.float32) for model in each], density,
                          scale)
        np.testing.assert_allclose(tensor, want, atol=1e-6, err_msg=name)


def test_signs_are_elected_by_their_sum():
    base = np.zeros(4, np.float32)
    changes = [np.float32([3, -1, 2, 0]), np.float32([-1, -2, -2, 0]), np.float32([-1, 4, 0, 0])]
    np.testing.assert_array_equal(merge.ties([*changes, base], 1.0, 2.0), [6, 8, 0, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["average", "slerp"])
def test_a_model_merged_with_itself_has_its_bytes(tmp_path, method, dtype):
    folder = variant(tmp_path / "in", 1, dtype=dtype)
    several = [folder] * (3 if method == "average" else 2)
    merged(several, tmp_path / "out", f"--method={method}")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", SINGLE, "tokenizer_config.json", export.RECORD, "README.md"}
    assert "Computed from other models by jaxtrain" in (tmp_path / "out" / "README.md").read_text()
    for name in names - {export.RECORD, "config.json", "README.md"}:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes(), name
    before, after = (json.loads((where / "config.json").read_text()) for where in (folder, tmp_path / "out"))
    assert before == after
    record = json.loads((tmp_path / "out" / export.RECORD).read_text())
    assert record["merged"] == {"sources": [f"{folder}"] * len(several), "method": method}
    assert record["sha256"].keys() == names - {export.RECORD}
    assert initial_params.origin(f"{tmp_path / 'out'}")["sha256"][SINGLE] == record["sha256"][SINGLE]


def test_files_and_dtype_are_as_asked_for(tmp_path):
    """A tensor that is float32 whatever the others are stays so."""
    folder = variant(tmp_path / "in", 1, "deepseek_v3", torch_dtype="float32")
    merged([folder] * 2, tmp_path / "out", "--dtype=bfloat16", "--file_gb=0.000008")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        kept = name.endswith("e_score_correction_bias")
        assert tensor.dtype == ("F32" if kept else "BF16")
        np.testing.assert_array_equal(
            tensor.view(), before[name].view() if kept else before[name].view().astype(ml_dtypes.bfloat16))


def test_never_a_whole_model_is_in_memory(tmp_path, models):
    rng = np.random.default_rng(0)
    many = {f"model.layers.{n}.weight": rng.standard_normal((250, 1000)).astype(np.float32) for n in range(20)}
    for name in ("a", "b", "base"):
        shutil.copytree(models[0], tmp_path / name)
        written(tmp_path / name, many)
    one = next(iter(many.values())).nbytes
    for method, base in (("average", ()), ("slerp", ()), ("ties", (f"--base={tmp_path / 'base'}",))):
        tracemalloc.start()
        assert merge_command.main([f"{tmp_path / 'a'}", f"{tmp_path / 'b'}", f"--output={tmp_path / method}",
                                   f"--method={method}", *base]) == 0
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert 2 * one < peak < 12 * one, f"{method}: {peak / one:.1f} tensors, of models of 20"


def test_published_folders_need_no_jax(models, tmp_path):
    code = f"""
import sys
from jaxtrain.commands import merge as merge_command
from jaxtrain.hub import merge
status = merge_command.main(["{models[0]}", "{models[1]}", "--output={tmp_path / 'out'}"])
assert "jax" not in sys.modules, "JAX is imported"
sys.exit(status)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=100).returncode == 0


def test_what_is_not_weights_has_to_be_the_same(models, tmp_path, capsys):
    folders = []
    for n in range(3):
        folders.append(shutil.copytree(models[n], tmp_path / f"{n}"))
        written(folders[n], {name: tensor.view() for name, tensor in tensors_of(models[n]).items()}
                | {"model.rotary_emb.steps": np.arange(3) + (n == 2)})
    assert merge_command.main([*map(str, folders[:2]), f"--output={tmp_path / 'out'}"]) == 0
    steps = tensors_of(tmp_path / "out")["model.rotary_emb.steps"].view(safetensors_files.OTHERS)
    np.testing.assert_array_equal(steps, np.arange(3))
    assert merge_command.main([*map(str, folders), f"--output={tmp_path / 'no'}"]) == 2
    assert "tensor model.rotary_emb.steps, of dtype I64, is not the same in" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (["{0}"], "MODEL: one model has nothing to be merged with; give two or more"),
    (["{0}", "{1}", "{2}", "--method=slerp"], "MODEL: --method=slerp is for two models, and 3 are given; use "
                                               "--method=average"),
    (["{0}", "{1}", "--density=0.5"], "--density: --method=average does not read it; leave it out, or use ties"),
    (["{0}", "{1}", "--method=ties"], "--base: ties merges changes, and needs the model that was changed; name the "
                                      "model that the sources were tuned from"),
    (["{0}", "{1}", "--method=ties", "--base={2}", "--weights=1,1"],
     "--weights: method=ties weights all sources equally; leave it out, or use average"),
    (["{0}", "{1}", "--method=ties", "--base={2}", "--density=0"], "--density: 0.0 is not in (0, 1]; try 0.2"),
    (["{0}", "{1}", "--weights=1"], "--weights: there are 1 for 2 sources; give one for each"),
    (["{0}", "{1}", "--weights=1,-1"],
     "--weights: '1,-1' have to be numbers of 0 or more, and not all 0; write them as 0.7,0.3"),
    (["{0}", "/no/such"], "MODEL: /no/such is neither a published folder nor the workdir of a run; give one of these"),
    (["{0}", "/no/such@last"], "MODEL: 'last' in '/no/such@last' is not a step; write WORKDIR@STEP, such as "
                               "runs/base@500"),
    (["{0}", "{eps}"], "MODEL: {eps} has model.norm_eps=0.5, and {0} has 1e-05; give models of one architecture"),
    (["{0}", "{fewer}"], "MODEL: tensor model.norm.weight is missing in {fewer} and of the shape [16] in {0}; give "
                         "models of one architecture"),
    (["{0}", "{more}"], "MODEL: tensor other is of the shape [2] in {more} and missing in {0}; give models of one "
                        "architecture"),
    (["{0}", "{1}", "--output={0}"], "--output: {0} is there already; name a folder that is not"),
])
def test_what_cannot_be_merged_is_told_in_one_line(models, tmp_path, capsys, words, message):
    tensors = {name: tensor.view() for name, tensor in tensors_of(models[0]).items()}
    other = {name: shutil.copytree(models[0], tmp_path / name) for name in ("fewer", "more")}
    written(other["fewer"], {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"})
    written(other["more"], tensors | {"other": np.zeros(2, np.float32)})
    other["eps"] = variant(tmp_path / "eps", 0, rms_norm_eps=0.5)
    to = [] if any(word.startswith("--output") for word in words) else [f"--output={tmp_path / 'out'}"]
    assert merge_command.main([*(word.format(*models, **other) for word in words), *to]) == 2
    assert capsys.readouterr().err.strip() == message.format(*models, **other)
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_of_a_folder_that_could_not_be_finished(models, tmp_path, monkeypatch, capsys):
    """Nor is what an attempt that was killed has left in the one that is."""
    def refuse(*args):
        raise jt.UserError("--output", "the disk is full", "make room")

    words = [f"{models[0]}", f"{models[1]}", f"--output={tmp_path}/new/deep/out"]
    with monkeypatch.context() as patch:
        patch.setattr(export, "finish", refuse)
        assert merge_command.main(words) == 2
    assert capsys.readouterr().err == "--output: the disk is full; make room\n" and not [*tmp_path.iterdir()]
    (tmp_path / "new/deep/out.partial").mkdir(parents=True)
    (tmp_path / "new/deep/out.partial/model-00009.safetensors").write_text("half")
    assert merge_command.main(words) == 0
    assert [path.name for path in (tmp_path / "new/deep").iterdir()] == ["out"]
    assert not (tmp_path / "new/deep/out/model-00009.safetensors").exists()


def test_a_merge_is_rehearsed_and_replaces_an_earlier_one_when_told(models, tmp_path, capsys):
    words = [f"{models[0]}", f"{models[1]}", f"--output={tmp_path / 'out'}"]
    assert merge_command.main([*words, "--dry_run"]) == 0
    assert "the average of 2 models would be written to" in capsys.readouterr().out and not [*tmp_path.iterdir()]
    first = merged(models[:2], tmp_path / "out")
    assert merge_command.main([f"{models[2]}", *words[1:]]) == 2
    second = merged([models[2], models[1]], tmp_path / "out", "--overwrite")
    assert any((first[name] != second[name]).any() for name in first)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out" / export.RECORD).unlink()
    capsys.readouterr()
    assert merge_command.main([*words, "--overwrite"]) == 2
    assert "has no export.json: it is not an earlier export" in capsys.readouterr().err
    assert values(tmp_path / "out").keys() == first.keys()


@pytest.mark.slow
def test_runs_are_merged_and_the_result_begins_another(tmp_path):
    """A run's workdir and step are merged with the first one's other files; the run that begins has its logits."""
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times.\n" * 200)
    keys = {"model.vocab_size": 264, "data.source": f"{tmp_path / 'text.txt'}", "data.seq_len": 32,
            "model.max_seq_len": 32, "data.global_batch_size": 8, "train.steps": 2, "optimizer.warmup_steps": 1,
            "train.eval_batches": 1, "train.progress": False, "checkpoint.every": 1, "mesh.data": 8}
    config = jt.make_config(reference.tiny("qwen3").to_dict(), keys)
    state = jt.train(config, tmp_path / "work")
    words = [f"{tmp_path / 'work'}@1", f"{tmp_path / 'work'}", f"--output={tmp_path / 'new' / 'out'}"]
    assert merge_command.main(words) == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"], "something temporary is left"
    run = jt.build(config)
    first = jt.CheckpointManager(tmp_path / "work" / "checkpoints").restore(1, run.abstract)
    want = jax.tree.map(lambda a, b: (np.float64(a) + np.float64(b)) / 2, first.params, state.params)
    begun = jt.build(jt.load_config(f"hf:{tmp_path / 'new' / 'out'}", {
        "data.seq_len": 32, "data.global_batch_size": 8, "data.source": f"{tmp_path / 'text.txt'}"})).init()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), begun.params, want)
    assert float(np.abs(np.float64(first.params["norm"]["scale"]) - state.params["norm"]["scale"]).max()) > 1e-5
