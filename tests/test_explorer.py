"""The explorer's page in a real browser: what it shows is what the model computes, and every control works."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
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
from tiny_runs import tiny_config
from typer.testing import CliRunner

import sa_zoo  # registers the names
from sa_zoo.analysis import explorer
from sa_zoo.analysis.explored_layers import value_norms, values_of
from sa_zoo.analysis.explorer import explore
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.cli import app
from sa_zoo.folders.opened import open_model
from sa_zoo.models.attention import Attention, attend
from sa_zoo.models.terms import Quadratic
from sa_zoo.verbs.explore import explore_source, explorer_files
from sa_zoo.verbs.fit import fit

SMALL = {
    "depth": 3,
    "num_heads": 5,
    "embed_dim": 11,
    "hidden_dim": 13,
    "img_size": (28, 20),
    "num_classes": 7,
}
VARIANTS = (
    "quadratic",
    "quadratic_gen",
    "quadratic_kernel",
    "learned",
    "content",
    "eq8",
    "absolute",
)


@pytest.fixture(scope="module")
def chromium_of_module(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("downloads")) as opened:
        yield opened


@pytest.fixture
def browser(chromium_of_module):
    yield chromium_of_module
    assert chromium_of_module.complaints() == []


def network(variant="quadratic", **arguments):
    torch.manual_seed(0)
    return timm.create_model(f"sa_{variant}_tiny_cifar" if variant in ("quadratic", "learned", "content")
                             else f"sa_{variant}_cifar", **(SMALL | arguments)).eval()  # fmt: skip


def pictures(height=28, width=20, count=2):
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(1))


def converted(alpha=1.3, content=False):
    torch.manual_seed(0)
    cnn = torch.nn.Sequential(
        torch.nn.Conv2d(3, 7, 5, stride=2, padding=2), torch.nn.Conv2d(7, 5, (3, 2), dilation=2)
    )
    return sa_zoo.convert(cnn, alpha=alpha, content=content, example=pictures())[0]


def with_open_gates(model):
    for layer in model:
        torch.nn.init.normal_(layer.gate)
    return model


def maps_in_page(browser, layer, query):
    """(N_h, keys)"""
    script = """explorer.maps(arguments[0]).then((maps) => Array.from(
        {length: explorer.data.layers[arguments[0]].heads}, (_, head) => Array.from(maps(head, arguments[1]))))"""
    return torch.tensor(browser.run(script, layer, list(query)))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of a small quadratic network, as most tests need it."""
    images = pictures(count=3)
    return explore(network(), images, title="small").save(
        tmp_path_factory.mktemp("page") / "small.html"
    )


