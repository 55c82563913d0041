"""H3, the Hungry Hungry Hippos state-space language model (Fu et al., arXiv 2212.14052), inference only.

    x = E[ids];  r = 0
    each layer:  r = r + x;  x = Mixer(LN1(r));  r = r + x;  x = MLP(LN2(r))
    logits = LNf(r + x) E^T

- The mixer of most layers is the H3 operator: a 64-tap shift SSM on k, times v, a diagonal SSM, times q.
  The few others are causal attention, optionally rotary, optionally over a window of the last tokens.
- A prompt is read in chunks of fixed length; the recurrent state is carried over exactly, so that memory does not
  grow with the prompt and time is linear in it. One token at a time runs the recurrence (`kernels/h3_step.py`).
- All SSM arithmetic and states are fp32, whatever the dtype of the linear layers. Coefficients and
  tables of powers are made in float64 at load: phases reach thousands of radians.

Letters: B batch, T tokens, D d_model, N shift taps, hd head_dim, H = D / hd, M complex modes (one of each pair).
"""

import time
from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_cosyh3.cache import H3Cache, H3State, KVState, fingerprint
from mlx_cosyh3.errors import CheckpointError
from mlx_cosyh3.h3_fused import FusedStep
from mlx_cosyh3.int8 import Int8Embedding, Int8Linear
from mlx_cosyh3.kernels import H3StepParams, h3_step
from mlx_cosyh3.scan import DiagonalScan, ShiftScan
from mlx_cosyh3.textgen import TextGeneration

CHUNK = 1024  # tokens of a prompt that are read at once


@dataclass
class H3Config:
    """Shapes and settings, as `config.json` holds them."""

    d_model: int
    n_layer: int
    vocab_size: int  # ids that may be drawn
    padded_vocab_size: int  # rows of the embedding
    d_inner: int = 0  # width of the MLP; 0 = 4 d_model
    d_state: int = 64  # shift taps; the diagonal SSM has d_state / 2 complex modes
    head_dim: int = 1  # of the H3 operator, not of attention
    attn_layer_idx: tuple = ()
    num_heads: int = 0  # of the attention layers
    rotary_emb_dim: int = 0  # leading dims of an attention head that are rotated; 0 = none
    rotary_base: float = 10000.0
    layer_norm_epsilon: float = 1e-5
    discretization: str = "bilinear"  # or "zoh"
    n_ssm: int = 0  # distinct A, B shared by the H channels (row h mod n_ssm); 0 = H
    eos_token_id: int = None
    tie_word_embeddings: bool = True

    @classmethod
    def from_dict(cls, d):
        """Keys that this class does not know are ignored."""
        config = cls(**{f.name: d[f.name] for f in fields(cls) if f.name in d})
        config.d_inner = config.d_inner or 4 * config.d_model
        config.n_ssm = config.n_ssm or config.d_model // config.head_dim
        return config


class ShiftSSM(nn.Module):
    """Parameters of the shift SSM on k: a 64-tap FIR filter, stored as state-space matrices."""

    def __init__(self, c):
        super().__init__()
        self.B = mx.zeros((c.d_model, c.d_state))
        self.C = mx.zeros((c.d_model, c.d_state))
        self.D = mx.zeros((c.d_model,))


class DiagonalSSM(nn.Module):
    """Parameters of the diagonal SSM in continuous time; a last axis of 2 holds (re, im)."""

    def __init__(self, c):
        super().__init__()
        H, M = c.d_model // c.head_dim, c.d_state // 2
        self.log_dt = mx.zeros((H,))
        self.inv_A_real = mx.zeros((c.n_ssm, M))  # A = -exp(inv_A_real) + i A_imag
        self.A_imag = mx.zeros((c.n_ssm, M))
        self.B = mx.zeros((c.n_ssm, M, 2))
        self.C = mx.zeros((H, M, 2))
        self.D = mx.zeros((H,))

    def discretize(self, rule):
        """dA, dB, C in numpy complex128 [H, M] (upstream: `SSKernelDiag`)."""
        p = {name: np.array(self[name], dtype=np.float64) for name in self}
        H, n_ssm = p["log_dt"].shape[0], p["A_imag"].shape[0]
        share = np.arange(H) % n_ssm
        dt = np.exp(p["log_dt"])[:, None]
        A = (-np.exp(p["inv_A_real"]) + 1j * p["A_imag"])[share]
        B = (p["B"][..., 0] + 1j * p["B"][..., 1])[share]
        C = p["C"][..., 0] + 1j * p["C"][..., 1]
        if rule == "bilinear":
            z = A * dt / 2
            return (1 + z) / (1 - z), B * dt / (1 - z), C
        if rule == "zoh":
            dA = np.exp(A * dt)
            return dA, B * (dA - 1) / A, C
        raise ValueError(f"discretization must be bilinear or zoh, not {rule!r}")


