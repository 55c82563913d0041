"""The speech language model of CosyVoice 1: text ids in, speech token ids (50 a second, or 25) out.

    [sos, speaker, text encoder(text of the prompt ++ text), task, speech of the prompt] -> transformer -> head -> ...

Text encoder and transformer have relative positions (`conformer.py`), and both look back only: the text encoder's mask
is chunked with chunks of one id. Decoding is that of the later versions (`llm.SpeechTokens`). After upstream's
`llm/llm.py`: TransformerLM.
"""

import re
from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.cosyvoice import conformer
from mlx_cosyh3.cosyvoice.conformer import EncoderConfig, RelativeEncoder
from mlx_cosyh3.cosyvoice.llm import SpeechTokens, Whole, checked_ids
from mlx_cosyh3.errors import CheckpointError, CosyH3Error, nearest

SOS, TASK = 0, 1  # rows of llm_embedding


@dataclass
class TransformerLMConfig:
    """Upstream's constructor arguments. Speech ids are 0 .. speech_token_size - 1; that number itself is eos."""

    text_token_size: int  # rows of the text embedding
    speech_token_size: int
    text_encoder: EncoderConfig
    llm: EncoderConfig
    spk_embed_dim: int = 192

    @classmethod
    def from_dict(cls, d):
        """The config from `config.json` or from the `llm` of `cosyvoice.yaml`; further keys are ignored, but not those
        that ask for another computation than ours: CheckpointError."""
        for name in ("text_token_size", "speech_token_size", "text_encoder", "llm"):
            if name not in d:
                raise CheckpointError(f"the config of the speech LM lacks {name}: convert the model again")
        causal = {"static_chunk_size": 1, "use_dynamic_chunk": False}
        values = {f.name: d[f.name] for f in fields(cls) if f.name in d} | {
            "text_encoder": EncoderConfig.from_dict(
                d["text_encoder"], "text_encoder", input_layer="linear", activation_type="swish", **causal
            ),
            "llm": EncoderConfig.from_dict(d["llm"], "llm", input_layer="linear_legacy", activation_type="relu"),
        }
        return cls(**values)

    @property
    def speech_vocab_size(self):
        """Rows of the head: the speech ids, and eos."""
        return self.speech_token_size + 1