MODELS = {
    **{variant: lambda variant=variant: (network(variant), pictures()) for variant in VARIANTS},
    "pyramid": lambda: (network("pyramid", depth=(1, 2), hidden_dim=0), pictures()),
    "converted": lambda: (converted(), pictures()),
    "converted, content": lambda: (with_open_gates(converted(content=True)), pictures()),
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
    pressed = browser.run(
        "[...document.querySelectorAll('[aria-pressed=true]')].map((button) => button.ariaLabel)"
    )
    assert pressed[1] == "Layer 2, blocks.1.attn"
    assert pressed[2].startswith("Head 5, largest share")


def test_keys_move_the_query_and_select(browser, page):
    browser.open(page)
    body = browser.driver.find_element("css selector", "body")
    body.send_keys(
        "2",
        Keys.ARROW_DOWN,
        Keys.ARROW_RIGHT,
        Keys.ARROW_RIGHT,
        "]",
        "]",
        "[",
        "i",
        "p",
        Keys.ARROW_UP,
    )
    browser.settle()
    state = browser.run("explorer.state()")
    assert (state["layer"], state["query"], state["head"], state["image"]) == (1, [3, 4], 1, 1)
    assert state["pin"] == [4, 4]
    assert "row 4, column 5" in browser.run("document.getElementById('status').textContent")
    assert browser.run("document.getElementById('second').checkVisibility()")
    body.send_keys(Keys.ESCAPE)
    browser.settle()
    assert not browser.run("document.getElementById('second').checkVisibility()")


@pytest.mark.parametrize("kind", ["mouse", "touch"])
def test_dragging_on_the_map_moves_the_query(kind, browser, page):
    browser.open(page)
    stage = browser.driver.find_element("css selector", "#stage canvas")
    width, height = stage.size["width"], stage.size["height"]
    cell = width / 5  # 7 x 5 tokens
    start = (
        round(1.5 * cell - width / 2),
        round(1.5 * cell - height / 2),
    )  # from the middle of the element
    action = ActionBuilder(browser.driver, mouse=PointerInput(kind, kind))
    action.pointer_action.move_to(stage, *start).pointer_down()
    action.pointer_action.move_to(
        stage, start[0] + round(2 * cell), start[1] + round(3 * cell)
    ).pointer_up()
    action.perform()
    browser.settle()
    assert browser.run("explorer.state().query") == [4, 3]


def test_a_view_of_large_images_is_zoomed_and_clicks_count_from_there(browser, tmp_path):
    model = network(img_size=(160, 124))
    browser.open(
        explore(model, pictures(160, 124)).save(tmp_path / "large.html"), "query=20,15&zoom=1"
    )
    stage = browser.driver.find_element("css selector", "#stage canvas")
    stage.click()  # the middle pixel of 17 x 17 around row 20, column 15
    browser.settle()
    assert browser.run("explorer.state().query") == [20, 15]
    left = -round(stage.size["width"] / 17 * 3)
    ActionChains(browser.driver).move_to_element_with_offset(stage, left, 0).click().perform()
    browser.settle()
    assert browser.run("explorer.state().query") == [20, 12]


def test_a_center_is_dragged_and_the_code_shown_computes_the_same_maps(browser, tmp_path):
    model, images = network(), pictures()
    browser.open(explore(model, images).save(tmp_path / "page.html"), "layer=2&head=3&query=2,3")
    before = maps_in_page(browser, 1, (2, 3))
    handle = browser.driver.find_element("css selector", ".handle.chosen")
    ActionChains(browser.driver).click_and_hold(handle).move_by_offset(40, -25).release().perform()
    browser.settle()
    moved = browser.run("explorer.state().edits[1][2].Delta")
    start = model.blocks[1].attn.terms[0].Delta[2].tolist()
    assert moved[0] < start[0] - 0.2
    assert moved[1] > start[1] + 0.3
    browser.driver.find_element("css selector", ".handle.chosen").send_keys(Keys.ARROW_DOWN)
    browser.settle()
    assert browser.run("explorer.state().edits[1][2].Delta[0]") == pytest.approx(moved[0] + 0.25)
    browser.run("document.getElementById('all').click()")
    slide(browser, "sharpness", 1.5)
    after = maps_in_page(browser, 1, (2, 3))
    assert not torch.allclose(before[2], after[2], atol=0.01)
    assert torch.equal(before[[0, 1, 3, 4]], after[[0, 1, 3, 4]])
    assert torch.allclose(maps_by_the_shown_code(browser, model), after, atol=1e-4)
    browser.driver.find_element("id", "reset").click()
    browser.settle()
    assert torch.equal(maps_in_page(browser, 1, (2, 3)), before)


def slide(browser, name, value):
    browser.run(f"""(() => {{ const slider = document.getElementById("{name}"); slider.value = {value};
        slider.dispatchEvent(new Event("input")); }})()""")
    browser.settle()


def maps_by_the_shown_code(browser, model):
    """What the Python code on the page computes, with the model that the page was made from: (N_h, keys)"""
    code = browser.run("document.getElementById('code').textContent")
    assert "model = ...  # the network that this page was made from" in code
    names = {"given": model}
    exec(code.replace("model = ...", "model = given"), names)
    return names["maps"].flatten(1)


@pytest.mark.parametrize("name", ["quadratic_gen", "learned", "converted"])
def test_sharper_heads_of_other_kinds_are_those_of_the_shown_code(name, browser, tmp_path):
    model, images = MODELS[name]()
    browser.open(explore(model, images).save(tmp_path / "page.html"), "layer=1&query=2,3")
    start = maps_in_page(browser, 0, (2, 3))
    slide(browser, "sharpness", 0.7)
    after = maps_in_page(browser, 0, (2, 3))
    assert not torch.allclose(start, after, atol=0.01)
    assert torch.allclose(maps_by_the_shown_code(browser, model), after, atol=1e-4)


def test_hardening_makes_the_layer_its_convolution(browser, tmp_path):
    browser.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]},
    )
    browser.open(explore(converted(), pictures()).save(tmp_path / "page.html"), "layer=1&query=5,3")
    share = "document.getElementById('meter').value"
    soft = browser.run(share)
    browser.driver.find_element("id", "harden").click()
    browser.settle()
    assert browser.run(share) < 1e-12 < 0.1 < soft
    maps = maps_in_page(browser, 0, (5, 3))
    assert torch.allclose(maps.amax(dim=1), torch.ones(25, dtype=maps.dtype))
    assert sorted(maps.argmax(dim=1).tolist()) == sorted(
        row * 24 + column for row in range(10, 15) for column in range(6, 11)
    ), "the 5 x 5 keys around the query (5, 3), at a stride of 2 on 32 x 24 keys"


