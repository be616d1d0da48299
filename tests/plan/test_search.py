"""A search finds what fits, says why the rest does not, and what it picks can be built."""

import dataclasses
import itertools
import json
import re
import types

import jax
import pytest

import jaxtrain as jt
from jaxtrain.commands.plan import main
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import AXES
from jaxtrain.plan import preflight, search, targets
from jaxtrain.plan.cost.time import COPIES
from jaxtrain.plan.estimate import change, estimate
from jaxtrain.plan.report.table import Choice, Found, explained, keys, milliseconds
from jaxtrain.plan.targets import gigabytes
from tests.tiers import slow

TINY = {"mesh.fsdp": 1, "train.accumulation": 1, "data.global_batch_size": 16}


FREE = {"train.remat": "", "train.accumulation": 0}  # keys in which the layouts of one mesh differ


def tiny(**keys):
    return jt.load_config("configs/llama3_8b.py:tiny", {**TINY, **{k.replace("__", "."): v for k, v in keys.items()}})


@pytest.fixture(scope="module")
def found():
    config = tiny(data__global_batch_size=64)
    most = estimate(change(config, {"mesh.data": 8}), targets.TARGETS["h100"], 8)
    return search.search(config, _small(0.6 * most.bytes), 8, meshes_traced=4, refined=1)


def _small(memory):
    """H100s with so little memory that a tiny model has to be cut up."""
    return dataclasses.replace(targets.TARGETS["h100"], memory=memory / 0.92)


def test_stages_are_offered_for_the_layers_of_both_stacks():
    """A decoder of 4 layers behind an encoder of 32."""
    config = load_config("configs/whisper.py:large-v3-turbo")
    assert {mesh["mesh.stage"] for mesh in search.meshes(config, targets.TARGETS["h100"], 64)} == {1, 2, 4, 8, 16, 32}


@pytest.mark.exhaustive
def test_all_that_is_offered_fits_and_the_fastest_is_first(found):
    assert found.fitting
    assert all(choice.estimate.bytes <= found.target.room for choice in found.fitting)
    seconds = [choice.estimate.seconds for choice in found.fitting]
    assert seconds == sorted(seconds)
    assert found.pareto()[0] is found.fitting[0]


@pytest.mark.slow
def test_what_is_too_large_says_by_how_much_and_what_would_help(found):
    assert found.too_large
    for choice in found.too_large:
        assert choice.estimate.bytes > found.target.room
        assert f"{gigabytes(choice.estimate.bytes)} of" in found.why(choice)
    helped = [found.why(choice) for choice in found.too_large if " saves " in found.why(choice)]
    assert helped, [found.why(choice) for choice in found.too_large]


@pytest.mark.slow
def test_every_policy_is_tried_and_none_is_listed_that_only_wastes_memory(found):
    tried = {choice.overrides["train.remat"] for choice in [*found.fitting, *found.too_large]}
    assert {"full", "attention"} <= tried and any("dots" in remat for remat in tried)
    for one, other in itertools.permutations(found.fitting, 2):
        same = {**one.overrides, **FREE} == {**other.overrides, **FREE}
        wasteful = one.estimate.seconds >= other.estimate.seconds and one.estimate.bytes >= other.estimate.bytes
        assert not (same and wasteful), f"{one} is neither faster nor smaller than {other}"


def test_a_mesh_is_listed_only_with_what_is_faster_or_smaller():
    def choice(seconds, size, **keys):
        guess = types.SimpleNamespace(seconds=seconds, bytes=size, fits=True)
        return Choice({f"train.{key}" if key in ("remat", "accumulation") else f"mesh.{key}": value
                       for key, value in keys.items()}, guess)

    fastest, smaller, another = (choice(1.0, 9, fsdp=8, remat="attention", accumulation=1),
                                 choice(3.0, 5, fsdp=8, remat="full", accumulation=1),
                                 choice(4.0, 9, fsdp=4, remat="dots", accumulation=2))
    wasteful = choice(2.0, 9, fsdp=8, remat="dots", accumulation=2)
    found = Found(tiny(), targets.TARGETS["h100"], 8, fitting=[another, wasteful, smaller, fastest])
    found.sort()
    assert found.fitting == [fastest, smaller, another]


