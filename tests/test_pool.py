"""Several models within a bound: who leaves, who comes back, what happens when loading fails.

Run: python -m pytest -q tests/test_pool.py
"""

import gc
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_cosyh3 import generate, load
from mlx_cosyh3.caches import nbytes
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.pool import Pool, PoolBusy, expected_bytes, memory_bound
from mlx_cosyh3.scheduler import Closed
from tests.fake_models import WAIT, FakeModel, FakeRun
from tests.small_model import write_model
from tests.small_voice_model import write_voice_model
from tests.test_scheduler_models import files, os_threads

pytestmark = pytest.mark.slow

UNIT = 4096  # bytes of a model of size 1
SIZES = {"a": 1, "b": 1, "c": 1, "d": 1, "two": 2, "four": 4}


class Weights(nn.Module):
    """A FakeModel with weights."""

    start = FakeModel.start

    def __init__(self, units):
        super().__init__()
        self.w = mx.zeros(units * UNIT // 4)
        mx.eval(self.w)
        self._order, self._runs = [], {}
        self._ballast = 0

    order, runs = property(lambda self: self._order), property(lambda self: self._runs)
    ballast = property(lambda self: self._ballast, lambda self, n: setattr(self, "_ballast", n))


class Loader:
    """load for a Pool; loads: the names it was called with. What is in `errors` fails, what is in `gates` waits."""

    def __init__(self):
        self.loads, self.errors, self.gates, self.begun = [], {}, {}, threading.Event()

    def __call__(self, name, **options):
        self.loads.append(name)
        self.begun.set()
        if name in self.gates:
            assert self.gates[name].wait(WAIT)
        if name in self.errors:
            raise self.errors[name]
        return Weights(SIZES[name])


@pytest.fixture
def loader():
    return Loader()


def pool_of(loader, units, **options):
    return Pool(units * UNIT, load=loader, size=lambda name, **o: SIZES[name] * UNIT, **options)


def use(pool, *names):
    for name in names:
        with pool.get(name) as lease:
            assert lease.submit("hi").result().text == "hi"


# ---------------------------------------------------------------- who leaves


def test_the_least_recently_used_leaves_and_comes_back(loader):
    with pool_of(loader, 3) as pool:
        use(pool, "a", "b", "c", "a")
        assert pool.names == ["b", "c", "a"] and pool.bytes == 3 * UNIT
        use(pool, "d")
        assert pool.names == ["c", "a", "d"]
        use(pool, "b")
        assert pool.names == ["a", "d", "b"]
        use(pool, "two")
        assert pool.names == ["b", "two"]
        assert loader.loads == ["a", "b", "c", "d", "b", "two"]
        assert pool.stats()["loads"] == 6 and pool.stats()["evictions"] == 4


def test_who_is_held_stays(loader):
    with pool_of(loader, 2) as pool:
        held = pool.get("a")
        use(pool, "b", "c")
        assert pool.names == ["a", "c"]
        with pytest.raises(PoolBusy, match="no room for the model two .* try again later"):
            pool.get("two")
        assert pool.get("a").model is held.model  # that one was dropped at once
        held.close()
        held.close()
        use(pool, "two")
        assert pool.names == ["two"]
        with pytest.raises(CosyH3Error, match="lease is closed"):
            held.submit("hi")


def test_a_request_keeps_its_model_without_a_lease(loader):
    gate = threading.Event()
    with pool_of(loader, 1) as pool:
        with pool.get("a") as lease:
            ticket = lease.submit("hi", gate=gate)
        with pytest.raises(PoolBusy):
            pool.get("b")
        gate.set()
        assert ticket.result().text == "hi"
        use(pool, "b")


@pytest.mark.parametrize("way", ["lease", "request"])
def test_waiting_for_room(loader, way):
    gate = threading.Event()
    with pool_of(loader, 1) as pool:
        held = pool.get("a")
        if way == "request":
            ticket = held.submit("hi", gate=gate)
            held.close()
        with ThreadPoolExecutor(1) as other:
            waiting = other.submit(pool.get, "b", timeout=WAIT)
            while not any(loading.bytes for loading in list(pool._loading.values())):
                time.sleep(0.01)  # it comes to ask for room
            assert not waiting.done() and pool.names == ["a"]
            if way == "request":
                gate.set()
                ticket.result()
            else:
                held.close()
            assert waiting.result().name == "b"
        del waiting


def test_trim(loader):
    with pool_of(loader, 4) as pool:
        use(pool, "a", "b", "c")
        held = pool.get("a")
        pool.trim(2 * UNIT)
        assert pool.names == ["c", "a"]
        pool.trim()
        assert pool.names == ["a"] and held.model is not None


def test_a_model_that_can_never_fit(loader):
    with pool_of(loader, 3) as pool:
        use(pool, "a")
        with pytest.raises(CosyH3Error, match="the model four takes .* more than max_memory"):
            pool.get("four")
        assert loader.loads == ["a"] and pool.names == ["a"]


def test_a_model_that_is_larger_than_it_seemed(loader):
    with Pool(3 * UNIT, load=loader, size=lambda name: 0) as pool:
        with pytest.raises(CosyH3Error, match="more than max_memory"):
            pool.get("four")
        assert pool.names == []
        use(pool, "a", "b", "c", "two")
        assert pool.names == ["c", "two"]
        held = pool.get("c"), pool.get("two")
        with pytest.raises(PoolBusy):
            pool.get("a")
        assert pool.names == ["c", "two"] and len(held) == 2


def test_options_make_another_model(loader):
    with pool_of(loader, 4) as pool:
        one, two = pool.get("a"), pool.get("a", kv_window=5)
        assert one.model is not two.model and pool.get("a", kv_window=5).model is two.model


# ---------------------------------------------------------------- loading


def test_many_ask_for_one_model(loader):
    loader.gates["a"] = threading.Event()
    with pool_of(loader, 2) as pool, ThreadPoolExecutor(8) as threads:
        leases = [threads.submit(pool.get, "a") for _ in range(8)]
        assert loader.begun.wait(WAIT)
        use(pool, "b")  # meanwhile another one can be loaded
        loader.gates["a"].set()
        assert len({id(lease.result().model) for lease in leases}) == 1
        assert sorted(loader.loads) == ["a", "b"]
        del leases


def test_room_that_is_set_aside_is_not_given_twice(loader):
    loader.gates["two"] = threading.Event()
    with pool_of(loader, 3) as pool, ThreadPoolExecutor(1) as other:
        lease = other.submit(pool.get, "two")
        assert loader.begun.wait(WAIT)
        held = pool.get("a")
        with pytest.raises(PoolBusy):
            pool.get("b")
        loader.gates["two"].set()
        assert lease.result().name == "two" and held.name == "a"
        del lease


@pytest.mark.parametrize(
    "error", [RuntimeError("[malloc] Unable to allocate\nmore"), OSError(28, "No space"), MemoryError(), KeyError("x")]
)
def test_a_failed_load_is_one_line_and_leaves_no_trace(loader, error):
    with pool_of(loader, 2) as pool:
        use(pool, "b")
        loader.errors["a"] = error
        with pytest.raises(CheckpointError, match="cannot load the model a: ") as e:
            pool.get("a")
        assert "\n" not in str(e.value)
        assert pool.names == ["b"] and not pool._loading
        del loader.errors["a"]
        use(pool, "a", "b")


def test_all_who_wait_get_the_error(loader):
    loader.gates["a"], loader.errors["a"] = threading.Event(), CheckpointError("it is damaged")
    with pool_of(loader, 2) as pool, ThreadPoolExecutor(8) as threads:
        leases = [threads.submit(pool.get, "a") for _ in range(8)]
        assert loader.begun.wait(WAIT)
        loader.gates["a"].set()
        for lease in leases:
            with pytest.raises(CheckpointError, match="it is damaged"):
                lease.result()
        loader.errors.clear()
        use(pool, "a")


def test_bad_options():
    with pytest.raises(CosyH3Error, match="workers"):
        Pool(workers=0)
    with pytest.raises(TypeError):
        Pool(wokers=1)
    with pytest.raises(CosyH3Error, match="timeout"):
        Pool().get("a", timeout=-1)


def test_bounds():
    assert memory_bound(5e9) == 5e9 and memory_bound(1) == 1
    assert 0 < memory_bound(0.25) < memory_bound(None) < memory_bound(1.0) < math.inf
    for bad in (0, -1, "big", math.nan, True):
        with pytest.raises(CosyH3Error, match="max_memory"):
            memory_bound(bad)


# ---------------------------------------------------------------- the end


def test_close(loader):
    pool = pool_of(loader, 3)
    held, gate = pool.get("a"), threading.Event()
    ticket = held.submit("abc", gate=gate)
    waiting = held.submit("d")
    FakeRun.stopped = gate  # close() lets it end
    try:
        pool.close()
    finally:
        del FakeRun.stopped
    assert ticket.result(0).finish_reason == waiting.result(0).finish_reason == "cancelled"
    with pytest.raises(Closed):
        pool.get("a")
    with pytest.raises(Closed):
        held.submit("e")
    assert pool.names == [] and pool.bytes == 0 and held.model is None
    pool.close()


def test_close_with_drain(loader):
    with pool_of(loader, 3) as pool:
        tickets = [pool.get(name).submit("abc") for name in ("a", "b")]
    assert [t.result(0).text for t in tickets] == ["abc", "abc"]


def test_close_while_loading(loader):
    loader.gates["a"] = threading.Event()
    pool = pool_of(loader, 2)
    with ThreadPoolExecutor(1) as other:
        lease = other.submit(pool.get, "a")
        assert loader.begun.wait(WAIT)
        pool.close()
        loader.gates["a"].set()
        with pytest.raises(Closed):
            lease.result()
    assert pool.names == []


# ---------------------------------------------------------------- real models


@pytest.fixture
def folders(tmp_path):
    return [write_model(tmp_path / "text"), write_voice_model(tmp_path / "voice"), write_model(tmp_path / "other", 1)]


def ask(pool, folder, n, **options):
    kind = {"max_tokens": 5} if "voice" not in str(folder) else {"note": lambda text: None, "max_seconds": 0.4}
    with pool.get(folder, **options) as lease:
        return lease.submit("the cat", seed=n, **kind).result()


def test_eight_threads_three_models_room_for_two(folders):
    sizes = [nbytes(load(f)) for f in folders]
    want = {}
    for i, folder in enumerate(folders):
        with Pool(sum(sizes)) as pool:
            want[i] = ask(pool, folder, 7)
    cap = sum(sizes) - 1
    assert max(sizes) < cap
    with Pool(cap) as pool, ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda k: ask(pool, folders[k % 3], 7, timeout=10 * WAIT), range(36)))
        assert pool.bytes <= cap and pool.stats()["evictions"] > 0
    for k, result in enumerate(got):
        if k % 3 == 1:
            np.testing.assert_array_equal(result.audio, want[1].audio)
        else:
            assert result.tokens == want[k % 3].tokens


