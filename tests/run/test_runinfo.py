"""A workdir says which run it holds, and refuses to become another."""

import json

import pytest

from jaxtrain.config.load import load_config, make_config
from jaxtrain.config.sections.earlier_keys import REMOVED
from jaxtrain.errors import UserError
from jaxtrain.run.runinfo import MAY_CHANGE, check_workdir, make_workdir, write_run_files
from tests.odd_files import ODD, WRONG, device, fifo, folder, in_time, text


def write(workdir, overrides=None, manifest="abc"):
    config = make_config({}, overrides)
    write_run_files(workdir, config, mesh_sizes={"data": 8, "tensor": 1}, device_kind="cpu",
                    data_manifest_hash=manifest)
    return config


def test_files(tmp_path):
    config = write(tmp_path / "new" / "run")
    folder = tmp_path / "new" / "run"
    assert json.loads((folder / "config.json").read_text()) == config.to_dict()
    run = json.loads((folder / "run.json").read_text())
    assert run["config_hash"] == config.hash() and run["data_manifest_hash"] == "abc" and run["process_count"] == 1
    assert run["mesh"] == {"data": 8, "tensor": 1} and run["device_kind"] == "cpu"
    assert run["packages"].keys() == {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "numpy"}
    assert all(run["packages"].values()) and run["python"].startswith("3.") and run["platform"]
    assert run["git_commit"] is None or len(run["git_commit"].removesuffix("-dirty")) == 40
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "run.json"]


@pytest.mark.parametrize("key", ["model.num_layers=3", "data.seed=1", "data.seq_len=128", "data.global_batch_size=8",
                                 "optimizer.b1=0.5", "train.seed=1", "train.steps=200", "train.z_loss=0.1"])
def test_other_mathematics_is_refused(tmp_path, key):
    config = write(tmp_path)
    key, value = key.split("=")
    section, name = key.split(".")
    before = config.to_dict()[section][name]
    with pytest.raises(UserError) as error:
        write(tmp_path, {key: value})
    allow = f"add --may_change={key} to continue it so, or " * (key in MAY_CHANGE)
    assert str(error.value) == (f"--workdir: {tmp_path} holds a run with {key}={before}, this config has {value}; "
                                f"{allow}give another --workdir or --config.{key}={before}")
    assert json.loads((tmp_path / "config.json").read_text()) == config.to_dict()


@pytest.mark.parametrize("key", sorted(MAY_CHANGE))
def test_what_is_named_may_change_and_is_recorded(tmp_path, key):
    read = {"optimizer.name": "muon"} if key == "optimizer.momentum" else {}  # adamw refuses it
    write(tmp_path, read)
    value = {"train.steps": 200, "optimizer.schedule": "linear", "optimizer.warmup_steps": 7}.get(key, 0.5)
    config = make_config({}, {**read, key: value})
    for may_change, done in (((key, "optimizer.eps"), 60), ((), 80)):  # it is the workdir's own from then on
        write_run_files(tmp_path, config, mesh_sizes={}, device_kind="cpu", data_manifest_hash="abc", done=done,
                        may_change=may_change)
    section, name = key.split(".")
    change = {"step": 60, "key": key, "before": make_config({}).to_dict()[section][name], "after": value}
    assert json.loads((tmp_path / "run.json").read_text())["config_changes"] == [change]
    assert json.loads((tmp_path / "config.json").read_text()) == config.to_dict()


def test_all_that_must_be_allowed_is_named_at_once(tmp_path):
    write(tmp_path)
    config = make_config({}, {"train.steps": 200, "optimizer.warmup_steps": 10})
    for may_change in ((), ("train.steps",)):
        with pytest.raises(UserError, match=r"; add --may_change=(train.steps|optimizer.warmup_steps),"
                                            r"(train.steps|optimizer.warmup_steps) to continue it so, or give"):
            check_workdir(tmp_path, config, may_change=may_change)
    check_workdir(tmp_path, config, may_change=("train.steps", "optimizer.warmup_steps"))
    check_workdir(tmp_path, config, may_change=("train.epochs", "optimizer.warmup_steps"))  # which are steps by now
    with pytest.raises(UserError, match=r"model.num_layers=.* or --config.model.num_layers=[0-9]+$"):
        check_workdir(tmp_path, make_config({}, {"train.steps": 200, "model.num_layers": 3}))


@pytest.mark.parametrize("key", ["train.z_loss", "model.mlp_dim"])  # its default is a number; it follows from others
def test_a_run_from_before_a_key_existed_had_its_default(tmp_path, key):
    write(tmp_path)
    section, name = key.split(".")
    started = json.loads((tmp_path / "config.json").read_text())
    before = started[section].pop(name)
    (tmp_path / "config.json").write_text(json.dumps(started))
    check_workdir(tmp_path, make_config({}))
    with pytest.raises(UserError, match=rf"holds a run with {key}={before}, this config has 96[.0]*;"):
        check_workdir(tmp_path, make_config({}, {key: 96}))


@pytest.mark.parametrize("key", ["model.num_layers", "data.seed", "train.stpes"])
def test_what_shapes_the_state_or_the_data_cannot_be_named(tmp_path, key):
    with pytest.raises(UserError, match=rf"^--may_change: {key} cannot change in a run; "):
        check_workdir(tmp_path, make_config({}), may_change=[key])


