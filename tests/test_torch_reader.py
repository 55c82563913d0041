"""The reader of PyTorch files gives what PyTorch gives, bit for bit: committed files, fresh ones, and real ones.

The committed files need nothing. With torch installed every variant is also made afresh and compared with
torch.load.
MLX_COSYH3_REAL_FILES is a folder that holds the unpacked wheels lpips 0.1.4, Resemblyzer 0.1.4 and silero-vad 6.2.3.
"""

import gc
import importlib.util
import json
import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_cosyh3.convert.torch_file import Opaque, TorchTensor, find_tensors, read_torch
from mlx_cosyh3.errors import CheckpointError
from tests import torch_streams as streams

GOLDEN = Path(__file__).parent / "golden" / "torch"
FILES = sorted(GOLDEN.glob("*.pt")) + sorted(GOLDEN.glob("*.jit"))
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed: the comparison with torch.load itself is left out")


def case_of(path):
    return path.name.split(".")[0].replace("old_big_endian", "old")


def same_bits(array, expected):
    return array.shape == expected.shape and array.tobytes() == expected.tobytes()


def write(tmp_path, data, name="x.pt"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


# -- committed files -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "expected.safetensors")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_committed_file(path, golden):
    case = case_of(path)
    tensors = find_tensors(read_torch(path))
    assert set(tensors) == set(EXPECTED[case])
    for key, tensor in tensors.items():
        dtype, shape = EXPECTED[case][key]
        assert (tensor.dtype, list(tensor.shape)) == (dtype, shape)
        values = tensor.numpy()
        assert list(values.shape) == shape
        assert values.dtype == (np.dtype("u2") if dtype == "BF16" else values.dtype)
        assert values.nbytes == tensor.nbytes
        assert values.tobytes() == golden[f"{case}/{key}"].tobytes(), key
        if shape:
            for start, stop in ((0, shape[0]), (0, 0), (1, shape[0]), (0, shape[0] - 1), (shape[0] // 2, shape[0])):
                if 0 <= start <= stop:
                    assert same_bits(tensor.rows(start, stop), np.ascontiguousarray(values[start:stop])), key


def test_every_kind_of_file_is_there():
    names = {path.name for path in FILES}
    for case in ("dtypes", "layouts", "containers", "optimizer", "lightning", "storages", "bits", "module"):
        assert {f"{case}.zip2.pt", f"{case}.legacy2.pt"} <= names
    assert {"big_endian.zip2.pt", "old.legacy2.pt", "torchscript.jit"} <= names
    assert {"dtypes.zip5.pt", "dtypes.legacy1.pt"} <= names
    kinds = {dtype for table in EXPECTED.values() for dtype, _ in table.values()}
    assert kinds == set("F64 F32 F16 BF16 C64 BOOL I64 I32 I16 I8 U8 U16 U32 U64".split())


PLAIN = {
    "none": None, "yes": True, "no": False, "ints": [0, 1, -1, 255, 256, 65535, 65536, -2 ** 31, 2 ** 31, 2 ** 70],
    "floats": (0.0, -0.0, 1.5, float("inf")), "complex": 1.5 - 2j, "text": "grüße\n日本 \U0001f600",
    "bytes": b"\x00\xff" * 3, "array": bytearray(b"ab\x80"), "set": {1, "a", (2, 3)}, "frozen": frozenset((4, 5)),
    "empty": [(), [], {}, ""], 1: "int key", 2.5: "float key", None: "none key", (1, "b"): "tuple key",
    "long": "x" * 300,
}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("containers.*.pt")), ids=lambda path: path.name)
def test_plain_values(path):
    value = read_torch(path)
    assert value["plain"] == PLAIN and list(value["plain"]) == list(PLAIN)
    assert math.copysign(1, value["plain"]["floats"][1]) == -1 and value["plain"]["yes"] is True
    assert type(value["plain"]["array"]) is bytearray and type(value["plain"]["frozen"]) is frozenset
    assert type(value["state_dict"]) is dict and list(value["state_dict"])[:2] == ["0.weight", "0.bias"]
    assert type(value["counts"]) is dict and value["bag"] == {"h": 1, "e": 1, "l": 2, "o": 1}
    assert value["queue"] == [1, 2] and value["size"] == (2, 3)


@pytest.mark.parametrize("container", ["zip2", "legacy2"])
def test_what_training_frameworks_add(container):
    value = read_torch(GOLDEN / f"lightning.{container}.pt")
    more = value["hyper_parameters"]
    args = more["args"]
    assert isinstance(args, Opaque) and args.name == "argparse.Namespace" and args.fields["lr"] == 0.1
    assert args.fields["dtype"].name == "torch.float16" and args.fields["device"].args == ("cuda", 0)
    assert more["optimizer"].name == "functools.partial"
    assert more["path"].args == ("/", "data", "x") and more["activation"].name.endswith("GELU")
    assert [kind.name for kind in more["types"][:2]] == ["builtins.int", "builtins.str"]
    assert more["types"][3].name.startswith("typing.")
    (key, callback), = value["callbacks"].items()
    assert key.name == "datetime.timedelta" and callback == {"best": 0.25, "steps": 7}
    assert value["loops"]["history"].name == "numpy.ndarray"
    assert value["loops"]["history"].state[4] == np.arange(3.0).tobytes()


def test_torchscript_module_and_constants():
    module = read_torch(GOLDEN / "torchscript.jit")
    assert isinstance(module, Opaque) and module.name.startswith("__torch__.")
    assert module.fields["rates"] == [8000, 16000] and module.fields["training"] is True
    assert set(find_tensors(module)) == {"bias", *(f"{gate}.{name}" for gate in ("first", "second")
                                                   for name in ("weight", "seen", "window"))}
    assert isinstance(read_torch(GOLDEN / "torchscript.jit", record="constants.pkl"), tuple)


def test_strings_of_python_2(tmp_path):
    text = b"S'a\\x62\\\\\\'\\n'\nU\x02\xc3\xa9T\x02\x00\x00\x00\xff\xfeV\\u00e9\\U0001f600\nI01\nI-7\nL12L\nF1.5\n"
    value = read_torch(write(tmp_path, streams.legacy(b"(" + text + b"t.")))
    assert value == ("ab\\'\n", "é", b"\xff\xfe", "é\U0001f600", True, -7, 12, 1.5)


def test_two_tensors_of_one_path_are_not_lost(tmp_path):
    one = streams.tensor((2,), (1,))
    stream = b"\x80\x02}(X\x03\x00\x00\x00a.b" + one + b"X\x01\x00\x00\x00a}X\x01\x00\x00\x00b" + one + b"su."
    value = read_torch(write(tmp_path, streams.archive(stream, data={"0": streams.DATA[8:]})))
    with pytest.raises(CheckpointError, match=r"two tensors are named 'a\.b'"):
        find_tensors(value)


# -- layout of the file ----------------------------------------------------------------------------------------


def test_any_top_folder(tmp_path):
    stream = b"\x80\x02" + streams.tensor((2, 2), (2, 1)) + b"."
    for folder in ("my model", "émile", "a" * 200):
        value = read_torch(write(tmp_path, streams.archive(stream, folder, {"0": streams.DATA[8:]})))
        assert value.numpy().tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("make", [streams.zip_tensor, streams.legacy_tensor])
def test_views_and_copies(tmp_path, make):
    whole = read_torch(write(tmp_path, make((2, 2), (2, 1))))
    values = whole.numpy()
    assert values.tolist() == [[1, 2], [3, 4]] and values.flags.aligned
    if not values.flags.owndata:
        assert not values.flags.writeable
    turned = read_torch(write(tmp_path, make((2, 2), (1, 2)), "t.pt"))
    assert turned.numpy().tolist() == [[1, 3], [2, 4]] and turned.numpy().flags.c_contiguous
    assert turned.rows(1, 2).tolist() == [[2, 4]]
    spread = read_torch(write(tmp_path, make((3, 2), (0, 1), offset=2), "s.pt"))
    assert spread.numpy().tolist() == [[3, 4]] * 3


def test_storages_at_odd_addresses_are_copied(tmp_path):
    owned = set()
    for padding in range(1, 9):  # the old container aligns nothing
        stream = b"\x80\x02(C" + bytes([padding]) + bytes(padding) + streams.tensor((2, 2), (2, 1), view=b"N") + b"t."
        data = streams.legacy(stream, streams.KEYS, streams.DATA)
        _, tensor = read_torch(write(tmp_path, data))
        values = tensor.numpy()
        assert values.tolist() == [[1, 2], [3, 4]] and values.flags.aligned
        assert values.flags.owndata == bool((len(data) - 16) % 4) and tensor.rows(1, 2).tolist() == [[3, 4]]
        owned.add(values.flags.owndata)
    assert owned == {True, False}


def test_aligned_tensors_are_views_into_the_file():
    value = read_torch(GOLDEN / "layouts.zip2.pt")  # PyTorch aligns the storages of its archives
    for key in ("whole", "row", "parameter"):
        values = value[key].numpy()
        assert not values.flags.owndata and not values.flags.writeable, key
        with pytest.raises(ValueError):
            values[...] = 0
    assert value["turned"].numpy().flags.owndata


def test_a_tensor_outlives_its_tree():
    values = read_torch(GOLDEN / "layouts.zip2.pt")["whole"].numpy()
    gc.collect()
    assert np.isfinite(values).all() and values.shape == (4, 6)


def test_rows_that_are_not_there():
    value = read_torch(GOLDEN / "layouts.zip2.pt")
    for key, start, stop in (("whole", 0, 5), ("whole", -1, 2), ("whole", 3, 2), ("scalar", 0, 1), ("scalar", 0, 0)):
        with pytest.raises(CheckpointError, match=r"no rows .* in a tensor of shape"):
            value[key].rows(start, stop)


def anonymous_memory():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc: the resident memory of a process is only read on Linux")
    return int(status.read_text().split("RssAnon:")[1].split()[0]) * 1024


def test_a_file_of_10_gb_is_not_read(tmp_path):
    gigabytes, width = 10, 1 << 20
    rows = gigabytes * (1 << 30) // (4 * width)
    stream = b"\x80\x02" + streams.tensor((rows, width), (width, 1), numel=rows * width) + b"."
    path = tmp_path / "large.pt"
    start = streams.sparse_zip(path, stream, b"0", rows * width * 4)
    with open(path, "r+b") as file:
        file.seek(start + (rows - 1) * width * 4)
        file.write(struct.pack("<2f", 1.5, -2.0))
    before = anonymous_memory()
    tensor = read_torch(path)
    assert tensor.shape == (rows, width) and tensor.nbytes == gigabytes << 30
    assert anonymous_memory() - before < 8 << 20
    last = tensor.rows(rows - 1, rows)  # starts at an odd address: one row is copied
    assert last[0, :3].tolist() == [1.5, -2.0, 0.0] and last.nbytes == 4 * width
    assert anonymous_memory() - before < (8 << 20) + last.nbytes


# -- files that are not whole, or are something else -----------------------------------------------------------


def refused(tmp_path, data, match, **options):
    with pytest.raises(CheckpointError, match=match) as e:
        read_torch(write(tmp_path, data), **options)
    assert str(e.value).count("\n") == 0 and "x.pt" in str(e.value)


@pytest.mark.parametrize("name", ["layouts.zip2.pt", "layouts.legacy2.pt"])
def test_truncated_anywhere(tmp_path, name):
    data = (GOLDEN / name).read_bytes()
    for length in (*range(1, 200), *range(200, len(data), 11), *range(len(data) - 60, len(data))):
        with pytest.raises(CheckpointError) as e:
            read_torch(write(tmp_path, data[:length]))
        assert "truncated" in str(e.value) or length < 160, (length, str(e.value))


def test_truncation_says_what_is_missing(tmp_path):
    zipped, old = (GOLDEN / "layouts.zip2.pt").read_bytes(), streams.legacy_tensor((4,), (1,))
    refused(tmp_path, zipped[:-100], rf"truncated: .* after {len(zipped) - 100} bytes the directory .* is missing")
    refused(tmp_path, old[:-6],
            rf"truncated: storage 1 of 1 needs 16 bytes at byte \d+, and the file has {len(old) - 6}")
    refused(tmp_path, old[:-20], r"truncated: storage 1 of 1 should begin at byte")
    refused(tmp_path, streams.zip_tensor((5,), (1,), numel=5), "needs 20 bytes of storage '0', which has 16")


@pytest.mark.parametrize("data, match", [
    (b"", "an empty file"),
    (b"\0" * 4096, "nothing but zeros"),
    (b"<!DOCTYPE html><html>", "a web page"),
    (b"\n <html>", "a web page"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
    (b"\x1f\x8b\x08" + bytes(30), "gzip"),
    (b"storages" + bytes(249) + b"ustar\x0000" + bytes(300), "format of PyTorch before 0.2"),
    (struct.pack("<Q", 2) + b'{"a":1}', "safetensors"),
    (b"hello world, this is no checkpoint", "unknown opcode|damaged"),
    (b"\x80\x02}X\x01\x00\x00\x00aK\x01s.", "a bare pickle, not a PyTorch checkpoint"),
    (streams.MAGIC + b"\x80\x02M\xea\x03.", "its PyTorch protocol is 1002"),
])
def test_other_files(tmp_path, data, match):
    refused(tmp_path, data, match)


def test_paths_that_hold_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be opened"):
        read_torch(tmp_path / "missing.pt")
    with pytest.raises(CheckpointError, match="a folder"):
        read_torch(tmp_path)
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match="not a file"):  # opening it would wait for a writer
        read_torch(tmp_path / "pipe.pt")


def test_zip_archives_that_are_not_pytorchs(tmp_path):
    import zipfile

    whole = streams.zip_tensor((4,), (1,))
    refused(tmp_path, streams.archive(b"N." + b"." * 100, compression=zipfile.ZIP_DEFLATED), "is compressed")
    flags = bytearray(whole)
    flags[whole.index(b"PK\x01\x02") + 8] |= 1
    refused(tmp_path, bytes(flags), "is encrypted")
    refused(tmp_path, streams.archive(b"N.").replace(b"data.pkl", b"dato.pkl"), r"a zip archive without data\.pkl")
    refused(tmp_path, streams.archive(b"N.", **{"model.json": b"{}"}).replace(b"data.pkl", b"dato.pkl"),
            "before PyTorch 1.4")
    refused(tmp_path, streams.archive(b"N.", **{"x/data.pkl": b"N."}), "2 checkpoints in one zip")
    refused(tmp_path, streams.archive(b"N.", byteorder=b"middle"), "byteorder")
    refused(tmp_path, whole.replace(b"data/0", b"data/1"), "lacks 'archive/data/0'")
    refused(tmp_path, whole.replace(b"PK\x03\x04", b"PK\x03\x05"), "no header of|needs|directory")
    overlap = bytearray(whole)
    second = whole.index(b"PK\x01\x02", whole.index(b"PK\x01\x02") + 4)
    overlap[second + 42:second + 46] = struct.pack("<I", 10)
    refused(tmp_path, bytes(overlap), "overlap")
    overlap[second + 42:second + 46] = struct.pack("<I", len(whole))
    refused(tmp_path, bytes(overlap), "should reach to byte")
    refused(tmp_path, whole, "constants.pkl", record="constants.pkl")


# -- shapes and types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [streams.zip_tensor, streams.legacy_tensor])
@pytest.mark.parametrize("shape, strides, offset, match", [
    ((5,), (1,), 0, "needs 20 bytes of storage '0', which has 16"),
    ((2, 2), (2, 2), 1, "needs 24 bytes"),
    ((4,), (1,), 1, "needs 20 bytes"),
    ((1,), (1,), 2 ** 61, "needs"),
    ((2 ** 61, 2 ** 61), (1, 1), 0, "needs"),
    ((2 ** 62,), (1,), 0, "the size of a tensor"),
    ((-1,), (1,), 0, "the size of a tensor is -1"),
    ((2,), (-1,), 3, "the stride of a tensor is -1"),
    ((2,), (1,), -1, "the offset of a tensor is -1"),
    ((2, 2), (1,), 0, "2 dimensions has 1 strides"),
    ((1,) * 33, (1,) * 33, 0, "33 dimensions"),
])
def test_windows_outside_the_storage(tmp_path, make, shape, strides, offset, match):
    refused(tmp_path, make(shape, strides, offset), match)


@pytest.mark.parametrize("make", [streams.zip_tensor, streams.legacy_tensor])
def test_an_absurd_expansion_is_not_allocated(tmp_path, make):
    tensor = read_torch(write(tmp_path, make((2 ** 30, 2 ** 30), (0, 0))))
    assert tensor.nbytes == 2 ** 62
    with pytest.raises(CheckpointError, match="would take 4611686018427387904 bytes, more than 64 times its file"):
        tensor.numpy()
    with pytest.raises(CheckpointError, match="would take"):
        tensor.rows(0, 1)
    assert read_torch(write(tmp_path, make((0, 2 ** 40, 2), (0, 0, 0)))).nbytes == 0
    narrow = read_torch(write(tmp_path, make((2 ** 40, 4), (0, 1))))
    assert narrow.rows(2 ** 39, 2 ** 39 + 2).tolist() == [[1, 2, 3, 4]] * 2


def test_types_that_are_not_read(tmp_path):
    tensor = read_torch(write(tmp_path, streams.zip_tensor((1,), (1,), kind=b"ComplexDoubleStorage", numel=1)))
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("torch.complex128", (1,), 16)
    for read in (tensor.numpy, lambda: tensor.rows(0, 1)):
        with pytest.raises(CheckpointError, match=r"x\.pt: a tensor of type torch\.complex128 cannot be read"):
            read()


@needs_torch
def test_types_that_are_not_read_beside_others(tmp_path):
    import torch

    value = {
        "good": torch.ones(2), "c128": torch.ones(2, dtype=torch.complex128),
        "meta": torch.empty(2, 3, device="meta"), "f8": torch.ones(2).to(torch.float8_e4m3fn),
        "coo": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(),
        "q": torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
    }
    for container in (True, False):
        torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=container)
        tensors = read_torch(tmp_path / "x.pt")
        assert tensors["good"].numpy().tolist() == [1, 1]
        why = {"c128": "torch.complex128", "f8": "torch.float8_e4m3fn", "q": r"quantised .*qint8", "csr": "sparse",
               "coo": r"sparse tensor \(torch.sparse_coo\)", "meta": "meta device"}
        for key, name in why.items():
            assert tensors[key].shape == tuple(value[key].shape), key
            with pytest.raises(CheckpointError, match=name):
                tensors[key].numpy()


