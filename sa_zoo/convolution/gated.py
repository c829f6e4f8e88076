"""Convolutional attention that can learn to look at pixels: ContentAttention. Symbols: theorem.py.

    A_h[q, k] = -alpha_h |delta - Delta_h|^2 + gate_h X_q W_qry_h W_key_h^T X_k^T / sqrt(D_h)

The gate starts at zero, where the layer is the convolution's SoftAttention, and has a gradient there; so a trained
network can be converted, fine-tuned, and learn where content is worth looking at. After d'Ascoli et al., "Transformed
CNNs: recasting pre-trained convolutional layers with self-attention" (2021, https://arxiv.org/abs/2106.05795), whose
gate mixes two softmaxes; this one adds a term to the scores of one, as Eq. 8 does.
"""

import math
from typing import Final

import torch
from torch import Tensor, nn

from sa_zoo.convolution.convolutional import ConvolutionalAttention, attend


def longest(vectors: Tensor, dim: int) -> Tensor:
    """The largest norm of a head's vectors, which lie along `dim`, without a gradient: (B, N_h, ...) -> (N_h,)"""
    squares = vectors.detach().square().sum(dim=dim).transpose(0, 1).flatten(1)
    return torch.cat([squares, squares.new_zeros(squares.shape[0], 1)], dim=1).amax(dim=1).sqrt()  # 0 of no images


class ContentAttention(ConvolutionalAttention):
    """The layer with a gated content term; finite alpha, all of it trains, evaluated explicitly: O(prod Q prod N).

    W_qry, W_key: (N_h, D_h, D_in) with D_h = D_in / N_h, rounded up; gate: (N_h,).
    """

    # Images attended at once: the maps of many more do not stay in a processor's caches.
    few: Final[int] = 16
    # A score this much below another one of the same query counts for nothing, in any floating type.
    negligible: Final[float] = math.log(1e-4 * torch.finfo(torch.float64).eps)

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
        query, key = self.content(keys)
        return self.near_scores(keys, query, key) + query @ key

    def content(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """gate_h X_q W_qry_h / sqrt(D_h) and (X_k W_key_h)^T: (B, N_h, prod Q, D_h) and (B, N_h, D_h, prod N)"""
        standing = keys
        for axis, count in enumerate(self.queries(list(keys.shape[2:]))):
            numbers = torch.arange(count, device=keys.device) * self.stride[axis] + self.centre[axis]
            standing = standing.index_select(2 + axis, numbers)
        scale = (self.gate * self.W_qry.shape[1] ** -0.5)[:, None, None]
        query = torch.einsum("hdi,biq->bhqd", self.W_qry * scale, standing.flatten(2))
        return query, torch.einsum("hdi,bik->bhdk", self.W_key, keys.flatten(2))

    def near_scores(self, keys: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """`positional_scores`, but -inf where no content in the batch can make a key count: (N_h, prod Q, prod N)

        By |q . k| <= |q| |k|. Far keys would leave denormal numbers, with which processors are many times slower.
        Arguments beside the keys: what `content` returns.
        """
        position = self.positional_scores(keys)
        largest = (longest(query, 3) * longest(key, 2))[:, None]
        least = position.detach().amax(dim=2) + self.negligible - 2 * largest
        return position.masked_fill(position < least[:, :, None], -math.inf)

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
        keys = self.pad(x)
        query, key = self.content(keys)
        position = self.near_scores(keys, query, key)
        sizes = self.queries(list(keys.shape[2:]))
        if torch.compiler.is_compiling():  # a graph with a loop over images would be of so many images only
            return self.mix(attend(position + query @ key, keys).unflatten(-1, sizes))
        heads = [x] * 0
        for first in range(0, max(len(x), 1), self.few):
            some = slice(first, first + self.few)
            heads.append(attend(position + query[some] @ key[some], keys[some]))
        return self.mix(torch.cat(heads).unflatten(-1, sizes))