class TransformerLM(nn.Module):
    """The model. Call it with embeddings [B, T, D] and a cache for logits."""

    def __init__(self, config):
        super().__init__()
        t, c = config.text_encoder, config.llm
        self.text_embedding = nn.Embedding(config.text_token_size, t.input_size)
        self.text_encoder = RelativeEncoder.from_config(t, activation="silu")
        self.text_encoder_affine_layer = nn.Linear(t.output_size, c.input_size)
        self.spk_embed_affine_layer = nn.Linear(config.spk_embed_dim, c.input_size)
        self.llm_embedding = nn.Embedding(2, c.input_size)
        self.speech_embedding = nn.Embedding(config.speech_token_size, c.input_size)
        self.llm = RelativeEncoder.from_config(c, activation="relu", legacy=True)
        self.llm_decoder = nn.Linear(c.output_size, config.speech_vocab_size)
        self.config = config

    def make_cache(self):
        """An empty cache; it takes the batch size of what is first read into it."""
        return self.llm.make_cache()

    def __call__(self, embeddings, cache=None):
        """embeddings [B, T, D] -> logits fp32 [B, T, speech_vocab_size]; `cache` moves on by T positions."""
        return self._head(self.llm(embeddings, "causal", cache))

    def last_logits(self, embeddings, cache, rows=None):
        """Logits fp32 [B, speech_vocab_size] of the last position alone.

        rows   ragged.Rows, where those of the cache are of different lengths: T is 1 then"""
        return self._head(self.llm(embeddings, "causal" if rows is None else rows.mask, cache)[:, -1])

    def _head(self, hidden):
        return self.llm_decoder(hidden).astype(mx.float32)

    def embed_text(self, ids):
        """A list of text ids -> [1, T, D], each having seen those before it: all text goes in at once."""
        embeddings = self.text_embedding(mx.array([ids], dtype=mx.int32))
        return self.text_encoder_affine_layer(self.text_encoder(embeddings, "causal"))

    def embed_speaker(self, speaker):
        """numpy [spk_embed_dim] -> [1, 1, D]; its length does not matter."""
        unit = speaker / max(np.linalg.norm(speaker), 1e-12)
        layer = self.spk_embed_affine_layer
        return layer(mx.array(unit[None, None], dtype=mx.float32).astype(layer.weight.dtype))

    def embed_speech(self, ids):
        """A list of speech ids -> [1, T, D]."""
        return self.speech_embedding(mx.array([ids], dtype=mx.int32))

    def embed_drawn(self, ids):
        """Ids as the sampler gives them, int32 [B] -> [B, 1, D]. Eos has no row: what comes of it is not used."""
        return self.speech_embedding(mx.minimum(ids[:, None], self.config.speech_token_size - 1))

    def embed_prefix(self, text_ids, prompt_text_ids, prompt_speech, speaker=None):
        """Three lists of ids, and numpy [spk_embed_dim] or None -> [1, 2 + all ids + (1 for a speaker), D]."""
        sos, task = (self.llm_embedding(mx.array([[row]], dtype=mx.int32)) for row in (SOS, TASK))
        parts = [sos] if speaker is None else [sos, self.embed_speaker(speaker)]
        parts += [self.embed_text([*prompt_text_ids, *text_ids]), task]
        return mx.concatenate(parts + [self.embed_speech(prompt_speech)] * bool(prompt_speech), axis=1)

    def generate(self, text_ids, prompt_text_ids, prompt_speech, options, key, speaker=None):
        """Say `text_ids` in the voice and manner of a prompt -> SpeechTokens, an iterator of ids.

        prompt_text_ids   what the prompt says, or an instruction; may be empty
        prompt_speech     speech ids of the prompt; may be empty
        key               an MLX PRNG key, or ras.RecordedDraws; not used at temperature 0
        speaker           embedding of the voice, floating, [1, spk_embed_dim]; None: none (as with an instruction)
        At least int(min_ratio * text ids) tokens come, at most int(max_ratio * text ids). Raises CosyH3Error for ids
        that the model does not have, and for a speaker of another size."""
        c = self.config
        text_ids = checked_ids(text_ids, c.text_token_size, "the text")
        prompt_text_ids = checked_ids(prompt_text_ids, c.text_token_size, "the prompt's text")
        prompt_speech = checked_ids(prompt_speech, c.speech_token_size, "the prompt's speech")
        if not text_ids:
            raise CosyH3Error("the text is empty (no text ids): there is nothing to say")
        if speaker is not None:
            if isinstance(speaker, mx.array):
                speaker = speaker.astype(mx.float32)
            speaker = np.array(speaker, dtype=np.float32).reshape(-1)  # evaluated: another thread may iterate
            if speaker.size != c.spk_embed_dim or not np.isfinite(speaker).all():
                raise CosyH3Error(
                    f"the speaker embedding must be {c.spk_embed_dim} finite numbers, not {speaker.size} with "
                    f"{np.isfinite(speaker).sum()} finite ones: make the voice again"
                )
        prefix = lambda: self.embed_prefix(text_ids, prompt_text_ids, prompt_speech, speaker)  # noqa: E731
        return SpeechTokens(self, options, key, Whole(len(text_ids), prefix))

    def generate_from_stream(self, text_id_iterator, prompt_text_ids, prompt_speech, options, key, **more):
        """CosyVoice 1 reads all of a text before it speaks: CosyH3Error."""
        raise CosyH3Error(
            "CosyVoice 1 cannot speak while text still arrives: its model reads a whole sentence first. Give it the "
            "whole text (the audio can be streamed), or use CosyVoice 2 or 3"
        )


ENCODERS = ("text_encoder.", "llm.")
OTHERS = [
    f"{name}.{part}"
    for name in ("text_encoder_affine_layer", "spk_embed_affine_layer", "llm_decoder")
    for part in ("weight", "bias")
] + [f"{name}.weight" for name in ("text_embedding", "llm_embedding", "speech_embedding")]


def sanitize(weights):
    """Tensors of upstream's `llm.pt` under our names: {name: array} -> {name: array}, the same arrays.

    Names that are ours already stay. CheckpointError for any other name."""
    out = {}
    for name, array in weights.items():
        prefix = next((p for p in ENCODERS if name.startswith(p)), "")
        ours = conformer.renamed(name[len(prefix) :]) if prefix else name if name in OTHERS else None
        if ours is None:
            number = re.search(r"\.(\d+)\.", name)
            pattern = re.sub(r"\.\d+\.", ".#.", name, count=1)
            near = nearest(pattern, OTHERS + [p + n for p in ENCODERS for n in conformer.OURS])
            near = near.replace("#", number[1] if number else "0")
            raise CheckpointError(f"the speech language model has no tensor {name!r}{near}")
        out[prefix + ours] = array
    return out


def quantizes(path):
    """Whether the module at `path` may be quantised: attention and feed-forward layers of both encoders."""
    return conformer.quantizes(path)
