"""Hostile PyTorch files: nothing of them runs, none makes the reader grow or hang, and each gets one clear line."""

import os
import re
import struct
import sys
import time
import tracemalloc

import pytest

from mlx_cosyh3.convert.pickle_names import check_call, check_name
from mlx_cosyh3.convert.torch_file import find_tensors, read_torch
from mlx_cosyh3.errors import CheckpointError
from tests import torch_streams as streams
from tests.torch_streams import WATCH

SLACK = 48 << 20  # bytes: the reader's own slack and what Python takes beside it


def write(tmp_path, data):
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    return path


def in_all_containers(stream):
    """A value's stream as the one pickle of a file, in the old container, and in a zip archive."""
    return {"bare": stream, "legacy": streams.legacy(stream), "zip": streams.archive(stream)}


def test_the_watch_sees(tmp_path):
    WATCH.seen, WATCH.path = [], "x"
    try:
        compile("1", "x", "eval")
        open(write(tmp_path, b"1")).close()
    finally:
        WATCH.path = None
    assert {event for event, _ in WATCH.seen} == {"compile", "open"}


# -- files that would run something ----------------------------------------------------------------------------


def unicode(text):
    return b"\x8c" + bytes([len(text)]) + text.encode()


def text(name):
    module, _, name = name.rpartition(".")
    return f"c{module}\n{name}\n".encode()


