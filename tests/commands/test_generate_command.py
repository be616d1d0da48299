"""`jaxtrain generate`: texts from a run's workdir and from a published folder, as `jt.generate` gives them."""

import json

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.commands import export
from jaxtrain.commands import generate as generate_command
from jaxtrain.hub import trained_model
from jaxtrain.hub.adapters import adapter_files
from jaxtrain.models import lora
from jaxtrain.run import abstract_model
from tests.numerics import reference

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache")]  # programs are compiled once
FEW = "--max_new_tokens=8"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times.\n" * 200)
    config = reference.tiny("llama", model__vocab_size=264, model__max_seq_len=64, data__seq_len=32,
                            data__global_batch_size=8, train__steps=2, optimizer__warmup_steps=1,
                            data__source=str(folder / "text.txt"), mesh__data=8)
    jt.train(config, folder / "work")
    return folder / "work"


def said(capsys, *words):
    status = generate_command.main([f"{word}" for word in words])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_a_run_continues_prompts_as_from_python(workdir, capsys):
    words = "--prompt=It was", "--prompt=the", "--temperature=0", FEW, "--json", "--logprobs"
    status, out, _ = said(capsys, workdir, *words)
    assert status == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["prompt"] for one in found] == ["It was", "the"]

    run, state = jt.load_model(workdir, {"mesh.data": "1", "mesh.tensor": "8"})
    assert run.mesh.shape["tensor"] == 8
    want = jt.generate(run, state, ["It was", "the"], max_new_tokens=8, temperature=0, logprobs=True,
                       tokenizer=workdir / "tokenizer")
    assert [one["tokens"] for one in found] == [list(one.tokens) for one in want]
    assert found[0]["logprobs"] == pytest.approx(want[0].logprobs, rel=1e-4)


def test_prompts_may_come_from_a_file_and_texts_are_printed_behind_them(workdir, capsys, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "It was"}\n"the"\n')
    status, out, _ = said(capsys, workdir, f"--prompts={tmp_path / 'prompts.jsonl'}", "--temperature=0", FEW)
    first, second, rest = out.split("\n---\n")
    assert status == 0 and first.startswith("It was") and second.startswith("the") and rest == ""


def test_a_text_ends_before_a_stop_string_wherever_its_tokens_do(workdir):
    run, state = jt.load_model(workdir)
    keys = dict(max_new_tokens=40, temperature=1.0, seed=5, tokenizer=workdir / "tokenizer")
    whole, = jt.generate(run, state, ["It was"], **keys)
    end = next(whole.text[n:n + 2] for n in range(4, 20) if whole.text.find(whole.text[n:n + 2]) == n
               and whole.text[n:n + 2].isascii())
    one, = jt.generate(run, state, ["It was"], stop=[end], **keys)
    assert (one.text, one.finish_reason) == (whole.text[:whole.text.index(end)], "stop")
    assert one.tokens == whole.tokens[:len(one.tokens)] and max(whole.tokens) < 257  # of 264 rows of the table


def test_a_message_is_answered_through_a_template(workdir, capsys):
    status, out, _ = said(capsys, workdir, "--prompt=Hello", "--chat", "--chat_template=plain", FEW, "--json")
    assert status == 0 and json.loads(out)["prompt"] == "Hello"


def test_a_published_folder_continues_prompts_too(workdir, capsys, tmp_path):
    assert export.main([f"{workdir}", f"--output={tmp_path / 'out'}", "--dtype=float32"]) == 0
    words = "--prompt=It was", "--temperature=0", FEW, "--json"
    assert said(capsys, tmp_path / "out", *words)[:2] == said(capsys, workdir, *words)[:2]