@pytest.mark.parametrize("alpha", [0.9, 3.0, 30.0])
def test_bound_and_kernel_are_those_of_the_certificate_and_of_the_composed_kernel(
    alpha, browser, tmp_path
):
    model = converted(alpha)
    with torch.no_grad():
        model[0].Delta += 0.3 * torch.randn(25, 2, generator=torch.Generator().manual_seed(2))
    browser.open(explore(model, pictures()).save(tmp_path / "page.html"))
    targets = sa_zoo.convolution.theorem.head_shifts([5, 5], [1, 1], [2, 2]).int()
    heads = "explorer.heads(0), arguments[0]"
    values = "explorer.unpack(explorer.data.layers[0].values)"
    found = browser.run(f"certificateOf('quadratic', {heads}, {values}.norms)", targets.tolist())
    expected = sa_zoo.certificate(model[0], [28, 20])
    assert found["bound"] == pytest.approx(float(expected.attention.max()), rel=1e-5)
    windows = model[0].windows()
    kernel = model[0].composed_kernel(windows).detach()
    rows, columns = ([window[0], window[-1]] for window in windows)
    norms = browser.run(f"kernelsOf('quadratic', {heads}, arguments[1], {values}.gram).now", targets.tolist(),
                        {"rows": rows, "columns": columns})  # fmt: skip
    assert torch.allclose(torch.tensor(norms), kernel.norm(dim=(0, 1)), atol=1e-5)


@pytest.mark.parametrize("name", ["quadratic", "quadratic_gen", "learned"])
def test_missed_attention_of_every_kind_is_that_of_a_large_grid(name, browser, tmp_path):
    """Learned encodings know no displacement beyond their grid, here 7 x 5 pixels."""
    model = network(name)
    browser.open(explore(model, pictures()).save(tmp_path / "page.html"))
    term = model.blocks[0].attn.terms[0].double().requires_grad_(False)
    reach = (6, 4) if name == "learned" else (40, 40)
    rows, columns = (torch.arange(-most, most + 1, dtype=torch.float64) for most in reach)
    if name == "learned":
        scores = (term.v @ term.col.T)[:, :, None] + (term.w @ term.row.T)[:, None, :]
    else:
        S = term.spread if name == "quadratic_gen" else term.spread[:, None, None] * torch.eye(2)
        offset = (
            torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)
            - term.Delta[:, None, None]
        )
        scores = -0.5 * torch.einsum("hrcd,hde->hrce", offset, S).square().sum(dim=-1)
    P = scores.flatten(1).softmax(dim=1).unflatten(1, [len(rows), len(columns)])
    kind = browser.run("explorer.data.layers[0].kind")
    for head in range(5):
        target = browser.run("targetOf(arguments[0], explorer.heads(0), arguments[1])", kind, head)
        heads = "explorer.heads(0), arguments[1], arguments[2]"
        missed = browser.run(f"missedAttention(arguments[0], {heads})", kind, head, target)
        row, column = (most + at for most, at in zip(reach, target, strict=True))
        assert missed == pytest.approx(1 - float(P[head, row, column]), abs=1e-6)
        if name == "learned":
            assert float(P[head, row, column]) == float(P[head].max())


