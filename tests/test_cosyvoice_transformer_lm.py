"""The speech language model of CosyVoice 1: upstream's values, full sizes, and the edges."""

import dataclasses
import functools
import json
import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.cosyvoice.llm import LMOptions
from mlx_cosyh3.cosyvoice.ras import RecordedDraws
from mlx_cosyh3.cosyvoice.transformer_lm import TransformerLM, TransformerLMConfig, quantizes, sanitize
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.int8 import Int8Linear, quantize_int8
from tests.golden_data import cosyvoice_golden, large

CASES = ("zero_shot", "no_prompt_speech", "text_only")
GREEDY = {"temperature": 0}
SIZES = {"attention_heads": 2, "linear_units": 48, "num_blocks": 2}
SMALL = {
    "text_token_size": 64,
    "speech_token_size": 40,
    "spk_embed_dim": 24,
    "text_encoder": {"input_size": 16, "output_size": 32, **SIZES},
    "llm": {"input_size": 32, "output_size": 32, **SIZES},
}
FULL = {
    "text_token_size": 51866,
    "speech_token_size": 4096,
    "text_encoder": {
        "input_size": 512, "output_size": 1024, "attention_heads": 16, "linear_units": 4096, "num_blocks": 6,
        "input_layer": "linear", "pos_enc_layer_type": "rel_pos_espnet", "selfattention_layer_type": "rel_selfattn",
        "use_cnn_module": False, "macaron_style": False, "normalize_before": True, "use_dynamic_chunk": False,
        "use_dynamic_left_chunk": False, "static_chunk_size": 1, "dropout_rate": 0.1,
    },
    "llm": {
        "input_size": 1024, "output_size": 1024, "attention_heads": 16, "linear_units": 4096, "num_blocks": 14,
        "input_layer": "linear_legacy", "pos_enc_layer_type": "rel_pos_espnet", "static_chunk_size": 1,
        "selfattention_layer_type": "rel_selfattn",
    },
}  # fmt: skip


@functools.cache
def golden():
    """(model, io tensors)."""
    folder = cosyvoice_golden("v1_llm")
    lm = TransformerLM(TransformerLMConfig.from_dict(json.loads((folder / "config.json").read_text())))
    weights = sanitize({name: t.numpy() for name, t in open_source(folder / "llm.pt").tensors.items()})
    lm.load_weights([(name, mx.array(a.astype(np.float32))) for name, a in weights.items()])
    mx.eval(lm.parameters())
    return lm, mx.load(str(folder / "io.safetensors"))


def random_lm(seed=0, stops=True, **changes):
    """A small random model (text vocabulary 64, speech vocabulary 40, speakers of 24 numbers)."""
    lm = TransformerLM(TransformerLMConfig.from_dict(SMALL | changes))
    rng = np.random.default_rng(seed)
    weights = []
    for name, a in tree_flatten(lm.parameters()):
        x = rng.standard_normal(a.shape)
        x = 1 + 0.1 * x if "norm" in name else x if "embedding" in name else x / np.sqrt(a.shape[-1])
        if name == "llm_decoder.bias" and not stops:
            x[-1] = -1e4
        weights.append((name, mx.array(x.astype(np.float32))))
    lm.load_weights(weights)
    mx.eval(lm.parameters())
    return lm


def inputs(io, case):
    """(text, prompt text, prompt speech, speaker) of a golden case."""
    text, prompt, speech = (io[f"in.{n}"][0].tolist() for n in ("text", "prompt_text", "prompt_speech_token"))
    speaker = np.array(io["in.embedding"])
    return {
        "zero_shot": (text, prompt, speech, speaker),
        "no_prompt_speech": (text, prompt, [], None),
        "text_only": (text, [], [], speaker),
    }[case]


def prefix_of(lm, text, prompt, speech, speaker):
    return lm.embed_prefix(text, prompt, speech, None if speaker is None else np.array(speaker).reshape(-1))


def generate(lm, inputs, options, key=None):
    *ids, speaker = inputs
    return lm.generate(*ids, options, key, speaker)


def logp_of(lm, inputs, said):
    """Log-probabilities before each id of `said` and after the last, in one forward pass: [len(said) + 1, V]."""
    parts = [prefix_of(lm, *inputs)] + [lm.embed_speech(said)] * bool(said)
    logits = lm(mx.concatenate(parts, axis=1))[0, -1 - len(said) :]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def difference(a, b):
    assert a.shape == b.shape
    return mx.abs(a - b).max().item()


# upstream's values