def test_sizes_are_known_before_loading(folders):
    for folder in folders[:2]:
        model = load(folder)
        weights = sum(a.nbytes for _, a in nn.utils.tree_flatten(model.parameters()))
        assert abs(expected_bytes(folder) - weights) <= 0.01 * weights
        assert weights <= nbytes(model)
    assert nbytes([model, model]) == nbytes(model)


@pytest.mark.parametrize("relative", [False, True])
def test_a_folder_that_vanishes(folders, tmp_path, monkeypatch, relative):
    text, voice, _ = folders
    monkeypatch.chdir(tmp_path.parent)
    name = os.path.relpath(text) if relative else text  # one slash: it could be a repo id
    with Pool(1e9) as pool:
        first = ask(pool, name, 1)
        away = shutil.move(text, tmp_path / "away")
        assert ask(pool, name, 1).tokens == first.tokens  # it is in memory
        pool.trim()
        with pytest.raises(CosyH3Error, match="no such model: .*text is neither a folder here nor a hub repo id"):
            pool.get(name)
        assert len(ask(pool, voice, 1).audio)
        shutil.move(away, text)
        assert ask(pool, name, 1).tokens == first.tokens


def test_a_folder_that_is_damaged(folders):
    text, voice, _ = folders
    file = text / "model.safetensors"
    whole = file.read_bytes()
    with Pool(1e9) as pool:
        for bad in (whole[: len(whole) // 2], b"", whole[:100]):
            file.write_bytes(bad)
            with pytest.raises(CheckpointError) as e:
                pool.get(text)
            assert "\n" not in str(e.value)
        (text / "config.json").write_text("{")
        with pytest.raises(CheckpointError, match="config"):
            pool.get(text)
        assert len(ask(pool, voice, 1).audio)


def test_memory_threads_and_files_are_flat_as_models_come_and_go(folders):
    def turn(n):
        with ThreadPoolExecutor(1) as asker:  # another thread each time
            asker.submit(ask, pool, folders[n % 3], n).result()
        pool.trim()
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory(), os_threads(), files()

    pool = Pool(1e9)
    seen = [turn(n) for n in range(18)]
    pool.close()
    memory, threads, fds = (np.array(column) for column in zip(*seen))
    assert np.ptp(memory[3:]) <= 1000, memory
    assert threads[6:].max() <= threads[:6].max() + 1 and fds[6:].max() <= fds[:6].max(), (threads, fds)


def test_process_exits_cleanly(folders):
    script = (
        "import sys\nfrom mlx_cosyh3 import generate\nfrom mlx_cosyh3.pool import Pool\npool = Pool(1e9)\n"
        "leases = [pool.get(f) for f in sys.argv[1:]]\nleases[0].submit('the', max_tokens=5).result()\n"
        "generate(leases[0].model, 'the', max_tokens=5)\npool.trim()\nt = leases[1].submit('the cat. ' * 50)"
    )
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, folders)], capture_output=True, text=True, timeout=120,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )  # fmt: skip
        assert done.returncode == 0 and done.stderr == "", done.stderr


def test_a_model_from_the_pool_is_the_model(folders):
    with Pool(1e9) as pool, pool.get(folders[0]) as lease:
        assert generate(lease.model, "the", seed=1, max_tokens=9).tokens == (
            generate(load(folders[0]), "the", seed=1, max_tokens=9).tokens
        )
