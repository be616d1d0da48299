"""Exporting a run to a published folder and back, and runs that begin with the parameters of either."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint import restore
from jaxtrain.commands import adapters
from jaxtrain.commands import export as export_command
from jaxtrain.commands import generate as generate_command
from jaxtrain.hub import export, initial_params
from jaxtrain.hub.release import exported_tokenizer
from jaxtrain.hub.weights import published_weights
from jaxtrain.run import abstract_model
from jaxtrain.train_step import partition, quantization, quantized_kernels
from tests.numerics import reference
from tests.numerics.plain_lora import merged
from tests.tiny import free_address, virtual_devices

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once

KEYS = {"model.vocab_size": 264, "model.max_seq_len": 32, "data.seq_len": 32, "data.global_batch_size": 8,
        "train.steps": 2, "optimizer.warmup_steps": 1, "train.eval_batches": 1, "train.progress": False,
        "mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 2}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run of two steps on eight devices."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times.\n" * 200)
    config = jt.make_config(reference.tiny("qwen3").to_dict(), KEYS | {"data.source": str(folder / "text.txt")})
    jt.train(config, folder / "work")
    return folder / "work"


@pytest.fixture(scope="module")
def published(workdir):
    folder = workdir.parent / "out"
    assert export_command.main([str(workdir), f"--output={folder}", "--dtype=float32", "--file_gb=0.00002"]) == 0
    return folder


def begun(path, **keys) -> jt.Run:
    return jt.build(jt.load_config(path, {"mesh.data": 8, "mesh.fsdp": 1, "mesh.tensor": 1} | {
        key.replace("__", "."): value for key, value in keys.items()}))


def trained(workdir):
    run = begun(workdir / "config.json")
    return restore.load_params(workdir, abstract_model(run), 2)


@pytest.mark.slow
def test_a_published_run_begins_another_with_the_same_parameters(workdir, published):
    run = begun(f"hf:{published}")
    assert run.config.train.init_from == str(published)
    assert run.config.model == begun(workdir / "config.json").config.model
    state = run.init()
    jax.tree.map(np.testing.assert_array_equal, state.params, trained(workdir))
    assert int(state.step) == 0 and float(sum(np.abs(x).sum() for x in jax.tree.leaves(state.opt_state))) == 0


@pytest.mark.exhaustive
def test_a_run_begins_another_and_a_resumed_one_goes_on_with_its_own(workdir, tmp_path):
    """The other run has another optimizer, and the run itself is continued by the same command line."""
    keys = dict(train__init_from=f"{workdir}@2", optimizer__name="muon")
    jax.tree.map(np.testing.assert_array_equal, begun(workdir / "config.json", **keys).init().params, trained(workdir))
    config = begun(workdir / "config.json", **keys).config
    first = jt.train(config, tmp_path)
    began = {"workdir": str(workdir), "step": 2, "parameters": restore.find_good(workdir)[1]}
    assert json.loads((tmp_path / "run.json").read_text())["init_from"] == began
    workdir.rename(workdir.with_name("elsewhere"))  # a resumed run does not need it any more
    try:
        again = jt.train(replace(config, train=replace(config.train, init_from="")), tmp_path)
    finally:
        workdir.with_name("elsewhere").rename(workdir)
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
    assert json.loads((tmp_path / "run.json").read_text())["init_from"] == began


@pytest.mark.slow
def test_what_computes_otherwise_than_the_published_model_is_told(published, capsys):
    begun(f"hf:{published}", model__rope_theta=500.0).init()
    assert "but with model.rope_theta=500.0 instead of 10000.0\n" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_two_processes_export_and_begin_as_one_does(workdir, published, tmp_path, forked):
    """Each holds a part of every parameter, and writes a part of the files."""
    def both(*words):
        where = [f"--coordinator={free_address()}", "--num_processes=2"]
        started = [forked.start(["-m", *words, *where, f"--process_id={i}"], ROOT,
                                os.environ | {"XLA_FLAGS": virtual_devices(4)}) for i in range(2)]
        try:
            said = [process.communicate(timeout=200)[1] for process in started]
            assert [process.returncode for process in started] == [0, 0], said
        finally:
            for process in started:
                process.kill()

    both("jaxtrain", "export", str(workdir), f"--output={tmp_path / 'out'}", "--dtype=float32", "--file_gb=0.00002")
    for file in published.glob("*model*"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    keys = [f"--config.{key}={value}" for key, value in KEYS.items() if not key.startswith("model.")]
    keys += [f"--config.data.source={workdir.parent / 'text.txt'}", "--config.optimizer.learning_rate=1e-30",
             "--config.optimizer.weight_decay=0"]
    both("jaxtrain.main", f"--config=hf:{published}", *keys, f"--workdir={tmp_path / 'work'}")
    jax.tree.map(np.testing.assert_array_equal, trained(tmp_path / "work"), trained(workdir))


@pytest.mark.slow
def test_adapters_of_a_run_are_tuned_resumed_and_merged(workdir, published, tmp_path):
    """Beside the frozen parameters of a published model, and in what is published in turn."""
    keys = {"train__init_from": str(published), "lora__rank": 2, "data__source": str(workdir.parent / "text.txt")}
    run = begun(f"hf:{published}", train__steps=2, data__seq_len=32, data__global_batch_size=8, **keys)
    state = jt.train(run.config, tmp_path / "tuned")
    base = jax.device_get(trained(workdir))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.frozen), base)
    assert export_command.main([str(tmp_path / "tuned"), f"--output={tmp_path / 'out'}", "--dtype=float32"]) == 0
    wanted = merged(jax.device_get(state.all_params), 16 / 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
                 begun(f"hf:{tmp_path / 'out'}").init().params, wanted)
    after, before = (tree["blocks"]["layer"]["mlp"]["up"]["kernel"] for tree in (wanted, base))
    assert not np.array_equal(after, before)

    assert adapters.main(["export", str(tmp_path / "tuned"), f"--output={tmp_path / 'adapters'}"]) == 0
    with_them = begun(f"hf:{published}", **keys | {"train__init_from": str(tmp_path / "adapters")})
    jax.tree.map(np.testing.assert_array_equal, with_them.init().all_params, state.all_params)
    said = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(published) and said["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert adapters.main(["export", str(workdir), f"--output={tmp_path / 'none'}"]) == 2
    assert generate_command.main([str(tmp_path / "adapters"), "--prompt=It was", "--max_new_tokens=3"]) == 0

    again = begun(tmp_path / "tuned/config.json", train__init_from=str(tmp_path / "tuned")).init()
    jax.tree.map(np.testing.assert_array_equal, again.all_params, state.all_params)
    with pytest.raises(jt.UserError, match=r"tuned has adapters \(lora.rank=2\), and this run has others"):
        begun(tmp_path / "tuned/config.json", train__init_from=str(tmp_path / "tuned"), lora__rank=0).init()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("along", [0, 1, 2])
def test_a_slice_of_a_quantized_weight_is_made_of_whole_blocks(along, kind):
    """Blocks stay whole where shards cut a block, too."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal([128 if d == along else 6 for d in range(3)]).astype(np.float32)
    both = quantization.quantize(weight, kind, along)
    for _ in range(20):
        for part, whole in enumerate(both):
            cut = [sorted(rng.choice(size + 1, 2, replace=False)) for size in whole.shape]
            index = tuple(slice(None) if rng.random() < 0.3 else slice(*map(int, ends)) for ends in cut)
            got = published_weights._read_quantized(weight.__getitem__, weight.shape, *both, part, index)
            np.testing.assert_array_equal(got, whole[index])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_adapters_beside_quantized_weights(workdir, published, tmp_path, kind):
    """Published weights become few bits as they are read, a run's when it begins; both resume, and are exported."""
    base = jax.device_get(trained(workdir))
    keys = {"lora__rank": 2, "lora__quantize": kind, "data__source": str(workdir.parent / "text.txt")}
    run = begun(f"hf:{published}", train__steps=2, data__seq_len=32, data__global_batch_size=8,
                train__init_from=str(published), **keys)
    begins = jax.device_get(run.init().frozen)
    jax.tree.map(np.testing.assert_array_equal, begins, quantized_kernels.quantized_like(abstract_model(run), base))
    other = begun(workdir / "config.json", train__init_from=str(workdir), mesh__data=2, mesh__fsdp=2, mesh__tensor=2,
                  **keys)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.init().frozen), begins)
    given = begun(workdir / "config.json", **keys)
    zeros = jax.tree.map(np.zeros_like, jax.device_get(given.init().params))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(given.with_params(
        partition.merge(base, zeros)).frozen), begins)

    state = jt.train(run.config, tmp_path / "tuned")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.frozen), begins)
    longer = replace(run.config, train=replace(run.config.train, steps=3))
    again = jt.train(longer, tmp_path / "tuned", may_change=["train.steps"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.frozen), begins)
    assert export_command.main([str(tmp_path / "tuned"), f"--output={tmp_path / 'out'}", "--dtype=float32"]) == 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
                 begun(f"hf:{tmp_path / 'out'}").init().params, merged(jax.device_get(again.all_params), 16 / 2))
    assert generate_command.main([str(tmp_path / "tuned"), "--prompt=It was", "--max_new_tokens=3"]) == 0

    student, teacher = (jt.load_config(folder / "config.json") for folder in (workdir, tmp_path / "tuned"))
    learning = jt.build(student, objective=jt.distillation(teacher, workdir=tmp_path / "tuned")).init()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(learning.frozen["teacher"]),
                 jax.device_get(again.all_params))
    with pytest.raises(jt.UserError, match=r"tuned has adapters \(lora.rank=2\), and the teacher's config has others"):
        jt.build(student, objective=jt.distillation(student, workdir=tmp_path / "tuned"))
    floats = quantized_kernels.as_floats(abstract_model(run)) if kind == "int8" else None
    if floats is not None:
        with pytest.raises(jt.UserError, match=r"kernel: is int8\[.* in the checkpoint .* and float32\["):
            restore.load_params(tmp_path / "tuned", floats, 3)