def test_prefix():
    lm, io = golden()
    text, prompt, speech, speaker = inputs(io, "zero_shot")
    assert difference(lm.embed_text(prompt + text), io["text_encode.out"]) < 1e-5
    assert difference(lm.embed_speaker(speaker[0])[0], io["spk_affine.out"]) < 1e-6
    embeddings = prefix_of(lm, text, prompt, speech, speaker)
    assert difference(embeddings, io["prefix.embed"]) < 1e-5
    assert difference(lm.llm(embeddings, "causal"), io["prefix.hidden"]) < 2e-5
    assert difference(lm(embeddings), io["prefix.logits"]) < 5e-5


@pytest.mark.parametrize("case", CASES)
def test_greedy(case):
    lm, io = golden()
    tokens = generate(lm, inputs(io, case), LMOptions(**GREEDY, max_ratio=4))
    said = list(tokens)
    assert said == io[f"{case}.greedy.tokens"].tolist()
    assert tokens.finish_reason == "length"
    assert difference(logp_of(lm, inputs(io, case), said)[:-1], io[f"{case}.greedy.logp"]) < 5e-5


@pytest.mark.parametrize("case", CASES)
def test_ras(case):
    lm, io = golden()
    u, sizes = np.array(io[f"{case}.ras.u"]), io[f"{case}.ras.draw_size"].tolist()
    tokens = generate(lm, inputs(io, case), LMOptions(max_ratio=5), RecordedDraws.start(u))
    said = list(tokens)
    assert said == io[f"{case}.ras.tokens"].tolist()
    assert len(u) == len(said) + sizes.count(lm.config.speech_vocab_size)  # some ids were drawn twice
    assert difference(logp_of(lm, inputs(io, case), said[:-1])[-1], io[f"{case}.ras.logp_last"]) < 5e-5


# decoding


def test_steps_equal_one_pass():
    """Through the places where caches and tables grow, and with drawn ids the model was not asked to repeat."""
    lm = random_lm(stops=False)
    given = ([3, 1, 2], [4], list(range(30)), np.ones(24, dtype=np.float32))
    said = list(generate(lm, given, LMOptions(**GREEDY, max_ratio=100)))
    assert len(said) == 300  # with the prefix more than 256
    logits = logp_of(lm, given, said)[:-1, :40]
    assert mx.argmax(logits, axis=-1).tolist() == said


def test_keys_of_a_batch():
    """Two rows at once are what each is alone."""
    lm = random_lm()
    rows = [lm.embed_prefix([i, 2, 3], [], [4, i], np.full(24, i, dtype=np.float32)) for i in (5, 6)]
    cache = lm.make_cache()
    both = [lm(mx.concatenate(rows), cache), lm(lm.embed_drawn(mx.array([7, 8])), cache)]
    for i, row in enumerate(rows):
        alone = lm(mx.concatenate([row, lm.embed_speech([7 + i])], axis=1))
        assert difference(mx.concatenate(both, axis=1)[i : i + 1], alone) < 1e-5


def test_each_draw_follows_its_key():
    lm = random_lm()
    say = lambda key: list(lm.generate([1, 2, 3, 4], [6], [5, 6], LMOptions(), mx.random.key(key)))  # noqa: E731
    assert say(1) == say(1) != say(2)


def test_speaker():
    """Its direction counts, not its length; without one there is no place for it."""
    lm = random_lm()
    speaker = np.random.default_rng(0).standard_normal((1, 24)).astype(np.float32)
    say = lambda s: list(lm.generate([1, 2, 3, 4], [], [], LMOptions(), mx.random.key(3), s))  # noqa: E731
    assert say(speaker) == say(mx.array(speaker[0], dtype=mx.float32)) == say(8 * speaker)  # 8: no rounding
    assert len({tuple(say(s)) for s in (speaker, -speaker, None)}) == 3
    zeros = np.zeros(24, dtype=np.float32)
    assert mx.isfinite(lm.embed_prefix([1], [], [], zeros)).all().item()
    assert lm.embed_prefix([1, 2], [3], [4], zeros).shape[1] == lm.embed_prefix([1, 2], [3], [4]).shape[1] + 1 == 7


def test_text_does_not_see_what_follows():
    lm = random_lm()
    assert difference(lm.embed_text([1, 2, 3, 4])[:, :2], lm.embed_text([1, 2, 9])[:, :2]) < 1e-6
    assert difference(lm.embed_text([1, 2])[:, 1], lm.embed_text([5, 2])[:, 1]) > 1e-2


def test_at_least_min_ratio_tokens_come():
    lm = random_lm()
    lm.llm_decoder.bias = lm.llm_decoder.bias + 100 * (mx.arange(41) == 40)  # always eos
    mx.eval(lm.parameters())
    for options, count in ((LMOptions(), 6), (LMOptions(min_ratio=1.5), 4), (LMOptions(min_ratio=0), 0)):
        tokens = lm.generate([1, 2, 3], [], [], options, mx.random.key(0))
        assert len(list(tokens)) == count
        assert tokens.finish_reason == "stop"
    tokens = lm.generate([1, 2, 3], [], [], LMOptions(max_ratio=1), mx.random.key(0))
    assert len(list(tokens)) == 3 and tokens.finish_reason == "length"


