"""Images of any size become patches, from files, archives and Parquet alike; and rows of several images."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

import jaxtrain as jt
from jaxtrain.commands import prepare_sequences as prepare_sequences_command
from jaxtrain.data.corpus.sequences import open_sequences
from jaxtrain.data.loading.modalities import image_batches
from jaxtrain.data.loading.modalities.augmentation import augmented, numbers_for
from jaxtrain.data.loading.modalities.image_batches import ImageBatches
from jaxtrain.data.packing.image_rows import CaptionedImages, LabelledImages, PairedImages, pack
from jaxtrain.data.prepare_sequences import prepare_sequences
from jaxtrain.data.prepare_sequences.image_patches import Images, from_patches, grid, to_patches

SIZES = {"cats/a": (8, 12), "cats/b": (4, 4), "dogs/c": (9, 30), "dogs/d": (200, 100), "dogs/e": (12, 8)}


def drawn(name):
    height, width = SIZES[name]
    return np.random.default_rng(len(name) + height).integers(0, 256, (height, width, 3), np.uint8)


def encoded(name):
    file = io.BytesIO()
    Image.fromarray(drawn(name)).save(file, "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The same images with captions as files, as an archive, and as two groups of rows of Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path_factory.mktemp("images")
    (root / "tar").mkdir()
    with tarfile.open(root / "tar" / "all.tar", "w") as archive:
        for name in SIZES:
            for end, content in ((".txt", f"it is {name}".encode()), (".png", encoded(name))):
                path = root / "files" / f"{name}{end}"
                path.parent.mkdir(exist_ok=True, parents=True)
                path.write_bytes(content)
                member = tarfile.TarInfo(f"{name}{end}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    (root / "files" / "dogs" / "broken.png").write_bytes(b"no image")
    (root / "files" / "dogs" / "broken.txt").write_text("none")
    (root / "parquet").mkdir()
    table = pa.table({"image": [{"bytes": encoded(name), "path": name} for name in SIZES],
                      "text": [f"it is {name}" for name in SIZES]})
    pq.write_table(table, root / "parquet" / "all.parquet", row_group_size=3)
    return root


def prepared(stored, kind, *flags, output=None):
    output = output or stored / f"{kind}{len(flags)}{'-'.join(flags)}".replace("/", "")
    assert prepare_sequences_command.main([
        "images", f"--input={stored / kind}", f"--output={output}", "--patch_size=4", "--most_patches=24",
        "--patches_per_side=8", "--eval_fraction=0", "--workers=1", *flags]) in (0, None)
    return open_sequences(output)


def test_all_ways_to_store_images_give_the_same_patches(stored):
    found = {kind: prepared(stored, kind, "--label=text") for kind in ("files", "tar", "parquet")}
    assert found["files"].manifest["left_out"] == {"not readable as an image": 1}
    for corpus in found.values():
        assert len(corpus.train) == len(SIZES)
        for name, one in zip(SIZES, corpus.train, strict=True):
            assert bytes(one["target"].astype(np.uint8)).decode() == f"it is {name}"
            rows, columns = one["places"].max(0) + 1
            assert (int(rows), int(columns)) == grid(*SIZES[name], 4, 24, 8) and rows * columns <= 24
            if SIZES[name] == (rows * 4, columns * 4):
                np.testing.assert_array_equal(from_patches(one["patches"], rows, columns), drawn(name))
    assert tuple(found["tar"].train[3]["places"].max(0) + 1) == (7, 3)  # 200 x 100 keeps its shape
    labels = [int(one["label"][0]) for one in prepared(stored, "tar", "--label=folder").train]
    assert labels == [0, 0, 1, 1, 1]


def test_buckets_that_suit_a_corpus_are_told_once(stored):
    """These five images have four lengths, for which four buckets are as good as eight."""
    corpus = prepared(stored, "files", "--label=text")
    lines = prepare_sequences.summary(corpus).splitlines()
    told = [line for line in lines if line.startswith("buckets ")]
    assert len(told) == len(set(told)) == 2, told
    found = json.loads(json.dumps(prepare_sequences.counted(corpus)))
    assert found["splits"]["train"] == {"sequences": len(SIZES), "steps": int(corpus.train.counts().sum())}
    assert found["left_out"] == {"not readable as an image": 1}
    assert told == [f"buckets {' '.join(map(str, one['lengths']))}: {one['padding']:.1%} padding"
                    for one in found["buckets"]]


def test_rows_hold_whole_images_and_fill_up():
    lengths = np.random.default_rng(0).integers(1, 30, 200)
    rows = pack(lengths, 32, 5)
    assert sorted(number for row in rows for number in row) == list(range(200))
    assert all(lengths[row].sum() <= 32 and len(row) <= 5 for row in rows)
    assert len(rows) <= 1.1 * lengths.sum() / 32


def test_rows_have_texts_labels_or_sequences_beside_the_patches(stored):
    corpus = prepared(stored, "files", "--label=text")
    row = PairedImages(corpus.train, 48, 3, text_len=9)[0]
    assert row["patches"].shape == (48, 48) and row["tokens"].shape == (27,)
    text = row["tokens"].reshape(3, 9)[1]
    number = PairedImages(corpus.train, 48, 3, 9).rows[0][1]
    assert bytes(text.astype(np.uint8)).decode() == f"it is {list(SIZES)[number]}"[:9]
    assert [PairedImages(corpus.train, 48, 3, *places).cut for places in ((11,), (12,), (12, -1, 9))] == [5, 0, 5]
    rows = PairedImages(corpus.train, 48, 3, text_len=9, end=256)
    assert image_batches.summary(ImageBatches(rows, global_batch_size=1, seed=0), corpus)[1].endswith(
        "% full; 5 of 5 captions are cut to 8 tokens (model.text_len)")
    sequences = CaptionedImages(corpus.train, 48, 3, end=256)
    for row in (sequences[i] for i in range(len(sequences))):
        for segment in range(1, row["segments"].max() + 1):
            here = row["segments"] == segment
            patches = (row["images"] == segment).sum()
            targets = row["targets"][here][patches - 1:]
            assert targets[-1] == 256 and bytes(targets[:-1].astype(np.uint8)).decode().startswith("it is ")
            np.testing.assert_array_equal(row["weights"][here], np.arange(here.sum()) >= patches - 1)
            np.testing.assert_array_equal(row["tokens"][here][patches:], targets[:-1])
    labelled = LabelledImages(prepared(stored, "files", "--label=folder").train, 48, 3)
    assert sum(int(labelled[i]["weights"].sum()) for i in range(len(labelled))) == len(SIZES)
    with pytest.raises(jt.UserError, match="a row of 16 does not hold the largest image, which takes 21; set it"):
        len(PairedImages(corpus.train, 16, 3, 9))


def test_augmentation_is_a_function_of_seed_step_and_row(stored):
    corpus = prepared(stored, "files", "--label=folder")
    rows, kinds = LabelledImages(corpus.train, 48, 3), ("flip", "crop", "colour")
    batches = ImageBatches(rows, global_batch_size=4, seed=3, augment=kinds, noise=True)
    whole, part = batches[7], ImageBatches(rows, global_batch_size=4, seed=3, augment=kinds, noise=True).rows(7, [2])
    assert all(np.array_equal(x[2], part[name][0]) for name, x in whole.items())
    assert not np.array_equal(whole["draws"], batches[8]["draws"]) and len(np.unique(whole["draws"])) > 70
    times, draws = ImageBatches(rows, global_batch_size=4, seed=3, noise=True).rows(0, range(4)), whole["draws"]
    assert len(np.unique(draws)) == draws.size and len(np.unique(times["times"])) == times["times"].size
    row = rows[0]
    chances = [numbers_for(3, 7, number, image).random(9) for number in range(4) for image in range(4)]
    assert len(np.unique(chances)) == 4 * 4 * 9, "rows or images share random numbers"
    flips = [augmented(row, ["flip"], 0, step, 0) for step in range(20)]
    here = row["images"] == 1
    pixels = from_patches(row["patches"][here], *(row["places"][here].max(0) + 1))
    flipped = to_patches(pixels[:, ::-1], 4)[0]
    same = [np.array_equal(one["patches"][here], row["patches"][here]) for one in flips]
    assert 3 < sum(same) < 17
    assert all(before or np.array_equal(one["patches"][here], flipped) for before, one in zip(same, flips, strict=True))
    for step in range(20):
        cropped = augmented(row, ["crop"], 0, step, 0)
        for image in range(1, row["images"].max() + 1):
            places = cropped["places"][cropped["images"] == image]
            high, wide = places.max(0) + 1
            assert len(places) == high * wide and len(np.unique(places, axis=0)) == len(places)
    assert np.array_equal(rows[0]["patches"], row["patches"]), "the data itself was changed"


def test_crops_are_anywhere_in_a_image():
    places = np.indices((6, 6)).reshape(2, -1).T
    row = {"patches": np.repeat(np.arange(36, dtype=np.uint8)[:, None], 12, 1), "places": places.astype(np.int32),
           "images": np.ones(36, np.int32)}
    first = {divmod(int(augmented(row, ["crop"], 0, step, 0)["patches"].max(1).nonzero()[0][0]), 6)
             for step in range(40)}
    assert any(down < across for down, across in first) and any(down > across for down, across in first)


@pytest.mark.parametrize(("flags", "message"), [
    (["--label=tag"], "--label: 'tag' is not known; "), (["--patch_size=0"], "--patch_size: 0 is not possible"),
    (["--label=folder", "parquet"], "--label: all.parquet has no folders"),
    (["--image_field=pixels", "parquet"], "--image_field: all.parquet has no column 'pixels'; it has image, text"),
])
def test_mistakes_are_told_in_one_line(stored, flags, message, tmp_path):
    kind = "parquet" if flags[-1] == "parquet" else "files"
    with pytest.raises(jt.UserError, match=message):
        flags = prepare_sequences_command.parse(["images", f"--input={stored / kind}", f"--output={tmp_path}/out",
                                         "--workers=1", *[flag for flag in flags if flag.startswith("--")]])
        prepare_sequences.prepare_sequences(flags.input, flags.output, prepare_sequences_command.source_of(flags))


def written(folder, *names):
    for name in names:
        (folder / f"{name}.png").write_bytes(encoded("cats/a"))
        (folder / f"{name}.txt").write_text(name)


def test_images_without_a_caption_are_left_out_and_counted(tmp_path):
    written(tmp_path, "cat", "blank", "alone", "empty")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "alone.txt").unlink()
    (tmp_path / "empty.png").write_bytes(b"")
    source = Images("text", patch_size=4, eval_fraction=0)
    corpus = prepare_sequences.prepare_sequences([f"{tmp_path}"], tmp_path / "out", source)
    assert [bytes(row["target"].tolist()) for row in corpus.train] == [b"cat"]
    assert corpus.manifest["left_out"] == {"without a caption": 2, "not readable as an image": 1}
    for path in tmp_path.glob("*.txt"):
        path.unlink()
    with pytest.raises(jt.UserError, match=r"alone\.png has no caption, nor"):
        source.find_tasks([f"{tmp_path}"])


def test_an_archive_may_hold_captions_in_any_order(tmp_path):
    written(tmp_path, "a", "b", "c", "d")
    (tmp_path / "d.txt").unlink()
    with tarfile.open(tmp_path / "ALL.TAR", "w") as archive:  # as `tar` writes a folder, in the order of its entries
        for name in ("b.png", "d.png", "a.txt", "c.png", "b.txt", "a.png", "c.txt"):
            archive.add(tmp_path / name, name)
    corpus = prepare_sequences.prepare_sequences([f"{tmp_path}/ALL.TAR"], tmp_path / "out",
                                                 Images("text", patch_size=4, eval_fraction=0))
    assert sorted(bytes(row["target"].tolist()) for row in corpus.train) == [b"a", b"b", b"c"]
    assert corpus.manifest["left_out"] == {"without a caption": 1}


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "I;16"), ("TIFF", "I;16"), ("TIFF", "I;16B")])
def test_grey_images_of_16_bits_keep_their_shades(kind, mode, tmp_path):
    """Under any name, as what a file holds is seen from its content; TIFF has either order of bytes."""
    shades = np.linspace(0, 65_535, 64).reshape(8, 8)
    content = shades.astype(">u2" if mode == "I;16B" else "<u2").tobytes()
    Image.frombytes(mode, (8, 8), content).save(tmp_path / "grey.png", kind)
    corpus = prepare_sequences.prepare_sequences([f"{tmp_path}"], tmp_path / "out",
                                                 Images(patch_size=4, eval_fraction=0))
    found = from_patches(corpus.train[0]["patches"], 2, 2)
    assert np.abs(found - shades[..., None] / 257).max() <= 0.51


@pytest.mark.parametrize(("row", "message"), [
    ({"text": ["a", "b"]}, "--text_field: row 0 of a.parquet has no text but list; name a column of text"),
    ({"image": "a.png"}, "--image_field: row 0 of a.parquet has no bytes of an image but str; write"),
    ({"image": {"file": "a.png"}}, "--image_field: row 0 of a.parquet has no bytes of an image but dict; write")])
def test_columns_of_other_types_are_refused(row, message, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([{"image": encoded("cats/a"), "text": "a"} | row]), tmp_path / "a.parquet")
    with pytest.raises(jt.UserError, match=message):
        prepare_sequences.prepare_sequences([f"{tmp_path}/a.parquet"], tmp_path / "out", Images("text"))
