"""fused.py and fused.cpp: attention by axes in compiled code, against loops in float64 and against the definition."""

import importlib
import importlib.util
import math
import os
import platform
import shutil
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from sa_zoo.kernels import fused
from sa_zoo.models.attention import Attention
from sa_zoo.models.terms import Quadratic

# Channels by vectors: one, a part of a block, a block and a part of one, several blocks.
VECTORS = [(1, 3), (3, 1), (5, 7), (7, 5), (11, 2)]
HEADS = 3

needs_it = pytest.mark.skipif(
    fused.LIBRARY is None, reason="fused.cpp was not built, or the processor has no AVX-512"
)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the processor has no AVX-512"
)
@pytest.mark.skipif(
    platform.system() != "Linux" or not shutil.which("g++"), reason="there is no GNU compiler"
)
def test_installing_where_there_is_a_compiler_builds_it():
    assert fused.LIBRARY is not None


def factors(size: int, reach: int) -> torch.Tensor:
    """(HEADS, size, size) numbers of both signs, zero beyond so many pixels of a center that each head has its own."""
    offset = (
        torch.arange(size)[None, None, :]
        - torch.arange(size)[None, :, None]
        - torch.arange(HEADS)[:, None, None]
    )
    return torch.randn(HEADS, size, size) * (offset.abs() <= reach)


def given(
    B: int, H: int, W: int, vectors: tuple[int, int] = (2, 3), reach: int = 99
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    D, N = (number * fused.LANES for number in vectors)
    return [
        torch.randn(B, H, W, D),
        factors(H, reach),
        factors(W, reach),
        torch.randn(N, HEADS * D) / D**0.5,
        torch.randn(N),
    ]


@contextmanager
def threads_of_torch(number: int):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def by_loops(X, P_down, P_across, W_val, b_val) -> np.ndarray:
    """The sum by its definition, pixel by pixel, in float64."""
    X, P_down, P_across, W_val = (
        tensor.double().numpy() for tensor in (X, P_down, P_across, W_val)
    )
    B, H, W, D = X.shape
    out = np.zeros((B, H, W, len(W_val)))
    for h in range(len(P_down)):
        weights = W_val[:, h * D : (h + 1) * D]
        for y in range(H):
            for x in range(W):
                P = P_down[h, y][:, None] * P_across[h, x][None, :]
                for image in range(B):
                    out[image, y, x] += weights @ (P[:, :, None] * X[image]).sum((0, 1))
    return out if b_val is None else out + b_val.double().numpy()


def right(tensors: list[torch.Tensor]) -> None:
    expected = by_loops(*tensors)
    got = fused.fused_values(*tensors).double().numpy()
    assert got.shape == expected.shape
    assert np.abs(got - expected).max(initial=0.0) <= 2e-6 * np.abs(expected).max(initial=0.0)


@needs_it
@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("reach", [2, 99])
def test_it_is_the_sum_over_heads_pixel_by_pixel(vectors, reach):
    right(given(2, 11, 7, vectors, reach))


@needs_it
@pytest.mark.parametrize(
    ("B", "H", "W"), [(1, 1, 1), (0, 5, 7), (3, 1, 13), (3, 13, 1), (1, 23, 19), (5, 2, 3)]
)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_sizes_on_any_number_of_threads(B, H, W, threads):
    with threads_of_torch(threads):
        right(given(B, H, W))


@needs_it
def test_an_image_comes_out_the_same_in_any_batch_on_any_number_of_threads():
    X, *rest = given(5, 11, 7)
    expected = fused.fused_values(X, *rest)
    for threads in (1, 2, 3, 7):
        with threads_of_torch(threads):
            assert torch.equal(
                torch.cat([fused.fused_values(image[None], *rest) for image in X]), expected
            )


@needs_it
@pytest.mark.parametrize("rows", [1, 2, 5, 11])
def test_tiles_of_any_height(rows, monkeypatch):
    X, *rest = given(2, 11, 7)
    monkeypatch.setattr(fused, "TILE", rows * X[0, 0].numel())
    right([X, *rest])


@needs_it
def test_without_bias_from_views_and_beside_heads_that_attend_to_nothing():
    X, P_down, P_across, W_val, _ = given(2, 11, 7)
    P_down[1] = 0.0
    right([X, P_down, P_across, W_val, None])
    strided = X.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    transposed = W_val.T.contiguous().T
    assert not strided.is_contiguous() and not transposed.is_contiguous()
    right([strided, P_down.mT, P_across.mT, transposed, None])


@needs_it
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_it_writes_to_no_other_memory_and_reads_nothing_that_memory_held(threads, monkeypatch):
    tensors = [given(B, H, W) for B, H, W in [(5, 11, 7), (1, 2, 19), (3, 23, 1)]]
    guarded = []

    def of(X: torch.Tensor, *shape: int) -> torch.Tensor:
        numbers = math.prod(shape)
        guarded.append((numbers, torch.full([numbers + 2**20], float("nan"), dtype=X.dtype)))
        return guarded[-1][1][:numbers].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", of)
    with threads_of_torch(threads):
        for some in tensors:
            right(some)
    assert len(guarded) == 9 and all(memory[numbers:].isnan().all() for numbers, memory in guarded)


@needs_it
@pytest.mark.parametrize(
    "wrong", [0, 1, 2, 3, 4], ids=["X", "P_down", "P_across", "W_val", "b_val"]
)
def test_other_shapes_and_types_are_refused(wrong):
    tensors = given(2, 11, 7)
    for other in (tensors[wrong].double(), tensors[wrong][..., 1:]):
        with pytest.raises(ValueError, match="expected an AVX-512 processor, float32, channels in"):
            fused.fused_values(*tensors[:wrong], other, *tensors[wrong + 1 :])


@needs_it
def test_torch_accepts_it_as_an_operator():
    torch.library.opcheck(
        fused.fused_values, tuple(given(2, 5, 7)), test_utils=("test_schema", "test_faketensor")
    )


@needs_it
def test_a_build_that_cannot_be_loaded_gives_a_warning(tmp_path, monkeypatch):
    damaged = tmp_path / "_fused.abi3.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(
        fused, "find_spec", lambda name: importlib.util.spec_from_file_location(name, damaged)
    )
    with pytest.warns(UserWarning, match=r"without compiled code: .*_fused\.abi3\.so"):
        assert fused._loaded() is None


def test_torchs_variable_turns_it_off():
    code = "from sa_zoo.kernels import fused; print(fused.LIBRARY)"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "None"


@needs_it
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_compiled_graph_calls_it_for_any_number_of_images(mode):
    layer = Attention(32, HEADS, (Quadratic,), (17, 13)).eval()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _) -> torch.fx.GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    with mode():
        for images in (2, 3, 5):
            X = torch.randn(images, 17, 13, 32)
            assert (compiled(X) - layer(X)).abs().max() < 1e-6
    assert len(graphs) == 1 and any("fused_values" in target for target in graphs[0])
    compiled(torch.randn(2, 17, 13, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