class H3Mixer(nn.Module):
    """q * diag(shift(k) * v), between linear projections."""

    def __init__(self, c):
        super().__init__()
        D = c.d_model
        self.q_proj = nn.Linear(D, D)
        self.k_proj = nn.Linear(D, D)
        self.v_proj = nn.Linear(D, D)
        self.shift = ShiftSSM(c)
        self.ssm = DiagonalSSM(c)
        self.output_linear = nn.Linear(D, D)
        self._head_dim = c.head_dim
        self._rule = c.discretization

    def prepare(self):
        """Discretise and make the tables of both forms; returns the arrays to evaluate."""
        dA, dB, C = self.ssm.discretize(self._rule)
        pairs = (mx.array(np.stack([a.real, a.imag], axis=-1).astype(np.float32)) for a in (dA, dB, C))
        # Contiguous, or each launch of the kernel would copy them.
        shift = (mx.contiguous(a) for a in (self.shift.B, self.shift.C, self.shift.D))
        self._params = H3StepParams(*shift, *pairs, self.ssm.D)
        f64 = lambda a: np.array(a, dtype=np.float64)  # noqa: E731
        self._shift_scan = ShiftScan(f64(self.shift.B), f64(self.shift.C), f64(self.shift.D))
        self._diag_scan = DiagonalScan(dA, dB, C, f64(self.ssm.D))
        return [*self._params, *self._shift_scan.tables(), *self._diag_scan.tables()]

    def __call__(self, x, state, lengths):
        """x [B, T, D] -> [B, T, D]; `state` moves on by lengths[b] <= T tokens in row b."""
        B, T, D = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if T == 1:
            ends = None if (lengths == 1).all() else mx.array(lengths.astype(np.int32))  # rows that have ended
            y, state.shift, state.ssm = h3_step(q, k, v, state.shift, state.ssm, self._params, lengths=ends)
            return self.output_linear(y)
        hd = self._head_dim
        H = D // hd
        k, state.shift = self._shift_scan(k.astype(mx.float32), state.shift, lengths)
        k, v32 = k.reshape(B, T, H, hd), v.astype(mx.float32).reshape(B, T, H, hd)
        u = k[..., :, None] * v32[..., None, :]  # [B, T, H, d1, d2]
        y, state.ssm = self._diag_scan(u, state.ssm, lengths)
        y = mx.sum(y * q.astype(mx.float32).reshape(B, T, H, hd, 1), axis=3)  # [B, T, H, d2]
        return self.output_linear(mx.swapaxes(y, 2, 3).reshape(B, T, D).astype(x.dtype))


class Attention(nn.Module):
    """Causal multi-head attention with a packed q, k, v projection."""

    def __init__(self, c):
        super().__init__()
        self.Wqkv = nn.Linear(c.d_model, 3 * c.d_model)
        self.out_proj = nn.Linear(c.d_model, c.d_model)
        self._heads = c.num_heads
        self._rotary, self._base = c.rotary_emb_dim, c.rotary_base

    def __call__(self, x, state, offsets):
        """x [B, T, D] -> [B, T, D]; offsets = tokens each row has read before (int, or int array [B])."""
        return self.out_proj(self.attend(self.Wqkv(x), state, offsets))

    def attend(self, qkv, state, offsets):
        """What lies between the projections: qkv [B, T, 3D] -> [B, T, D]."""
        B, T, _ = qkv.shape
        qkv = qkv.reshape(B, T, 3, self._heads, -1).transpose(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]  # [B, heads, T, dim]
        if self._rotary:
            q, k = (
                mx.fast.rope(a, self._rotary, traditional=False, base=self._base, scale=1.0, offset=offsets)
                for a in (q, k)
            )
        k, v, start = state.append(k, v)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=state.mask(T, start))
        return y.swapaxes(1, 2).reshape(B, T, -1)


def offsets_of(cache):
    """Tokens read before, for rotary positions: an int, or int32 [B] where rows differ."""
    same = (cache.lengths == cache.lengths[0]).all()
    return int(cache.lengths[0]) if same else mx.array(cache.lengths.astype(np.int32))


