"""Speech in threads: the same bytes everywhere, streams that change hands, flat memory, a clean exit.

Run: python -m pytest -q tests/test_cosyvoice_speech_threads.py
The slow ones, as many as a service would see: -m slow
"""

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3 import generate, load, stream_generate
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.stream import _idle as idle
from mlx_cosyh3.stream import _workers as workers
from tests.small_voice_model import small_voice, write_voice_model

TEXT = "Hello there."
WORDS = "the cat sat on a mat and it was warm so they went home in good time for tea".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_voice_model(tmp_path_factory.mktemp("models") / "voice")


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


def spoken(make):
    """The audio of make(); none where the random model ends its speech at once, which is an error."""
    try:
        return make().audio
    except CosyH3Error as e:
        assert "made no speech" in str(e)
        return np.zeros(0, np.float32)


def streamed(stream):
    heard = np.concatenate([np.zeros(0, np.float32), *stream])
    np.testing.assert_array_equal(stream.result.audio, heard)
    return stream.result


def request(model, n):
    """The n-th of many different requests: voices, modes, streams -> its audio."""
    text = f"{WORDS[n % len(WORDS)]} {WORDS[3 * n % len(WORDS)]}."
    options = [{}, {"voice": "bert", "speed": 1.5}, {"voice": small_voice(seed=n)}, {"instruct": "Speak fast."}][n % 4]
    options = dict(seed=n, note=lambda text: None, max_seconds=1.5, **options)
    if n % 3:
        return spoken(lambda: generate(model, text, **options))
    return spoken(lambda: streamed(stream_generate(model, text, chunk_tokens=5, **options)))


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)


def test_the_same_seed_is_the_same_bytes(model):
    want = generate(model, TEXT, seed=4)
    again = generate(model, TEXT, seed=4)
    request(model, 3)  # another voice, streamed, between them
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(generate, model, TEXT, seed=4).result()
    for other in (again, elsewhere, generate(model, TEXT, seed=4)):
        assert other.tokens == want.tokens
        np.testing.assert_array_equal(other.audio, want.audio)


def test_eight_threads_at_once(model):
    want = [request(model, n) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            same(list(pool.map(lambda n: request(model, n), range(8))), want)


def test_loaded_in_a_thread_that_is_gone(folder, model):
    box = []
    thread = threading.Thread(target=lambda: box.append(load(folder)))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(generate(box[0], TEXT, seed=4).audio, generate(model, TEXT, seed=4).audio)


def test_a_voice_made_in_another_thread(model):
    from mlx_cosyh3.cosyvoice.voice import Voice

    recording = (0.1 * np.random.default_rng(0).standard_normal(24000).astype(np.float32), 24000)
    with ThreadPoolExecutor(1) as pool:
        voice = pool.submit(Voice.from_audio, model, recording, "the cat").result()
    here = Voice.from_audio(model, recording, "the cat")
    np.testing.assert_array_equal(voice.embedding, here.embedding)
    np.testing.assert_array_equal(voice.prompt_tokens, here.prompt_tokens)
    np.testing.assert_array_equal(
        generate(model, TEXT, voice=voice, seed=4).audio, generate(model, TEXT, voice=here, seed=4).audio
    )


@pytest.mark.parametrize("pieces", [False, True])
def test_a_stream_changes_hands(model, pieces):
    text = lambda: iter(["The cat sat ", "on the mat."]) if pieces else "The cat sat on the mat."  # noqa: E731
    options = dict(seed=4, chunk_tokens=5, max_chunk_tokens=5)
    want = list(stream_generate(model, text(), **options))
    stream = stream_generate(model, text(), **options)
    got = [next(stream)]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        while stream.result is None:
            for pool in (one, two):
                got.append(pool.submit(next, stream, np.zeros(0, np.float32)).result())
    assert len(want) > 2
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(want))


# ---------------------------------------------------------------- memory


def settle():
    for _ in range(100):  # streams that were given up end soon
        if len(idle) == len(workers):
            break
        time.sleep(0.05)
    mx.clear_cache()
    return mx.get_active_memory()


def held():
    """(threads, open files) of this process."""
    linux = sys.platform == "linux"
    return (
        (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
        if linux
        else (threading.active_count(), 0)
    )


def check_flat(model, count, settled, different=None):
    """`count` utterances (`different` ones, again and again), of which some are streams that are closed or given up; all
    is flat from `settled` on."""
    memory = []
    for n in range(count):
        request(model, n % (different or count))
        if n % 5 == 0:
            stream = stream_generate(model, "The cat sat on the mat.", seed=4, chunk_tokens=5, note=lambda text: None)
            next(stream)
            if n % 10:
                stream.close()
            del stream
        memory.append(settle())
        if n == settled:
            before = held()
    low, high = min(memory[settled:]), max(memory[settled:])
    assert high - low <= 0.01 * low, memory
    assert held() <= before, (before, held())


def test_memory_threads_and_files_are_flat(model):
    check_flat(model, 30, 10)


@pytest.mark.slow
def test_memory_is_flat_over_200_utterances(model):
    check_flat(model, 200, 20)


@pytest.mark.slow
def test_200_random_texts_in_eight_threads_and_alone(model):
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 25))) for _ in range(200)]
    options = [
        dict(seed=n, voice=draw.choice(["anna", "bert", small_voice()]), note=lambda text: None) for n in range(200)
    ]
    speak = lambda n: spoken(lambda: generate(model, texts[n], **options[n]))  # noqa: E731
    alone = [speak(n) for n in range(200)]
    assert sum(map(len, alone)) > 200 * 12000
    with ThreadPoolExecutor(8) as pool:
        same(list(pool.map(speak, range(200))), alone)


# ---------------------------------------------------------------- the end of the process

SCRIPTS = {
    "generate in a worker": "t = threading.Thread(target=lambda: generate(m, 'Hello.', seed=1)); t.start(); t.join()",
    "stream to its end": "print(sum(map(len, stream_generate(m, 'Hello.', seed=1))))",
    "stream kept open at exit": "s = stream_generate(m, 'the cat. ' * 200, seed=1); next(s)",
    "stream dropped": "next(stream_generate(m, 'the cat. ' * 200, seed=1))",
    "offline kept open at exit": "s = m.start('the cat. ' * 200, False, seed=1); next(s)",
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_process_exits_cleanly(folder, name):
    script = "import sys, threading\nfrom mlx_cosyh3 import generate, load, stream_generate\nm = load(sys.argv[1])\n"
    done = subprocess.run(
        [sys.executable, "-c", script + SCRIPTS[name], str(folder)], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