def test_the_epoch_slider_moves_heads_along_their_path(browser, tmp_path):
    model, random = network(), torch.Generator().manual_seed(3)
    recorded = {
        f"blocks.{block}.attn.terms.0.{name}": torch.randn(4, *shape, generator=random)
        for block in range(3)
        for name, shape in {"Delta": (5, 2), "spread": (5,)}.items()
    }
    browser.open(
        explore(model, pictures(), recorded=recorded).save(tmp_path / "page.html"),
        "layer=3&query=1,1",
    )
    final = maps_in_page(browser, 2, (1, 1))
    assert browser.run("document.getElementById('epoch-text').textContent") == "3 of 3"
    slide(browser, "epoch", 1)
    model.load_state_dict({name: rows[1] for name, rows in recorded.items()}, strict=False)
    expected = attention_layers(model, pictures())[2].at((1, 1)).flatten(1)
    assert torch.allclose(maps_in_page(browser, 2, (1, 1)), expected, atol=1e-5)
    assert not torch.allclose(final, expected, atol=1e-2)
    assert "epoch=1" in browser.run("location.hash")


def test_the_address_holds_the_view(browser, page):
    fragment = "image=2&layer=3&head=4&query=1,2&pin=6,0&zoom=1&edits=3,4,2.5,0.25,-1;1,1,0.5"
    browser.open(page, fragment)
    state = browser.run("explorer.state()")
    assert state["edits"] == {
        "0": {"0": {"sharpness": 0.5}},
        "2": {"3": {"Delta": [0.25, -1], "sharpness": 2.5}},
    }
    assert (state["image"], state["layer"], state["head"], state["query"], state["pin"]) == (
        1,
        2,
        3,
        [1, 2],
        [6, 0],
    )
    browser.run("explorer.update({})")
    browser.settle()
    address = browser.run("location.hash")
    browser.open(page, address.removeprefix("#"))
    assert browser.run("explorer.state()") == state


@pytest.mark.parametrize(
    "fragment", ["layer=99&head=-3&query=1e9,NaN&epoch=7&edits=a,b;9,9,-1", "%3Cscript%3E&image=x"]
)
def test_an_address_from_elsewhere_gives_a_valid_view(fragment, browser, page):
    browser.open(page, fragment)
    state = browser.run("explorer.state()")
    assert (state["image"], state["head"], state["epoch"]) == (0, 0, None)
    assert state["query"][0] <= 6


def test_the_code_is_copied(browser, page):
    browser.open(page)
    browser.driver.find_element("id", "copy").click()
    assert browser.run("document.getElementById('copy').textContent") == "Copied"
    assert browser.run("getSelection().toString().includes('attention_layers(model, images)[')")


def test_the_view_is_exported_as_svg_and_png(browser, page):
    browser.open(page, "layer=2&query=1,1&pin=5,2")
    browser.driver.find_element("id", "svg").click()
    tree = ElementTree.fromstring(browser.downloaded("attention.svg"))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in tree.iter(f"{space}text")]
    assert texts == ["small", "Layer 2 (blocks.1.attn), head 1; query row 2, column 2 and row 6, column 3",
                     *(f"head {head}" for head in range(1, 6))]  # fmt: skip
    assert len(list(tree.iter(f"{space}image"))) == 2 * 2 + 5 * 3, (
        "two enlarged maps, and both queries for every head"
    )
    browser.driver.find_element("id", "png").click()
    (browser.downloads / "png").write_bytes(browser.downloaded("attention.png"))
    drawn = imread(browser.downloads / "png", format="png")
    assert drawn.shape[1] == pytest.approx(2 * float(tree.get("width")), abs=1)
    orange, teal = (torch.tensor([0xD1, 0x41, 0x0C]) / 255, torch.tensor([0x00, 0x70, 0x8A]) / 255)
    for query in (orange, teal):
        near = (torch.from_numpy(drawn[..., :3]) - query).abs().amax(dim=-1) < 0.02
        assert near.sum() > 500