# -- torch.load itself -----------------------------------------------------------------------------------------


def compare(ours, theirs, where="value"):
    """Equal to what torch.load gives: values, order, types; foreign objects by name."""
    import torch
    from tests import make_torch_fixtures as fixtures

    if isinstance(theirs, (torch.storage.TypedStorage, torch.UntypedStorage)):
        theirs = fixtures.expected_tensors(theirs)[""]
    if isinstance(ours, TorchTensor):
        assert isinstance(theirs, torch.Tensor) and ours.dtype == fixtures.NAMES[theirs.dtype], where
        assert ours.shape == tuple(theirs.shape), where
        expected = np.ascontiguousarray(fixtures.as_numpy(theirs)).reshape(ours.shape)
        assert same_bits(ours.numpy(), expected), where
        for row in range(ours.shape[0] if ours.shape else 0):
            assert same_bits(ours.rows(row, row + 1), expected[row:row + 1]), where
    elif isinstance(ours, dict):
        assert isinstance(theirs, dict) and len(ours) == len(theirs), where
        for (our_key, our_value), (key, value) in zip(ours.items(), theirs.items()):
            compare(our_key, key, f"key of {where}")
            compare(our_value, value, f"{where}[{key!r}]")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs)):
            compare(*pair, f"{where}[{index}]")
    elif isinstance(ours, Opaque):
        kind = theirs if ours.args is None and ours.state is None else type(theirs)
        if getattr(kind, "__module__", None) != "typing":  # its names are not those of its types
            assert ours.name.split(".")[-1] == getattr(kind, "__qualname__", str(kind)).split(".")[-1], where
    else:
        assert type(ours) is type(theirs) or isinstance(theirs, np.generic), where
        assert ours == theirs, where