@pytest.mark.slow
def test_what_is_exported_says_where_it_comes_from(workdir, published):
    record = json.loads((published / export.RECORD).read_text())
    assert record["step"] == 2 and record["workdir"] == "work"
    assert record["parameters"] == restore.find_good(workdir)[1]
    assert record["sha256"].keys() == {file.name for file in published.iterdir()} - {export.RECORD}
    assert len([name for name in record["sha256"] if name.endswith(".safetensors")]) > 2
    config = json.loads((published / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"], config["dtype"]) == ("qwen3", 256, "float32")


@pytest.mark.slow
def test_weights_are_rounded_to_bfloat16_by_default(workdir, tmp_path):
    assert export_command.main([str(workdir), f"--output={tmp_path / 'out'}", "--step=2"]) == 0
    state = begun(f"hf:{tmp_path / 'out'}").init()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype("bfloat16").astype("float32")), state.params,
                 trained(workdir))


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "message"), [
    (["--output={out}"], "--output: {out} is there already; name a folder that is not"),
    (["--output={out}/config.json/new"],
     "--output: {out}/config.json/new.partial cannot be made (Not a directory); name another"),
    (["--output={new}", "--step=-1"], "--step: -1 is not a step; leave it out for the newest good checkpoint, or see "
                                      "those that there are: jaxtrain checkpoint list {work}"),
    (["--output={new}", "--step=7"], "--step: {work} has no checkpoint of step 7 that was found good; see those that "
                                     "it has: jaxtrain checkpoint list {work}"),
])
def test_what_cannot_be_exported_is_told_in_one_line(workdir, published, capsys, flags, message):
    names = {"out": published, "new": published.parent / "new", "work": workdir}
    for rehearsal in ([], ["--dry_run"]) if "/new" not in flags[0] and "--step=-1" not in flags else ([],):
        assert export_command.main([str(workdir), *(flag.format(**names) for flag in flags), *rehearsal]) == 2
        assert capsys.readouterr().err.strip() == message.format(**names)
    assert not names["new"].exists()


