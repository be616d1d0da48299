"""Pipeline schedules: published lengths and memory, what validation refuses, and a run of the executor's table."""

import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxtrain.commands.schedules import main
from jaxtrain.config.schema import PipelineConfig
from jaxtrain.errors import UserError
from jaxtrain.parallel import schedules
from jaxtrain.parallel.pipeline.pipeline import make_schedules
from jaxtrain.parallel.schedules import Column as C
from jaxtrain.parallel.schedules import Hop, Op, make
from jaxtrain.parallel.schedules.drawing import write_svg
from tests.tiers import exhaustive, slow

DOCS = Path(__file__).parents[3] / "docs/schedules"
SIZES = [(p, m) for p in (1, 2, 4, 8) for m in sorted({1, 3, p - 1, p, p + 1, 2 * p, 2 * p + 3, 4 * p} - {0})]
PUBLISHED = [(p, m) for p in (2, 4, 8) for m in (p, p + 1, 2 * p, 3 * p - 1, 4 * p, 33)]
VARIANTS = [("gpipe", 1, False), ("gpipe", 2, False), ("gpipe", 1, True), ("1f1b", 1, False), ("1f1b", 1, True),
            ("interleaved", 2, False), ("interleaved", 3, False), ("interleaved", 2, True), ("interleaved", 3, True),
            ("zb_h1", 1, False), ("zb_v", 2, False)]
each_variant = pytest.mark.parametrize("name, chunks, paired", VARIANTS)
each_latency = pytest.mark.parametrize("latency", (1, 2))


def each(count, schedule):
    return [count(stage) for stage in range(schedule.stages)]


# --------------------------------------------------------------------------------------------- what has been published


@pytest.mark.parametrize("p, m", [*PUBLISHED, (4, 1), (4, 3), (8, 5), (1, 1), (1, 7)])
def test_gpipe_and_1f1b_last_as_long_and_hold_as_much_as_published(p, m):
    for name, held in (("gpipe", [m] * p), ("1f1b", [min(m, p - stage) for stage in range(p)])):
        made = make(name, p, m)
        assert made.length == 2 * (m + p - 1), name
        assert each(made.idle, made) == [2 * (p - 1)] * p, name
        assert each(made.in_flight, made) == held, name
        assert made.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("p, m", PUBLISHED)