CASES = ("dtypes", "layouts", "containers", "optimizer", "lightning", "storages", "bits", "module")


@needs_torch
@pytest.mark.parametrize("container, protocol", [("zip", 2), ("zip", 3), ("zip", 4), ("zip", 5), ("legacy", 1),
                                                 ("legacy", 2), ("legacy", 3), ("legacy", 4), ("legacy", 5)])
@pytest.mark.parametrize("case", CASES)
def test_equals_torch_load(tmp_path, case, container, protocol):
    from tests import make_torch_fixtures as fixtures

    value = fixtures.CASES[case]()
    data = fixtures.save(value, container, protocol)
    ours = read_torch(write(tmp_path, data))
    # torch.load (2.13) cannot read its own UntypedStorage in the old container: what was saved is the truth then.
    untyped = container == "legacy" and case in ("dtypes", "layouts", "storages")
    theirs = value if untyped else fixtures.load(data)
    if case == "module":
        ours, theirs = find_tensors(ours), dict(theirs.state_dict())
        assert list(ours) == list(theirs)
    compare(ours, theirs)


@needs_torch
def test_containers_of_other_times_equal_torch_load(tmp_path):
    import torch
    from tests import make_torch_fixtures as fixtures

    swapped = {key: value for key, value in fixtures.dtypes().items() if key not in ("uint16", "uint32", "uint64")}
    for data in (fixtures.swapped_zip(swapped), fixtures.old_legacy(), fixtures.old_legacy(little_endian=False)):
        compare(read_torch(write(tmp_path, data)), fixtures.load(data))
    data = fixtures.script()
    ours = find_tensors(read_torch(write(tmp_path, data)))
    theirs = torch.jit.load(tmp_path / "x.pt").state_dict()
    compare(dict(sorted(ours.items())), dict(sorted(theirs.items())))


