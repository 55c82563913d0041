"""A state that is copied, saved, loaded or rewound goes on as if nothing had happened."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.cache import H3Cache
from mlx_cosyh3.errors import CosyH3Error
from tests.golden_data import random_h3

HYBRID = {"attn_layer_idx": [1], "num_heads": 4, "rotary_emb_dim": 8}


@pytest.fixture(scope="module", params=[None, 16])
def model(request):
    model = random_h3(1, **HYBRID)
    model.kv_window = request.param
    return model


def ids(n, seed=0):
    return mx.array(np.random.default_rng(seed).integers(0, 60, (1, n)).astype(np.int32))


def continue_from(model, cache, n=5):
    """Logits of n more tokens."""
    return mx.stack([model.step(ids(n, seed=9)[:, t], cache) for t in range(n)])


def test_copy_is_independent(model):
    cache = model.make_cache()
    model.prefill(ids(50), cache)
    copy = cache.copy()
    one = continue_from(model, cache)
    assert copy.length == 50 and cache.length == 55
    assert mx.array_equal(continue_from(model, copy), one)


def test_copies_do_not_share_the_buffer_they_write_to(model):
    cache = model.make_cache()
    model.prefill(ids(50), cache)
    copy = cache.copy()
    a = model.step(mx.array([1]), cache)
    model.step(mx.array([2]), copy)  # writes its own key into its own slot
    assert mx.array_equal(model.step(mx.array([3]), cache), model.step(mx.array([3]), replay(model, [1])))
    assert a is not None


def replay(model, tokens):
    cache = model.make_cache()
    model.prefill(ids(50), cache)
    for token in tokens:
        model.step(mx.array([token]), cache)
    return cache


@pytest.mark.parametrize("length", [1, 50, 700])
def test_save_and_load(model, tmp_path, length):
    cache = model.make_cache()
    model.prefill(ids(length), cache)
    cache.pending = [7]
    path = tmp_path / "state"
    cache.save(path)
    loaded = H3Cache.load(path, model)
    assert (loaded.length, loaded.pending) == (length + 1, [7])
    assert mx.array_equal(continue_from(model, loaded), continue_from(model, cache))
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_save_and_load_ragged_batch(model, tmp_path):
    cache = model.make_cache(2)
    model.prefill(mx.concatenate([ids(30), ids(30, seed=1)]), cache, [30, 4])
    cache.save(tmp_path / "state")
    loaded = H3Cache.load(tmp_path / "state", model)
    step = mx.array([5, 6])
    assert mx.array_equal(model.step(step, loaded), model.step(step, cache))


def test_context_of_a_pure_model_is_small(tmp_path):
    """Its size does not depend on the length: here 10,000 tokens."""
    model = random_h3(2)
    cache = model.make_cache()
    model.prefill(ids(10_000), cache)
    cache.save(tmp_path / "state")
    c = model.config
    states = c.n_layer * c.d_model * (4 * c.d_state + 8 * c.d_state // 2)
    assert states < (tmp_path / "state").stat().st_size < states + 4096


def test_reset(model):
    cache = model.make_cache()
    model.prefill(ids(50), cache)
    cache.pending = [3]
    cache.reset()
    assert cache.length == 0 and cache.pending is None
    assert mx.array_equal(model.prefill(ids(8), cache), model.prefill(ids(8), model.make_cache()))


@pytest.mark.parametrize("length", [5, 250, 255, 256, 270])
def test_rewind_takes_one_step_back(model, length):
    """Also where the step made the buffer grow or move."""
    cache = model.make_cache()
    model.prefill(ids(length), cache)
    for t in range(20):
        want = model.step(mx.array([t]), cache.copy())
        mark = cache.mark()
        model.step(mx.array([59]), cache)
        cache.rewind(mark)
        assert mx.array_equal(model.step(mx.array([t]), cache), want)
    assert cache.length == length + 20


def test_refusals(model, tmp_path):
    cache = model.make_cache()
    path = tmp_path / "state"
    with pytest.raises(CosyH3Error, match="no saved state at"):
        H3Cache.load(path, model)
    path.write_bytes(b"not safetensors")
    with pytest.raises(CosyH3Error, match="is not a saved state"):
        H3Cache.load(path, model)
    mx.save_safetensors(str(tmp_path / "other.safetensors"), {"x": mx.zeros(3)})
    with pytest.raises(CosyH3Error, match="is not a saved state"):
        H3Cache.load(tmp_path / "other.safetensors", model)
    cache.save(path)
    with pytest.raises(CosyH3Error, match="another model"):
        H3Cache.load(path, random_h3(5, **HYBRID))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CosyH3Error, match="is not a saved state"):
        H3Cache.load(path, model)
    with pytest.raises(CosyH3Error, match="cannot write the state"):
        cache.save(tmp_path / "no such folder" / "state")
    with pytest.raises(CosyH3Error, match="holds 2 rows"):
        model.make_cache(2).repeated(3)


def test_a_full_disk_loses_nothing(model, tmp_path):
    """Simulated with a limit on file sizes: one line, the old file untouched, nothing half-written beside it."""
    import resource

    path = tmp_path / "state"
    cache = model.make_cache()
    cache.save(path)
    before = path.read_bytes()
    model.prefill(ids(30), cache)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(CosyH3Error, match="cannot write the state"):
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