def gelu_tanh(x):
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), written with a sigmoid: tanh(z) = 2 sigmoid(2 z) - 1."""
    return x * mx.sigmoid(1.5957691216057308 * (x + 0.044715 * (x * x * x)))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c.d_model, c.d_inner)
        self.fc2 = nn.Linear(c.d_inner, c.d_model)

    def __call__(self, x):
        fused = isinstance(self.fc1, Int8Linear)
        return self.fc2(self.fc1(x, activation="gelu_tanh") if fused else gelu_tanh(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.norm1 = nn.LayerNorm(c.d_model, eps=c.layer_norm_epsilon)
        self.mixer = Attention(c) if attention else H3Mixer(c)
        self.norm2 = nn.LayerNorm(c.d_model, eps=c.layer_norm_epsilon)
        self.mlp = MLP(c)


class H3(nn.Module, TextGeneration):
    """The language model. Call it with ids [B, T] int32 for logits [B, T, padded vocabulary].

    tokenizer   set by `load`
    kv_window   attention layers look at this many last tokens (None: at all)
    """

    def __init__(self, config, kv_window=None):
        super().__init__()
        self.embeddings = nn.Embedding(config.padded_vocab_size, config.d_model)
        self.layers = [Layer(config, i in config.attn_layer_idx) for i in range(config.n_layer)]
        self.norm_f = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.d_model, config.padded_vocab_size, bias=False)
        self.config, self.kv_window = config, kv_window
        self.tokenizer = self.fingerprint = None
        self._fused_step = FusedStep()

    def load_weights(self, *args, **kwargs):
        super().load_weights(*args, **kwargs)
        return self.prepare()

    def prepare(self):
        """Make the tables from the weights and evaluate everything, so that any thread may use the model."""
        tables = [a for layer in self.layers if isinstance(layer.mixer, H3Mixer) for a in layer.mixer.prepare()]
        mx.eval(self.parameters(), tables)
        self.fingerprint = fingerprint(self)
        self._fused_step = FusedStep()
        self.freeze()
        self.eval()
        return self

    def init_weights(self, seed=0):
        """Random weights as a fresh H3 has them (upstream's defaults: diag-lin SSM, N(0, 0.02) linear layers)."""
        rng = np.random.default_rng(seed)
        fresh = {
            "log_dt": lambda s: rng.uniform(np.log(1e-3), np.log(0.1), s),
            "inv_A_real": lambda s: np.full(s, np.log(0.5)),
            "A_imag": lambda s: np.broadcast_to(np.pi * np.arange(s[-1]), s),
            "ssm.B": lambda s: np.broadcast_to([1.0, 0.0], s),
            "ssm.C": lambda s: rng.standard_normal(s) * 0.5**0.5,
            "shift.B": lambda s: np.broadcast_to(np.eye(1, s[-1]), s),
            "shift.C": rng.standard_normal,
            ".D": rng.standard_normal,
            "norm1.weight": np.ones,
            "norm2.weight": np.ones,
            "norm_f.weight": np.ones,
            "bias": np.zeros,
            "weight": lambda s: 0.02 * rng.standard_normal(s, dtype=np.float32),
        }
        weights = []
        for name, a in tree_flatten(self.parameters()):
            make = next(f for end, f in fresh.items() if name.endswith(end))
            weights.append((name, mx.array(np.asarray(make(a.shape), dtype=np.float32))))
        return self.load_weights(weights)

    def make_cache(self, batch_size=1):
        """An empty state for `batch_size` rows."""
        if self.fingerprint is None:
            raise RuntimeError("the model has no weights yet: call load_weights or prepare")
        c = self.config
        H = c.d_model // c.head_dim
        dtype = self.layers[0].norm1.weight.dtype

        def layers():
            made = []
            for layer in self.layers:
                if isinstance(layer.mixer, Attention):
                    made.append(KVState(batch_size, c.num_heads, c.d_model // c.num_heads, dtype, self.kv_window))
                else:
                    ssm = mx.zeros((batch_size, H, c.head_dim, c.head_dim, c.d_state // 2, 2))
                    made.append(H3State(mx.zeros((batch_size, c.d_model, c.d_state)), ssm))
            mx.eval([a for s in made for a in s.arrays()])
            return made

        return H3Cache(layers, self.fingerprint)

    def __call__(self, ids, cache=None):
        """Logits [B, T, padded vocabulary] of ids [B, T] int32; `cache` moves on by T tokens.

        For a long prompt of which only the last logits matter use `prefill`: it keeps memory flat."""
        cache = cache or self.make_cache(ids.shape[0])
        hidden = [self._hidden(ids[:, i : i + CHUNK], cache) for i in range(0, ids.shape[1], CHUNK)]
        return self._head(mx.concatenate(hidden, axis=1) if len(hidden) > 1 else hidden[0])

    def prefill(self, ids, cache, lengths=None, chunk=CHUNK, on_chunk=None):
        """Read ids [B, L] into `cache`, `chunk` tokens at a time -> logits [B, padded vocabulary] of each last token.

        lengths    tokens in each row, for prompts of different lengths (padding at the end; each >= 1)
        on_chunk   called between two chunks, with the seconds that the last one took"""
        B, L = ids.shape
        lengths = np.full(B, L) if lengths is None else np.asarray(lengths)
        if L == 0 or (lengths < 1).any():
            raise ValueError(f"prefill needs a token in each row, not ids {[B, L]} with lengths {lengths.tolist()}")
        last = None  # [B, D] hidden states of each row's last token so far
        for start in range(0, L, chunk):
            begin = time.perf_counter()
            part = ids[:, start : start + chunk]
            here = np.clip(lengths - start, 0, part.shape[1])
            hidden = self._hidden(part, cache, here)
            picked = mx.take_along_axis(hidden, mx.array(np.maximum(here - 1, 0))[:, None, None], axis=1)[:, 0]
            last = picked if last is None else mx.where(mx.array(here > 0)[:, None], picked, last)
            mx.eval(last, cache.arrays())  # or the graph of the whole prompt would pile up
            if on_chunk is not None and start + chunk < L:
                on_chunk(time.perf_counter() - begin)
        return self._head(last)

    def step(self, ids, cache):
        """Logits [B, padded vocabulary] after one more token a row, ids [B] int32."""
        if ids.shape[0] == 1 and self._fused_step.usable(self):
            return self._fused_step(self, ids, cache)
        return self._head(self._hidden(ids[:, None], cache)[:, 0])

    def _hidden(self, ids, cache, lengths=None):
        """ids [B, T] -> final hidden states [B, T, D]; `cache` moves on by lengths[b] tokens (None: by T)."""
        B, T = ids.shape
        ragged = lengths is not None and (lengths != T).any()
        lengths = lengths if ragged else np.full(B, T)
        offsets = offsets_of(cache)
        x, r = self.embeddings(ids), None
        for layer, state in zip(self.layers, cache.layers):
            r = x if r is None else r + x
            h = layer.norm1(r)
            if isinstance(layer.mixer, Attention):
                x = layer.mixer(h, state, offsets)
                if ragged:
                    state.align(T - lengths)
            else:
                x = layer.mixer(h, state, lengths)
            r = r + x
            x = layer.mlp(layer.norm2(r))
        cache.lengths = cache.lengths + lengths
        return self.norm_f(r + x)

    def _head(self, hidden):
        return self.embeddings.as_linear(hidden) if self.config.tie_word_embeddings else self.lm_head(hidden)


def build(config, kv_window=None):
    """The model that a config.json (a dict) describes, with its quantised layers in place, without weights."""
    try:
        model = H3(H3Config.from_dict(config), kv_window)
    except TypeError as e:
        raise CheckpointError(f"config.json lacks a value: {e}") from e
    q = config.get("quantization")
    if q is None:
        return model
    if q.get("mode") == "int8":
        return to_int8(model)
    if q.get("mode", "affine") != "affine":
        raise CheckpointError(f"config.json: quantization mode {q['mode']!r} is not int8 or affine")

    def settings(path, module):
        own = q.get(path, True)  # a layer's own settings win; False leaves it as it is
        return hasattr(module, "to_quantized") and own

    nn.quantize(model, q["group_size"], q["bits"], class_predicate=settings)
    return model


def to_int8(model):
    """Exchange the linear layers and the embedding for their int8 forms, to be filled by load_weights."""

    def int8(path, module):
        if isinstance(module, nn.Linear):
            out_dims, in_dims = module.weight.shape
            return Int8Linear(in_dims, out_dims, "bias" in module)
        if isinstance(module, nn.Embedding):
            return Int8Embedding(*module.weight.shape)
        return module

    model.update_modules(tree_map_with_path(int8, model.leaf_modules(), is_leaf=nn.Module.is_module))
    return model
