"""The work of plain networks."""

from small_networks import small

from sa_zoo.convolution.harden import harden
from sa_zoo.cost import cost_of, training_macs

IMAGE = (3, 24, 40)
GRIDS = [(23, 39), (11, 19), (11, 19), (5, 9), (2, 4), (2, 4)]  # that attention sees
WIDTHS = [7, 7, 5, 11, 11, 11]


def macs(by_axes: bool) -> int:
    """Multiply-adds for one image."""
    total = 23 * 39 * 24 * 3 * 2 * 2 + 11 * 11
    for (height, width), D_in, D in zip(GRIDS, [24, *WIDTHS], WIDTHS, strict=False):
        T = height * width
        keys = height + width if by_axes and T > 128 else T
        total += 2 * T * D_in * (keys + D)
    return total


def test_work_is_that_of_each_stages_grid_and_width():
    network = small("plain")
    assert cost_of(network, IMAGE).macs == macs(by_axes=False)
    assert training_macs(network, IMAGE) == macs(by_axes=True)
    harden(network)
    assert cost_of(network, IMAGE).macs == macs(by_axes=False)
