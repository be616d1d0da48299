"""Safetensors files: what another library reads and writes, slices, and files that are not what they say."""

import json

import ml_dtypes
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub.weights import safetensors_files
from jaxtrain.hub.weights.safetensors_files import INDEX, SINGLE, file_names, split_over_files, tensors_of

A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((4,), ml_dtypes.bfloat16)


def raw(header, content=b"", length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + content


def test_what_is_written_is_read(tmp_path):
    safetensors_files.write(tmp_path / SINGLE, {"a": A.shape, "empty": (0, 3)},
                            {"a": np.float32, "empty": np.float32},
                            iter([A, np.zeros((0, 3), np.float32)]))
    found = tensors_of(tmp_path)
    np.testing.assert_array_equal(found["a"].view(), A)
    assert found["empty"].view().shape == (0, 3)


def test_the_library_of_the_format_reads_what_is_written_and_the_other_way_round(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    safetensors_files.write(tmp_path / SINGLE, {"b": B.shape}, {"b": ml_dtypes.bfloat16}, iter([B]))
    np.testing.assert_array_equal(library.load_file(tmp_path / SINGLE)["b"], B)
    library.save_file({"a": A, "b": B}, tmp_path / SINGLE)
    for name, wanted in (("a", A), ("b", B)):
        np.testing.assert_array_equal(tensors_of(tmp_path)[name].view(), wanted)


def test_files_are_filled_up_to_a_limit_and_named_as_usual():
    assert split_over_files({"a": 3, "b": 2, "c": 9, "d": 1}, 5) == [["a", "b"], ["c"], ["d"]]
    assert file_names(1) == [SINGLE] and file_names(2)[1] == "model-00002-of-00002.safetensors"


def entry(**changes):
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes


@pytest.mark.parametrize(("content", "reason"), [
    (b"", "a header of 0 bytes does not fit into 0 bytes"),
    (raw({}, length=10**9), "a header of 1000000000 bytes does not fit into 10 bytes"),
    (raw(b"{{"), "Expecting property name"),
    (raw(b"[" * 5000), "is nested too deeply"),
    (raw({"a": entry()}, b"\0" * 23), "its tensors end at byte 24 of 23"),
    (raw({"a": entry()}, b"\0" * 25), "its tensors end at byte 24 of 25"),
    (raw({"a": entry(shape=[2, 4])}, b"\0" * 24), "tensor a has 24 bytes, which is not its shape in F32"),
    (raw({"a": entry(dtype="F64")}, b"\0" * 24), "tensor a has 24 bytes, which is not its shape in F64"),
    (raw({"a": entry(shape=[-2, -3])}, b"\0" * 24), "tensor a has a size or an offset that no file has"),
    (raw({"a": entry(data_offsets=[4, 28])}, b"\0" * 28), "tensor a does not begin at byte 0"),
    (raw({"a": entry(), "b": entry(data_offsets=[20, 44])}, b"\0" * 44), "tensor b does not begin at byte 24"),
    (raw({"a": entry(data_offsets=[24])}, b"\0" * 24), "a.data_offsets is not a list of 2"),
    (raw({"a": {"dtype": "F32"}}), "a has no 'shape'"),
])
def test_a_file_that_is_not_what_it_says_is_told_in_one_line(tmp_path, content, reason):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(jt.UserError) as refusal:
        tensors_of(tmp_path)
    assert f"{refusal.value}".startswith(f"{tmp_path / SINGLE}: it is not a whole safetensors file (") and \
        reason in f"{refusal.value}"


def test_a_dtype_that_weights_do_not_have_is_refused_by_name(tmp_path):
    (tmp_path / SINGLE).write_bytes(raw({"a": entry(dtype="I64", shape=[3])}, b"\0" * 24))
    with pytest.raises(jt.UserError, match="tensor a is of dtype I64; give weights in F64, F32, F16, BF16"):
        tensors_of(tmp_path)["a"].view()


@pytest.mark.parametrize(("index", "reason"), [
    ({"weight_map": {"a": "../out.safetensors"}}, "'../out.safetensors' does not name a file inside a folder"),
    ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors: it is not there; download the folder again"),
    ({"weight_map": {"a": SINGLE, "b": SINGLE}}, f"it lists b, which {SINGLE} does not have; download the"),
    ({}, "it has no 'weight_map'"),
])
def test_an_index_that_is_not_what_it_says_is_told_in_one_line(tmp_path, index, reason):
    safetensors_files.write(tmp_path / SINGLE, {"a": A.shape}, {"a": np.float32}, iter([A]))
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(jt.UserError) as refusal:
        tensors_of(tmp_path)
    assert reason in f"{refusal.value}"


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(jt.UserError, match=f"it has neither {SINGLE} nor {INDEX}; give a folder in Hugging Face's"):
        tensors_of(tmp_path)
