"""Cards say what the folder says, no more and no less."""

import hashlib
import json
import re

import pytest
from huggingface_hub import ModelCard
from model_folders import METRICS, TEST, make_run

import sa_zoo
from sa_zoo.publishing.card import published_card, render_card, write_card

NAME = "sa_quadratic_tiny_cifar"


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / NAME, NAME)


def card_of(folder, repo_id=""):
    return render_card(sa_zoo.open(folder), repo_id)


def change(path, **keys):
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def rows(card):
    """Cells of the card's table rows."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in card.splitlines()
        if line.startswith("|")
    ]


def test_the_table_holds_the_numbers_of_the_metrics(run):
    card = card_of(run)
    table = rows(card)
    assert [NAME, "test", "1009", "87.11 ± 2.07 %", "99.11 %", "0.4127"] in table
    assert [NAME, "validation", "503", "85.33 ± 3.09 %", "98.73 %", "0.4519"] in table
    assert ["train.images_per_second", "443.7"] in table and ["parameters", "785,164"] in table
    assert hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest() in card
    (run / "metrics.json").write_text("{}")
    card = card_of(run)
    assert "## Results" not in card and "model-index" not in card


def test_the_metadata_holds_the_test_scores_exactly(run):
    data = ModelCard(card_of(run)).data
    assert [result.metric_value for result in data.eval_results] == [TEST["top1"], TEST["top5"]]
    assert {result.dataset_revision for result in data.eval_results} == {METRICS["data_revision"]}
    assert (data.license, data.library_name) == ("apache-2.0", "timm")
    assert data.datasets == ["uoft-cs/cifar10"] and data.metrics == ["accuracy"]
    change(run / "metrics.json", data="CIFAR-10 (JPEG q75 copy)", data_revision="")
    data = ModelCard(card_of(run)).data
    assert data.datasets is None
    kinds = {(result.dataset_type, result.dataset_revision) for result in data.eval_results}
    assert kinds == {("cifar-10-jpeg-q75-copy", None)}


def test_text_from_others_is_only_text(run):
    evil = "owl\n# Heading\n<script>alert(1)</script> [a](b) `c` | https://evil.org www.evil.org"
    change(run / "config.json", label_names=[evil] * 10)
    scores = METRICS["test"]
    change(run / "metrics.json", data=evil, environment={evil: evil})
    change(run / "metrics.json", baseline={"model": evil, "test": scores})
    body = card_of(run).split("\n---\n", 1)[1]
    shown = r"owl # Heading \<script\>alert(1)\</script\> \[a\](b) \`c\` \| https\://evil.org www\.evil.org"
    assert body.count(shown) == body.count("owl") == 15
    assert "\n# Heading" not in body


def test_a_model_of_ones_own_has_the_title_of_its_folder(tmp_path):
    run = make_run(tmp_path / "mask detector", NAME, num_classes=2)
    change(run / "metrics.json", test=TEST | {"top5": None, "balanced": 0.7007}, validation=None)
    card = card_of(run)
    assert "# mask-detector\n" in card and f"`{NAME}`" in card
    assert card.count("you/mask-detector") == card.count("you/") == 3
    assert ["mask-detector", "test", "1009", "87.11 ± 2.07 %", "70.07 %", "0.4127"] in rows(card)
    data = ModelCard(card).data
    assert [result.metric_value for result in data.eval_results] == [TEST["top1"]]


@pytest.mark.parametrize(
    ("init", "base", "said"),
    [
        ("hf-hub:somebody/model@v1", "somebody/model", "somebody/model@v1"),
        ("pretrained", "timm/resnet18.a1_in1k", "timm/resnet18.a1_in1k"),
        ("/home/jane/other", None, "another model"),
    ],
)
def test_a_fine_tuned_model_names_its_start(run, init, base, said):
    (run / "train.toml").write_text(f'[model]\nname = "{NAME}"\ninit = "{init}"\n')
    if base:
        change(run / "metrics.json", base_model=base)
    card = card_of(run)
    assert ModelCard(card).data.base_model == base
    assert f"Starts from the weights of {said}." in card
    assert ("\nsa-zoo train train.toml\n" in card) == (not init.startswith("/"))


@pytest.mark.parametrize(
    ("base", "license_"), [("timm/resnet18.a1_in1k", "cc-by-nc-4.0"), (None, None)]
)
def test_a_converted_model_names_its_network_and_keeps_its_license(tmp_path, base, license_):
    run = make_run(tmp_path / "mine", "mhsa_network", cnn="test_resnet", layers="conv1.*")
    config = json.loads((run / "config.json").read_text())
    config["pretrained_cfg"]["license"] = license_
    change(run / "config.json", **config)
    conversion = {"layers": "layer4.*", "alpha": 4.5, "logits": 0.0123}
    change(run / "metrics.json", base_model=base, conversion=conversion)
    card = card_of(run)
    data = ModelCard(card).data
    assert (data.base_model, data.license) == (base, license_ or "unknown")
    assert "\ntest_resnet of timm with its convolutions as multi-head self-attention." in card
    assert f"The convolutions of {base or 'test_resnet'} in" in card.replace("\\", "")
    assert "`layer4.*`" in card and "alpha 4.5" in card and "1.2e-02 on" in card


@pytest.mark.parametrize("channels", [1, 3])
def test_the_code_for_timm_runs(tmp_path, channels):
    folder = make_run(tmp_path / NAME, NAME, in_chans=channels)
    card = card_of(folder)
    (code,) = re.findall(r"```python\n(import timm.*?)```", card, re.DOTALL)
    found = {}
    exec(code.replace(f"hf-hub:you/{NAME}", f"local-dir:{folder}"), found)
    assert found["probabilities"].shape == (1, 10)
    # transformers makes three channels of any image
    tag = ModelCard(card).data.pipeline_tag
    assert (tag == "image-classification", "With transformers" in card) == 2 * (channels == 3,)
    assert ("pipelines do not apply" in card) == (channels == 1)


def test_a_card_is_published_with_its_name_and_edits(run):
    # a folder without a card is published with one
    assert published_card(sa_zoo.open(run), "them/model") == card_of(run, "them/model")
    path = write_card(sa_zoo.open(run))
    card = published_card(sa_zoo.open(run), "them/model")
    assert "you/" not in card and card.count("them/model") == 3
    path.write_text(path.read_text() + "\nA word of my own.\n")
    assert published_card(sa_zoo.open(run), "them/model") == card + "\nA word of my own.\n"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("value: 0.8711", "value: 0.9711", "model-index"),
        ("license: apache-2.0", "license: mit", "license"),
        ('init = "', 'init = "/home/jane', "recipe"),
        ("sha256 `", "sha256 `0", "weights_sha256"),
    ],
)
def test_a_card_that_contradicts_its_folder_is_refused(run, old, new, words):
    path = write_card(sa_zoo.open(run))
    path.write_text(re.sub(rf"{old}\w*", new, path.read_text()))
    with pytest.raises(ValueError, match=f"got another {words}, expected"):
        published_card(sa_zoo.open(run), "them/model")
