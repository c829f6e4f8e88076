"""Convolutional attention of finite alpha, all of it trainable: SoftAttention. Symbols: theorem.py.

P_h is a product of one factor per axis, so the layer never builds probabilities of all pairs of pixels. It takes more
work than its convolution the larger the image is: choose late layers of a CNN.
"""

import torch
from torch import Tensor

from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.convolution.padding import Keys
from sa_zoo.convolution.theorem import neighborhoods
from sa_zoo.models.attention import attend_by_axes, probabilities_from
from sa_zoo.models.positions import at_least_float32


class SoftAttention(ConvolutionalAttention):
    """The layer at finite alpha. Delta (N_h, n) and alpha (N_h,) are parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_out, *Q)"""
        keys = self.pad.keys(x)
        factors = [self.factor(axis, keys) for axis in range(len(keys.sizes))]
        return self.project(attend_by_axes(factors, keys.stored.movedim(1, -1)))

    def factor(self, axis: int, keys: Keys) -> Tensor:
        """The factor of P_h along one axis, for the stored keys: (N_h, Q, stored)"""
        P = probabilities_from(self.axis_scores(axis, keys.sizes))
        return P.narrow(2, keys.before[axis], keys.stored.shape[2 + axis])

    def neighborhoods(self) -> list[range]:
        """One neighborhood per axis; empty if a head has unbounded support."""
        precision = torch.finfo(at_least_float32(self.alpha).dtype).eps
        return neighborhoods(self.Delta, self.alpha, precision)