def test_keeping_more_for_the_backward_pass_takes_more_memory_and_less_time():
    keys = {"mesh.fsdp": 8, "mesh.data": 1, "data.global_batch_size": 8, "train.accumulation": 1}
    none, full = (estimate(jt.load_config("configs/llama3_8b.py", {**keys, "train.remat": remat}),
                           targets.TARGETS["h100"], 8) for remat in ("none", "full"))
    assert none.bytes > full.bytes
    assert none.seconds < full.seconds


def test_the_state_is_counted_to_the_byte():
    config = tiny(mesh__fsdp=4, mesh__data=2)
    guess, run = estimate(config, targets.TARGETS["h100"], 8), jt.build(config, devices=8)
    from jaxtrain.train_step.report import total

    assert guess.memory["parameters"] == total(run.abstract.params)
    assert guess.memory["optimizer"] == total(run.abstract.opt_state)
    assert sum(guess.memory.values()) == guess.bytes


@pytest.mark.slow
def test_an_offloaded_state_takes_the_hosts_memory_and_the_time_of_its_way():
    from jaxtrain.train_step.report import total

    config, target = tiny(mesh__fsdp=4, mesh__data=2), targets.TARGETS["h100"]
    kept, away = (estimate(change(config, {"optimizer.offload": offload}), target, 8) for offload in (False, True))
    state = total(jt.build(config, devices=8).abstract.opt_state)
    scalars = away.memory["optimizer"]
    assert 0 < scalars <= 16 and away.host == state - scalars
    assert away.bytes < kept.bytes - 0.9 * away.host
    assert kept.host == 0 and "copies from and to hosts" not in kept.time.parts
    assert away.time.parts["copies from and to hosts"] == pytest.approx(2 * away.host / target.host)


@pytest.mark.exhaustive
def test_the_state_goes_to_the_hosts_where_rows_cannot_be_accumulated():
    few = tiny(data__global_batch_size=8)  # as many as devices
    least = estimate(change(few, {"mesh.fsdp": 8, "train.remat": "full"}), targets.TARGETS["h100"], 8)
    found = search.search(few, _small(0.95 * least.bytes), 8, meshes_traced=6, refined=1)
    assert found.fitting and all(choice.overrides["optimizer.offload"] for choice in found.fitting)


@pytest.mark.exhaustive
def test_the_state_goes_to_the_hosts_where_nothing_else_fits():
    config = tiny(data__global_batch_size=64)
    least = estimate(change(config, {"mesh.data": 1, "mesh.fsdp": 8, "train.remat": "full", "optimizer.offload": True,
                                     "train.accumulation": 8}), targets.TARGETS["h100"], 8)
    found = search.search(config, _small(1.05 * least.bytes), 8, meshes_traced=6, refined=2)
    assert found.fitting and all(choice.overrides["optimizer.offload"] for choice in found.fitting)
    assert "offload=True" in f"{found.best}" and "--config.optimizer.offload=True" in keys(found, found.best)
    assert "in the hosts" in explained(found.best.estimate)
    few = tiny(data__global_batch_size=8)
    least = estimate(change(few, {"mesh.fsdp": 8, "train.remat": "full"}), targets.TARGETS["h100"], 8)
    small = dataclasses.replace(_small(0.95 * least.bytes), host_memory=10.0)
    found = search.search(few, small, 8, meshes_traced=6, refined=1)
    assert not found.fitting, "the hosts have no room either"
    assert any("in the hosts" in found.why(choice) for choice in found.too_large)
    plenty = search.search(config, targets.TARGETS["h100"], 8, meshes_traced=6, refined=2)
    assert not any(choice.overrides.get("optimizer.offload") for choice in plenty.fitting)


