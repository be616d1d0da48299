"""The schema: who wins, what is coerced, what is refused; and that every field is read by somebody."""

import ast
import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import jaxtrain
from jaxtrain.config.family import config_class, config_classes
from jaxtrain.config.load import diff, load_config, make_config, with_steps
from jaxtrain.config.model_config import Experts
from jaxtrain.config.schema import Config
from jaxtrain.config.sections import plug_in_sections
from jaxtrain.config.sections.earlier_keys import REMOVED
from jaxtrain.errors import UserError

SECTIONS = plug_in_sections.sections()  # name -> dataclass
FILE = "def get_config(variant=None):\n    return {'model': {'num_layers': 7, 'num_heads': 8 if variant else 2}}\n"


def test_who_wins(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    assert Config().model.num_layers == 4
    assert load_config(tmp_path / "mine.py").model.num_layers == 7  # the file over the default
    assert load_config(f"{tmp_path}/mine.py:wide").model.num_heads == 8
    override = load_config(tmp_path / "mine", {"model.num_layers": "3", "train.steps": 5})  # ours over the file
    assert (override.model.num_layers, override.model.num_heads, override.train.steps) == (3, 2, 5)
    assert override.model.head_dim == 64 and override.model.mlp_dim == 512  # derived from what came out of it all


@pytest.mark.parametrize("key, text, value", [
    ("train.steps", "1e6", 1_000_000), ("train.steps", "12", 12), ("train.z_loss", "1", 1.0),
    ("optimizer.learning_rate", "3e-4", 3e-4), ("train.progress", "false", False), ("train.progress", "True", True),
    ("data.source", "12", "12"), ("data.source", "/some/None", "/some/None"), ("mesh.data", "-1", -1),
    ("mesh.overrides.embed", "data+fsdp", {"embed": "data+fsdp"}),
    ("mesh.overrides", "{'mlp':'none'}", {"mlp": "none"}),
])
def test_text_becomes_what_the_field_is(key, text, value):
    section, name = key.split(".")[:2]
    found = getattr(getattr(make_config({}, {key: text}), section), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(("name", "meant"), {
    "per_device_train_batch_size": "data.global_batch_size counts", "gradient_accumulation_steps": "train.accumulation",
    "learning_rate": "optimizer.learning_rate", "lr": "optimizer.learning_rate", "num_train_epochs": "train.epochs is",
    "seq_length": "data.seq_len", "max_length": "data.seq_len", "bf16": "train.precision=bfloat16",
    "save_steps": "checkpoint.every", "lr_scheduler_type": "optimizer.schedule", "logging_steps": "train.log_every",
    "load_in_4bit": "lora.quantize=nf4", "flash_attention_2": "train.attention=cudnn", "output_dir": "--workdir",
}.items())
@pytest.mark.parametrize("section", ["checkpoint", "optimizer", "train", "of_another_framework"])
def test_another_frameworks_key_leads_to_the_section_that_has_it(section, name, meant):
    own, _, key = meant.partition(".")
    if (own, key) == (section, name):
        return
    with pytest.raises(UserError) as refused:
        make_config({}, {f"{section}.{name}": 4})
    shown = key if own == section and " " not in meant else meant
    assert refused.value.fix.startswith(shown if " " in meant else f"did you mean '{shown}'?")


@pytest.mark.parametrize("values, overrides, line", [
    ({}, {"model.num_layer": 3}, "model.num_layer: there is no such key; did you mean 'num_layers'?"),
    ({}, {"optimizer.lr": 1}, "optimizer.lr: there is no such key; did you mean 'learning_rate'?"),
    ({}, {"batch_size": 8}, "batch_size: there is no such key; did you mean 'data.global_batch_size'?"),
    ({}, {"train.batch_size": 8}, "train.batch_size: there is no such key; did you mean 'data.global_batch_size'?"),
    ({}, {"train.micro_batch_size": 8}, "train.micro_batch_size: there is no such key; data.global_batch_size counts "
     "the rows of a step on all devices together, and train.accumulation=N computes them in N parts"),
    ({}, {"train.warmup_ratio": 0.03}, "train.warmup_ratio: there is no such key; optimizer.warmup_steps takes a "
     "fraction of the run's steps, too, such as 0.03"),
    ({}, {"data.epochs": 2}, "data.epochs: there is no such key; train.epochs is the length of a run in passes over "
     "its data; data.mixture.NAME.epochs limits one source of a mixture"),
    ({}, {"train.attention": "flash"}, "train.attention: 'flash' is not supported; did you mean 'cudnn'?"),
    ({}, {"train.precision": "bf16"}, "train.precision: 'bf16' is not supported; did you mean 'bfloat16'?"),
    ({}, {"pipeline.schedule": "dualpipe"}, "pipeline.schedule: 'dualpipe' is not supported; did you mean 'zb_v'?"),
    ({}, {"pipeline.schedule": "pipe"}, "pipeline.schedule: 'pipe' is not supported; did you mean 'gpipe'?"),
    ({}, {"train.attention": "xl"},
     "train.attention: 'xl' is not supported; known: auto, cudnn, mosaic, splash, triton, xla"),
    ({}, {"optimizer.learning_rate": "1,5"}, "optimizer.learning_rate: '1,5' is not a finite number; give a finite "
     "number"),
    ({"optimiser": {}}, {}, "optimiser: there is no such key; did you mean 'optimizer'?"),
    ({"train": {"stpes": 3}}, {}, "train.stpes: there is no such key; did you mean 'steps'?"),
    ({"train": {"steps": "3"}}, {}, "train.steps: '3' is not a whole number; give a whole number"),  # text in a file
    ({"train": {"steps": True}}, {}, "train.steps: 'True' is not a whole number; give a whole number"),
    ({"data": {"source": 3}}, {}, "data.source: '3' is not text; give text"),
    ({}, {"train.steps": "ten"}, "train.steps: 'ten' is not a whole number; give a whole number"),
    ({}, {"optimizer.learning_rate": "1e999"}, "optimizer.learning_rate: 'inf' is not a finite number; give a finite "
     "number"),
    ({}, {"optimizer.momentum": 0.9}, "optimizer.momentum: adamw does not read it; leave it out, or at 0.95"),
    ({"optimizer": {"b2": 0.99}}, {"optimizer.name": "sgd"}, "optimizer.b2: sgd does not read it; leave it out, or at "
     "0.95"),
    ({}, {"optimizer.name": "adafactor", "optimizer.eps": 1e-6}, "optimizer.eps: adafactor does not read it; leave it "
     "out, or at 1e-08"),
    ({}, {"model.num_heads": 3}, "model.num_heads: 3 does not divide model.embed_dim=128; choose a divisor or set "
     "model.head_dim"),
    ({}, {"model.num_kv_heads": 3}, "model.num_kv_heads: 3 does not divide model.num_heads=4; choose a divisor of it"),
    ({}, {"mesh.fsdp": -1}, "mesh: more than one axis is -1; give all axes but one a size"),
    ({}, {"data.prefetch": 10**11}, "data.prefetch: 100,000,000,000 is above the limit; give 1,000 or less"),
    ({}, {"train.steps": 2**31}, "train.steps: 2,147,483,648 is above the limit; give 2,147,483,647 or less"),
    ({}, {"train.epochs": -1}, "train.epochs: -1.0 is negative; give 0 or more"),
    ({}, {"train.patience": 2}, "train.patience: it counts evaluations, and train.eval_every=0 leaves only the one "
     "after the last step; set train.eval_every, such as 0.05"),
    ({}, {"train.patience": -1}, "train.patience: -1 is negative; give 0 or more"),
    ({}, {"optimizer.warmup_steps": 101}, "optimizer.warmup_steps: 101 exceeds train.steps=100; warm up for fewer "
     "steps"),
])
def test_refusals(values, overrides, line):
    with pytest.raises(UserError) as error:
        make_config(values, overrides)
    assert str(error.value) == line


@pytest.mark.parametrize(("values", "overrides", "line"), [
    ({}, {"model.rope_theta": 3.0}, "model.rope_theta: gpt2 has no such key; remove it, or use llama or qwen2 or qwen3 "
     r"or arcee or one of \d\d others"),
    ({"model": {"name": "mixtral", "num_experts": 8}}, {"model.name": "llama"}, "model.num_experts: llama has no such "
     r"key; remove it, or use mixtral or qwen3_moe or qwen2_moe or granitemoe or one of \d\d others")])
def test_a_key_of_other_families_is_refused_with_the_names_of_some(values, overrides, line):
    with pytest.raises(UserError, match=f"^{line}$"):
        make_config(values, overrides)


def test_numbers_of_steps_may_be_parts_of_the_run():
    values = {"optimizer": {"warmup_steps": 0.05}, "train": {"steps": 800, "eval_every": 0.25}}
    found = make_config(values, {"checkpoint.every": "0.1"})
    assert (found.optimizer.warmup_steps, found.train.eval_every, found.checkpoint.every) == (40, 200, 80)
    found = make_config(values, {"train.steps": "30"})  # follows an override
    assert (found.optimizer.warmup_steps, found.train.eval_every) == (2, 8)
    assert make_config(values, {"train.steps": 3}).optimizer.warmup_steps == 1  # 0 would mean none, or never
    assert make_config(values, {"train.steps": 0}).train.eval_every == 0
    assert make_config(found.to_dict()) == found  # what is recorded is numbers of steps


def test_the_length_in_epochs():
    found = make_config({"optimizer": {"warmup_steps": 0.05}, "sparsity": {"targets": ["*"], "start": 0.5}},
                        {"train.epochs": "3", "train.eval_every": "0.25", "checkpoint.every": 200})
    assert (found.train.epochs, found.train.steps) == (3, 0)  # not known yet
    assert (found.optimizer.warmup_steps, found.train.eval_every, found.sparsity.start) == (0.05, 0.25, 0.5)
    assert make_config(found.to_dict()) == found
    counted = with_steps(found, 40)
    assert (counted.train.epochs, counted.train.steps) == (0, 40)
    assert (counted.optimizer.warmup_steps, counted.train.eval_every, counted.sparsity.start) == (2, 10, 20)
    assert counted.checkpoint.every == 200 and make_config(counted.to_dict()) == counted
    later = make_config({"optimizer": {"warmup_steps": 200}}, {"train.epochs": 1})  # which may be enough steps for it
    with pytest.raises(UserError, match=r"warmup_steps: 200 exceeds train\.steps=40"):
        with_steps(later, 40)


@pytest.mark.parametrize("file, overrides, length", [
    ({"steps": 7}, {"train.epochs": "2"}, (0, 2)), ({"epochs": 2}, {"train.steps": 7}, (7, 0)),
    ({"steps": 7}, {"train.epochs": 0}, (7, 0)), ({"steps": 7, "epochs": 0.0}, {}, (7, 0)),
    ({"steps": 7}, {"train.epochs": 2, "train.steps": 0}, (0, 2)),
    ({"steps": 7, "epochs": 2}, {}, None), ({}, {"train.steps": "7", "train.epochs": "2"}, None),
    ({"steps": 100, "epochs": 2}, {}, None)])
def test_one_length_of_a_run_counts(file, overrides, length):
    if length is not None:
        found = make_config({"train": file}, overrides).train
        assert (found.steps, found.epochs) == length
        return
    with pytest.raises(UserError, match=r"^train\.epochs: 2 epochs and train\.steps=\d+ are two lengths of one run; "):
        make_config({"train": file}, overrides)


def test_the_config_json_of_a_run_is_a_config(tmp_path):
    config = make_config({}, {"train.steps": 7, "data.mixture.a": 2})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert load_config(tmp_path / "config.json") == config
    assert load_config(tmp_path / "config.json", {"train.steps": "9"}).train.steps == 9
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"^--config: .*config.json raised RecursionError"):
        load_config(tmp_path / "config.json")


def test_the_name_picks_the_class_also_when_it_is_overridden():
    llama = make_config({"model": {"name": "gpt2"}}, {"model.name": "llama", "model.rope_theta": "5e5"}).model
    assert type(llama) is config_class("llama") and llama.rope_theta == 5e5
    assert "num_experts" not in Config(model=llama).to_dict()["model"] and llama.experts == Experts()


def test_a_wrong_key_is_told_without_importing_jax():
    program = ("import sys; from jaxtrain.config.load import make_config\n"
               "try: make_config({}, {'model.swiglu_limit': 8})\n"
               "except ValueError as error: print(error, 'jax' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "model.swiglu_limit: gpt2 has no such key; remove it, or use gpt_oss False\n", done.stderr


def test_frozen_and_hashed():
    config = make_config({}, {"train.steps": 7})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 8
    assert config.hash() == make_config({}, {"train.steps": "7"}).hash() != Config().hash()
    assert make_config(config.to_dict()) == config
    assert diff(config, Config()) == {"train.steps": (7, 100)}


# ------------------------------------------------------------------------------------------ every field has a reader


@functools.cache
def read_fields(source: str) -> set[tuple[str, str]]:
    """(section, field) pairs that are read as `X.section.field`, or as `name.field` where `name` holds a section.

    A name holds a section where it was assigned one (`t = config.train`) or is annotated as one (`c: ModelConfig`), and
    `self` in a property of a model's config, such as `experts`, whose own fields count as those of a section.
    """
    by_class = {cls.__name__: section for section, cls in SECTIONS.items()} | {"Experts": "experts"}
    by_class |= {base.__name__: "model" for cls in config_classes().values() for base in cls.__mro__[:-1]}
    nodes = list(ast.walk(ast.parse(source)))
    held = {(node.arg, by_class[node.annotation.id]) for node in nodes if isinstance(node, ast.arg)
            and isinstance(node.annotation, ast.Name) and node.annotation.id in by_class}
    properties = [node for node in nodes if isinstance(node, ast.FunctionDef)
                  and any(isinstance(by, ast.Name) and by.id == "property" for by in node.decorator_list)]
    found = {(section, node.attr) for made in properties for node in ast.walk(made) for section in ("model", "experts")
             if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"}
    for node in nodes:
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(node.targets[0].elts, node.value.elts, strict=False)
            held |= {(name.id, value.attr) for name, value in pairs if isinstance(name, ast.Name)
                     and isinstance(value, ast.Attribute) and value.attr in by_class.values()}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Attribute) and node.value.attr in by_class.values():
                found.add((node.value.attr, node.attr))
            elif isinstance(node.value, ast.Name):
                found |= {(section, node.attr) for name, section in held if name == node.value.id}
    return found


def unread(sources: list[str]) -> set[tuple[str, str]]:
    fields = {(section, field.name) for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)}
    fields |= {("model", field.name) for cls in config_classes().values() for field in dataclasses.fields(cls)}
    fields |= {("experts", field.name) for field in dataclasses.fields(Experts)}
    return fields.difference(*map(read_fields, sources))


def test_every_field_is_read():
    package = Path(jaxtrain.__file__).parent
    declared = (package / "config" / "schema.py", package / "config" / "families.py")
    sources = {path: path.read_text() for path in package.rglob("*.py") if path not in declared}
    assert "for axis in AXES" in sources[package / "builder.py"]  # where the sizes of the mesh are read
    assert unread(list(sources.values())) == {("mesh", axis) for axis in ("context", "expert")}
    without = [source.replace("z_loss", "other") for source in sources.values()]
    assert {("train", "z_loss"), ("experts", "z_loss")} <= unread(without)


def test_a_mixture_is_set_key_by_key_from_words_and_from_python():
    words = {"data.mixture.web.source": "w", "data.mixture.web.weight": "5", "data.mixture.code": "2"}
    values = {"data.mixture.web": {"source": "w"}, "data.mixture.web.weight": 5, "data.mixture.code": 2}
    wanted = {"web": {"source": "w", "weight": 5}, "code": {"weight": 2}}
    assert make_config({}, words).data.mixture == make_config({}, values).data.mixture == wanted
    with pytest.raises(UserError, match=r"give data.mixture.NAME.weight=NUMBER"):
        make_config({}, {"data.mixture.web.weight.x": 1})


def test_the_config_of_an_older_run_means_the_same():
    """`older_config.json` is what a run of configs/gpt.py:tiny wrote before `rl.staleness` was a key.

    It has keys that were removed since, at the defaults that they had.
    """
    older = Path(__file__).with_name("older_config.json")
    assert "staleness" not in older.read_text()
    assert load_config(older) == load_config("configs/gpt.py:tiny", {"train.expert_buffer": 2.0})  # the default then
    said = json.loads(older.read_text())
    for key, default in REMOVED.items():
        section, _, name = key.partition(".")
        assert said[section][name] == default and not hasattr(getattr(Config(), section), name)


def test_a_run_of_images_is_read_by_the_names_of_today(tmp_path):
    earlier = {"data": {"packing": "best_fit"}, "train": {"freeze": ["picture/*", "embed"]}}
    (tmp_path / "config.json").write_text(json.dumps(earlier | {"model": {
        "name": "picture_flow", "pictures_per_row": 3}}))
    c = load_config(tmp_path / "config.json")
    assert (c.model.name, c.model.images_per_row, list(c.train.freeze)) == ("image_flow", 3, ["image/*", "embed"])
    (tmp_path / "config.json").write_text(json.dumps(earlier | {"model": {
        "name": "siglip", "picture_embed_dim": 24, "picture_heads": 3}}))
    assert load_config(tmp_path / "config.json").model.image_mlp_dim == 96
    for keys, now in ((["model.name=picture_flow"], "image_flow"),
                      (["model.name=siglip", "model.picture_size=8"], "image_size")):
        with pytest.raises(UserError, match=f"did you mean '{now}'"):
            make_config({}, dict(key.split("=") for key in keys))


def test_a_removed_key_with_another_value_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"resilience": {"straggler_factor": 2.0}}')
    with pytest.raises(UserError, match=r"^resilience.straggler_factor: there is no such key; "):
        load_config(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"^resilience.straggler_factor: there is no such key; "):
        make_config({}, {"resilience.straggler_factor": 1.25})


