"""Convolutional attention with a gated content term: ContentAttention. Symbols: theorem.py.

    A_h[q, k] = -alpha_h |delta - Delta_h|^2 + gate_h X_q W_qry_h W_key_h^T X_k^T / sqrt(D_h)

The gate starts at zero, where the layer is the convolution's SoftAttention, and has a gradient there. So a trained
network can be converted and fine-tuned, and learns where content helps. After d'Ascoli et al., "Transformed
CNNs: recasting pre-trained convolutional layers with self-attention" (2021, https://arxiv.org/abs/2106.05795). Their
gate mixes two softmaxes; this one adds a term to the scores, as in Eq. 8.
"""

import torch
from torch import Tensor, nn

from sa_zoo.convolution.convolutional import ConvolutionalAttention


class ContentAttention(ConvolutionalAttention):
    """The layer with a gated content term, at finite alpha; all of it is trained. Explicit, O(prod Q prod N).

    W_qry, W_key: (N_h, D_h, D_in) with D_h = D_in / N_h, rounded up; gate: (N_h,).
    """

    not_decayed = ("Delta", "alpha", "gate")

    def register_positions(self, Delta: Tensor, alpha: Tensor) -> None:
        super().register_positions(Delta, alpha)
        heads = alpha.shape[0]
        shape = (heads, (self.in_channels + heads - 1) // heads, self.in_channels)
        self.W_qry = nn.Parameter(torch.randn(shape).to(alpha) * self.in_channels**-0.5)
        self.W_key = nn.Parameter(torch.randn(shape).to(alpha) * self.in_channels**-0.5)
        self.gate = nn.Parameter(torch.zeros_like(alpha))

    def scores(self, keys: Tensor) -> Tensor:
        """Scores of all queries and the keys (B, D_in, *N): (B, N_h, prod Q, prod N)"""
        query, key = self.content(keys)
        return self.positional_scores(list(keys.shape[2:])) + query @ key

    def content(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """gate_h X_q W_qry_h / sqrt(D_h) and (X_k W_key_h)^T: (B, N_h, prod Q, D_h) and (B, N_h, D_h, prod N)"""
        sizes = list(keys.shape[2:])
        at_queries = keys
        for axis in range(len(sizes)):
            at_queries = at_queries.index_select(2 + axis, self.query_positions(axis, sizes).long())
        scale = (self.gate * self.W_qry.shape[1] ** -0.5)[:, None, None]
        query = torch.einsum("hdi,biq->bhqd", self.W_qry * scale, at_queries.flatten(2))
        return query, torch.einsum("hdi,bik->bhdk", self.W_key, keys.flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_out, *Q)"""
        return self.definition(x)


def without_content(name: str, layer: nn.Module) -> ConvolutionalAttention:
    """`layer`, if its scores depend on positions only. Raises ValueError for the argument `name` if not."""
    if not isinstance(layer, ConvolutionalAttention):
        raise ValueError(
            f"{name}: got {type(layer).__name__}, expected a result of attention_from_conv"
        )
    if isinstance(layer, ContentAttention) and layer.gate.detach().any():
        raise ValueError(f"{name}: got a layer whose gate is open, expected gates of zero")
    return layer