def test_sizes_in_words():
    assert [gigabytes(size) for size in (371.62e9, 12.34e9, 1.234e9, 3.4e7, 0)] == [
        "371.6", "12.3", "1.23", "0.034", "0"]
    assert [milliseconds(seconds) for seconds in (2.5, 0.00123, 4.56e-6, 0)] == ["2500.00", "1.23", "0.0046", "0"]


@pytest.mark.slow
def test_the_table_and_the_explanation_add_up(found):
    text = str(found)
    assert text.splitlines()[0].split() == ["layout", "GB", "step", "tokens/s", "MFU", "days", "cost"]
    assert str(found.fitting[0]) in text and found.why(found.too_large[0]) in text
    assert "With train.precision=float32 instead the first would take" in text
    assert found.otherwise.estimate.seconds > found.fitting[0].estimate.seconds
    best = found.fitting[0].estimate
    assert f"{gigabytes(best.bytes)} of {gigabytes(best.target.room)} GB" in explained(best)
    assert sum(best.time.parts.values()) == pytest.approx(best.seconds)


@pytest.mark.slow
def test_mesh_auto_builds_what_a_plan_has_first_for_the_devices_that_are_here(monkeypatch, capsys):
    chosen, fastest = [], search.fastest_mesh
    monkeypatch.setattr(search, "fastest_mesh", lambda *args: chosen.append(fastest(*args)) or chosen[-1])
    run = jt.build(jt.load_config("configs/gpt.py:tiny", {"mesh": "auto", "data.global_batch_size": 16}))
    assert run.mesh.size == jax.device_count()
    assert not run.config.mesh.auto
    _, metrics = run.step(run.init(), run.batch(0))
    assert float(metrics["loss"]) > 0
    config = ["--config=configs/gpt.py:tiny", "--config.mesh=auto", "--config.data.global_batch_size=16"]
    assert main([*config, "--target=cpux8"]) == 0
    assert f"1*  {chosen[0].best} " in capsys.readouterr().out


def test_mesh_auto_in_a_config_takes_the_place_of_sizes():
    config = jt.make_config({"mesh": {"tensor": 2, "rules": "fsdp"}}, {"mesh": "auto"})
    assert config.mesh.auto and config.mesh.tensor == 1 and config.mesh.rules == "fsdp"
    assert jt.make_config({"mesh": "auto"}).mesh.auto
    with pytest.raises(jt.UserError, match="no devices to choose for"):
        jt.build(config, devices=8)


@pytest.mark.slow
def test_what_cannot_fit_is_refused_with_what_does(monkeypatch):
    run = jt.build(tiny(mesh__data=8, train__remat="none", data__global_batch_size=64))
    need = estimate(run.config, targets.TARGETS["h100"], 8).bytes
    monkeypatch.setattr(targets, "here", lambda devices=None: _small(0.6 * need))
    with pytest.raises(jt.UserError, match=r"train\.check_memory: a step would take about") as refusal:
        preflight.check(run)
    fix = dict(word.split("=") for word in refusal.value.fix.removeprefix("use ").split())
    changed = change(run.config, {key: type(_at(run.config, key))(value) for key, value in fix.items()})
    assert estimate(changed, _small(0.6 * need), 8).fits
    monkeypatch.setattr(targets, "here", lambda devices=None: _small(2 * need))
    assert "predicted: " in preflight.check(run)


@pytest.mark.slow
def test_what_the_hosts_cannot_hold_is_refused(monkeypatch):
    run = jt.build(tiny(mesh__data=8, data__global_batch_size=64, optimizer__offload=True))
    state = estimate(run.config, targets.TARGETS["h100"], 8).host
    for room, replays, fits in ((1.1, 0, True), (0.9, 0, False), (1.1, 10, False), (2.1, 10, True)):
        monkeypatch.setattr(targets, "here", lambda devices=None, room=room: dataclasses.replace(
            targets.TARGETS["h100"], host_memory=room * state / 0.8))
        asked = dataclasses.replace(run, config=change(run.config, {"resilience.replay_every": replays}))
        if fits:
            assert "predicted: " in preflight.check(asked)
        else:
            with pytest.raises(jt.UserError, match=r"optimizer\.offload: it takes .* GB of the host's memory"):
                preflight.check(asked)