def test_a_folder_is_not_a_config(tmp_path):
    for name in ("b.py", "a.py", "__init__.py"):
        (tmp_path / name).touch()
    for path in (tmp_path, f"{tmp_path}/"):
        with pytest.raises(UserError) as wrong:
            load_config(path)
        assert wrong.value.reason == f"{tmp_path} is a folder"
        assert wrong.value.fix == f"give the path of a config such as {tmp_path / 'a.py'} or {tmp_path / 'b.py'}"


_NEEDS = {"events": {"categories": {"a": 5}}, "clips": {"labels": 3}, "gpt_oss": {"num_experts": 8},
          "deepseek_v3": {"num_experts": 8, "kv_rank": 8, "rope_head_dim": 4}, "mixtral": {"num_experts": 8},
          "clip": {"class_token": True, "image_size": 32, "pooling": "class"}, "qwen3_moe": {"num_experts": 8}}


def test_no_whole_number_is_without_a_bound():
    """Each is refused by its key before anything is counted by it."""
    keys = [({}, f"{section}.{field.name}") for section, cls in SECTIONS.items() if section != "model"
            for field in dataclasses.fields(cls) if get_type_hints(cls)[field.name] is int]
    keys += [({"name": name} | _NEEDS.get(name, {}), f"model.{field.name}") for name, cls in config_classes().items()
             for field in dataclasses.fields(cls) if get_type_hints(cls)[field.name] is int]
    assert len(keys) > 200
    for model, key in keys:
        for huge in (10**30, 2**63, 10**400, -(10**30)):
            with pytest.raises(UserError) as refusal:
                make_config({"model": model}, {key: huge})
            assert refusal.value.key == key and len(f"{refusal.value}") < 300


@pytest.mark.parametrize("key", ["model.num_layers", "model.embed_dim", "model.vocab_size", "data.seq_len", "mesh.fsdp",
                                 "train.accumulation", "data.global_batch_size", "model.max_seq_len"])
def test_what_is_counted_has_a_bound_of_its_own(key):
    with pytest.raises(UserError, match=rf"^{key}: 1,000,000,000 is above the limit; give [\d,]+ or less"):
        make_config({}, {key: 10**9})


def test_a_model_of_more_parameters_than_any_is_refused():
    with pytest.raises(UserError, match=r"^model: its sizes make 2.8e\+15 parameters, and the limit is 1e\+14; lower"):
        make_config({}, {"model.embed_dim": 2**16, "model.num_layers": 10_000, "model.mlp_dim": 2**22})