def test_nothing_in_a_model_becomes_script(browser, tmp_path):
    class Hostile(torch.nn.Sequential):
        pass

    attack = (
        "</script><script>window.taken = 1</script><img src=x onerror='window.taken = 2'>\u2028"
    )
    model = Hostile()
    model.add_module(attack.replace(".", ""), network())
    path = explore(model, pictures(), title=attack, source=attack).save(tmp_path / "page.html")
    browser.open(path)
    assert browser.run("window.taken === undefined")
    assert browser.run("document.querySelector('h1').textContent") == attack
    assert attack.replace(".", "") in browser.run("explorer.data.layers[0].name")


NEEDS_BROWSER = """
import pytest
from browser import chromium

@pytest.fixture
def browser(tmp_path):
    with chromium(tmp_path) as opened:
        yield opened

def test_one(browser): ...
def test_another(browser): ...
"""


@pytest.mark.parametrize(
    ("CI", "summary"), [("", r"SKIPPED \[2\] test_needs.py: {}"), ("true", "AssertionError: {}")]
)
def test_without_a_browser_tests_are_skipped_but_fail_in_ci(CI, summary, tmp_path):
    (tmp_path / "test_needs.py").write_text(NEEDS_BROWSER)
    tests = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-ra", "test_needs.py"],
        cwd=tmp_path,
        env={**os.environ, "PATH": "", "PYTHONPATH": tests, "CI": CI},
        capture_output=True,
        text=True,
    )
    said = "chromium and chromedriver not found; apt-get install chromium chromium-driver"
    assert re.search(summary.format(said), done.stdout), done.stdout
    assert done.returncode == (1 if CI else 0)


def test_the_page_allows_no_connection(browser, page):
    browser.open(page)
    refused = browser.run("""fetch("https://example.org/").then(() => "sent", () => "refused")""")
    assert refused == "refused"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())


def test_own_pictures_are_opened_and_dropped(browser, page, tmp_path):
    Image.fromarray((torch.rand(90, 50, 3) * 255).byte().numpy()).save(tmp_path / "own <b>.png")
    browser.open(page)
    browser.driver.find_element("id", "file").send_keys(str(tmp_path / "own <b>.png"))
    browser.wait("explorer.state().image === 3")
    browser.run("""(async () => {
        const canvas = Object.assign(document.createElement("canvas"), {width: 30, height: 30});
        canvas.getContext("2d").fillRect(0, 0, 30, 30);
        const blob = await new Promise((done) => canvas.toBlob(done));
        const dropped = new DataTransfer();
        dropped.items.add(new File([blob], "dropped.png", {type: "image/png"}));
        document.dispatchEvent(new DragEvent("drop", {dataTransfer: dropped, cancelable: true}));
    })()""")
    browser.wait("explorer.state().image === 4")
    names = browser.run("[...document.querySelectorAll('#images img')].map((image) => image.alt)")
    assert names == ["image 1", "image 2", "image 3", "own <b>.png", "dropped.png"]
    assert browser.run("[4].map((at) => [pictures[at].width, pictures[at].height])[0]") == [20, 28]