def _at(config, key):
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def test_devices_that_nobody_knows_stop_no_run(monkeypatch):
    def unknown(devices=None):
        raise jt.UserError("--target", "nothing is known of 'GPU 9000'", "describe it in a file for --targets")

    run = jt.build(tiny(mesh__data=8))
    monkeypatch.setattr(targets, "here", unknown)
    assert "nothing is known of 'GPU 9000'" in preflight.check(run)


@pytest.mark.slow
def test_a_mesh_given_to_build_is_the_one_predicted(monkeypatch):
    monkeypatch.setattr(targets, "here", lambda devices=None: targets.TARGETS["h100"])
    config = tiny(mesh__data=8)
    given = jt.build(config, mesh=jt.make_mesh(data=1, fsdp=8))
    assert preflight.check(given) == preflight.check(jt.build(change(config, {"mesh.data": 1, "mesh.fsdp": 8})))
    assert preflight.check(given) != preflight.check(jt.build(config))


def test_a_check_can_be_turned_off(monkeypatch):
    monkeypatch.setattr(targets, "here", lambda devices=None: _small(1e6))
    assert "predicted: " in preflight.check(jt.build(tiny(mesh__data=8, train__check_memory=False)))


@pytest.mark.parametrize(("words", "said"), [
    (["--target=h1000x8"], "--target: 'h1000x8' is not known"),
    (["--target=h100x8", "--config.mesh.tensr=2"], "there is no such key"),
    (["--target=h100x8", "--top=0"], "--top: 0 is too few"),
    (["--target=h100x8", "--global_batch_size=0"], "--global_batch_size: 0 is too few"),
    (["--target=h100x8", "--tokens=nan"], "--tokens: nan is too few"),
    (["--target=h100x8", "--globl_batch=8"], "did you mean '--global_batch_size'?"),
    (["--target=h100x8", "--config.mesh=auto", "--config.mesh.tensor=2"], "mesh.tensor: 2 was given with mesh=auto"),
    (["--target=h100x8", "--explain", "--config.mesh=auto"], "mesh=auto is not a layout yet"),
    (["--target=h100x8", "--config.mesh=hsdp"], "mesh.hsdp: without --explain the planner compares"),
    (["--target=h100x8", "--precisions=float32,bflot16"], "bflot16 is not a precision; did you mean 'bfloat16'?"),
    (["--target=h100x8", "--link=1"], "--link: it is the rate of a link between islands, and above 0"),
    (["--target=h100x8", "--slowest=3"], "--slowest: it is not a factor of 1 or more"),
    (["--target=h100x8", "--config.diloco.count=2", "--link=1", "--slowest=nan"], "--slowest: it is not a factor"),
    (["--target=h100x8", "--precisions=float32", "--explain"], "--explain keeps the config's precision"),
])
def test_mistakes_are_one_line(words, said, capsys):
    assert main(["--config=configs/gpt.py:tiny", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_a_plan_for_scripts(capsys):
    assert main(["--config=configs/gpt.py:tiny", "--target=h100x1", "--explain", "--json", "--tokens=1e6"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] and said["bytes"] == sum(said["memory"].values()) and said["mesh"]["data"] == 1
    assert said["days"] == pytest.approx(1e6 / said["tokens_per_s"] / 86400)


@pytest.mark.slow
@pytest.mark.parametrize(("slowest", "first"), [(1, "streaming"), (3, "asynchronous")])
def test_a_slow_island_changes_which_mode_is_fastest(slowest, first, capsys):
    keys = dict(count=8, fragments=2, overlap=5, compression="int4")
    main(["--config=configs/gpt.py:124m", "--target=h100x8", "--explain", "--link=1", f"--slowest={slowest}",
          *(f"--config.diloco.{key}={value}" for key, value in keys.items())])
    told = capsys.readouterr().out.partition("by links of 1 Gbit/s")[2].splitlines()
    assert told[1].split()[0] == first


@pytest.mark.slow
def test_the_keys_of_a_layout_give_that_layout(found):
    """Keys that are 1, as the stage of ZeRO or the number of micro-batches, may be others in the config."""
    for choice in found.fitting[:6]:
        words = dict(word.removeprefix("--config.").split("=") for word in keys(found, choice).split())
        config = load_config("configs/llama3_8b.py:tiny", {**TINY, "data.global_batch_size": 64, **words})
        again = estimate(config, found.target, found.devices)
        assert again.bytes == choice.estimate.bytes and again.seconds == choice.estimate.seconds


@pytest.mark.exhaustive
def test_other_precisions_are_ranked_where_they_are_asked_for():
    config, target = tiny(data__global_batch_size=64), targets.TARGETS["h100"]
    usual = search.search(config, target, 8, meshes_traced=2, refined=1)
    assert not any("train.precision" in choice.overrides for choice in usual.fitting) and usual.otherwise
    told: list[tuple[int, int]] = []
    ranked = search.search(config, target, 8, meshes_traced=2, refined=1, precisions=("float32", "bfloat16"),
                           progress=lambda *counts: told.append(counts))
    assert [done for done, _ in told] == [*range(1, len(told) + 1)]
    assert len(told) / 2 < sum(told[1]) < 2 * len(told) and told[-1][1] <= search.VARIANTS < told[0][1]
    everything = [choice for choice in ranked.fitting if choice.overrides["train.remat"] == "none"]
    assert everything and len(told) < 12, "where all results fit, what keeps less is not looked at"
    found = {choice.overrides.get("train.precision") for choice in ranked.fitting}
    assert found == {None, "float32"}, "bfloat16 is what the config means, and is ranked already"
    assert [choice.estimate.seconds for choice in ranked.fitting] == sorted(
        choice.estimate.seconds for choice in ranked.fitting)
    same = [choice for choice in ranked.fitting if "train.precision" not in choice.overrides]
    assert [choice.overrides for choice in same] == [choice.overrides for choice in usual.fitting]
    single = change(config, {"train.precision": "float32"})
    small = _small(0.8 * min(choice.estimate.bytes for choice in search.search(
        single, target, 8, meshes_traced=2, refined=1).fitting))
    assert search.search(single, small, 8, meshes_traced=2, refined=1, precisions=("bfloat16",)).fitting
    slow = next(choice for choice in ranked.fitting if "train.precision" in choice.overrides)
    assert "precision=float32" in f"{slow}" and "--config.train.precision=float32" in keys(ranked, slow)


@pytest.mark.exhaustive
def test_every_stage_of_zero_is_looked_at():
    config = tiny(data__global_batch_size=64)
    large = search.search(config, targets.TARGETS["h100"], 8, meshes_traced=2, refined=2)
    copies = [choice for choice in large.fitting if choice.mesh["mesh.data"] > 1]
    assert {choice.overrides["optimizer.zero_stage"] for choice in copies} == {0, 1}


@pytest.mark.parametrize(("name", "alone", "bytes_each"), [
    ("adamw", "parameters", 4), ("adafactor", "parameters and optimizer", 4)])
def test_nothing_fits(name, alone, bytes_each, tmp_path, capsys):
    (tmp_path / "small.json").write_text('{"small": {"like": "h100", "memory": 100000}}')
    with pytest.raises(SystemExit) as stop:
        main(["--config=configs/gpt.py:tiny", f"--config.optimizer.name={name}", "--target=smallx2",
              f"--targets={tmp_path}/small.json"])
    assert stop.value.code == 1
    least = re.match(rf"nothing fits 2 x small: {alone} alone need (\d+) devices\n", capsys.readouterr().out)
    state = bytes_each * 125_000 * 0.9  # of the smallest model, about
    assert state / 100_000 < int(least[1]) <= 4 * state / 100_000


@pytest.mark.exhaustive
def test_remat_auto_keeps_as_much_as_fits(monkeypatch):
    """Everything where it fits; else the first layers keep less, and one layer more of those that keep more would not
    fit.
    """
    config = jt.load_config("configs/llama3_8b.py", {
        "mesh.fsdp": 8, "data.global_batch_size": 8, "train.accumulation": 1, "model.num_layers": 8,
        "train.remat": "auto", "data.source": "README.md"})
    sizes = {remat: estimate(change(config, {"train.remat": remat}), targets.TARGETS["h100"], 8).bytes
             for remat in ("none", "attention", "attention_and_dots")}
    assert search.remat_that_fits(config, _small(1.1 * sizes["none"]), 8).overrides["train.remat"] == "none"

    monkeypatch.setattr(search, "WORTH", 0.0)  # nothing is worth a copy to the hosts
    room = (sizes["attention"] + sizes["attention_and_dots"]) / 2
    target = _small(room / search.CAREFUL)
    mixed = search.remat_that_fits(config, target, 8).overrides["train.remat"]
    name, count, more = re.fullmatch(r"(\w+):(\d),(\w+)", mixed).groups()
    assert estimate(change(config, {"train.remat": mixed}), target, 8).bytes <= room
    one_more = f"{name}:{int(count) - 1},{more}" if int(count) > 1 else more
    assert estimate(change(config, {"train.remat": one_more}), target, 8).bytes > room
    assert search.remat_that_fits(config, _small(0.1 * sizes["attention"]), 8) is None

    monkeypatch.setattr(targets, "here", lambda devices=None: target)
    assert preflight.resolve(config, jax.devices()[:8]).train.remat == mixed
    with pytest.raises(jt.UserError, match=r"train.remat: the planner knows only .*; name a policy, such as full"):
        preflight.resolve(config, jax.devices()[:8], own_parts=True)
    with pytest.raises(jt.UserError, match=r"train.remat: the planner chooses it for the mesh of the config"):
        jt.build(config, mesh=jt.make_mesh(fsdp=8))


def test_results_on_hosts_take_their_memory_and_pass_partly_behind_products():
    config, target = tiny(mesh__data=8, data__global_batch_size=64), targets.TARGETS["h100"]
    kept, away = (estimate(change(config, {"train.remat": remat}), target, 8) for remat in ("mlp", "mlp@host"))
    both = 2 * 2 * 8 * 64 * config.model.mlp_dim * 2  # layers, gate and up, rows of a device, tokens, width, bytes
    assert away.host == both and kept.host == 0
    assert away.bytes < kept.bytes
    assert away.time.parts[COPIES] > away.time.hidden[COPIES] > 0


@pytest.mark.parametrize(("asked", "compared"), [
    *slow(("auto", {"ulysses", "ring", "gather"})), ("gather", {"gather"})])
def test_strategies_of_context_parallelism_are_compared_unless_one_is_asked_for(asked, compared):
    found = Found(tiny(mesh__context_strategy=asked), targets.TARGETS["h100"], 2)
    look = search._Looker(found)
    mesh = dict.fromkeys((f"mesh.{axis}" for axis in AXES), 1) | {"mesh.context": 2}
    start = look.at({**mesh, "train.accumulation": 1, "train.remat": "full"})
    look.across(start)
    assert {choice.estimate.strategy for choice in found.fitting} == compared
    said = {f"{choice}".partition("context_strategy=")[2].partition(" ")[0] for choice in found.fitting[1:]}
    assert said == compared - {start.estimate.strategy}
    assert f"attention over context by {start.estimate.strategy}:" in explained(start.estimate)
