"""A small random CosyVoice 3 model folder with a byte tokenizer and three voices, for tests of all around the parts.

It says noise, about twenty speech tokens an utterance. Its streaming chunk is 5 tokens, so that short speech has many.
"""

import dataclasses
import json

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_cosyh3.cosyvoice import cosyvoice3
from mlx_cosyh3.cosyvoice.llm import SpeechLMConfig
from mlx_cosyh3.cosyvoice.special_tokens import ADDED, END_OF_PROMPT, QWEN2
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.tokenizer import ALPHABET

SPEECH = 81  # speech tokens, 3^4
END_OF_PROMPT_ID = 256 + len(QWEN2) + ADDED[3].index(END_OF_PROMPT)
QWEN = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 256 + len(QWEN2) + len(ADDED[3]) + 8, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}  # fmt: skip
FLOW = {
    "vocab_size": SPEECH, "pre_lookahead_layer": {"channels": 64, "pre_lookahead_len": 3},
    "dit": {"dim": 64, "depth": 2, "heads": 2, "dim_head": 32, "ff_mult": 2, "static_chunk_size": 10},
}  # fmt: skip
HIFT = {
    "in_channels": 80, "base_channels": 32, "nb_harmonics": 8, "sampling_rate": 24000, "nsf_alpha": 0.1,
    "nsf_sigma": 0.003, "nsf_voiced_threshold": 10, "upsample_rates": [8, 5, 3], "upsample_kernel_sizes": [16, 11, 7],
    "istft_params": {"n_fft": 16, "hop_len": 4}, "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]],
    "source_resblock_kernel_sizes": [7, 7, 11], "source_resblock_dilation_sizes": [[1, 3, 5]] * 3, "lrelu_slope": 0.1,
    "audio_limit": 0.99, "conv_pre_look_right": 4, "f0_predictor": {"cond_channels": 32},
}  # fmt: skip
CAMPPLUS = {
    "feat_dim": 80, "embedding_size": 192, "head_channels": 4, "init_channels": 16, "growth_rate": 8, "bottleneck": 16,
    "context": 8, "layers": [2, 2, 2], "dilations": [1, 2, 2], "segment": 100,
}  # fmt: skip
S3 = {
    "n_mels": 128, "n_state": 64, "n_head": 1, "n_layer": 1, "strides": [2, 2], "positions": 0, "memory": 31,
    "codebook": 0, "digits": 4, "attn_epsilon": 1e-5, "mlp_epsilon": 1e-5, "key_bias": False,
}  # fmt: skip
MEL = {"n_fft": 1920, "hop_size": 480, "win_size": 1920, "num_mels": 80, "fmin": 0, "fmax": None}


def config(**changes):
    """config.json of the model; `changes`: other values of its entries, such as campplus=None."""
    return {
        "model_type": "cosyvoice3", "sample_rate": 24000, "token_frame_rate": 25, "token_mel_ratio": 2, "chunk_size": 5,
        "llm": dataclasses.asdict(SpeechLMConfig.v3(QWEN, SPEECH, END_OF_PROMPT_ID)), "flow": FLOW, "hift": HIFT,
        "campplus": CAMPPLUS, "speech_tokenizer": S3, "mel": MEL,
        "dtype": {"llm": "float32", "flow": "float32", "hift": "float32"},
    } | changes  # fmt: skip


def _draw(name, shape, rng):
    noise = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name and name.endswith("weight") or name.endswith(("alpha", "weight_g")):
        return 1 + 0.1 * noise
    if name == "hift.f0_predictor.classifier.bias":
        return 150 + noise  # Hz; it varies little, so that what rounds off does not add up to another phase
    if name == "hift.conv_post.bias":
        return noise - 4  # log magnitudes
    if name == "hift.conv_post.weight":
        return 0.1 * noise / np.sqrt(np.prod(shape[1:]))  # rarely clipped
    if name == "speech_tokenizer.project.weight":
        return noise  # all ids occur
    if len(shape) == 1:
        return 0.1 * noise
    return noise if "embed" in name else noise / np.sqrt(np.prod(shape[1:]))


def weights(config, seed=0):
    """{name: array}: speech goes on for some twenty tokens; text, pauses and specials are not among them."""
    rng = np.random.default_rng(seed)
    w = {n: _draw(n, a.shape, rng) for n, a in tree_flatten(cosyvoice3.build(config).parameters())}
    # Channel 0 of the language model is a constant, channel 1 tells speech from the rest: biases, which its head lacks.
    for name, a in w.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            a[:2] = 0
    w["llm.qwen2.norm.weight"][:2] = 1
    w["llm.qwen2.embed_tokens.weight"][:, :2] = 4, 0
    speech, head = w["llm.speech_embedding.weight"], w["llm.llm_decoder.weight"]
    speech[:, :2] = 4, 0
    speech[:SPEECH, 1] = 4
    head *= 1.5
    head[:, :2] = 0
    head[SPEECH:, 0] = -20  # never
    head[SPEECH + 1] = 0  # but for the end, which does not come at once
    head[SPEECH + 1, :2] = -2.2, 3
    return {n: mx.array(a) for n, a in w.items()}


def write_tokenizer(folder):
    vocab = {char: i for i, char in enumerate(sorted(ALPHABET))}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    added = {str(len(vocab) + i): {"content": token, "special": True} for i, token in enumerate(QWEN2)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


def small_voice(name="prompted", tokens=12, transcript="the cat", seed=5, codebook=SPEECH):
    """A random Voice; tokens=0: a speaker embedding alone."""
    rng = np.random.default_rng(seed)
    return Voice(
        rng.standard_normal(192).astype(np.float32), rng.integers(0, codebook, tokens).astype(np.int32),
        rng.standard_normal((2 * tokens, 80)).astype(np.float32), transcript if tokens else None, None, name, codebook,
    )  # fmt: skip


def write_voice_model(folder, seed=0, **changes):
    """Write the folder. Its voices: anna and bert, embeddings alone, and clara, with a recording and its transcript."""
    (folder / "voices").mkdir(parents=True, exist_ok=True)
    c = config(**changes)
    mx.save_safetensors(str(folder / "model.safetensors"), weights(c, seed), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(c, sort_keys=True))
    write_tokenizer(folder)
    for i, (name, tokens) in enumerate((("anna", 0), ("bert", 0), ("clara", 12))):
        small_voice(name, tokens, seed=i).save(folder / "voices" / f"{name}.safetensors")
    return folder
