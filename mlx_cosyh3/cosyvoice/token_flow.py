"""What the flows of all versions begin with: speech tokens as vectors, and the speaker as a mel frame."""

import mlx.core as mx
import mlx.nn as nn

from mlx_cosyh3.errors import CosyH3Error

MEL = 80  # bins


class TokenFlow(nn.Module):
    def __init__(self, config, dims):
        """dims   width of the tokens' embedding"""
        super().__init__()
        self.input_embedding = nn.Embedding(config.vocab_size, dims)
        self.spk_embed_affine_layer = nn.Linear(config.spk_embed_dim, MEL)
        self._vocab, self._guidance = config.vocab_size, config.guidance

    def embed(self, tokens):
        """int [1, T] -> float32 [1, T, C]. Raises CosyH3Error for a token that is none."""
        low, high = (tokens.min().item(), tokens.max().item()) if tokens.size else (0, 0)
        if not 0 <= low <= high < self._vocab:
            raise CosyH3Error(f"a speech token is outside of 0 to {self._vocab - 1}: {low} to {high}")
        return self.input_embedding(tokens).astype(mx.float32)

    def speaker(self, embedding):
        """float32 [B, 192] -> [B, 80]"""
        embedding = embedding / mx.maximum(mx.sqrt((embedding * embedding).sum(axis=-1, keepdims=True)), 1e-12)
        project = self.spk_embed_affine_layer
        return project(embedding.astype(project.weight.dtype)).astype(mx.float32)