OS = "posix" if os.name == "posix" else "nt"
ECHO = b"(X\x09\x00\x00\x00echo evilt"
RUNS = {
    "reduce os.system": (b"\x80\x02" + text("os.system") + ECHO + b"R.", "os.system"),
    "reduce posix.system": (b"\x80\x02" + text(f"{OS}.system") + ECHO + b"R.", f"{OS}.system"),
    "protocol 0": (b"cos\nsystem\n(S'echo evil'\ntR.", "os.system"),
    "inst": (b"(S'echo evil'\nios\nsystem\n.", "os.system"),
    "obj": (b"(cos\nsystem\nS'echo evil'\no.", "os.system"),
    "named only": (b"\x80\x02}X\x01\x00\x00\x00acos\nsystem\ns.", "os.system"),
    "eval": (b"\x80\x02" + text("builtins.eval") + ECHO + b"R.", "builtins.eval"),
    "python 2": (b"\x80\x02" + text("__builtin__.eval") + ECHO + b"R.", "builtins.eval"),
    "exec": (b"\x80\x02" + text("builtins.exec") + ECHO + b"R.", "builtins.exec"),
    "open": (b"\x80\x02" + text("builtins.open") + ECHO + b"R.", "builtins.open"),
    "_io.open": (b"\x80\x02" + text("_io.open") + ECHO + b"R.", "_io.open"),
    "import": (b"\x80\x02" + text("builtins.__import__") + ECHO + b"R.", "builtins.__import__"),
    "getattr": (b"\x80\x02" + text("builtins.getattr") + b"(ccollections\nOrderedDict\nX\x05\x00\x00\x00cleartR.",
                "builtins.getattr"),
    "newobj": (b"\x80\x02" + text("subprocess.Popen") + ECHO + b"\x81.", "subprocess.Popen"),
    "newobj_ex": (b"\x80\x04" + unicode("subprocess") + unicode("Popen") + b"\x93" + unicode("x") + b"\x85}\x92.",
                  "subprocess.Popen"),
    "stack_global": (
        b"\x80\x04" + unicode("os") + unicode("system") + b"\x93" + unicode("x") + b"\x85R.", "os.system"),
    "dotted name": (
        b"\x80\x04" + unicode("torch.serialization") + unicode("os.system") + b"\x93" + unicode("x") + b"\x85R.",
                    "torch.serialization.os.system"),
    "private door": (
        b"\x80\x04" + unicode("random") + unicode("_os.system") + b"\x93" + unicode("x") + b"\x85R.", "_os"),
    "door in a module": (b"\x80\x02" + text("torch.subprocess.Popen") + ECHO + b"R.", "torch.subprocess.Popen"),
    "module as a name": (b"\x80\x02" + text("torch.serialization.os") + b".", "torch.serialization.os"),
    "dunder": (
        b"\x80\x04" + unicode("collections") + unicode("OrderedDict.__reduce_ex__") + b"\x93.", "__reduce_ex__"),
    "attribute of a class": (
        b"\x80\x04" + unicode("torch") + unicode("Tensor.__init__.__globals__") + b"\x93.", "__globals__"),
    "attrgetter": (b"\x80\x02" + text("operator.attrgetter") + ECHO + b"R.", "operator.attrgetter"),
    "partial of system": (
        b"\x80\x02" + text("functools.partial") + b"(cos\nsystem\nX\x01\x00\x00\x00xtR.", "os.system"),
    "nested pickle": (b"\x80\x02" + text("pickle.loads") + b"(C\x02N.tR.", "pickle.loads"),
    "torch.load": (b"\x80\x02" + text("torch.load") + ECHO + b"R.", "torch.load"),
    "storage from bytes": (
        b"\x80\x02" + text("torch.storage._load_from_bytes") + b"(C\x02N.tR.", "_load_from_bytes"),
    "torch.hub": (b"\x80\x02" + text("torch.hub.load") + ECHO + b"R.", "torch.hub.load"),
    "numpy runstring": (b"\x80\x02" + text("numpy.testing._private.utils.runstring") + ECHO + b"R.", "runstring"),
    "unknown package": (b"\x80\x02" + text("evil_package.Payload") + ECHO + b"R.", "evil_package.Payload"),
    "unknown function": (b"\x80\x02" + text("models.run") + ECHO + b"R.", "models.run"),
    "new class": (b"\x80\x02" + text("builtins.type") + b"(X\x01\x00\x00\x00x)}tR.", "builtins.type"),
    "subscription": (b"\x80\x02" + text("_operator.getitem") + b"(}K\x01tR.", "operator.getitem"),
    "reconstructor": (
        b"ccopy_reg\n_reconstructor\n(csubprocess\nPopen\nc__builtin__\nobject\nNtR.", "subprocess.Popen"),
    "rebuild through system": (
        b"\x80\x02" + text("torch._tensor._rebuild_from_type_v2") + b"(cos\nsystem\ncos\nsystem\n)}tR.",
                               "os.system"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_file_that_would_run_something_is_refused(tmp_path, name):
    stream, what = RUNS[name]
    for container, data in in_all_containers(stream).items():
        with pytest.raises(CheckpointError, match=f"not a plain checkpoint: .*{re.escape(what)}") as e:
            WATCH.read(write(tmp_path, data))
        assert "\n" not in str(e.value) and "nothing was run" in str(e.value), container


def test_as_python_itself_pickles_it(tmp_path):
    import pickle

    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    for protocol in range(6):
        for data in in_all_containers(pickle.dumps({"weight": Payload()}, protocol)).values():
            with pytest.raises(CheckpointError, match=r"not a plain checkpoint: it names (posix|nt)\.system"):
                WATCH.read(write(tmp_path, data))
    assert not (tmp_path / "ran").exists()


REFUSED = {
    "call of a value": (b"\x80\x02X\x01\x00\x00\x00a)R.", "would call a str"),
    "call of a record": (b"\x80\x02cmodels\nNet\n)\x81)R.", "would call a Opaque"),
    "extension": (b"\x80\x02\x82\x07.", "global number 7"),
    "extension 4": (b"\x80\x02\x84\x07\x00\x00\x7f.", "global number"),
    "persistent text": (b"Pevil\n.", "persistent id"),
    "persistent number": (b"\x80\x02K\x05Q.", "persistent id"),
    "persistent module": (b"\x80\x02(X\x06\x00\x00\x00modulecos\nsystem\nNNtQ.", "os.system"),
    "setstate": (b"\x80\x02cbuiltins\ndict\n}X\x0c\x00\x00\x00__setstate__cos\nsystem\nsb.", "os.system"),
    "state of a class": (b"\x80\x02ctorch.nn\nLinear\n}b.", "state is set on a Global"),
    "state of a string": (b"\x80\x02X\x01\x00\x00\x00a}b.", "state is set on a str"),
    "state twice": (b"\x80\x02cmodels\nNet\n)\x81}b}b.", "state is set twice"),
    "frame": (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "frame of 18446744073709551615 bytes"),
    "bytes of 2**63": (
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 63) + b"N.", "needs 9223372036854775808 more bytes"),
    "text of 2**63": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b"N.", "more bytes"),
    "bytearray of 2**40": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"N.", "more bytes"),
    "bytes of 4 GB": (b"\x80\x03B\xff\xff\xff\xffN.", "needs 4294967295 more bytes"),
    "string of -1": (b"T\xff\xff\xff\xffN.", "a string of -1 bytes"),
    "long of 2 GB": (b"\x80\x02\x8b\xff\xff\xff\x7fN.", "pickle bomb: an integer of 2147483647 bytes"),
    "long of -1": (b"\x80\x02\x8b\xff\xff\xff\xffN.", "pickle bomb: an integer of -1 bytes"),
    "digits": (b"L" + b"9" * 5000 + b"L\n.", "pickle bomb: an integer of"),
    "allocation by number": (
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.", "a int where a container"),
    "protocol 6": (b"\x80\x06N.", "pickle protocol 6"),
    "buffer": (b"\x80\x05\x97.", "unknown opcode 0x97"),
    "stop on nothing": (b"\x80\x02.", "nothing to take"),
    "below a mark": (b"\x80\x02N(\x85.", "nothing to take"),
    "memo unset": (b"\x80\x02h\x05.", "memo 5 is used before"),
    "left over": (b"\x80\x02NN.", "left over"),
    "list as key": (b"\x80\x02}]Ns.", "a list as a key"),
    "long key": (b"\x80\x02}\x8a\x0a" + b"\x01" * 10 + b"Ns.", "beyond 64 bits as a key"),
    "nested key": (b"\x80\x02})\x85Ns.", "a tuple as a key"),
    "list in itself": (b"\x80\x02]q\x00h\x00a.", "a list that holds itself"),
    "dict in itself": (b"\x80\x02}q\x00K\x01h\x00s.", "a dict that holds itself"),
    "no name": (b"ca b\nc\n.", "is no name of Python"),
    "empty name": (b"c\n\n.", "is no name of Python"),
    "endless line": (b"S'" + b"a" * (2 << 20) + b"'\n.", "has no end"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_stream_that_no_pickler_writes_is_refused(tmp_path, name):
    stream, what = REFUSED[name]
    for data in in_all_containers(stream).values():
        with pytest.raises(CheckpointError, match=re.escape(what)):
            WATCH.read(write(tmp_path, data))


# -- bombs: small files that ask for much ----------------------------------------------------------------------


def laughs(levels):
    """A list of ten times a list of ten times ... of ten numbers."""
    def ten(item):
        return b"](" + item * 10 + b"eq"

    rest = b"".join(b"0" + ten(b"h" + bytes([level])) + bytes([level + 1]) for level in range(levels))
    return b"\x80\x02" + ten(b"K\x01") + b"\x00" + rest + b"."


def copies(name, source, wrap=b"\x85"):
    """A large value that one call after another copies into the same list."""
    call = b"h\x01h\x00" + wrap + b"R"
    return b"\x80\x02" + source + b"q\x000" + text(name) + b"q\x010](" + call * 20000 + b"e."


MANY = b"](" + b"".join(b"M" + struct.pack("<H", i) for i in range(20000)) + b"e"
WIDE = b"B" + struct.pack("<I", 200000) + bytes(200000)
BOMBS = {
    "lists of lists": (laughs(40), "unfold to more than"),
    "tuples of tuples": (b"\x80\x02K\x01\x85" + b"2\x86" * 100 + b".", "unfold to more than"),
    "dicts of dicts": (b"\x80\x02K\x01" + b"q\x000}(K\x01h\x00K\x02h\x00u" * 100 + b".", "unfold to more than"),
    "nested lists": (b"\x80\x02" + b"]" * 100000 + b"a" * 99999 + b".", "containers inside one another"),
    "nested tuples": (b"\x80\x02K\x01" + b"\x85" * 100000 + b".", "containers inside one another"),
    "nested dicts": (b"\x80\x02" + b"}K\x01" * 9999 + b"}" + b"s" * 9999 + b".", "containers inside one another"),
    "empty sets": (b"\x80\x04(" + b"\x8f" * 600000 + b"t.", "ask for"),
    "set copies": (copies("builtins.set", MANY), "ask for"),
    "frozenset copies": (copies("builtins.frozenset", MANY), "ask for"),
    "list copies": (copies("builtins.list", MANY), "ask for"),
    "size copies": (copies("torch.Size", MANY), "ask for"),
    "deque copies": (copies("collections.deque", MANY), "ask for"),
    "bytes copies": (copies("builtins.bytearray", WIDE), "ask for"),
    "text copies": (copies("_codecs.encode", b"X" + WIDE[1:], b"X\x06\x00\x00\x00latin1\x86"), "ask for"),
    "dict copies": (copies("collections.OrderedDict", b"}(" + MANY[2:-1] + b"u"), "ask for"),
    "tuple keys": (b"\x80\x02}(" + b"".join(b"J" + struct.pack("<i", i) + b"\x85N" for i in range(5000)) + b"u.",
                   "tuples as keys"),
    "colliding keys": (b"\x80\x02}(" + b"".join(
        b"\x8a\x10" + (i * (2 ** 61 - 1)).to_bytes(16, "little", signed=True) + b"N" for i in range(5000)) + b"u.",
        "beyond 64 bits as a key"),
    "colliding set": (b"\x80\x04\x8f(" + b"".join(
        b"\x8a\x10" + (i * (2 ** 61 - 1)).to_bytes(16, "little", signed=True) for i in range(5000)) + b"\x90.",
        "beyond 64 bits as a key"),
}


def measured(path):
    """(value or error, seconds, peak of Python's memory)"""
    tracemalloc.start()
    begin = time.process_time()
    try:
        result = WATCH.read(path)
    except CheckpointError as e:
        result = e
    seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return result, seconds, peak


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_one_clear_line(tmp_path, name):
    stream, what = BOMBS[name]
    data = streams.legacy(stream)
    result, seconds, peak = measured(write(tmp_path, data))
    assert isinstance(result, CheckpointError) and "pickle bomb: " in str(result) and what in str(result)
    assert peak < SLACK + 100 * len(data) and seconds < 30, (peak, seconds)  # of processor time, under tracemalloc


HARMLESS = {
    "memo at 4e9": b"\x80\x02Nr\xff\xff\xff\xffj\xff\xff\xff\xff\x86.",
    "marks": b"\x80\x02N" + b"(" * 50000 + b"0" * 50000 + b".",
    "scattered memo": b"\x80\x02N" + b"".join(b"r" + struct.pack("<I", i * 7919) for i in range(20000)) + b".",
    "one list many times": b"\x80\x02](K\x01K\x02eq\x000](" + b"h\x00" * 3000 + b"e.",
    "chain of objects": b"\x80\x02cmodels\nNet\nq\x000" + b"h\x00" * 5000 + b")R" + b"\x85R" * 4999 + b".",
    "objects that know one another": b"\x80\x02cmodels\nNet\n)\x81q\x00}X\x01\x00\x00\x00ah\x00sb.",
    "floats": b"\x80\x02](" + b"G\x7f\xf8\x00\x00\x00\x00\x00\x00" * 1000 + b"e.",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_odd_but_harmless_streams_stay_small(tmp_path, name):
    data = streams.archive(HARMLESS[name])
    result, seconds, peak = measured(write(tmp_path, data))
    assert not isinstance(result, Exception), result
    assert peak < SLACK + 100 * len(data) and seconds < 30


def test_a_chain_of_modules_does_not_blow_up_the_search(tmp_path):
    link = b"h\x00)\x81}X\x01\x00\x00\x00a"
    stream = b"\x80\x02cmodels\nNet\nq\x000" + link * 5000 + b"N" + b"sb" * 5000 + b"."
    value = read_torch(write(tmp_path, streams.archive(stream)))
    with pytest.raises(CheckpointError, match="inside one another"):
        find_tensors(value)


def test_tensors_cannot_be_built_in_circles(tmp_path):
    name = b"ctorch._tensor\n_rebuild_from_type_v2\n"
    stream = b"\x80\x02" + name + b"q\x00" + b"(h\x00Nh\x00NtR."
    with pytest.raises(CheckpointError, match="a tensor subclass that is not built from a tensor"):
        read_torch(write(tmp_path, streams.archive(stream)))


def test_names_in_a_file_cannot_flood_the_message(tmp_path):
    key = b"X" + struct.pack("<I", 60000) + b"a\n" * 30000
    stream = b"\x80\x02" + streams.tensor((2,), (1,)).replace(b"X\x01\x00\x00\x000", key) + b"."
    for data in (streams.archive(stream), streams.legacy(stream)):
        with pytest.raises(CheckpointError) as e:
            read_torch(write(tmp_path, data))
        assert len(str(e.value)) < 1200 and "\n" not in str(e.value)


# -- the rule about names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "argparse.Namespace", "pathlib.PosixPath", "omegaconf.dictconfig.DictConfig", "hydra.utils.Name", "typing.Any",
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint", "lightning.fabric.utilities.data.AttributeDict",
    "transformers.training_args.TrainingArguments", "transformers.trainer_utils.IntervalStrategy", "torch.float16",
    "torchmetrics.aggregation.MeanMetric", "src.models.h3.Config", "__main__.Args", "numpy.dtype",
    "datetime.datetime", "torch.optim.lr_scheduler.LambdaLR", "builtins.ValueError", "models.Outer.Inner",
    "functools.partial",
])
def test_names_that_checkpoints_hold(name):
    module, _, last = name.rpartition(".")
    if name.endswith("Outer.Inner"):
        module, last = "models", "Outer.Inner"
    assert check_name(module, last) == name
    if last not in ("float16", "Any"):
        check_call(name)


def test_no_function_of_the_standard_library_can_be_called():
    for module in sorted(sys.stdlib_module_names):
        for name in ("run", "load", "Popen", "system", "exec", "loads", "_exit"):
            if name == "Popen" and module in ("collections", "datetime", "enum", "pathlib", "typing"):
                continue  # their classes may be called
            with pytest.raises(CheckpointError, match="not a plain checkpoint|damaged"):
                check_call(check_name(module, name))
