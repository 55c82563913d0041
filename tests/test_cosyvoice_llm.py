"""The speech language models of CosyVoice 2 and 3: upstream's values, the trained small model, and the edges."""

import dataclasses
import functools
import gc
import json
import math
import threading
import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path
from safetensors.numpy import load_file

from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.cosyvoice.llm import LMOptions, SpeechLM, SpeechLMConfig, quantizes, sanitize
from mlx_cosyh3.cosyvoice.qwen2 import CACHE_STEP, KVCache, Qwen2Config
from mlx_cosyh3.cosyvoice.ras import RecordedDraws
from mlx_cosyh3.cosyvoice.safe_tokens import SafeTokens
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.int8 import Int8Linear, quantize_int8
from tests.golden_data import cosyvoice_golden, large

VERSIONS = ("v3_llm", "v2_llm")
CASES = ("zero_shot", "no_prompt_speech", "text_only")
GREEDY = {"temperature": 0}


def load_lm(config, path):
    lm = SpeechLM(config)
    weights = sanitize({name: t.numpy() for name, t in open_source(path).tensors.items()})
    lm.load_weights([(name, mx.array(a.astype(np.float32))) for name, a in weights.items()])
    mx.eval(lm.parameters())
    return lm


@functools.cache
def golden(name):
    """(model, config.json, io tensors)."""
    folder = cosyvoice_golden(name)
    d = json.loads((folder / "config.json").read_text())
    if d["endofprompt_id"] is None:
        config = SpeechLMConfig.v2(d["qwen2"], d["speech_token_size"], d["mix_ratio"])
    else:
        config = SpeechLMConfig.v3(d["qwen2"], d["speech_token_size"], d["endofprompt_id"], d["mix_ratio"])
    return load_lm(config, folder / "llm.pt"), d, mx.load(str(folder / "io.safetensors"))


