"""The seeded constants against upstream's, number by number."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.cosyvoice import noise
from tests.golden_data import cosyvoice_golden


@pytest.fixture(scope="module")
def golden():
    return {k: np.array(v) for k, v in mx.load(str(cosyvoice_golden("rng") / "buffers.safetensors")).items()}


def test_flow_noise(golden):
    ours = noise.cfm_noise(noise.FRAMES)
    assert ours.shape == (1, noise.FRAMES, 80) and ours.dtype == np.float32
    np.testing.assert_allclose(ours[0, :500].T, golden["rand_noise_first_500"][0], atol=1e-6, rtol=0)
    np.testing.assert_allclose(ours[0, -50:].T, golden["rand_noise_last_50"][0], atol=1e-6, rtol=0)


def test_phases(golden):
    np.testing.assert_array_equal(noise.rand_ini(), golden["rand_ini"][0])


def test_sine_noise(golden):
    np.testing.assert_array_equal(noise.sine_noise(0, 4800), golden["sine_noise_first_4800"][0])
    end = 300 * 24000
    np.testing.assert_array_equal(noise.sine_noise(end - 10, end), golden["sine_noise_last_10"][0])


def test_any_part_is_the_same_in_any_order_and_thread():
    whole = noise.sine_noise(0, 3 * noise.BLOCK)
    parts = [(0, 1), (5, 5), (noise.BLOCK - 1, noise.BLOCK + 1), (480, 2 * noise.BLOCK), (2 * noise.BLOCK, 3 * noise.BLOCK)]
    with ThreadPoolExecutor(4) as pool:
        for (a, b), part in zip(parts * 3, pool.map(lambda p: noise.sine_noise(*p), parts * 3)):
            assert part.shape == (b - a, 9)
            np.testing.assert_array_equal(part, whole[a:b])