def test_the_rest_may_change(tmp_path):
    write(tmp_path)
    changed = {"mesh.tensor": 2, "mesh.rules": "dp", "optimizer.zero_stage": 1, "checkpoint.keep": 5,
               "data.cache_dir": "elsewhere", "data.prefetch": 4, "train.accumulation": 2, "train.remat": "full",
               "train.precision": "float32", "train.log_every": 7, "train.progress": False,
               "pipeline.microbatches": 4, "train.check_memory": False, "train.expert_exchange": "gather",
               "train.grouped_matmul": "xla", "train.recurrent_kernel": "xla", "train.expert_buffer": 0.0,
               "train.patience": 3, "train.eval_every": 5}
    config = write(tmp_path, changed)
    assert json.loads((tmp_path / "config.json").read_text()) == config.to_dict()


def test_a_run_that_wrote_keys_which_were_removed_goes_on(tmp_path):
    config = write(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    for key, default in REMOVED.items():
        section, _, name = key.partition(".")
        said[section][name] = default
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert check_workdir(tmp_path, config, done=5) == []
    assert load_config(tmp_path / "config.json") == config


def test_exact_sums_may_cross_once_a_step_from_here_on_and_lossy_ones_may_not(tmp_path):
    """A run with mesh=hsdp may go on within one node, for example."""
    write(tmp_path, {"compression.method": "exact", "optimizer.zero_stage": 2})
    write(tmp_path)
    write(tmp_path, {"compression.method": "exact"})
    with pytest.raises(UserError, match=r"holds a run with compression\.method=exact, this config has int8"):
        write(tmp_path, {"compression.method": "int8"})


def test_constant_schedule_may_be_extended(tmp_path):
    write(tmp_path, {"optimizer.schedule": "constant"})
    write(tmp_path, {"optimizer.schedule": "constant", "train.steps": 200})


def test_a_warm_up_that_is_over_may_have_another_length(tmp_path):
    """A constant schedule can still be extended if its warm-up is given as a part of train.steps."""
    keys = {"optimizer.schedule": "constant", "optimizer.warmup_steps": 5}
    write(tmp_path, keys)
    longer = make_config({}, keys | {"train.steps": 200, "optimizer.warmup_steps": 10})
    with pytest.raises(UserError, match=r"optimizer.warmup_steps=5, this config has 10"):
        check_workdir(tmp_path, longer, done=9)
    assert check_workdir(tmp_path, longer, done=10) == []


def test_other_data_is_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match=r"^--workdir: .* manifest abc, now xyz; "):
        write(tmp_path, manifest="xyz")
    write(tmp_path, manifest=None)


def test_config_of_an_older_schema(tmp_path):
    write(tmp_path)
    old = json.loads((tmp_path / "config.json").read_text())
    del old["train"]["z_loss"], old["checkpoint"]
    (tmp_path / "config.json").write_text(json.dumps(old))
    write(tmp_path)


def test_unwritable(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for workdir in (tmp_path / "file", tmp_path / "file" / "below", "/proc", "/proc/nothing", "/dev/null"):
        with pytest.raises(UserError, match=r"^--workdir: .* cannot be written \("):
            check_workdir(workdir, make_config({}))


def test_checkpoints_that_cannot_be_written(tmp_path):
    """Told at the start, and not at the first save."""
    check_workdir(tmp_path, make_config({}))
    for target in ("/proc", "nowhere"):
        (tmp_path / "checkpoints").symlink_to(target)
        with pytest.raises(UserError, match=r"^--workdir: .*/checkpoints cannot be written \("):
            make_workdir(tmp_path)
        (tmp_path / "checkpoints").unlink()
    (tmp_path / "checkpoints").mkdir()
    make_workdir(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_folder_where_the_file_belongs(tmp_path):
    (tmp_path / "run.json").mkdir()
    with pytest.raises(UserError, match=r"^--workdir: "):
        write(tmp_path)


def test_broken_config_file(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not valid JSON"):
        write(tmp_path)


@pytest.mark.parametrize("make", [*ODD, *WRONG], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["config.json", "run.json"])
def test_a_file_that_is_not_one_of_a_run(tmp_path, name, make):
    config = write(tmp_path)
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(UserError, match=rf"--workdir: .*{name} .*; give another --workdir") as error:
        in_time(lambda: check_workdir(tmp_path, config))
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("name, content", [
    ("config.json", {"model": [1]}), ("config.json", {"data": {"no_such_key": 1}}), ("config.json", {"train": {}}),
    ("config.json", {"data": {"stages": None}}), ("config.json", {"data": {"mixture": [3]}}),
    ("run.json", {"own_parts": [1]}), ("run.json", {"own_parts": {"optimizer": {}}}), ("run.json", {"data_changes": 3}),
    ("run.json", {"data_manifests": None}), ("run.json", {"data_manifests": {"": [1]}}),
])
def test_a_file_of_another_form(tmp_path, name, content):
    config = write(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        check_workdir(tmp_path, config, {"": "abc"}, done=3, parts={"optimizer": {"state": "a", "update": {}}})
    assert error.value.key == "--workdir"


@pytest.mark.parametrize("name, make, words", [
    ("metrics.jsonl", fifo, "is not a file"), ("metrics.jsonl", folder, "is not a file"),
    ("metrics.jsonl", device, "is not a file"), ("checkpoints", text("x"), "is not a folder"),
    ("checkpoints", fifo, "is not a folder")])
def test_what_could_not_be_written_later_is_refused_at_the_start(tmp_path, name, make, words):
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"--workdir: .*{name} {words}; move it away"):
        write(tmp_path)


def test_files_of_an_earlier_start_are_no_obstacle(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    write(tmp_path)