def test_limits():
    lm = random_lm(stops=False)
    for name, value, count in (("max_ratio", 2.5, 7), ("max_tokens", 4, 4), ("max_tokens", 1, 1), ("max_ratio", 0, 0)):
        tokens = lm.generate([1, 2, 3], [60], [], LMOptions(**GREEDY, **{name: value}), None)
        assert tokens.finish_reason is None
        assert len(list(tokens)) == count
        assert tokens.finish_reason == "length"


def test_each_token_in_another_thread():
    """Nothing that a step leaves behind is lazy; also across the growth of the tables."""
    lm = random_lm(stops=False)
    given = (list(range(20)), [3], [5, 6] * 100, mx.random.normal((1, 24), key=mx.random.key(1)))
    options = LMOptions(max_tokens=60)
    tokens, got = generate(lm, given, options, mx.random.key(2)), []
    for _ in range(60):
        thread = threading.Thread(target=lambda: got.append(next(tokens)))
        thread.start()
        thread.join()
    assert got == list(generate(lm, given, options, mx.random.key(2)))


def test_stopping_early_leaves_the_model_usable():
    lm = random_lm(stops=False)
    tokens = lm.generate([1, 2, 3, 4], [60], [], LMOptions(), mx.random.key(0))
    first = next(tokens)
    tokens.close()
    assert list(tokens) == []
    assert next(lm.generate([1, 2, 3, 4], [60], [], LMOptions(), mx.random.key(0))) == first


# bad input


def test_errors():
    lm, o, key = random_lm(), LMOptions(), mx.random.key(0)
    for text, prompt, speech, message in (
        ([], [60], [], "the text is empty"),
        ([1, 64], [60], [], r"id 64 in the text is outside of the vocabulary \(0 to 63\)"),
        ([1], [-1], [], "id -1 in the prompt's text"),
        ([1], [60], [3, 40], r"id 40 in the prompt's speech .*0 to 39"),  # eos is no speech
        ([1.5], [60], [], "the text must be a flat list of whole numbers"),
    ):
        with pytest.raises(CosyH3Error, match=message):
            lm.generate(text, prompt, speech, o, key)
    for speaker, message in ((np.ones((1, 23)), "24 finite numbers, not 23"), (np.full(24, np.nan), "with 0 finite")):
        with pytest.raises(CosyH3Error, match=message):
            lm.generate([1], [], [], o, key, speaker)
    with pytest.raises(CosyH3Error, match="CosyVoice 1 cannot speak while text still arrives"):
        lm.generate_from_stream(iter([1, 2]), [], [], o, key)
    with pytest.raises(TypeError, match="PRNG key"):
        lm.generate([1], [60], [], o, None)


def test_non_finite_weights_are_named():
    lm = random_lm()
    lm.llm.after_norm.weight = lm.llm.after_norm.weight * mx.nan
    mx.eval(lm.parameters())
    for options in (LMOptions(), LMOptions(**GREEDY)):
        with pytest.raises(CosyH3Error, match="non-finite value .* at token 1:"):
            list(lm.generate([1], [60], [], options, mx.random.key(0)))


# weights and configs


def test_full_size_is_upstream_s():
    """Names and shapes of the released model, without its weights: MLX makes none before they are asked for."""
    keys = json.loads(large("golden", "cosyvoice", "inventory.json").read_text())["v1.llm"]["keys"]
    released = {name: np.broadcast_to(np.float32(0), shape) for name, (shape, _) in keys.items()}
    lm = TransformerLM(TransformerLMConfig.from_dict(FULL))
    ours = {name: a.shape for name, a in tree_flatten(lm.parameters())}
    assert ours == {name: a.shape for name, a in sanitize(released).items()}
    assert len(ours) == len(released) == 401
    assert sum(np.prod(shape) for shape in ours.values()) == 310_718_465
    # The variant of 25 tokens a second has another table of text.
    lm = TransformerLM(TransformerLMConfig.from_dict(FULL | {"text_token_size": 60515}))
    assert lm.text_embedding.weight.shape == (60515, 512)


def test_sanitize_twice_is_once():
    tensors = {n: t.numpy() for n, t in open_source(cosyvoice_golden("v1_llm") / "llm.pt").tensors.items()}
    once = sanitize(tensors)
    twice = sanitize(once)
    assert len(tensors) == len(once)
    assert twice.keys() == once.keys() and all(twice[n] is once[n] for n in once)


