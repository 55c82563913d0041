"""The flows of CosyVoice 2 and 3, small and random: their streaming against the whole, and what they refuse."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map

from mlx_cosyh3.cosyvoice import causal_flow, noise
from mlx_cosyh3.cosyvoice.causal_flow import CausalFlow, default_budget
from mlx_cosyh3.cosyvoice.flow import Flow, FlowConfig
from mlx_cosyh3.cosyvoice.flow_upsampled import UpsampledFlow, UpsampledFlowConfig
from mlx_cosyh3.cosyvoice.qwen2 import CACHE_STEP
from mlx_cosyh3.errors import CosyH3Error

PROMPT, TOKENS = 7, 40
V2 = {"vocab_size": 30, "input_size": 32, "pre_lookahead_len": 3,
      "encoder": {"input_size": 32, "output_size": 32, "attention_heads": 2, "linear_units": 48, "num_blocks": 2,
                  "static_chunk_size": 4},
      "decoder": {"channels": [32], "num_heads": 2, "attention_head_dim": 16, "n_blocks": 1, "num_mid_blocks": 2,
                  "static_chunk_size": 8}}  # fmt: skip
V3 = {"vocab_size": 30, "dit": {"dim": 64, "depth": 2, "heads": 2, "dim_head": 32, "static_chunk_size": 8},
      "pre_lookahead_layer": {"channels": 16, "pre_lookahead_len": 3}}  # fmt: skip
KINDS = {2: (UpsampledFlow, UpsampledFlowConfig, V2), 3: (Flow, FlowConfig, V3)}


def build(version):
    kind, config, values = KINDS[version]
    return kind(config.from_dict(values))


def draw(flow, seed=0):
    """Random weights."""
    keys = iter(mx.random.split(mx.random.key(seed), 400))

    def values(name, a):
        n = mx.random.normal(a.shape, key=next(keys))
        return 1 + 0.1 * n if "norm" in name and name.endswith("weight") else n * (0.5 / a.shape[-1] ** 0.5)

    flow.load_weights([(name, values(name, a)) for name, a in tree_flatten(flow.parameters())])
    mx.eval(flow.parameters())
    return flow


@pytest.fixture(scope="module", params=KINDS, ids=lambda v: f"v{v}")
def version(request):
    return request.param


@pytest.fixture(scope="module")
def tiny(version):
    """A random flow, its prompts and 40 tokens."""
    flow = draw(build(version))
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 30, PROMPT)
    mel = rng.standard_normal((1, 2 * PROMPT, 80)).astype(np.float32)
    args = mx.array(prompt[None]), mx.array(mel), mx.array(rng.standard_normal((1, 192)).astype(np.float32))
    return flow, args, rng.integers(0, 30, TOKENS).tolist()


@pytest.fixture
def watched(monkeypatch):
    """All runs of the steps: (first frame, frames, whether they were kept)."""
    runs, solve = [], CausalFlow.solve

    def watch(self, mu, *args, **how):
        runs.append((how.get("start", 0), mu.shape[1], how.get("keep", True)))
        return solve(self, mu, *args, **how)

    monkeypatch.setattr(CausalFlow, "solve", watch)
    return runs


def same(parts, whole):
    whole = np.array(whole)
    np.testing.assert_allclose(np.array(mx.concatenate(parts, axis=1)), whole, atol=1e-5 * np.abs(whole).max(), rtol=0)


def unprompted(args):
    return args[0][:, :0], args[1][:, :0], args[2]


def allocated(stream):
    """Bytes of the keys and values that the stream keeps."""
    caches = [c for state in stream.states for c in state.caches if c.keys is not None]
    return sum(c.keys.nbytes + c.values.nbytes for c in caches)


def test_the_streaming_mask_matters(tiny):
    flow, args, tokens = tiny
    a, b = (np.array(flow(mx.array([tokens]), *args, streaming=s, steps=2)) for s in (True, False))
    assert np.abs(a - b).max() > 1e-3 * np.abs(a).max()


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, TOKENS), max_size=6),
    count=st.integers(1, TOKENS),
    kept=st.sampled_from([0, 8, 9, 16, 24, 40, 64, None]),
    prompted=st.booleans(),
)
def test_stream_equals_the_whole(tiny, cuts, count, kept, prompted):
    """For any pieces, and any number of frames that fit into the memory budget."""
    flow, args, tokens = tiny
    args, tokens = args if prompted else unprompted(args), tokens[:count]
    whole = flow(mx.array([tokens]), *args, streaming=True, steps=2)
    stream = flow.stream(*args, steps=2, memory_budget=float("inf"))
    if kept is not None:
        stream.keep = kept // 8 * 8
    edges = sorted(min(c, count) for c in cuts)
    parts = [stream.add(tokens[a:b]) for a, b in zip([0, *edges], edges)]
    assert stream.frames == sum(p.shape[1] for p in parts)
    parts.append(stream.add(tokens[edges[-1] if edges else 0 :], last=True))
    same(parts, whole)


@pytest.mark.parametrize("keep", [0, 24, 104])
def test_chunks_of_encoder_and_network_need_not_agree(tiny, keep):
    _, args, tokens = tiny
    encoder = V2["encoder"] | {"static_chunk_size": 3}
    flow = draw(UpsampledFlow(UpsampledFlowConfig.from_dict(V2 | {"encoder": encoder})))
    stream = flow.stream(*args, steps=2)
    stream.keep = keep
    parts = [stream.add(tokens[n : n + 6]) for n in range(0, TOKENS, 6)]
    assert stream.done % 8 == 0
    same([*parts, stream.add([], last=True)], flow(mx.array([tokens]), *args, streaming=True, steps=2))


def test_prompt_of_more_or_less_mel_than_its_tokens(tiny):
    flow, (prompt, mel, embedding), tokens = tiny
    for frames in (9, 2 * PROMPT + 5):
        args = prompt, mx.concatenate([mel, mel], axis=1)[:, :frames], embedding
        stream = flow.stream(*args, steps=2)
        parts = [stream.add(tokens[n : n + 3]) for n in range(0, TOKENS, 3)] + [stream.add([], last=True)]
        same(parts, flow(mx.array([tokens]), *args, streaming=True, steps=2))


def test_stream_computes_each_frame_once(tiny, watched):
    flow, args, tokens = tiny
    stream = flow.stream(*args, steps=1, memory_budget=1e12)
    for t in tokens:
        stream.add([t])
    stream.add([], last=True)
    assert sum(frames for _, frames, _ in watched) == 2 * (PROMPT + TOKENS)
    assert max(frames for _, frames, _ in watched) <= 8


def test_past_the_budget_a_prefix_is_kept(tiny, watched):
    flow, args, tokens = tiny
    tokens = 5 * tokens
    whole = flow(mx.array([tokens]), *args, streaming=True, steps=2)
    frame = flow.stream(*args, steps=2, memory_budget=0).bytes_per_frame
    stream = flow.stream(*args, steps=2, memory_budget=1.9 * CACHE_STEP * frame)
    assert stream.keep == CACHE_STEP
    watched.clear()
    parts = [stream.add(tokens[:12])]
    assert watched == [(0, 32, True)]
    assert allocated(stream) == CACHE_STEP * frame  # buffers grow by blocks, and those count
    parts.append(stream.add(tokens[12:150]))
    assert watched[1:] == [(32, CACHE_STEP - 32, True), (CACHE_STEP, 48, False)]
    parts.append(stream.add(tokens[150:190]))
    parts.append(stream.add(tokens[190:]))
    parts.append(stream.add([], last=True))
    assert watched[3:] == [(CACHE_STEP, n, False) for n in (128, 152, 158)]  # always from the end of what is kept
    assert allocated(stream) == CACHE_STEP * frame
    same(parts, whole)


def test_the_last_chunk_need_not_be_kept(tiny, watched):
    flow, args, tokens = tiny
    stream = flow.stream(*args, steps=2, memory_budget=0)
    stream.keep = 64
    parts = [stream.add(tokens[:12]), stream.add(tokens[12:], last=True)]
    assert watched == [(0, 32, True), (32, 62, False)]
    same(parts, flow(mx.array([tokens]), *args, streaming=True, steps=2))


@pytest.mark.parametrize("chunks", [0, 0.9, 1, 2.5, 1e9, float("inf")])
def test_frames_that_fit_into_a_budget(tiny, chunks):
    """Whole blocks of a buffer, and of these whole chunks of the mask."""
    flow, args, _ = tiny
    frame = flow.stream(*args, steps=3).bytes_per_frame
    stream = flow.stream(*args, steps=3, memory_budget=chunks * CACHE_STEP * frame)
    assert stream.keep >= noise.FRAMES if chunks > 100 else stream.keep == int(chunks) * CACHE_STEP
    flow.chunk_frames, size = 50, flow.chunk_frames
    try:
        stream = flow.stream(*args, steps=3, memory_budget=chunks * CACHE_STEP * frame)
        assert stream.keep >= noise.FRAMES if chunks > 100 else stream.keep == int(chunks) * CACHE_STEP // 50 * 50
    finally:
        flow.chunk_frames = size


def test_kept_bytes_are_what_is_said(tiny):
    flow, args, tokens = tiny
    stream = flow.stream(*args, steps=2, memory_budget=1e12)
    stream.add(tokens, last=True)
    used = sum(2 * c.keys.nbytes * c.offset // c.keys.shape[2] for s in stream.states for c in s.caches)
    assert used == stream.bytes_per_frame * 2 * (PROMPT + TOKENS)


METAL = {"max_recommended_working_set_size": 12e9, "memory_size": 16e9}


@pytest.mark.parametrize("info", [METAL, {"total_memory": 140e9}, {}])
def test_default_budget_knows_both_kinds_of_gpu(monkeypatch, info):
    monkeypatch.setattr(mx, "is_available", lambda device: True)
    monkeypatch.setattr(mx, "device_info", lambda device=None: info)
    assert default_budget() == next(iter(info.values()), 8e9) / 4
    monkeypatch.setattr(mx, "is_available", lambda device: False)
    assert default_budget() == 2e9


def test_bf16_weights_keep_fp32_outside(tiny, version):
    flow, args, tokens = tiny
    half = build(version)
    half.update(tree_map(lambda a: a.astype(mx.bfloat16), flow.parameters()))
    mx.eval(half.parameters())
    a, b = (f(mx.array([tokens]), *args, streaming=True, steps=2) for f in (flow, half))
    assert b.dtype == mx.float32
    assert 0 < mx.abs(a - b).max() < 0.1 * mx.abs(a).max()
    stream = half.stream(*args, steps=2)
    assert stream.bytes_per_frame == flow.stream(*args, steps=2).bytes_per_frame / 2
    parts = [stream.add(tokens[:19]), stream.add(tokens[19:], last=True)]
    assert parts[0].dtype == mx.float32 and stream.states[0].caches[0].keys.dtype == mx.bfloat16
    assert mx.abs(mx.concatenate(parts, axis=1) - b).max() < 0.1 * mx.abs(a).max()


def test_a_value_that_is_not_finite_names_stage_and_step(tiny):
    flow, args, tokens = tiny
    with pytest.raises(CosyH3Error, match=r"the flow gave a value that is not finite .* in step 1 of 3"):
        flow(mx.array([tokens]), args[0], args[1] * float("inf"), args[2], steps=3)


def test_too_little_to_tell_anything(tiny):
    flow, args, tokens = tiny
    none = unprompted(args)
    for count in range(4):  # the last 3 are only looked ahead at
        assert flow(mx.array([tokens[:count]], dtype=mx.int32), *none, finalize=False, steps=1).shape == (1, 0, 80)
    assert flow(mx.array([tokens[:4]]), *none, finalize=False, steps=1).shape == (1, 2, 80)
    assert flow(mx.zeros((1, 0), dtype=mx.int32), *none, steps=1).shape == (1, 0, 80)
    assert flow.stream(*none, steps=1).add([], last=True).shape == (1, 0, 80)
    assert flow.stream(*none, steps=1).add(tokens[:3]).shape == (1, 0, 80)


def test_no_steps(tiny):
    flow, args, tokens = tiny
    with pytest.raises(CosyH3Error, match="0 steps: give at least 1"):
        flow(mx.array([tokens]), *args, steps=0)
    with pytest.raises(CosyH3Error, match="0 steps"):
        flow.stream(*args, steps=0)


def test_bad_tokens_and_lengths(tiny, monkeypatch):
    flow, args, tokens = tiny
    with pytest.raises(CosyH3Error, match="outside of 0 to 29: 3 to 30"):
        flow(mx.array([[3, 30]]), *unprompted(args))
    with pytest.raises(CosyH3Error, match="outside of 0 to 29: -1 to 3"):
        flow.stream(*unprompted(args)).add([3, -1], last=True)
    with pytest.raises(CosyH3Error, match="at most 300 s"):
        flow(mx.zeros((1, noise.FRAMES // 2), dtype=mx.int32), *args, steps=1)
    monkeypatch.setattr(causal_flow.noise, "FRAMES", 50)
    stream = flow.stream(*args, steps=1)
    assert stream.add(tokens[:20]).shape[1]
    with pytest.raises(CosyH3Error, match="2 s of speech, the voice's own included, are too long .* at most 1 s"):
        stream.add(tokens[20:], last=True)


def test_progress_counts_the_steps(tiny):
    flow, args, tokens = tiny
    seen = []
    flow(mx.array([tokens[:3]]), *args, steps=4, on_step=seen.append)
    assert seen == [1, 2, 3, 4]


def test_progress_of_a_stream(tiny):
    flow, args, tokens = tiny
    stream, seen = flow.stream(*args, steps=4, memory_budget=1e12), []
    stream.add(tokens[:20], on_step=seen.append)
    assert seen == [1, 2, 3, 4]
    stream.add([], on_step=seen.append)
    assert seen == [1, 2, 3, 4]  # there was nothing to compute
    stream.keep = 56
    stream.add(tokens[20:39], on_step=seen.append)  # in two runs: what is still kept, and the rest
    assert seen[4:] == [0, 1, 1, 2, 2, 3, 3, 4]
    stream.add(tokens[39:], last=True, on_step=seen.append)
    assert seen[12:] == [1, 2, 3, 4]


@pytest.mark.parametrize("how", ["whole", "stream"])
def test_a_run_can_be_stopped_between_steps(tiny, how):
    flow, args, tokens = tiny
    seen = []

    def stop(done):
        seen.append(done)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        if how == "whole":
            flow(mx.array([tokens[:3]]), *args, steps=50, on_step=stop)
        else:
            flow.stream(*args, steps=50).add(tokens, on_step=stop)
    assert seen == [1, 2]
