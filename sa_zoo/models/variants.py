"""One table of the networks for CIFAR's 32x32 images.

The models of Cordonnier, Loukas, Jaggi (ICLR 2020), Table 1; variants with Eq. 7 and all of Eq. 8; tiny ones for about
an hour of training on a laptop; and ResNets as baselines.

timm's names and configurations, transformers' types of attention and the rows of docs/models.md follow from it.
"""

from dataclasses import dataclass, field
from typing import Any

from .content import Absolute, Content, Relative
from .network import AttentionNetwork, SANet
from .plain import PlainNet
from .terms import GeneralizedQuadratic, Learned, Quadratic, Terms


@dataclass(frozen=True)
class Variant:
    """A row.

    Args:
        name: timm's. Rows without sizes are `sa_{attention_type}_cifar`, the source of transformers' `attention_type`.
        terms: summed score terms; none for a ResNet.
        sentence: its description.
        sizes: arguments other than the defaults of the network, or of timm's ResNet.
        network: the class of networks with score terms.
    """

    name: str
    terms: Terms
    sentence: str
    sizes: dict[str, Any] = field(default_factory=dict)
    network: type[AttentionNetwork] = SANet

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the network."""
        return {"terms": self.terms} | self.sizes if self.network is SANet else self.sizes


TINY = {"patch_size": 4, "embed_dim": 96, "hidden_dim": 192}

# fmt: off
VARIANTS = (
    Variant("sa_quadratic_cifar", (Quadratic,),
            "SA-quadratic: 9 isotropic Gaussian heads per layer, as many as a 3x3 kernel has pixels (Section 4.2)."),
    Variant("sa_quadratic_h16_cifar", (Quadratic,),
            "SA-quadratic with 16 heads (Appendix).", {"num_heads": 16}),
    Variant("sa_quadratic_gen_cifar", (GeneralizedQuadratic,),
            "SA-quadratic with a full covariance per head (appendix)."),
    Variant("sa_learned_cifar", (Learned,),
            "SA-learned: scores by a learned relative encoding of row and column, without content (Section 4.3)."),
    Variant("sa_content_cifar", (Content,),
            "SA-learned + content: query-key products added to a learned relative encoding (Section 4.3)."),
    Variant("sa_eq8_cifar", (Relative,),
            "All four terms of Eq. 8 (Dai et al. 2019): the form that the paper starts from."),
    Variant("sa_absolute_cifar", (Absolute,),
            "Absolute positional encoding (Eq. 7), for contrast: scores do not depend on displacements only."),
    Variant("sa_plain_cifar", (Quadratic,),
            "A plain network (no residual connections), after Jordan's CNN (airbench).",
            network=PlainNet),
    Variant("sa_quadratic_tiny_cifar", (Quadratic,),
            "SA-quadratic on 4x4 patches, 96 channels: for two CPU cores.",
            TINY),
    Variant("sa_learned_tiny_cifar", (Learned,),
            "SA-learned on 4x4 patches, 96 channels: for two CPU cores.", TINY),
    Variant("sa_content_tiny_cifar", (Content,),
            "SA-learned + content on 4x4 patches, 96 channels: for two CPU cores.", TINY),
    Variant("sa_plain_tiny_cifar", (Quadratic,),
            "The plain network with 64 and 256 channels: for two CPU cores.",
            {"embed_dim": (64, 256, 256)}, PlainNet),
    Variant("resnet18_cifar", (),
            "The paper's baseline: ResNet18 with a 3x3 stem and without max-pooling.",
            {"layers": (2, 2, 2, 2)}),
    Variant("resnet_tiny_cifar", (),
            "A ResNet of about the size and cost of sa_quadratic_tiny_cifar: one block per stage, 40 to 192 channels.",
            {"layers": (1, 1, 1, 1), "channels": (40, 56, 104, 192)}),
)
# fmt: on

# By `attention_type`.
TYPES = {
    row.name.removeprefix("sa_").removesuffix("_cifar"): row
    for row in VARIANTS
    if row.terms and not row.sizes
}
# `attention_type` by timm's name.
ATTENTION_TYPES = {
    row.name: kind
    for row in VARIANTS
    for kind, first in TYPES.items()
    if (first.network, first.terms) == (row.network, row.terms)
}