@pytest.mark.parametrize("v", (2, 3))
def test_interleaved_is_as_published_and_stays_so_when_stages_do_not_divide_micro_batches(p, m, v):
    made = make("interleaved", p, m, v)
    assert made.length == 2 * (m * v + p - 1)
    group = -(-m // (m // p))  # p where p divides m: then this is Megatron's number of warm-up forwards, and one more
    assert each(made.in_flight, made) == [min(m * v, 2 * (p - 1 - s) + (v - 1) * group + 1) for s in range(p)]


@pytest.mark.parametrize("p, m", PUBLISHED)
@each_latency
def test_paired_schedules_lose_two_way_trips_and_nothing_else(p, m, latency):
    way = latency * (p - 1)
    made = make("1f1b", p, m, paired=True, latency=latency)
    assert made.length == m + 2 * way
    assert each(made.in_flight, made) == [min(m, 2 * latency * (p - 1 - s) + 1) for s in range(p)]
    if m >= latency * p:
        group, v = -(-m // (m // (latency * p))), 2
        made = make("interleaved", p, m, v, paired=True, latency=latency)
        assert made.length == m * v + 2 * way + (v - 1) * group
        assert all(held <= 2 * latency * (p - 1 - s) + (v - 1) * group + 1
                   for s, held in enumerate(each(made.in_flight, made)))


@pytest.mark.parametrize("p, m", PUBLISHED)
def test_zb_h1_has_a_third_of_the_bubble_in_the_memory_of_1f1b(p, m):
    made = make("zb_h1", p, m)  # m >= p
    assert made.length == 3 * m + p - 1
    assert each(made.idle, made) == [p - 1] * p
    assert max(made.in_flight(stage, until="W") for stage in range(p)) == p
    assert each(made.in_flight, made) <= each(make("1f1b", p, m).in_flight, made)


@pytest.mark.parametrize("p, m", PUBLISHED)
def test_zb_v_leaves_no_stage_idle_once_it_has_begun_in_the_memory_of_1f1b(p, m):
    made = make("zb_v", p, m, 2)
    assert made.length == 6 * m + p - 1  # no schedule is shorter: the last stage begins at tick p - 1
    assert max(made.in_flight(stage, until="W") for stage in range(p)) == 2 * p  # half a stage each
    for latency in (1, 2):
        m = max(m, 2 * latency * p)
        made = make("zb_v", p, m, 2, latency=latency)
        assert each(made.bubble, made) == [0] * p
        assert made.length == 6 * m + latency * (p - 1)


@pytest.mark.parametrize("p, m", PUBLISHED)
def test_transfers_that_overlap_a_tick_cost_a_tick_per_hop(p, m):
    assert make("1f1b", p, m, latency=2).length <= 2 * (m + 2 * (p - 1))
    if m >= 2 * p:
        assert make("interleaved", p, m, 2, latency=2).length == 2 * (2 * m + 2 * (p - 1))
        assert make("zb_h1", p, m, latency=2).length == 3 * m + 2 * (p - 1)


@each_latency
@pytest.mark.parametrize("p, m", SIZES)
@pytest.mark.parametrize("chunks", (1, 2, 3))
def test_forwards_alone_wait_only_for_the_pipeline_to_fill(latency, p, m, chunks):
    made = schedules.forward_only(p, m, chunks, latency=latency)
    # The last group is short of latency x p micro-batches unless they divide: that many ticks pass at each round.
    short = -m % (latency * p) if p > 1 else 0
    assert made.length == m * chunks + latency * (p - 1) + (chunks - 1) * short
    assert made.kinds == "F"


def test_free_running_and_lockstep_times():
    p, m = 4, 8
    ones = make("1f1b", p, m)
    assert schedules.free_running_time(ones, 1, 1, 1) == 3 * (m + p - 1)  # arXiv 2104.04473: (m + p - 1)(f + b)
    assert schedules.modelled_time(ones, 1, 1, 1) > 3 * (m + p - 1)  # F beside B: each tick waits for B
    paired = make("1f1b", p, m, paired=True)
    assert schedules.modelled_time(paired, 1, 1, 1) == 3 * (m + p - 1)
    assert schedules.efficiency(paired, 1, 1, 1) == pytest.approx(m / (m + p - 1))
    interleaved = make("interleaved", p, m, 2, paired=True)
    assert schedules.modelled_time(interleaved, 1, 1, 1) == 3 * (2 * m + p - 1) / 2
    zero = make("zb_h1", p, m)
    assert schedules.free_running_time(zero) == schedules.modelled_time(zero) == 3 * m + p - 1
    assert schedules.ideal_time(zero, 1, 2, 3) == schedules.ideal_time(ones, 1, 2, 3) == 6 * m


# ------------------------------------------------------------------------------------------- the table, run in symbols


def run(schedule):
    """Walk the executor's table with names in place of arrays; every read must find the name that it should."""
    table, p, latency = schedules.table(schedule), schedule.stages, schedule.latency
    counts = (table.activations, table.gradients, table.weight_slots)
    acts, grads, weights = ([[None] * (count + 1) for _ in range(p)] for count in counts)
    sent = [{} for _ in range(p)]  # by stage: ring -> message
    seen = []

    def g(stage, row, kind):
        return schedule.position[stage][row[C[f"{kind}_CHUNK"]]]

    for rows in table.op:
        arriving, sent = sent, [{} for _ in range(p)]

        def deliver(stage, row, arriving=arriving):
            for ring, source in (("RIGHT", (stage - 1) % p), ("LEFT", (stage + 1) % p)):
                message = arriving[source].get(ring)
                act, grad = row[C[f"{ring}_ACT"]], row[C[f"{ring}_GRAD"]]
                wanted = (act < table.activations) + (grad < table.gradients)
                assert wanted == (message is not None), "a slot for each message, and no other"
                acts[stage][act] = grads[stage][grad] = message
                acts[stage][-1] = grads[stage][-1] = "trash"

        for stage, row in enumerate(rows):
            if latency == 1:
                deliver(stage, row)
            send = sent[stage]

            def output(kind, message, row=row, stage=stage, send=send):
                hop = Hop(row[C[f"{kind}_TO"]])
                if hop == Hop.SELF:
                    (acts if kind == "F" else grads)[stage][row[C[f"{kind}_SELF"]]] = message
                elif hop != Hop.NOWHERE:
                    assert send.setdefault(hop.name, message) == message
                return hop

            if row[C.F_ON]:
                m, at, slot = row[C.F_MB], g(stage, row, "F"), row[C.F_IN]
                if at == 0:
                    acts[stage][slot] = ("F", m, -1)  # the embedding's output
                assert acts[stage][slot] == ("F", m, at - 1)
                assert (output("F", ("F", m, at)) == Hop.NOWHERE) == (at == schedule.last)
                seen.append(("F", m, at))
            if row[C.B_ON]:
                m, at = row[C.B_MB], g(stage, row, "B")
                assert acts[stage][row[C.B_IN]] == ("F", m, at - 1)
                if at == schedule.last:
                    assert row[C.B_GRAD] == table.gradients and ("F", m, at) in seen
                else:
                    assert grads[stage][row[C.B_GRAD]] == ("B", m, at + 1)
                weights[stage][row[C.B_STORE]] = ("pair", m, at)
                assert (output("B", ("B", m, at)) == Hop.NOWHERE) == (at == 0)
                seen.append(("B", m, at))
            if row[C.W_ON]:
                m, at = row[C.W_MB], g(stage, row, "W")
                assert row[C.W_FROM] < table.weight_slots and weights[stage][row[C.W_FROM]] == ("pair", m, at)
                seen.append(("W", m, at))
        if latency == 2:
            for stage, row in enumerate(rows):
                deliver(stage, row)
    wanted = itertools.product(schedule.kinds, range(schedule.microbatches), range(schedule.last + 1))
    assert sorted(seen) == sorted(wanted)
    return table


@each_variant
@pytest.mark.parametrize("latency", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_operation_finds_what_it_should_in_the_slots_it_is_told(name, chunks, paired, latency):
    for p, m in SIZES:
        made = make(name, p, m, chunks, paired=paired, latency=latency)
        table = run(made)
        # An input may arrive before its F, so slots may exceed inputs in flight.
        assert max(each(made.in_flight, made)) <= table.activations <= m * chunks


@each_latency
def test_evaluation_finds_what_it_should_too(latency):
    for p, m in SIZES:
        run(schedules.forward_only(p, m, latency=latency))
        run(schedules.forward_only(p, m, 2, latency=latency))
        run(schedules.forward_only(p, m, 2, latency=latency, position=schedules.v_shape(p)))


def test_slots_are_as_few_as_published():
    for p, m in PUBLISHED:
        table = schedules.table(make("1f1b", p, m, paired=True))
        assert (table.activations, table.gradients, table.weight_slots) == (min(m, 2 * p - 1), 1, 0)
        assert schedules.table(make("gpipe", p, m)).activations == m
        assert schedules.table(make("1f1b", p, m)).activations == p
        assert schedules.table(schedules.forward_only(p, m)).activations == 1


@each_variant
@pytest.mark.parametrize("latency", [*exhaustive(1), *slow(2)])  # with 1, the published numbers are tested above
def test_slots_are_as_few_as_values_live_at_once(name, chunks, paired, latency):
    for p, m in SIZES:
        made = make(name, p, m, chunks, paired=paired, latency=latency)
        act, grad, weight = ([[0] * made.length for _ in range(p)] for _ in range(3))

        def live(values, stage, begin, end):
            values[stage][begin:end + 1] = [count + 1 for count in values[stage][begin:end + 1]]

        for k, g in itertools.product(range(m), range(made.last + 1)):
            def tick(kind, g, k=k, made=made):
                return made.at[made.place[g][0], Op(kind, k, made.place[g][1])]

            def arrives(kind, source, g=g, made=made, tick=tick):
                return tick(kind, source) + (latency if made.place[source][0] != made.place[g][0] else 0)

            stage = made.place[g][0]
            live(act, stage, arrives("F", g - 1) if g else tick("F", g), tick("B", g))
            if g < made.last:
                live(grad, stage, arrives("B", g + 1), tick("B", g))
            if "W" in made.kinds:
                live(weight, stage, tick("B", g), tick("W", g))
        table = schedules.table(made)
        assert [table.activations, table.gradients, table.weight_slots] == [
            max(map(max, values)) for values in (act, grad, weight)]


def test_the_run_in_symbols_sees_a_wrong_table(monkeypatch):
    made, whole = make("zb_v", 2, 4, 2), schedules.table
    for column in (C.F_IN, C.F_TO, C.F_SELF, C.B_IN, C.B_GRAD, C.B_STORE, C.B_TO, C.W_FROM, C.RIGHT_ACT, C.LEFT_GRAD):
        def wrong(schedule, column=column):
            table = whole(schedule)
            values = sorted(set(table.op[..., column].flat))
            op = table.op.copy()
            rotated = {a: b for a, b in zip(values, values[1:] + values[:1], strict=True)}
            op[..., column] = [[rotated[value] for value in row] for row in op[..., column]]
            return replace(table, op=op)

        monkeypatch.setattr(schedules, "table", wrong)
        with pytest.raises((AssertionError, IndexError, ValueError)):
            run(made)


# ---------------------------------------------------------------------------------------------------- what is refused


def edited(schedule, change):
    """The same schedule with its cells, as lists [tick][stage] of operations, changed."""
    cells = [[list(cell) for cell in row] for row in schedule.ticks]
    change(cells)
    return replace(schedule, ticks=tuple(tuple(map(tuple, row)) for row in cells))


def refusal(schedule, change):
    with pytest.raises(UserError) as caught:
        schedules.validate(edited(schedule, change))
    assert caught.value.key == "pipeline.schedule"
    return str(caught.value)


def test_a_missing_operation_is_named():
    assert "stage 1 never does B0" in refusal(make("1f1b", 2, 4), lambda cells: cells[2][1].clear())
    made = make("zb_h1", 2, 2)
    tick = made.at[0, Op("W", 1)]
    assert "stage 0 never does W1" in refusal(made, lambda cells: cells[tick][0].clear())


def test_a_repeated_operation_is_named():
    message = refusal(make("1f1b", 2, 4), lambda cells: cells.append([[Op("F", 0)], []]))
    assert "stage 0, tick 10, F0: it was done at tick 0 already" in message


def test_data_that_have_not_arrived_are_named():
    def swap(cells):
        cells[0][0], cells[1][0] = cells[1][0], cells[0][0]

    message = refusal(make("1f1b", 2, 4), swap)
    assert "stage 1, tick 1, F0: its input (F0 of stage 0, tick 1) is not there before tick 2" in message
    overlapped = replace(make("1f1b", 2, 4), latency=2)
    assert "is not there before tick 2" in refusal(overlapped, lambda cells: None)
    made = make("gpipe", 2, 1)  # F0 . | . F0 | . B0 | B0 .

    def early(cells):
        cells[3][0], cells[2][0] = [], [Op("B", 0)]

    message = refusal(made, early)
    assert "stage 0, tick 2, B0: its gradient (B0 of stage 1, tick 2) is not there before tick 3" in message


def test_weight_gradients_wait_for_their_b():
    made = make("zb_h1", 1, 1)
    message = refusal(made, lambda cells: cells[1][0].insert(1, cells.pop()[0][0]) or cells[0][0].append(
        cells[1][0].pop()))
    assert "W0: its stored gradient (B0 of stage 0, tick 1) is not there" in message


def test_one_operation_of_a_kind_per_tick_in_order():
    assert "at most one F" in refusal(make("1f1b", 1, 2), lambda cells: cells[0][0].append(cells[2][0].pop()))
    assert "then one B" in refusal(make("1f1b", 1, 1, paired=True), lambda cells: cells[0][0].reverse())


def test_unknown_operations_and_stages_are_named():
    made = make("1f1b", 2, 2)
    for op in (Op("F", 2), Op("F", 0, 1), Op("X", 0), Op("FB", 0)):
        assert f"stage 1, tick 0, {op}: there is no such" in refusal(made, lambda cells, op=op: cells[0][1].append(op))
    assert "tick 1 has 3 stages, not 2" in refusal(made, lambda cells: cells[1].append([]))


def test_two_messages_on_one_ring_are_refused():
    made = make("zb_v", 3, 6, 2)

    def collide(cells):
        f, b = made.at[0, Op("F", 5)], made.at[0, Op("B", 0, 1)]
        cells[f][0], cells[b][0] = [], [Op("F", 5), Op("B", 0, 1)]  # the first F needs nothing: it may be earlier

    assert "both go right" in refusal(made, collide)


def test_placements_that_no_ring_serves_are_refused():
    made = make("gpipe", 4, 4)
    for position, words in ((((0,), (0,), (2,), (3,)), "does not give"), (((0,), (2,), (1,), (3,)), "not neighbours")):
        with pytest.raises(UserError, match=words):
            schedules.validate(replace(made, position=position))


@each_variant
def test_any_swap_drop_double_or_shift_is_refused_unless_the_table_still_runs(name, chunks, paired):
    draw, refused = random.Random(0), 0
    made = make(name, 4, 6, chunks, paired=paired)
    busy = [(tick, stage) for tick, stage, _ in made.walk()]

    def change(cells):
        (tick, stage), (other, _) = draw.choice(busy), draw.choice(busy)
        here, there = cells[tick][stage], cells[other][stage]
        kind = draw.choice(("swap", "drop", "double", "shift"))
        if kind == "swap":
            cells[tick][stage], cells[other][stage] = there, here
        elif kind == "drop":
            here.pop()
        elif kind == "double":
            cells.append([[here[0]] if s == stage else [] for s in range(made.stages)])
        else:
            for late in range(len(cells) - 1, tick, -1):
                cells[late][stage] = cells[late - 1][stage]
            here.clear()

    for _ in range(40):
        mutant = edited(made, change)
        if mutant.ticks == made.ticks:
            continue
        try:
            schedules.validate(mutant)
        except UserError:
            refused += 1
        else:
            run(mutant)
    assert refused >= 20


@pytest.mark.parametrize("arguments, words", [
    (("1f1c", 2, 2), "did you mean '1f1b'"), (("1f1b", 0, 2), "pipeline.stages: 0"),
    (("1f1b", 2, 0), "pipeline.microbatches: 0"), (("gpipe", 2, 2, 0), "pipeline.chunks: 0"),
    (("1f1b", 2, 2, 2), "use interleaved"), (("interleaved", 2, 2), "use 1f1b"), (("zb_v", 2, 2), "set it to 2")])
def test_what_cannot_be_made(arguments, words):
    with pytest.raises(UserError) as caught:
        make(*arguments)
    assert words in str(caught.value)


def test_options_that_do_not_fit():
    with pytest.raises(UserError, match="zb_h1 has one operation per tick"):
        make("zb_h1", 2, 2, paired=True)
    with pytest.raises(UserError, match="3 is neither 1 nor 2"):
        make("gpipe", 2, 2, latency=3)


# ----------------------------------------------------------------------------------------------------- files and flags


@each_variant
@each_latency
def test_tables_survive_files(tmp_path, name, chunks, paired, latency):
    made = make(name, 4, 5, chunks, paired=paired, latency=latency)
    path = tmp_path / f"{name}.json"
    schedules.to_json(made, path)
    assert schedules.from_file(path, 4, 5, chunks, latency=latency) == made
    path = tmp_path / f"{name}.csv"
    if name == "zb_v":
        with pytest.raises(UserError, match="write JSON"):
            schedules.to_csv(made, path)
        return
    schedules.to_csv(made, path)
    assert schedules.from_file(path, 4, 5, chunks, latency=latency) == made


def test_a_table_of_ones_own(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("F0,F1,,B0,B1\n,F0+B0, F1+B1\n")
    made = schedules.from_file(path, 2, 2)
    assert made.name == "mine" and made.length == 5 and made.ticks[1][1] == (Op("F", 0), Op("B", 0))
    run(made)


@pytest.mark.parametrize("name, content, words", [
    ("t.csv", "F0,B0\n", "has 1 rows for 2 stages"),
    ("t.csv", "F0,,,B0\n,F0,G0\n", "stage 1, tick 2: 'G0' names no operation"),
    ("t.csv", "F0,,B0\n,F0,B0\n", "stage 0, tick 2, B0: its gradient (B0 of stage 1, tick 2) is not there"),
    ("t.csv", "F0\n,F0\n", "has no B"),
    ("t.csv", "", "has 0 rows"),
    ("t.json", "{", "JSONDecodeError"),
    ("t.json", "[]", "TypeError"),
    ("t.json", '{"rows": []}', "KeyError"),
    ("t.json", json.dumps({"position": [[0], [0]], "stages": [["F0", "", "", "B0"], ["", "F0", "B0"]]}),
     "does not give"),
    ("t.json", '{"position": [[0.5], [1]], "stages": [["F0", "", "", "B0"], ["", "F0", "B0"]]}', "TypeError"),
    ("t.csv", "F" + "9" * 5000 + "\n,F0\n", "names no operation"),
    ("t.csv", '"' + "x" * 200_000, "is not valid CSV"),
    ("none.csv", None, "cannot be read"),
])
def test_a_bad_file_is_told_in_one_sentence(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        schedules.from_file(tmp_path / name, 2, 1)
    assert caught.value.key == "pipeline.table" and words in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_line_draws(capsys, tmp_path):
    svg = tmp_path / "a.svg"
    assert main(["--stages=2", "--microbatches=2", f"--output={svg}", "--no-recompute"]) == 0
    out = capsys.readouterr().out
    assert "stage 0  F0 F1 .  B0 .  B1" in out and "6, 33.3% empty" in out and "\033" not in out
    assert svg.read_text().count("<text") == 8 and ">B1</text>" in svg.read_text()
    assert main(["--paired", "--stages=1", "--microbatches=1", f"--output={svg}"]) == 0
    assert 'y="14" width="28" height="14"' in svg.read_text()  # B below F, in one cell
    capsys.readouterr()
    assert main(["--schedule=zb_v", "--latency=2"]) == 0 and "until W" in capsys.readouterr().out
    path = tmp_path / "mine.csv"
    schedules.to_csv(make("gpipe", 2, 3), path)
    assert main([f"--table={path}", "--stages=2", "--microbatches=3"]) == 0 and "mine" in capsys.readouterr().out


@pytest.mark.parametrize("name", schedules.NAMES)
def test_the_documentation_shows_schedules_as_they_are_executed(name, tmp_path):
    schedule, _ = make_schedules(PipelineConfig(schedule=name), 4, 8)
    write_svg(schedule, tmp_path / "now.svg")
    assert (tmp_path / "now.svg").read_text() == (DOCS / f"{name}.svg").read_text(), "draw it again with --output"


def test_the_report_compares(capsys):
    assert main(["--all", "--no-recompute"]) == 0
    lines = {line[:22].strip(): line[22:].split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert lines["zb_h1"][:2] == ["88.9%", "(88.9%)"] and lines["1f1b, paired"][0] == "72.7%"


def test_png_needs_matplotlib(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([f"--output={tmp_path / 'a.png'}"]) == 2
    assert "'.[plots]'" in capsys.readouterr().err


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    assert main([f"--output={tmp_path / 'a.png'}"]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags, words", [
    (["--stage=2"], "--stage=2: there is no such flag; did you mean '--stages'?"), (["--stages=two"], "invalid int"),
    (["--schedule=zb"], "is not a schedule"),
    (["--f=0"], "--f: 0 is not a valid time"), (["--table=no.csv"], "cannot be read"),
    (["--output=/no/such/a.svg"], "cannot be written")])
def test_bad_flags_are_one_sentence_and_status_2(capsys, flags, words):
    assert main(flags) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_schedules_need_no_jax():
    code = "import sys, jaxtrain.commands.schedules; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
