"""Convolutional attention that can learn to look at pixels: ContentAttention. Symbols: theorem.py.

    A_h[q, k] = -alpha_h |delta - Delta_h|^2 + gate_h X_q W_qry_h W_key_h^T X_k^T / sqrt(D_h)

The gate starts at zero, where the layer is the convolution's SoftAttention, and has a gradient there; so a trained
network can be converted, fine-tuned, and learn where content is worth looking at. After d'Ascoli et al., "Transformed
CNNs: recasting pre-trained convolutional layers with self-attention" (2021, https://arxiv.org/abs/2106.05795), whose
gate mixes two softmaxes; this one adds a term to the scores of one, as Eq. 8 does.
"""

import math

import torch
from torch import Tensor, nn

from .convolution import ConvolutionalAttention


class ContentAttention(ConvolutionalAttention):
    """The layer with a gated content term; finite alpha, all of it trains, evaluated explicitly: O(prod Q prod N).

    W_qry, W_key: (N_h, D_h, D_in) with D_h = D_in / N_h, rounded up; gate: (N_h,).
    """

    @torch.jit.ignore
    def hold(self, Delta: Tensor, alpha: Tensor) -> None:
        self.Delta = nn.Parameter(Delta)
        self.alpha = nn.Parameter(alpha)
        heads = alpha.shape[0]
        shape = (heads, (self.in_channels + heads - 1) // heads, self.in_channels)
        self.W_qry = nn.Parameter(torch.randn(shape).to(alpha) * self.in_channels**-0.5)
        self.W_key = nn.Parameter(torch.randn(shape).to(alpha) * self.in_channels**-0.5)
        self.gate = nn.Parameter(torch.zeros_like(alpha))

    def scores(self, keys: Tensor) -> Tensor:
        """Scores of all queries and the keys (B, D_in, *N): (B, N_h, prod Q, prod N)"""
        standing = keys
        for axis, count in enumerate(self.queries(list(keys.shape[2:]))):
            numbers = torch.arange(count, device=keys.device) * self.stride[axis] + self.centre[axis]
            standing = standing.index_select(2 + axis, numbers)
        query = torch.einsum("hdi,biq->bhqd", self.W_qry, standing.flatten(2))
        key = torch.einsum("hdi,bik->bhdk", self.W_key, keys.flatten(2))
        content = (query @ key) * (self.gate * self.W_qry.shape[1] ** -0.5)[:, None, None]
        return self.positional_scores(keys) + content

    @torch.jit.ignore
    def macs(self, image: list[int]) -> int:
        sizes = self.key_sizes(image)
        heads, head_dim, _ = self.W_qry.shape
        queries, keys = math.prod(self.queries(sizes)), math.prod(sizes)
        projected = heads * head_dim * self.in_channels * (queries + keys)
        attended = heads * queries * keys * (head_dim + self.in_channels)
        return projected + attended + heads * queries * (self.in_channels // self.groups) * self.out_channels

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_out, *Q)"""
        return self.explicit(x)
