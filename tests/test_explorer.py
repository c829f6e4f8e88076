"""The explorer's page in a real browser: its maps are those of the model, and every control works."""

import json
import re
from io import BytesIO

import pytest
import timm
import torch
from browser import chromium
from matplotlib.image import imread
from model_folders import make_run
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.pointer_input import PointerInput
from selenium.webdriver.common.keys import Keys
from small_networks import SMALL, pictures, small_network
from timm.utils import reparameterize_model
from tiny_runs import tiny_config
from typer.testing import CliRunner

import sa_zoo
from sa_zoo.analysis import explorer
from sa_zoo.analysis.explorer import explore, explorer_files
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.cli import app
from sa_zoo.commands.finish import finish
from sa_zoo.convolution.theorem import head_shifts
from sa_zoo.opened import open_model
from sa_zoo.training.train import train


@pytest.fixture(scope="module")
def chromium_of_module(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("downloads")) as opened:
        yield opened


@pytest.fixture
def browser(chromium_of_module):
    yield chromium_of_module
    assert chromium_of_module.complaints() == []


@pytest.fixture
def show(browser, tmp_path):
    """Open the page of a model."""

    def opened(model, images=None, recorded=None, source="", **state):
        images = pictures() if images is None else images
        page = explore(model, images, source, recorded)
        browser.open(page.save(tmp_path / "page.html"), **state)

    return opened


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of a small quadratic network, as most tests need it."""
    small = explore(small_network(), pictures(3))
    return small.save(tmp_path_factory.mktemp("page") / "small.html")


def converted(alpha=1.3):
    torch.manual_seed(0)
    first = torch.nn.Conv2d(3, 7, 5, stride=2, padding=2)
    cnn = torch.nn.Sequential(first, torch.nn.Conv2d(7, 5, (3, 2), dilation=2))
    network, _ = sa_zoo.convert(cnn, alpha=alpha, example=pictures())
    return network


def folded():
    network = small_network()
    sa_zoo.harden(network)
    return reparameterize_model(network)


def maps_in_page(browser, layer, query):
    """(N_h, keys)"""
    script = """explorer.maps(arguments[0]).then((maps) => Array.from(
        {length: explorer.data.layers[arguments[0]].heads}, (_, head) => Array.from(maps(head, arguments[1]))))"""
    return torch.tensor(browser.run(script, layer, list(query)), dtype=torch.float32)


MODELS = {
    "quadratic": small_network,
    "quadratic_gen": lambda: small_network("quadratic_gen"),
    "learned": lambda: small_network("learned"),
    "content": lambda: small_network("content"),
    "converted": converted,
    "hardened and folded": folded,
    "vision transformer": lambda: timm.create_model("test_vit", img_size=96).eval(),
}


@pytest.mark.parametrize("name", MODELS)
def test_maps_in_the_page_are_those_of_the_model(name, browser, show):
    model = MODELS[name]()
    images = pictures(size=(96, 96) if name.startswith("vision") else (28, 20))
    show(model, images=images)
    browser.run("explorer.update({image: 1})")
    browser.settle()
    for index, layer in enumerate(attention_layers(model, images)):
        height, width = layer.grid
        for query in ((0, 0), (height // 2, width // 3), (height - 1, width - 1)):
            P = layer.at(query)
            P = (P if layer.positional else P[1]).flatten(1)
            atol = 1e-5 if layer.positional else float(P.max()) / 255
            assert torch.allclose(maps_in_page(browser, index, query), P, atol=atol, rtol=0)
        keys = torch.cartesian_prod(*(torch.arange(size) for size in layer.keys))
        distance = (keys - torch.tensor(layer.origin(query))).float().norm(dim=1)
        summary = "summaryOf(explorer.data.layers[arguments[0]], arguments[1], arguments[2])"
        found = browser.run(summary, index, P[0].tolist(), query)["distance"]
        assert found == pytest.approx(float(P[0] @ distance), rel=1e-4)


def test_buttons_and_keys_select_the_view(browser, page):
    browser.open(page)
    for kind, number in (("images", 3), ("layers", 2), ("heads", 5)):
        browser.click(f"#{kind} button:nth-child({number})")
    assert browser.state("image", "layer", "head") == [2, 1, 4]
    browser.click("#next")
    assert browser.state("head") == [0]
    arrows = [Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT]
    browser.find("body").send_keys("3", *arrows, "]", "i", "p", Keys.ARROW_UP)
    browser.settle()
    expected = [2, 1, 0, [3, 4], [4, 4]]
    assert browser.state("layer", "head", "image", "query", "pin") == expected
    assert browser.find("#second").is_displayed()
    assert "row 4, column 5" in browser.text("status")


@pytest.mark.parametrize(
    ("kind", "size", "query", "columns"),
    [("mouse", (28, 20), [3, 2], 5), ("touch", (160, 124), [20, 15], 17)],  # the larger is zoomed
)
def test_dragging_on_the_map_moves_the_query(kind, size, query, columns, browser, show):
    show(small_network(img_size=size), pictures(size=size), query=query, zoom=True)
    stage = browser.find("#stage canvas")  # the query is in its middle
    cell = stage.size["width"] / columns
    action = ActionBuilder(browser.driver, mouse=PointerInput(kind, kind))
    action.pointer_action.move_to(stage, 0, 0).pointer_down()
    action.pointer_action.move_to(stage, round(cell), round(2 * cell)).pointer_up()
    action.perform()
    browser.settle()
    assert browser.state("query") == [[query[0] + 2, query[1] + 1]]


def maps_by_the_shown_code(browser, model):
    """The maps that the Python code on the page computes with the model: (N_h, keys)"""
    code = browser.text("code")
    assert "model = ...  # the network that this page was made from" in code
    names = {"given": model}
    exec(code.replace("model = ...", "model = given"), names)
    return names["maps"].flatten(1)


def test_a_dragged_center_changes_maps_and_shown_code(browser, show):
    model = small_network()
    show(model, layer=1, head=2, query=[2, 3])
    before = maps_in_page(browser, 1, (2, 3))
    handle = browser.find(".handle.chosen")
    ActionChains(browser.driver).click_and_hold(handle).move_by_offset(40, -25).release().perform()
    browser.settle()
    moved = browser.run("explorer.state().edits[1][2].Delta")
    start = model.blocks[1].attn.terms[0].Delta[2].tolist()
    assert moved[0] < start[0] - 0.2 and moved[1] > start[1] + 0.3
    browser.find(".handle.chosen").send_keys(Keys.ARROW_DOWN)
    browser.settle()
    assert browser.run("explorer.state().edits[1][2].Delta[0]") == pytest.approx(moved[0] + 0.25)
    after = maps_in_page(browser, 1, (2, 3))
    changed = (after - before).abs().amax(dim=1) > 0.01
    assert changed.nonzero().tolist() == [[2]]
    assert torch.allclose(maps_by_the_shown_code(browser, model), after, atol=1e-4)
    browser.click("#reset")
    assert torch.equal(maps_in_page(browser, 1, (2, 3)), before)


@pytest.mark.parametrize("name", ["quadratic", "quadratic_gen", "learned", "converted"])
def test_sharper_heads_are_those_of_the_shown_code(name, browser, show):
    model = MODELS[name]()
    show(model, layer=0, query=[2, 3])
    before = maps_in_page(browser, 0, (2, 3))
    browser.slide("sharpness", 0.7)
    after = maps_in_page(browser, 0, (2, 3))
    assert not torch.allclose(before, after, atol=0.01)
    assert torch.allclose(maps_by_the_shown_code(browser, model), after, atol=1e-4)


def test_hardening_makes_the_layer_its_convolution(browser, show):
    show(converted(), layer=0, query=[5, 3])
    share = "document.getElementById('meter').value"
    assert browser.run(share) > 0.1
    browser.click("#harden")
    browser.wait(f"{share} < 1e-12")
    maps = maps_in_page(browser, 0, (5, 3))
    # the 5 x 5 keys around the query (5, 3), at a stride of 2 on 32 x 24 keys
    window = [row * 24 + column for row in range(10, 15) for column in range(6, 11)]
    assert sorted(maps.argmax(dim=1).tolist()) == window


@pytest.mark.parametrize("alpha", [0.9, 30.0])
def test_bound_and_kernel_are_those_of_the_layer(alpha, browser, show):
    model = converted(alpha)
    with torch.no_grad():
        model[0].Delta += 0.3 * torch.randn(25, 2, generator=torch.Generator().manual_seed(2))
    show(model)
    targets = head_shifts([5, 5], [1, 1], [2, 2]).int().tolist()
    heads = "'quadratic', explorer.heads(0), arguments[0]"
    values = "explorer.unpack(explorer.data.layers[0].values)"
    found = browser.run(f"certificateOf({heads}, {values}.norms)", targets)
    expected = sa_zoo.certificate(model[0], [28, 20])
    assert found["bound"] == pytest.approx(float(expected.attention.max()), rel=1e-5)
    windows = model[0].neighborhoods()
    kernel = model[0].composed_kernel(windows).detach()
    rows, columns = ([window[0], window[-1]] for window in windows)
    window = {"rows": rows, "columns": columns}
    norms = browser.run(f"kernelsOf({heads}, arguments[1], {values}.gram).now", targets, window)
    assert torch.allclose(torch.tensor(norms), kernel.norm(dim=(0, 1)), atol=1e-5)


def test_the_epoch_slider_moves_heads_along_their_path(browser, show):
    model, random = small_network(), torch.Generator().manual_seed(3)
    recorded = {
        f"blocks.{block}.attn.terms.0.{name}": torch.randn(4, *shape, generator=random)
        for block in range(3)
        for name, shape in {"Delta": (5, 2), "spread": (5,)}.items()
    }
    show(model, recorded=recorded, layer=2, query=[1, 1])
    final = maps_in_page(browser, 2, (1, 1))
    browser.slide("epoch", 1)
    model.load_state_dict({name: rows[1] for name, rows in recorded.items()}, strict=False)
    expected = attention_layers(model, pictures())[2].at((1, 1)).flatten(1)
    assert torch.allclose(maps_in_page(browser, 2, (1, 1)), expected, atol=1e-5)
    assert not torch.allclose(final, expected, atol=1e-2)


VIEW = {"image": 1, "layer": 2, "head": 3, "query": [1, 2], "pin": [6, 0], "epoch": None}
VIEW |= {"zoom": True, "edits": {"2": {"3": {"Delta": [0.25, -1], "sharpness": 2.5}}}}
FOREIGN = {"image": "x", "layer": 99, "head": -3, "query": [1e9, None], "pin": None, "epoch": 7}
FOREIGN |= {"zoom": 0, "edits": {"0": {"0": {"Delta": ["a", 1], "sharpness": -1}}, "x": None}}
VALID = {"image": 0, "layer": 2, "head": 0, "query": [6, 0], "pin": None, "epoch": None}
VALID |= {"zoom": False, "edits": {"0": {"0": {}}, "x": {}}}


@pytest.mark.parametrize(("given", "view"), [(VIEW, VIEW), (FOREIGN, VALID)])
def test_the_address_holds_a_valid_view(given, view, browser, page):
    browser.open(page, **given)
    browser.run("explorer.update({})")
    browser.settle()
    browser.driver.refresh()
    browser.wait("document.body.dataset.ready")
    assert browser.run("explorer.state()") == view


def test_code_is_copied_and_the_view_saved(browser, page):
    browser.open(page, layer=1, query=[1, 1], pin=[5, 2])
    browser.click("#copy")
    assert "attention_layers(model, images)[" in browser.run("getSelection().toString()")
    browser.click("#png")
    drawn = imread(BytesIO(browser.downloaded("attention.png")))
    for color in ((0xD1, 0x41, 0x0C), (0x00, 0x70, 0x8A)):  # of both queries
        assert (abs(drawn[..., :3] * 255 - color).max(axis=-1) < 5).sum() > 200


def test_nothing_in_a_model_becomes_script_or_connects(browser, show):
    attack = "</script><script>taken = 1</script><img src=x onerror='taken = 2'>\u2028"
    model = torch.nn.Sequential()
    model.add_module(attack, small_network())
    show(model, source=attack)
    assert browser.run("window.taken === undefined")
    assert attack in browser.run("explorer.data.layers[0].name")
    refused = browser.run("""fetch("https://example.org/").then(() => "sent", () => "refused")""")
    assert refused == "refused"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())


def test_a_notebook_shows_the_page_in_a_frame(browser, tmp_path):
    frame = explore(small_network(), pictures())._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!doctype html><title>notebook</title>{frame}")
    browser.driver.get((tmp_path / "notebook.html").as_uri())
    browser.driver.switch_to.frame(browser.find("iframe"))
    browser.wait("document.body.dataset.ready")
    assert browser.run("document.querySelectorAll('#heads canvas').length") == 5
    browser.driver.switch_to.default_content()


def data_of(html):
    return json.loads(re.search(r'type="application/json" id="data">(.*?)</script>', html)[1])


def test_a_page_has_as_many_images_as_fit(monkeypatch):
    model, images = small_network("content"), pictures(9)
    whole = data_of(explore(model, images).html)
    limit = round(0.7 * len(json.dumps(whole)))
    monkeypatch.setattr(explorer, "DATA_BYTES", limit)
    fewer = data_of(explore(model, images).html)
    assert 2 < len(fewer["images"]) < len(whole["images"]) == 9
    assert len(json.dumps(fewer)) < limit


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    sizes = {name: SMALL[name] for name in ("depth", "num_heads", "embed_dim", "hidden_dim")}
    model = {"name": "sa_quadratic_tiny_cifar", "args": sizes}
    folder = tmp_path_factory.mktemp("runs") / "run"
    finish(train(tiny_config(model=model, data={"image_size": 16}), folder))
    return folder


def test_a_run_has_a_page_of_its_own(run):
    page = data_of((run / "explorer.html").read_text())
    assert page["epochs"] == [0, 1, 2]
    assert page["source"] == "local-dir:run"
    assert all("CC BY 2.0" in image["name"] for image in page["images"]), "they may be published"


def test_the_command_shows_pictures(run, tmp_path):
    red, other, lime, broken = files = [
        tmp_path / name for name in ("red.png", "blue/red.png", "lime.png", "broken.png")
    ]
    (tmp_path / "blue").mkdir()
    for file in files[:3]:
        Image.new("RGB", (50, 40)).save(file)
    broken.write_text("no picture")
    out = tmp_path / "page.html"

    def shown(*options):
        command = ["explore", run, "--out", out, *options]
        result = CliRunner().invoke(app, list(map(str, command)))
        assert result.exit_code == (broken in options), result.output
        assert str(broken if broken in options else out) in result.output
        return [image["name"] for image in data_of(out.read_text())["images"]]

    pictures = ["--image", red, "--image", other, "--image", lime]
    assert shown(*pictures) == [str(red), str(other), "lime.png"]
    shown("--image", broken)


def test_a_model_of_other_channels_or_without_maps(tmp_path):
    folder = make_run(tmp_path / "run", "resnet_tiny_cifar")
    assert explorer_files(open_model(folder)) == {}
    page = explore(small_network(in_chans=5), pictures(channels=5))
    assert data_of(page.html)["size"] == [5, 28, 20]