@pytest.mark.slow
def test_an_export_is_rehearsed_and_replaces_an_earlier_one_when_told(workdir, published, tmp_path, capsys):
    to = tmp_path / "out"
    assert export_command.main([str(workdir), f"--output={to}", "--dry_run"]) == 0
    count = sum(leaf.size for leaf in jax.tree.leaves(trained(workdir)))
    assert f"step 2 of {workdir} would be written to {to}: {count:,} parameters" in capsys.readouterr().out
    assert not to.exists()
    shutil.copytree(published, to)
    assert export_command.main([str(workdir), f"--output={to}", "--overwrite"]) == 0
    assert json.loads((to / "config.json").read_text())["dtype"] == "bfloat16", "the earlier one was float32"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("source", "message"), [
    ("{tmp}", "train.init_from: {tmp} is neither a run's workdir with checkpoints nor a folder with a published "
              "config.json or adapter_config.json; give one of these"),
    ("{tmp}/run@last", "train.init_from: 'last' in '{tmp}/run@last' is not a step; write WORKDIR@STEP, such as "
                       "runs/base@500"),
])
def test_a_source_that_is_none_is_refused(tmp_path, source, message):
    with pytest.raises(jt.UserError) as refusal:
        jt.build(reference.tiny(train__init_from=source.format(tmp=tmp_path)), devices=jax.devices()[:1]).init()
    assert f"{refusal.value}" == message.format(tmp=tmp_path)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """A run of one step on conversations in chatml."""
    from jaxtrain.commands import prepare, train_tokenizer

    folder = tmp_path_factory.mktemp("answers")
    text = folder / "text.txt"
    text.write_text("Hello, what is this? It is a text of some words.\n" * 50)
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"]
    assert train_tokenizer.main([f"--input={text}", "--vocab_size=300", "--special_tokens", *words,
                                 f"--output={folder}/tokenizer.json"]) == 0
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"Hello {n}"}, {"role": "assistant", "content": "It is a text."}]}) + "\n"
        for n in range(20)))
    assert prepare.main([f"--input={folder}/chat.jsonl", f"--tokenizer={folder}/tokenizer.json",
                         "--chat_template=chatml", f"--output={folder}/corpus"]) == 0
    keys = {"model.vocab_size": 304, "data.source": str(folder / "corpus"), "train.steps": 1, "data.eval_fraction": 0.1}
    jt.train(jt.make_config(reference.tiny("qwen3").to_dict(), KEYS | keys), folder / "work")
    export.export(folder / "work", folder / "out", dtype="float32")
    return folder


