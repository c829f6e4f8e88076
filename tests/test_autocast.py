"""Training under a GPU's autocast, imitated on a CPU: what is cast, copied and kept."""

import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.models.attention import CastForImages
from sa_zoo.models.blocks import PostNormBlock
from sa_zoo.models.terms import Learned, Quadratic

B = 4


class NormsInFloat32(TorchFunctionMode):
    """On CUDA, and not on a CPU, autocast evaluates layer norms in float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.layer_norm and torch.is_autocast_enabled("cpu"):
            args = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
            with torch.autocast("cpu", enabled=False):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def autocast_step(network, x) -> Tensor:
    with NormsInFloat32(), torch.autocast("cpu", dtype=torch.bfloat16):
        return network(x).float().square().sum()


def of_images(tensor: Tensor) -> bool:
    """Whether a tensor has numbers for each image: P, expanded, has not."""
    return len(tensor) in (B, B * 256) and tensor.stride(0) > 0


def test_training_keeps_nothing_per_image_that_images_share():
    torch.manual_seed(0)
    network = timm.create_model("sa_quadratic_cifar", proj_drop_rate=0.1, attn_drop_rate=0.1)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # holds it, so that no address returns
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        autocast_step(network, torch.randn(B, 3, 32, 32))
    storages = [tensor.untyped_storage().nbytes() for tensor in kept.values() if of_images(tensor)]
    assert sum(storages) / B / 2**20 < 23


def test_gradients_of_all_images_add_up_in_float32():
    """Ones, of which bfloat16 counts no more than 256; in batches of P too."""
    P = torch.ones(5, 2, 3, requires_grad=True)
    mapped = torch.func.vmap(lambda P: CastForImages.apply(P, 601, torch.bfloat16))
    for cast in (CastForImages.apply(P[0], 601, torch.bfloat16), mapped(P)):
        (dP,) = torch.autograd.grad(cast.sum(), P)
        assert torch.equal(dP[0], torch.full_like(P[0], 601.0))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("term", "grid"), [(Quadratic, (7, 5)), (Learned, (13, 11))])
def test_a_block_under_autocast_is_that_of_float32_within_rounding(term, grid, compiled):
    torch.manual_seed(0)
    block = PostNormBlock(17, 3, 13, (term,), grid)
    x = torch.randn(B, *grid, 17, requires_grad=True)
    half = x.detach().bfloat16().requires_grad_()
    learned = list(block.parameters())
    called = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    direction = torch.randn_like(x)
    wanted = torch.autograd.grad(block(x), [x, *learned], direction)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = called(half)
    assert y.dtype == torch.bfloat16
    found = torch.autograd.grad(y, [half, *learned], direction.bfloat16())
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).norm() < 0.1 * want.norm()
