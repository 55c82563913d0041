"""Load in one thread, generate in others; streams that change hands; no leak; a clean exit."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from mlx_cosyh3 import generate, load, stream_generate
from mlx_cosyh3.stream import _idle as idle
from mlx_cosyh3.stream import _workers as workers

OPTIONS = {"max_tokens": 12, "temperature": 1.0}


def test_eight_threads_at_once(model):
    prompts = [f"{'the cat ' * n}" for n in range(1, 9)]
    want = [generate(model, p, seed=n, **OPTIONS).tokens for n, p in enumerate(prompts)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            got = pool.map(lambda n: generate(model, prompts[n], seed=n, **OPTIONS).tokens, range(8))
            assert list(got) == want


def test_loaded_in_a_thread_that_is_gone(folder):
    box = []
    thread = threading.Thread(target=lambda: box.append(load(folder)))
    thread.start()
    thread.join()
    assert generate(box[0], "the", seed=1, **OPTIONS).tokens == generate(load(folder), "the", seed=1, **OPTIONS).tokens


def test_a_stream_and_a_cache_change_hands(model):
    """Started here, consumed by turns in two other threads; its cache goes on in a third."""
    want = generate(model, "the cat", seed=4, **OPTIONS)
    cache = model.make_cache()
    stream = stream_generate(model, "the cat", seed=4, cache=cache, **OPTIONS)
    pieces = [next(stream)]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        while stream.result is None:
            for pool in (one, two):
                pieces.append(pool.submit(next, stream, "").result())
        more = one.submit(generate, model, "", seed=5, cache=cache, **OPTIONS).result()
    assert "".join(pieces) == want.text
    other = model.make_cache()
    generate(model, "the cat", seed=4, cache=other, **OPTIONS)
    assert more.tokens == generate(model, "", seed=5, cache=other, **OPTIONS).tokens


@pytest.mark.slow
def test_memory_and_threads_are_flat(model):
    """200 generations, every fourth a stream, some of them abandoned or cancelled."""

    def run(n):
        for i in range(n):
            if i % 4:
                generate(model, "the cat", seed=i, **OPTIONS)
            else:
                stream = stream_generate(model, "the cat", seed=i, max_tokens=50)
                next(stream, None)
                if i % 8:
                    stream.close()
        stream = None
        for _ in range(100):  # the abandoned ones end soon
            if len(idle) == len(workers):
                break
            time.sleep(0.05)
        mx.clear_cache()
        return mx.get_active_memory()

    def os_threads():
        return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()

    first = run(10)
    threads = os_threads()
    last = run(190)
    assert abs(last - first) <= 0.01 * first, (first, last)
    assert os_threads() <= threads, (threads, os_threads())


SCRIPTS = {
    "generate in a worker": "t = threading.Thread(target=lambda: generate(m, 'the', max_tokens=5)); t.start(); t.join()",
    "stream to its end": "print(''.join(stream_generate(m, 'the', max_tokens=5)))",
    "stream kept open at exit": "s = stream_generate(m, 'the', max_tokens=5000); next(s)",
    "stream dropped": "next(stream_generate(m, 'the', max_tokens=5000))",
    "stream in a worker, open at exit":
        "L = []\ndef f():\n    s = stream_generate(m, 'the', max_tokens=5000); next(s); L.append(s)\n"
        "t = threading.Thread(target=f); t.start(); t.join()",
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_process_exits_cleanly(folder, name):
    script = "import sys, threading\nfrom mlx_cosyh3 import generate, load, stream_generate\nm = load(sys.argv[1])\n"
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script + SCRIPTS[name], str(folder)],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0 and done.stderr == "", done.stderr