def random_lm(version=3, seed=0, **changes):
    """A small random model (text vocabulary 64, <|endofprompt|> 60, speech vocabulary 40)."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e6}  # fmt: skip
    sizes |= changes
    lm = SpeechLM(SpeechLMConfig.v3(sizes, 40, 60) if version == 3 else SpeechLMConfig.v2(sizes, 40))
    rng = np.random.default_rng(seed)
    weights = []
    for name, a in tree_flatten(lm.parameters()):
        x = rng.standard_normal(a.shape)
        x = 1 + 0.1 * x if "norm" in name else x if "embed" in name else x / np.sqrt(a.shape[-1])
        weights.append((name, mx.array(x.astype(np.float32))))
    lm.load_weights(weights)
    mx.eval(lm.parameters())
    return lm


def no_stop(version=3):
    """A random model that never ends an utterance by itself."""
    lm = random_lm(version)
    w = lm.llm_decoder.weight
    lm.llm_decoder.weight = mx.concatenate([w[:40], mx.zeros_like(w[40:])]) * 8
    mx.eval(lm.parameters())
    return lm


def inputs(d, io, case):
    """(text, prompt text, prompt speech) of a golden case."""
    text, prompt, speech = (io[f"in.{n}"][0].tolist() for n in ("text", "prompt_text", "prompt_speech_token"))
    if case == "text_only" and d["endofprompt_id"] is None:
        prompt = []
    return text, prompt, speech if case == "zero_shot" else []


def log_softmax(logits):
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def logp_of(lm, text, prompt, speech, said):
    """Log-probabilities before each id of `said` and after the last, in one forward pass: [len(said) + 1, V]."""
    embeddings = [lm.embed_prefix(text, prompt, speech)] + [lm.embed_speech(said)] * bool(said)
    return log_softmax(lm(mx.concatenate(embeddings, axis=1)))[0, -1 - len(said) :]


def difference(a, b):
    assert a.shape == b.shape
    return mx.abs(a - b).max().item()


# upstream's values


@pytest.mark.parametrize("name", VERSIONS)
def test_prefix(name):
    lm, d, io = golden(name)
    embeddings = lm.embed_prefix(*inputs(d, io, "zero_shot"))
    assert difference(embeddings, io["prefix.embed"]) == 0
    hidden = lm.qwen2(embeddings, lm.make_cache())
    assert difference(hidden, io["prefix.hidden"]) < 1e-5
    assert difference(lm(embeddings), io["prefix.logits"]) < 3e-5


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_greedy(name, case):
    lm, d, io = golden(name)
    tokens = lm.generate(*inputs(d, io, case), LMOptions(**GREEDY, max_ratio=4), None)
    said = list(tokens)
    assert said == io[f"{case}.greedy.tokens"].tolist()
    assert tokens.finish_reason == "length"
    assert difference(logp_of(lm, *inputs(d, io, case), said)[:-1], io[f"{case}.greedy.logp"]) < 3e-5


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_ras(name, case):
    lm, d, io = golden(name)
    u, sizes = np.array(io[f"{case}.ras.u"]), io[f"{case}.ras.draw_size"].tolist()
    tokens = lm.generate(*inputs(d, io, case), LMOptions(max_ratio=5), RecordedDraws.start(u))
    said = list(tokens)
    assert said == io[f"{case}.ras.tokens"].tolist()
    stopped = len(said) < 45
    assert tokens.finish_reason == ("stop" if stopped else "length")
    assert tokens._state.draws.at.item() == len(u) == len(said) + stopped + sizes.count(lm.config.speech_vocab_size)
    last = logp_of(lm, *inputs(d, io, case), said)[-1 if stopped else -2]
    assert difference(last, io[f"{case}.ras.logp_last"]) < 3e-5


@functools.cache
def trained():
    folder = large("checkpoints", "cosyvoice3-tiny")
    qwen2 = json.loads((folder / "CosyVoice-BlankEN" / "config.json").read_text())
    return load_lm(SpeechLMConfig.v3(qwen2, 928, 771), folder / "llm.pt"), load_file(str(folder / "io.safetensors"))


@pytest.mark.parametrize("j", range(5))
def test_trained_model_says_what_upstream_says(j):
    lm, io = trained()
    tokens = lm.generate(io[f"s{j}.text_ids"], [], [], LMOptions(), RecordedDraws.start(io[f"s{j}.u"]))
    assert list(tokens) == io[f"s{j}.llm_tokens"].tolist()
    assert tokens.finish_reason == "stop"


# the decode loop


def naive(lm, text, prompt, speech, key, limit):
    """The same utterance without anything ahead of time: each step from the start, read before the next."""
    sampler = LMOptions().sampler()
    tokens = lm.generate(text, prompt, speech, LMOptions(), key)
    tokens._start()
    state, said = tokens._state, []
    while len(said) < limit:
        embeddings = [lm.embed_prefix(text, prompt, speech)] + [lm.embed_speech(said)] * bool(said)
        ids, _, state = sampler(lm(mx.concatenate(embeddings, axis=1))[:, -1], state)
        if ids.item() >= lm.config.speech_token_size:
            break
        said.append(ids.item())
    return said


@pytest.mark.parametrize("seed", range(4))
def test_looking_ahead_changes_nothing(seed):
    lm, d, io = golden("v3_llm")
    text, prompt, speech = inputs(d, io, "zero_shot")
    key = mx.random.key(seed)
    made = list(lm.generate(text, prompt, speech, LMOptions(max_ratio=5), key))
    assert made == naive(lm, text, prompt, speech, key, 45)


def test_seeds_reproduce_in_any_thread():
    lm = no_stop()
    keys = [mx.random.key(s) for s in range(4)]
    say = lambda key: list(lm.generate([1, 2, 3, 4], [60], [5, 6], LMOptions(), key))  # noqa: E731
    alone = [say(key) for key in keys]
    assert alone == [say(key) for key in keys]
    assert len({tuple(a) for a in alone}) == 4
    together = [None] * 4

    def work(i):
        together[i] = say(keys[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert together == alone


def test_ids_made_in_one_thread_are_drawn_in_another():
    """Made here, iterated there: the object holds nothing lazy, also with recorded draws."""
    lm = no_stop()
    for key in (mx.random.key(1), RecordedDraws.start([0.2] * 50)):
        tokens, got = lm.generate([1, 2], [60], [], LMOptions(max_tokens=5), key), []
        worker = threading.Thread(target=got.extend, args=(tokens,))
        worker.start()
        worker.join()
        assert len(got) == 5
        assert got == list(lm.generate([1, 2], [60], [], LMOptions(max_tokens=5), key))


def test_one_thread_goes_on_where_another_stopped():
    lm, key = no_stop(), mx.random.key(2)
    text = list(range(30))
    for make in (
        lambda: lm.generate(text, [60], [], LMOptions(max_tokens=300), key),
        lambda: lm.generate(text, [60], [], LMOptions(max_tokens=300), RecordedDraws.start([0.3] * 600)),
        lambda: lm.generate_from_stream(text, [60], [1, 2], LMOptions(max_tokens=200), key),
    ):
        tokens, alone = make(), list(make())
        got = [next(tokens) for _ in range(3)]
        worker = threading.Thread(target=got.extend, args=(tokens,))
        worker.start()
        worker.join()
        assert got == alone and len(got) >= 200


def test_cache_grows_beyond_its_first_size():
    lm = no_stop()
    said = list(lm.generate([1] * 30, [60], [], LMOptions(**GREEDY), None))
    assert len(said) == 600 > 2 * CACHE_STEP
    best = mx.argmax(logp_of(lm, [1] * 30, [60], [], said)[:-1], axis=-1).tolist()
    assert best == said


@pytest.mark.parametrize("cuts", ([255, 1, 1], [256, 1], [1, 512], [100, 300, 7, 1]))
def test_cache_equals_one_piece(cuts):
    rng = np.random.default_rng(0)
    keys = mx.array(rng.standard_normal((2, 3, sum(cuts), 4)).astype(np.float32))
    cache, at = KVCache(), 0
    for n in cuts:
        k, v = cache.append(keys[:, :, at : at + n], -keys[:, :, at : at + n])
        at += n
        assert mx.array_equal(k, keys[:, :, :at]) and mx.array_equal(v, -keys[:, :, :at])
    assert cache.keys.shape[2] % CACHE_STEP == 0
    cache.rewind(3)
    k, _ = cache.append(keys[:, :, 10:12], keys[:, :, 10:12])
    assert mx.array_equal(k, mx.concatenate([keys[:, :, :3], keys[:, :, 10:12]], axis=2))


def test_pieces_and_batch_equal_the_whole():
    lm = random_lm()
    x = mx.array(np.random.default_rng(1).standard_normal((3, 20, 32)).astype(np.float32))
    whole, cache = lm(x), lm.make_cache()
    pieces = mx.concatenate([lm(x[:, a:b], cache) for a, b in ((0, 7), (7, 8), (8, 20))], axis=1)
    assert difference(pieces, whole) < 1e-5
    assert difference(mx.concatenate([lm(x[i : i + 1]) for i in range(3)]), whole) < 1e-5


# lengths


def test_v2_says_the_minimum_and_v3_does_not_know_one():
    lm = random_lm(2)
    lm.llm_decoder.bias = lm.llm_decoder.bias + 100 * (mx.arange(43) == lm.config.eos_id)
    tokens = lm.generate([1, 2, 3], [], [], LMOptions(**GREEDY), None)
    assert len(list(tokens)) == 6 and tokens.finish_reason == "stop"
    assert list(lm.generate([1, 2, 3], [], [], LMOptions(**GREEDY, min_ratio=0.5), None))[1:] == []
    assert list(lm.generate([1, 2, 3], [], [], LMOptions(**GREEDY, min_ratio=0), None)) == []
    io = golden("v3_llm")[2]  # upstream's mask is on sos there: 9 text ids, 8 tokens
    assert io["zero_shot.ras.tokens"].size < 2 * io["in.text"].size


def test_limits_and_finish_reason():
    lm = no_stop()
    for name, value, count in (("max_ratio", 2.5, 7), ("max_tokens", 4, 4), ("max_tokens", 1, 1), ("max_ratio", 0, 0)):
        tokens = lm.generate([1, 2, 3], [60], [], LMOptions(**GREEDY, **{name: value}), None)
        assert tokens.finish_reason is None
        assert len(list(tokens)) == count
        assert tokens.finish_reason == "length"
        assert list(tokens) == []


def test_stopping_early_leaves_the_model_usable():
    lm = no_stop()
    key = mx.random.key(0)
    tokens = lm.generate([1, 2, 3, 4], [60], [], LMOptions(), key)
    first = next(tokens)
    tokens.close()
    assert list(tokens) == []
    assert next(lm.generate([1, 2, 3, 4], [60], [], LMOptions(), key)) == first


# text that arrives bit by bit


def test_a_watched_run_and_its_caches_are_gone_when_it_has_ended():
    """Nothing that can go on elsewhere holds itself: memory falls at once, not when the garbage collector comes."""
    gone = []

    class Request:
        def guard(self, stage, function, again):
            return function()

    def make(text):
        run = lm.generate([5, 6], [], [], LMOptions(max_tokens=9), mx.random.key(0))
        gone.extend(map(weakref.ref, (run, *run._cache)))
        return run

    lm = no_stop(2)
    gc.collect()
    gc.disable()
    try:
        assert len(list(SafeTokens(Request(), make))) == 9
        assert len(gone) > 2 and not any(ref() for ref in gone)
    finally:
        gc.enable()


def test_errors():
    lm, o, key = random_lm(), LMOptions(), mx.random.key(0)
    for text, prompt, speech, message in (
        ([1, 2], [3], [], r"neither .* <\|endofprompt\|> \(id 60\)"),
        ([], [60], [], "the text is empty"),
        ([1, 64], [60], [], r"id 64 in the text is outside of the vocabulary \(0 to 63\)"),
        ([1, -1], [60], [], "id -1 in the text"),
        ([1], [60, 99], [], "id 99 in the prompt's text"),
        ([1], [60], [3, 40], r"id 40 in the prompt's speech .*0 to 39"),
        ([1.5], [60], [], "the text must be a flat list of whole numbers"),
        (np.array([[1, 2]]), [60], [], "flat list"),
        (7, [60], [], "flat list"),
    ):
        with pytest.raises(CosyH3Error, match=message):
            lm.generate(text, prompt, speech, o, key)
    with pytest.raises(CosyH3Error, match="the prompt's text does not hold"):
        lm.generate_from_stream([60, 1], [1], [], o, key)
    with pytest.raises(CosyH3Error, match="id 70 in the text"):
        list(lm.generate_from_stream([1, 2, 70], [60], [], o, key))
    with pytest.raises(CosyH3Error, match="the text is empty"):
        list(lm.generate_from_stream([], [60], [], o, key))
    for bad in (None, 3, mx.array([1, 2])):
        with pytest.raises(TypeError, match="PRNG key"):
            lm.generate([1], [60], [], o, bad)


def test_v2_needs_no_end_of_prompt():
    assert len(list(random_lm(2).generate([1], [], [], LMOptions(max_tokens=2), mx.random.key(0)))) <= 2


@pytest.mark.parametrize(
    "option, value",
    [("temperature", -1), ("top_p", 0), ("top_k", 1.5), ("win_size", -1), ("win_size", 2.5), ("tau_r", math.nan),
     ("min_ratio", -0.1), ("max_ratio", "20"), ("max_tokens", 0), ("tau_r", True)],
)  # fmt: skip
def test_bad_options(option, value):
    with pytest.raises(CosyH3Error, match=f"^{option} must be"):
        LMOptions(**{option: value})


def test_non_finite_weights_are_named():
    lm = random_lm()
    lm.qwen2.norm.weight = lm.qwen2.norm.weight * mx.nan
    mx.eval(lm.parameters())
    for options in (LMOptions(), LMOptions(**GREEDY)):
        with pytest.raises(CosyH3Error, match="non-finite value .* at token 1:"):
            list(lm.generate([1], [60], [], options, mx.random.key(0)))


# weights and configs


@pytest.mark.parametrize("name", VERSIONS)
def test_sanitize_twice_is_once(name):
    tensors = {n: t.numpy() for n, t in open_source(cosyvoice_golden(name) / "llm.pt").tensors.items()}
    once = sanitize(tensors)
    assert len(tensors) == len(once) + 1  # without Qwen2's own head
    twice = sanitize(once)
    assert twice.keys() == once.keys() and all(twice[n] is once[n] for n in once)
    lm = golden(name)[0]
    assert {n: a.shape for n, a in tree_flatten(lm.parameters())} == {n: a.shape for n, a in once.items()}


def test_sanitize_names_what_it_does_not_know():
    with pytest.raises(CheckpointError, match=r"no tensor 'llm\.model\.model\.layers\.3\.mlp\.gate\.weight', nearest "
                       r"known: 'llm\.model\.model\.layers\.3\.mlp\.gate_proj\.weight'"):  # fmt: skip
        sanitize({"llm.model.model.layers.3.mlp.gate.weight": np.zeros(1)})
    with pytest.raises(CheckpointError, match="no tensor 'spk_embed_affine_layer.weight'"):
        sanitize({"spk_embed_affine_layer.weight": np.zeros(1)})
    assert sanitize({"llm.model.model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(1)}) == {}


def test_config_round_trip_and_errors():
    for lm in (random_lm(2), random_lm(3)):
        d = json.loads(json.dumps(dataclasses.asdict(lm.config)))
        assert SpeechLMConfig.from_dict(d | {"unknown": 1}) == lm.config
        for missing in ("qwen2", "own_specials"):
            with pytest.raises(CheckpointError, match=f"lacks {missing}"):
                SpeechLMConfig.from_dict({k: v for k, v in d.items() if k != missing})
        for name, value, message in (("hidden_act", "gelu", "= 'gelu'"), ("num_key_value_heads", 3, "no multiple")):
            with pytest.raises(CheckpointError, match=message):
                Qwen2Config.from_dict(d["qwen2"] | {name: value})
        with pytest.raises(CheckpointError, match="lacks rope_theta"):
            Qwen2Config.from_dict({k: v for k, v in d["qwen2"].items() if k != "rope_theta"})


def test_special_ids():
    v2, v3 = random_lm(2).config, random_lm(3).config
    assert (v2.eos_id, v2.fill_id, v2.sos_row, v2.task_row, v2.speech_vocab_size) == (40, 42, 0, 1, 43)
    assert (v3.eos_id, v3.fill_id, v3.sos_row, v3.task_row, v3.speech_vocab_size) == (41, 43, 40, 42, 240)


def test_what_is_quantised():
    lm = random_lm()
    paths = [p for p, m in lm.named_modules() if quantizes(p)]
    assert len(paths) == 2 * 7 and all(isinstance(m, nn.Linear) for p, m in lm.named_modules() if quantizes(p))
    assert quantizes("llm.qwen2.layers.11.self_attn.o_proj")
    for path in ("llm_decoder", "speech_embedding", "qwen2.embed_tokens", "qwen2.layers.0.mlp", "qwen2.norm"):
        assert not quantizes(path)


@pytest.mark.parametrize("how", ("int8", "affine", "bfloat16"))
def test_quantised_and_half_models_run(how):
    lm = random_lm()
    x = lm.embed_prefix([1, 2, 3], [60], [4, 5])
    wanted = lm(x)
    if how == "int8":
        weights = dict(tree_flatten(lm.parameters()))

        def swap(path, module):
            if not quantizes(path):
                return module
            q, scale = quantize_int8(np.array(module.weight))
            new = Int8Linear(q.shape[1], q.shape[0], "bias" in module)
            own = {"weight": mx.array(q), "scale": mx.array(scale)}
            new.update(own | ({"bias": weights[f"{path}.bias"]} if "bias" in module else {}))
            return new

        lm.update_modules(tree_map_with_path(swap, lm.leaf_modules(), is_leaf=nn.Module.is_module))
    elif how == "affine":
        lm = random_lm(hidden_size=64, intermediate_size=64)
        x = lm.embed_prefix([1, 2, 3], [60], [4, 5])
        wanted = lm(x)
        nn.quantize(lm, 64, 8, class_predicate=lambda path, _: quantizes(path))
    else:
        lm.set_dtype(mx.bfloat16)
        x = x.astype(mx.bfloat16)
    got = lm(x)
    assert got.dtype == mx.float32
    error = mx.linalg.norm((got - wanted).reshape(-1)) / mx.linalg.norm(wanted.reshape(-1))
    assert 1e-6 < error.item() < 0.05
    mx.eval(lm.parameters())
    said = list(lm.generate([1, 2, 3], [60], [4, 5], LMOptions(max_tokens=6), mx.random.key(0)))
    assert all(0 <= i < 40 for i in said)