# -- real files ------------------------------------------------------------------------------------------------


def real_files(pattern, count):
    root = os.environ.get("MLX_COSYH3_REAL_FILES")
    if not root:
        pytest.skip("MLX_COSYH3_REAL_FILES is not set: no real checkpoints (see the first lines of this file)")
    found = sorted(Path(root).glob(f"**/{pattern}"))
    assert len(found) == count, f"{len(found)} files {pattern} in {root}, not {count}"
    return found


def torch_too():
    return importlib.util.find_spec("torch") is not None


def test_real_lpips():
    layers = {"alex": (64, 192, 384, 256, 256), "vgg": (64, 128, 256, 512, 512),
              "squeeze": (64, 128, 256, 384, 384, 512, 512)}
    for path in real_files("lpips/weights/*/*.pth", 6):
        value = read_torch(path)
        assert [tensor.shape for tensor in value.values()] == [(1, width, 1, 1) for width in layers[path.stem]]
        assert all(np.isfinite(tensor.numpy()).all() for tensor in value.values())
        if torch_too():
            import torch

            compare(value, torch.load(path, map_location="cpu"))


def test_real_resemblyzer():
    (path,) = real_files("resemblyzer/pretrained.pt", 1)
    before = anonymous_memory()
    value = read_torch(path)
    assert anonymous_memory() - before < 8 << 20
    assert list(value) == ["step", "model_state", "optimizer_state"]
    tensors = find_tensors(value)
    assert len(tensors) == 48 and sum(math.prod(t.shape) for t in tensors.values()) == 4_270_854
    lstm = [tensor for key, tensor in value["model_state"].items() if key.startswith("lstm.")]
    assert len(lstm) == 12 and len({id(tensor._storage) for tensor in lstm}) == 1
    assert sorted(tensor._start // 4 for tensor in lstm)[:3] == [0, 40960, 303104]
    if torch_too():
        import torch

        compare(value, torch.load(path, map_location="cpu"))


def test_real_silero():
    (path,) = real_files("silero_vad/data/silero_vad.jit", 1)
    (twin,) = real_files("silero_vad/data/silero_vad_16k.safetensors", 1)
    tensors = find_tensors(read_torch(path))
    full = {key: tensor for key, tensor in tensors.items() if tensor.nbytes}
    assert len(full) == 30
    twins = load_file(twin)  # the 16 kHz half, from another training run: only the fixed Fourier basis is the same
    basis = tensors["_model.stft.forward_basis_buffer"]
    assert basis.numpy().tobytes() == twins["stft_conv.weight"].tobytes()
    half = [tensor.shape for key, tensor in full.items() if key.startswith("_model.")]
    assert sorted(half) == sorted(values.shape for values in twins.values())
    if torch_too():
        import torch

        theirs = torch.jit.load(path).state_dict()
        compare({key: tensors[key] for key in theirs}, dict(theirs))
