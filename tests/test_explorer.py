"""The explorer's page in a real browser: what it shows is what the model computes, and every control works."""

import pytest
import timm
import torch
from browser import chromium
from selenium.webdriver.common.keys import Keys

import sa_zoo  # registers the names
from sa_zoo.analysis.explorer import explore
from sa_zoo.analysis.maps import attention_layers

SMALL = {"depth": 3, "num_heads": 5, "embed_dim": 11, "hidden_dim": 13, "img_size": (28, 20), "num_classes": 7}
VARIANTS = ("quadratic", "quadratic_gen", "learned", "content", "eq8", "absolute")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("downloads")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_complaints(request):
    yield
    if "browser" in request.fixturenames:
        assert request.getfixturevalue("browser").complaints() == []


def network(variant="quadratic", **arguments):
    torch.manual_seed(0)
    return timm.create_model(f"sa_{variant}_tiny_cifar" if variant in ("quadratic", "learned", "content")
                             else f"sa_{variant}_cifar", **(SMALL | arguments)).eval()  # fmt: skip


def pictures(height=28, width=20, count=2):
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(1))


def converted(alpha=1.3, content=False):
    torch.manual_seed(0)
    cnn = torch.nn.Sequential(torch.nn.Conv2d(3, 7, 5, stride=2, padding=2), torch.nn.Conv2d(7, 5, (3, 2), dilation=2))
    return sa_zoo.convert(cnn, alpha=alpha, content=content, example=pictures())[0]


def maps_in_page(browser, layer, query):
    """(N_h, keys)"""
    script = """explorer.maps(arguments[0]).then((maps) => Array.from(
        {length: explorer.data.layers[arguments[0]].heads}, (_, head) => Array.from(maps(head, arguments[1]))))"""
    return torch.tensor(browser.run(script, layer, list(query)))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of a small quadratic network, as most tests need it."""
    images = pictures(count=3)
    return explore(network(), images, title="small").save(tmp_path_factory.mktemp("page") / "small.html")


MODELS = {
    **{variant: lambda variant=variant: (network(variant), pictures()) for variant in VARIANTS},
    "converted": lambda: (converted(), pictures()),
    "converted, hard": lambda: (converted(alpha=46.0), pictures()),
    "test_vit": lambda: (timm.create_model("test_vit", img_size=96).eval(), pictures(96, 96)),
}


@pytest.mark.parametrize("name", MODELS)
def test_maps_in_the_page_are_those_of_the_model(name, browser, tmp_path):
    model, images = MODELS[name]()
    browser.open(explore(model, images).save(tmp_path / "page.html"))
    browser.run("explorer.update({image: 1})")
    browser.settle()
    for index, layer in enumerate(attention_layers(model, images)):
        height, width = layer.grid
        for query in ((0, 0), (height // 2, width // 3), (height - 1, width - 1)):
            P = layer.at(query)
            P = (P if layer.positional else P[1]).flatten(1)
            atol = 1e-5 if layer.positional else float(P.max()) / 255
            assert torch.allclose(maps_in_page(browser, index, query), P, atol=atol, rtol=0)
            kind = browser.run("explorer.data.layers[arguments[0]].kind", index)
            assert (kind == "stored") == (not layer.positional)


def test_buttons_select_image_layer_and_head(browser, page):
    browser.open(page)
    for selector, key, value in (
        ("#images button:nth-child(3)", "image", 2),
        ("#layers button:nth-child(2)", "layer", 1),
        ("#heads button:nth-child(4)", "head", 3),
        ("#next", "head", 4),
        ("#next", "head", 0),
        ("#previous", "head", 4),
    ):
        browser.driver.find_element("css selector", selector).click()
        browser.settle()
        assert browser.run("explorer.state()")[key] == value
    assert browser.run("document.getElementById('head-number').textContent") == "5 of 5, layer 2"
    pressed = browser.run("[...document.querySelectorAll('[aria-pressed=true]')].map((button) => button.ariaLabel)")
    assert pressed[1] == "Layer 2, blocks.1.attn"
    assert pressed[2].startswith("Head 5, largest share")


def test_keys_move_the_query_and_select(browser, page):
    browser.open(page)
    body = browser.driver.find_element("css selector", "body")
    body.send_keys("2", Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, "]", "]", "[", "i", "p", Keys.ARROW_UP)
    browser.settle()
    state = browser.run("explorer.state()")
    assert (state["layer"], state["query"], state["head"], state["image"]) == (1, [3, 4], 1, 1)
    assert state["pin"] == [4, 4]
    assert "row 4, column 5" in browser.run("document.getElementById('status').textContent")
    assert browser.run("document.getElementById('second').checkVisibility()")
    body.send_keys(Keys.ESCAPE)
    browser.settle()
    assert not browser.run("document.getElementById('second').checkVisibility()")