def test_sanitize_names_what_it_does_not_know():
    for name, near in (
        ("llm.encoders.13.self_attn.linear_w.weight", r"llm\.encoders\.13\.self_attn\.linear_.\.weight"),
        ("llm.encoders.13.self_attn.linear_pos.bias", r"llm\.encoders\.13\.self_attn\.linear_.+\."),
        ("speech_embeding.weight", "speech_embedding.weight"),
    ):
        with pytest.raises(CheckpointError, match=rf"no tensor '{name}', nearest known: '{near}"):
            sanitize({name: np.zeros(1)})
    for name in ("llm.model.model.norm.weight", "encoders.0.norm1.weight", "text_encoder.layers.0"):
        with pytest.raises(CheckpointError, match=f"no tensor '{name}'"):
            sanitize({name: np.zeros(1)})


def test_config_round_trip_and_errors():
    config = TransformerLMConfig.from_dict(FULL)
    d = json.loads(json.dumps(dataclasses.asdict(config)))
    assert TransformerLMConfig.from_dict(d | {"unknown": 1}) == config
    assert (config.spk_embed_dim, config.speech_vocab_size) == (192, 4097)
    for missing in ("text_token_size", "llm"):
        with pytest.raises(CheckpointError, match=f"lacks {missing}"):
            TransformerLMConfig.from_dict({k: v for k, v in d.items() if k != missing})
    for part, name, value, message in (
        ("text_encoder", "static_chunk_size", 0, r"text_encoder.static_chunk_size = 0; only 1 is"),
        ("text_encoder", "use_cnn_module", True, "use_cnn_module = True; only False"),
        ("llm", "input_layer", "linear", "llm.input_layer = 'linear'; only 'linear_legacy'"),
        ("llm", "attention_heads", 3, "a multiple of attention_heads = 3"),
    ):
        with pytest.raises(CheckpointError, match=message):
            TransformerLMConfig.from_dict(FULL | {part: FULL[part] | {name: value}})
    with pytest.raises(CheckpointError, match="lacks llm.num_blocks"):
        TransformerLMConfig.from_dict(d | {"llm": {k: v for k, v in d["llm"].items() if k != "num_blocks"}})


def test_what_is_quantised():
    lm = random_lm()
    paths = [p for p, m in lm.named_modules() if quantizes(p)]
    assert len(paths) == 2 * 2 * 6 and all(isinstance(m, nn.Linear) for p, m in lm.named_modules() if quantizes(p))
    assert quantizes("llm.llm.layers.13.attention.out") and quantizes("llm.text_encoder.layers.5.ff_in")
    for path in ("llm_decoder", "text_embedding", "llm.layers.0.attention.pos", "llm.embed.linear", "llm.layers.0",
                 "spk_embed_affine_layer", "text_encoder_affine_layer", "llm.layers.0.norm_ff"):  # fmt: skip
        assert not quantizes(path)


@pytest.mark.parametrize("how", ("int8", "affine", "bfloat16"))
def test_quantised_and_half_models_run(how):
    wide = {"output_size": 64, "attention_heads": 4, "linear_units": 64, "num_blocks": 2}
    lm = random_lm(text_encoder={"input_size": 16, **wide}, llm={"input_size": 64, **wide})
    given = ([1, 2, 3], [60], [4, 5], np.ones(24, dtype=np.float32))
    wanted = lm(prefix_of(lm, *given))
    if how == "int8":
        weights = dict(tree_flatten(lm.parameters()))

        def swap(path, module):
            if not quantizes(path):
                return module
            q, scale = quantize_int8(np.array(module.weight))
            new = Int8Linear(q.shape[1], q.shape[0])
            return new.update({"weight": mx.array(q), "scale": mx.array(scale), "bias": weights[f"{path}.bias"]})

        lm.update_modules(tree_map_with_path(swap, lm.leaf_modules(), is_leaf=nn.Module.is_module))
    elif how == "affine":
        nn.quantize(lm, 64, 8, class_predicate=lambda path, _: quantizes(path))
    else:
        lm.set_dtype(mx.bfloat16)
    mx.eval(lm.parameters())
    prefix = prefix_of(lm, *given)
    assert prefix.dtype == (mx.bfloat16 if how == "bfloat16" else mx.float32)
    got = lm(prefix)
    assert got.dtype == mx.float32
    error = mx.linalg.norm((got - wanted).reshape(-1)) / mx.linalg.norm(wanted.reshape(-1))
    assert 1e-6 < error.item() < 0.05
    said = list(generate(lm, given, LMOptions(max_tokens=6), mx.random.key(0)))
    assert all(0 <= i < 40 for i in said)