@pytest.mark.exhaustive
def test_what_surrounds_texts_and_answers_is_published(answers, monkeypatch, tmp_path, capsys):
    from jaxtrain.commands import generate as generate_command
    from jaxtrain.hub.trained_tokenizer import tokenizer_of

    kept, published = tokenizer_of(answers / "work"), tokenizer_of(answers / "out")
    assert (kept.bos, kept.eod) == (published.bos, published.eod)
    assert "<|im_start|>" in (answers / "out" / "chat_template.jinja").read_text()
    ends = json.loads((answers / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert set(ends) == {kept.eod, kept.specials["<|im_end|>"]}
    monkeypatch.chdir(tmp_path)  # where the corpus is not
    (answers / "corpus").rename(answers / "elsewhere")
    said = []
    for source in ("work", "out"):
        assert generate_command.main([f"{answers / source}", "--prompt=Hello 3", "--chat", "--temperature=0", "--json",
                                    "--max_new_tokens=4", "--logprobs"]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["tokens"] == said[1]["tokens"]
    np.testing.assert_allclose(said[0]["logprobs"], said[1]["logprobs"], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "status"), [("", 0), ("no such answer", 1)])
def test_gates_decide_whether_a_folder_is_releasable(answers, tmp_path, pattern, status, capsys):
    """The gates test the weights that are written, since bfloat16 may have changed the answers."""
    check = {"prompt": "Hello 3", "must_match": pattern, "max_new_tokens": 4}
    (tmp_path / "gates.jsonl").write_text("".join(
        json.dumps(check | {"chat": chat}) + "\n" for chat in (True, False)))
    words = [str(answers / "work"), f"--output={tmp_path / 'out'}", f"--gates={tmp_path / 'gates.jsonl'}"]
    if status:
        with pytest.raises(SystemExit):
            export_command.main(words)
    else:
        assert export_command.main(words) == 0
    record = json.loads((tmp_path / "out" / export.RECORD).read_text())
    assert record["gates"]["releasable"] is (not status) and record["sha256"]["README.md"]
    assert record["gates"]["suites"] == {"gates": {"passed": 2 * (not status), "checks": 2}}
    if not status:
        kept = [json.loads(line) for line in (answers / "work" / "gates" / "1.jsonl").read_text().splitlines()]
        assert generate_command.main([str(tmp_path / "out"), "--prompt=Hello 3", "--chat", "--temperature=0", "--json",
                                    "--max_new_tokens=4"]) == 0
        assert kept[0]["answer"] == json.loads(capsys.readouterr().out)["text"]


@pytest.mark.slow
def test_nothing_is_left_of_a_refused_export(workdir, tmp_path, monkeypatch, capsys):
    (tmp_path / "gates.jsonl").write_text(json.dumps({"prompt": "Hello " * 20, "must_match": "x"}) + "\n")
    gates = [str(workdir), f"--output={tmp_path}/new/out", f"--gates={tmp_path}/gates.jsonl"]
    assert export_command.main(gates) == 2
    assert "leave no room in model.max_seq_len=32" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["gates.jsonl"]

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export.export(workdir, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["gates.jsonl"]


@pytest.mark.slow
def test_the_token_that_begins_texts_is_published(answers, tmp_path):
    """It is in the tokenizer's own template, so that other programs put it there too."""
    import tokenizers

    from jaxtrain.data.tokenizers import tokenizer_folder
    from jaxtrain.data.tokenizers.tokenizer import load_tokenizer

    kept = load_tokenizer(f"{answers}/tokenizer.json", "<|im_end|>", "<|begin|>")
    tokenizer_folder.save(kept, tmp_path / "work" / "tokenizer")
    shutil.copy(answers / "work" / "config.json", tmp_path / "work")
    (tmp_path / "out").mkdir()
    model = jt.load_config(answers / "work" / "config.json").model
    exported_tokenizer.write(tmp_path / "work", tmp_path / "out", None, {}, model)
    found = load_tokenizer(f"{tmp_path / 'out'}")
    assert (found.bos, found.eod) == (kept.bos, kept.eod) and kept.bos is not None
    raw = tokenizers.Tokenizer.from_file(f"{tmp_path / 'out' / 'tokenizer.json'}")
    assert raw.encode("Hello").ids == [kept.bos, *kept.encode(b"Hello")]


@pytest.mark.slow
def test_what_a_run_begins_with_is_not_forgotten_before_its_first_checkpoint(workdir, tmp_path):
    def config(**keys):
        given = {key.replace("__", "."): value for key, value in keys.items()}
        return jt.make_config(jt.load_config(workdir / "config.json").to_dict(), given)

    class Stop(jt.Observer):
        def on_batch(self, step, batch):
            raise RuntimeError("as if the machine had died")

    with pytest.raises(RuntimeError, match="died"):
        jt.train(config(train__init_from=f"{workdir}"), tmp_path / "work", observers=[Stop()])
    with pytest.raises(jt.UserError, match=r"train\.init_from: the run in .* began with other parameters and has no "):
        jt.train(config(), tmp_path / "work")


@pytest.mark.slow
def test_a_model_that_computes_otherwise_is_told(workdir, capsys):
    config = jt.make_config(jt.load_config(workdir / "config.json").to_dict(), {
        "train.init_from": f"{workdir}", "model.norm_eps": 0.1})
    jt.build(config).init()
    assert "of step 2 of " in (told := capsys.readouterr().err) and "but with model.norm_eps=0.1 instead of" in told


@pytest.mark.slow
def test_a_source_without_weights_or_without_a_config_is_refused(workdir, published, tmp_path):
    shutil.copytree(workdir, tmp_path / "work")
    (tmp_path / "work" / "config.json").unlink()
    config = jt.load_config(workdir / "config.json")
    with pytest.raises(jt.UserError, match=r"train\.init_from: .* has checkpoints and no config\.json; bring it back"):
        jt.build(jt.make_config(config.to_dict(), {"train.init_from": f"{tmp_path / 'work'}"})).init()
    (tmp_path / "bare").mkdir()
    shutil.copy(published / "config.json", tmp_path / "bare")
    with pytest.raises(jt.UserError, match=r"train\.init_from: .* has a config\.json and no weights; put them there"):
        jt.build(jt.load_config(f"hf:{tmp_path / 'bare'}", {"mesh.data": 8})).init()


@pytest.mark.slow
def test_weights_that_have_changed_since_their_export_are_refused(published, tmp_path):
    shutil.copytree(published, tmp_path / "out")
    path = next((tmp_path / "out").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    assert len(initial_params.origin(f"{tmp_path / 'out'}")["sha256"]) > 3
    path.write_bytes(content)
    with pytest.raises(jt.UserError, match=r"is not as it was exported: its SHA-256 is not that in export\.json; copy"):
        initial_params.origin(f"{tmp_path / 'out'}")


@pytest.mark.slow
def test_data_of_another_tokenizer_is_warned_of(answers, workdir):
    source = next(path for path in (answers / "corpus", answers / "elsewhere") if path.exists())
    keys = {"data.source": f"{source}", "data.seq_len": 32, "mesh.data": 8, "data.eval_fraction": 0.1}
    run = jt.build(jt.load_config(f"hf:{answers / 'out'}", keys))
    assert initial_params.other_tokenizer(answers / "out", run.corpus.tokenizer) == ""
    assert "the data's tokenizer, tokenizer.json, is not that of" in initial_params.other_tokenizer(
        workdir, run.corpus.tokenizer)


def test_parameters_of_another_family_are_refused_by_its_name(tmp_path):
    """The message names both, and not the first tensor that is missing."""
    theirs = jt.make_config({"model": {"name": "llama"}}).model
    run = SimpleNamespace(config=jt.make_config({}))
    with pytest.raises(jt.UserError, match=r"train.init_from: a model of name=llama is there, and model.name=gpt2; "
                                           r"begin with its config \(--config=hf:FOLDER"):
        initial_params._check_kind(theirs, run)