def test_a_phone_shows_everything_without_scrolling_sideways(browser, page):
    size = {"width": 375, "height": 700, "deviceScaleFactor": 2, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.open(page, "pin=1,1")
    assert browser.run("document.documentElement.scrollWidth") == 375
    small = browser.run("""[...document.querySelectorAll("button, .button, input[type=range]")]
        .filter((control) => control.checkVisibility() && control.getBoundingClientRect().height < 44).length""")
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert small == 0, "fingers need 44 pixels"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_and_every_control_has_a_name(scheme, browser, page):
    """Contrast as in WCAG 2.2, 1.4.3: at least 4.5."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.open(page)

    def color(name):
        return [
            int(value, 16) / 255
            for value in re.findall("..", browser.run(f"color('--{name}')")[1:])
        ]

    def contrast(text, ground):
        low, high = sorted((luminance(text), luminance(ground)))
        return (high + 0.05) / (low + 0.05)

    def luminance(rgb):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for text, ground in itertools.product(("ink", "quiet", "accent"), ("paper", "card")):
        assert contrast(color(text), color(ground)) >= 4.5, (text, ground)
    nearest = [
        0.45 * norm + 0.55 * card for norm, card in zip(color("norm"), color("card"), strict=True)
    ]
    assert contrast(color("ink"), nearest) >= 4.5, "in the table of distances"
    controls = "button, input, a, [tabindex='0'], [role=img]"
    nodes = browser.driver.find_elements("css selector", controls)
    assert len(nodes) > 25
    for node in nodes:
        if node.is_displayed():
            assert node.accessible_name.strip(), node.get_attribute("outerHTML")


def test_tab_goes_from_the_top_to_the_bottom(browser, page):
    browser.open(page)
    seen = []
    for _ in range(50):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        seen.append(browser.run("document.activeElement.closest('[id]')?.id"))
    order = [
        "images",
        "file",
        "layers",
        "previous",
        "next",
        "pin",
        "stage",
        "heads",
        "snap",
        "reset",
        "geometry",
    ]
    order += ["harden", "sharpness", "all", "svg", "png", "copy"]
    assert [name for name in dict.fromkeys(seen) if name in order] == order


def test_a_notebook_shows_the_page_in_a_frame(browser, tmp_path):
    page = explore(network(), pictures())
    (tmp_path / "notebook.html").write_text(
        f"<!doctype html><title>notebook</title>{page._repr_html_()}"
    )
    browser.driver.get((tmp_path / "notebook.html").as_uri())
    frame = browser.driver.find_element("css selector", "iframe")
    browser.driver.switch_to.frame(frame)
    browser.wait("document.body.dataset.ready")
    assert browser.run("document.querySelectorAll('#heads canvas').length") == 5
    browser.driver.switch_to.default_content()


def data_of(page):
    return json.loads(re.search(r'type="application/json" id="data">(.*?)</script>', page.html)[1])


def test_pages_are_small_and_have_as_many_images_as_fit(monkeypatch, caplog):
    assert len(explore(timm.create_model("sa_quadratic_tiny_cifar")).html) < 1_000_000
    model, images = network("content"), pictures(count=9)
    whole = explore(model, images)
    assert len(data_of(whole)["images"]) == 9
    monkeypatch.setattr(explorer, "LARGEST", len(whole.html) + 20_000)
    fewer = explore(model, images)
    assert 2 < len(data_of(fewer)["images"]) < 9
    assert len(fewer.html) < explorer.LARGEST
    assert caplog.messages == [
        f"the page has room for {len(data_of(fewer)['images'])} of the 9 images"
    ]
    monkeypatch.setattr(explorer, "LARGEST", 100_000)
    with pytest.raises(
        ValueError, match=r"3 layers whose maps of one image take [\d,]+ bytes, expected less"
    ):
        explore(model, images)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run on the digits."""
    out = tmp_path_factory.mktemp("runs") / "run"
    small = {key: value for key, value in SMALL.items() if key not in ("img_size", "num_classes")}
    config = tiny_config(
        model={"name": "sa_quadratic_tiny_cifar", "args": small}, data={"image_size": 16}
    )
    fit(config, out)
    return out


def test_a_run_has_a_page_with_its_path_and_images_that_may_be_published(run, browser):
    browser.open(run / "explorer.html")
    assert browser.run("document.querySelector('h1').textContent") == "sa_quadratic_tiny_cifar"
    assert browser.run("explorer.data.epochs") == [0, 1, 2]
    names = browser.run("explorer.data.images.map((image) => image.name)")
    assert names == ["china, danielbuechele, CC BY 2.0", "flower, vultilion, CC BY 2.0"]
    assert "local-dir:run" in browser.run("document.getElementById('code').textContent")


def test_the_command_shows_test_images_or_files_and_refuses_others(run, browser, tmp_path):
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["explore", str(run), "--images", "3", "--out", str(page)])
    assert result.exit_code == 0, result.output
    assert f"{page}: 0." in result.output
    browser.open(page)
    assert browser.run("explorer.data.images.map((image) => image.name)") == [
        "1: 0",
        "2: 1",
        "3: 2",
    ], "digits"
    Image.new("RGB", (50, 40), "red").save(tmp_path / "red.png")
    files = ["--image", str(tmp_path / "red.png"), "--image", str(tmp_path / "red.png")]
    assert CliRunner().invoke(app, ["explore", str(run), *files, "--out", str(page)]).exit_code == 0
    (tmp_path / "blue").mkdir()
    Image.new("RGB", (50, 40), "blue").save(tmp_path / "blue" / "red.png")
    Image.new("RGB", (50, 40), "lime").save(tmp_path / "lime.png")
    files = [tmp_path / "red.png", tmp_path / "blue" / "red.png", tmp_path / "lime.png"]
    names = [image["name"] for image in data_of(explore_source(str(run), files))["images"]]
    assert names == [str(files[0]), str(files[1]), "lime.png"]
    (tmp_path / "text.png").write_text("no picture")
    refused = CliRunner().invoke(app, ["explore", str(run), "--image", str(tmp_path / "text.png")])
    assert refused.exit_code == 1
    assert "expected a picture" in refused.output


