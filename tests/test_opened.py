"""A model is opened once: checked, built and read once, whatever a command then does with it."""

import pytest
from damage import flip
from model_folders import make_run

import sa_zoo
from sa_zoo.commands.finish import finish
from sa_zoo.folders.write import write_sums

pytestmark = pytest.mark.usefixtures("without_figures")
SMALL = {"embed_dim": 7, "depth": 2, "hidden_dim": 11, "num_heads": 3}


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", "sa_quadratic_tiny_cifar", **SMALL)


def test_only_files_of_the_network_have_to_be_whole(run):
    names = ["explorer.html", "config.json", "model.safetensors"]
    (run / "explorer.html").touch()
    write_sums(run, names)
    (run / "explorer.html").unlink()
    assert sa_zoo.open(run).network
    assert (finish(sa_zoo.open(run)).local_folder / "explorer.html").is_file(), "made again"
    for name in names[1:]:
        write_sums(run, names)
        flip(run / name)
        with pytest.raises(ValueError, match=f"damaged folder: .*{name} does not match"):
            sa_zoo.open(run)
        flip(run / name)