def test_prompts_name_their_adapters(workdir, capsys, tmp_path):
    rng = np.random.default_rng(0)
    for rank, name in ((2, "one"), (3, "two")):
        run = trained_model.model_of(trained_model.sections_of(workdir) | {"lora": {"rank": rank}}, {}, "data")
        made = jax.tree.map(lambda leaf: jax.device_put(
            0.3 * rng.standard_normal(leaf.shape), leaf.sharding), lora.adapters(abstract_model(run)))
        (tmp_path / name).mkdir()
        adapter_files.save(made, run.config.model, run.config.lora, tmp_path / name, "", np.dtype("float32"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "It was", "adapter": 2}\n')
    flags, _ = generate_command.parse(["work", f"--prompts={prompts}"])
    assert generate_command._prompts(flags) == (["It was"], [None])
    assert capsys.readouterr().err.startswith(f"warning: {prompts} names adapters, which are ignored: there ")
    prompts.write_text('{"prompt": "It was", "adapter": "two"}\n{"prompt": "It was"}\n')
    folders = {name: tmp_path / name for name in ("one", "two")}
    given = ",".join(f"{name}={folder}" for name, folder in folders.items())
    words = workdir, f"--adapters={given}", f"--prompts={prompts}", "--temperature=0", FEW, "--json"
    run, state = jt.load_model(workdir, adapters=folders)
    keys = dict(max_new_tokens=8, temperature=0, tokenizer=workdir / "tokenizer")
    for more, names in (((), ["two", None]), (("--adapter=one",), ["two", "one"])):
        status, out, _ = said(capsys, *words, *more)
        found = [json.loads(line) for line in out.splitlines()]
        assert (status, [one["adapter"] for one in found]) == (0, names)
        want = jt.generate(run, state, ["It was", "It was"], adapters=names, **keys)
        assert [one["tokens"] for one in found] == [list(one.tokens) for one in want]


@pytest.mark.parametrize(("words", "message"), [
    (["{work}"], "--prompt: there is no prompt; give --prompt=TEXT, --prompts=FILE or --messages=JSON"),
    (["{gone}", "--prompt=a"], "WORKDIR: there is no folder {gone}; give the workdir of a run, or a published"),
    (["Org/Tiny", "--prompt=a"], "WORKDIR: there is no folder Org/Tiny; write hf:Org/Tiny for a model on the Hugging "
                                 "Face Hub"),
    (["{gone}.gguf", "--prompt=a"], "WORKDIR: {gone}.gguf is a model in GGUF, which jaxtrain does not read; give the"),
    (["{work}", "--prompt=a", "--step=-1"], "--step: -1 is not a step; leave it out for the newest good"),
    (["{work}", "--prompt=a", "--step=7"], "--step: {work} has no checkpoint of step 7 that was found good; "),
    (["{work}", "--prompt=a", "--top_p=2"], "top_p: 2.0 is out of range; give more than 0 and at most 1"),
    (["{work}", "--prompt=a", "--seed=-1"], "seed: -1 is out of range; give 0 or more, and less than 2^32"),
    (["{work}", "--prompt=a", f"--top_k={2**31}"], "top_k: 2147483648 is out of range; give 0 or more, and less"),
    (["{work}", "--prompt=a", "--max_new_tokens=0"], "max_new_tokens: 0 is below 1; give 1 or more"),
    (["{work}", "--prompt=a", "--config.model.num_layers=3"], "--config.model.num_layers: the model is as it was "),
    (["{work}", "--prompt=" + 64 * "a"], "prompts[0]: its 64 tokens leave no room in model.max_seq_len=64; "),
    (["{gone}", "--prompt=a", "--adapter=b"], "--adapters: there is none of the name 'b', which --adapter names; give "
                                              "--adapters=NAME=FOLDER"),
    (["{gone}", "--prompt=a", "--adapters=b=f", "--adapter=c"], "--adapters: there is none of the name 'c', which "
                                                                "--adapter names; known: b"),
    (["{gone}", "--adapters=b=f", "--prompts={named}"], "--adapters: there is none of the name 'c', which line 2 of "
                                                        "{named} names; known: b"),
    (["{work}", "--prompt=a", "--adapters=b"], "--adapters: 'b' is not a list of different names with folders; "),
    (["{work}", "--prompt=a", "--adapters=b={gone}"], "adapters: b: {gone} is not a folder of adapters in PEFT's form"),
    (["{work}", "--prompts={gone}"], "--prompts: {gone} cannot be read ("),
    (["{work}", "--prompt=a", "--chat", "--chat_template={gone}"], ""),
])
def test_mistakes_are_told_in_one_line(workdir, capsys, tmp_path, words, message):
    names = {"work": workdir, "gone": tmp_path / "gone", "named": tmp_path / "named.jsonl"}
    names["named"].write_text('"a"\n{"prompt": "a", "adapter": "c"}\n')
    status, out, err = said(capsys, *(word.format(**names) for word in words))
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith(message.format(**names))


def test_all_devices_share_the_prompts(workdir):
    run, _ = jt.load_model(workdir)
    assert run.mesh.shape["data"] == jax.device_count() == 8


def test_messages_are_prompts_through_the_template(workdir, capsys, tmp_path):
    """Messages of a file, of JSON as a flag and in a line, and a system's message in front of a prompt."""
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    (tmp_path / "turns.json").write_text(json.dumps(turns))
    (tmp_path / "lines.jsonl").write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"prompt": turns}))
    how = "--chat_template=plain", FEW, "--temperature=0", "--json"
    found = [json.loads(line) for words in (
        [f"--messages={tmp_path / 'turns.json'}"], [f"--messages= {json.dumps(turns)}"],
        [f"--prompts={tmp_path / 'lines.jsonl'}"],
        ["--system=Be brief.", "--prompt=Hello"]) for line in said(capsys, workdir, *words, *how)[1].splitlines()]
    run, state = jt.load_model(workdir)
    want, = jt.generate(run, state, ["system: Be brief.\nuser: Hello\nassistant: "], max_new_tokens=8, temperature=0,
                        tokenizer=workdir / "tokenizer")
    assert [one["tokens"] for one in found] == 5 * [list(want.tokens)]
    assert [one.get("messages") for one in found] == [turns, turns, turns, turns, None]


@pytest.mark.parametrize(("given", "message"), [
    ("{file}", "{file} is not a list of messages with a role and a content; write [{{"),
    ("{file}s", "there is no file {file}s; give a JSON file with a list of messages, or [{{"),
    ('[{{"role": "user"}}]', '[{{"role": "user"}}] is not a list of messages with a role and a content; write [{{'),
    ("{{}}", "{{}} is not a list of messages with a role and a content; write [{{"),
    ("[{{role: user}}]", "[{{role: user}}] is not JSON (Expecting property name enclosed in double quotes: line 1 "
                         'column 3 (char 2)); write [{{"role": "user", "content": "Hello"}}], in single quotes in '
                         "a shell, or give a file"),
    ("[" * 100, "this is not JSON (Expecting value: line 1 column 101 (char 100)); write [{{"),
])
def test_what_is_no_list_of_messages_is_refused(capsys, tmp_path, given, message):
    (file := tmp_path / "turns.json").write_text('[{"role": "user"}]')
    status, _, err = said(capsys, "anywhere", f"--messages={given.format(file=file)}")
    assert (status, err.count("\n")) == (2, 1) and err.startswith(f"--messages: {message.format(file=file)}")