def test_a_missing_folder_is_named(run, tmp_path):
    page = tmp_path / "nowhere" / "page.html"
    refused = CliRunner().invoke(app, ["explore", str(run), "--out", str(page)])
    assert refused.exit_code == 1
    assert f"out: got {page}, expected an existing folder {page.parent}" in refused.output


def test_norms_of_value_matrices_are_exact_for_the_largest_layers():
    """Sums of 262,144 products, of which some processors lose three digits in float32."""
    torch.manual_seed(0)
    layer = sa_zoo.attention_from_conv(torch.nn.Conv2d(512, 512, 3), 46.0)
    W = layer.W_val().detach().double().flatten(2).permute(2, 0, 1).numpy()  # (N_h, D_out, D_in)
    found = value_norms(values_of(layer))
    expected = [[(W[g] * W[h]).sum() for h in range(9)] for g in range(9)]
    np.testing.assert_allclose(found["gram"], expected, rtol=1e-6)
    np.testing.assert_allclose(found["norms"], abs(W).sum(axis=2).T, rtol=1e-6)


def test_value_matrices_include_what_follows_them():
    layer = Attention(7, 5, (Quadratic,), (3, 11), normalize=True).eval()
    bn = layer.W_out.bn
    for values in (bn.weight, bn.running_mean, layer.W_val.weight):
        torch.nn.init.normal_(values)
    torch.nn.init.uniform_(bn.running_var, 0.5, 2.0)
    X = torch.randn(2, 3, 11, 7)
    heads = attend(layer.probabilities(X), X.flatten(1, 2)).unflatten(-1, [5, 7])
    summed = torch.einsum("ohi,bqhi->bqo", values_of(layer).float(), heads).unflatten(1, [3, 11])
    constant = layer(X) - summed
    assert torch.allclose(constant, constant[0, 0, 0].expand_as(constant), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "size"), [({"in_chans": 1}, [1, 28, 20]), ({"img_size": (36, 44)}, [3, 36, 44])]
)
def test_pictures_are_made_to_fit_the_model(arguments, size):
    page = sa_zoo.explore(
        network("learned", **arguments),
        {"a": Image.new("RGB", (90, 50)), "b": Image.new("L", (9, 9))},
    )
    assert data_of(page)["size"] == size
    assert [image["name"] for image in data_of(page)["images"]] == ["a", "b"]


def test_a_model_of_other_channels_asks_for_tensors():
    model = network(in_chans=5)
    with pytest.raises(ValueError, match="model of 5 channels"):
        explore(model)
    assert data_of(explore(model, torch.rand(2, 5, 28, 20)))["size"] == [5, 28, 20]


@pytest.mark.parametrize(
    ("images", "got"),
    [
        ([Image.new("RGB", (20, 28))], "list"),
        (Image.new("RGB", (20, 28)), "Image"),
        (pictures().numpy(), "ndarray"),
        ({"a": pictures()[0]}, "dict"),
        (pictures()[0], r"a tensor \(3, 28, 20\)"),
        (pictures(count=0), r"a tensor \(0, 3, 28, 20\)"),
    ],
)
def test_images_of_another_kind_are_refused(images, got):
    with pytest.raises(ValueError, match=rf"^images: got {got}, expected a tensor \(B, C, H, W\)"):
        explore(network(), images)


def test_a_network_without_attention_gets_no_page(tmp_path):
    folder = make_run(tmp_path / "run", "resnet_tiny_cifar")
    assert explorer_files(open_model(str(folder))) == {}
