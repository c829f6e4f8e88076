"""Cards say what the folder says, no more and no less."""

import hashlib
import json
import re

import pytest
import timm
from huggingface_hub import ModelCard
from model_folders import METRICS, TEST, VALIDATION, make_run

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.folders.opened import open_folder
from sa_zoo.publishing.card import name_baseline, published_card, render_card, write_card

NAME = "sa_quadratic_tiny_cifar"


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", NAME)


def card_of(folder, repo_id=""):
    return render_card(open_folder(folder), repo_id)


def change(path, **keys):
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def rows(card):
    """Cells of the card's table rows."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in card.splitlines()
        if line.startswith("|")
    ]


def test_rendering_twice_gives_the_same_bytes(run):
    assert card_of(run) == card_of(run)


def test_the_table_holds_the_numbers_of_the_metrics(run):
    table = rows(card_of(run))
    for split, scores in (("test", TEST), ("validation", VALIDATION)):
        shown = next(row for row in table if row[:2] == [NAME, split])
        assert int(shown[2]) == scores["n"]
        assert [float(shown[index].split()[0]) / 100 for index in (3, 4)] == pytest.approx(
            [scores["top1"], scores["top5"]]
        )
        assert float(shown[5]) == scores["loss"]
    assert ["train.images_per_second", "443.7"] in table


def test_the_metadata_holds_the_test_scores_exactly_and_names_data_and_revision(run):
    data = ModelCard(card_of(run)).data
    assert [result.metric_value for result in data.eval_results] == [TEST["top1"], TEST["top5"]]
    assert {result.dataset_revision for result in data.eval_results} == {METRICS["data_revision"]}
    assert (data.license, data.library_name, data.pipeline_tag) == (
        "apache-2.0",
        "timm",
        "image-classification",
    )
    assert data.datasets == ["uoft-cs/cifar10"] and data.metrics == ["accuracy"]
    assert data.base_model is None


def test_numbers_move_with_the_metrics(run):
    before = card_of(run)
    change(run / "metrics.json", test={**TEST, "top1": 0.1234})
    after = card_of(run)
    assert "12.34 %" in after and "12.34 %" not in before


def test_what_was_not_measured_is_not_claimed(run):
    (run / "metrics.json").write_text("{}")
    card = card_of(run)
    assert "## Results" not in card and "model-index" not in card and "Measured on" not in card
    assert "energy use" in card and "co2" not in card.lower()


def test_the_card_names_the_weights_by_their_sum(run):
    assert hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest() in card_of(run)


def test_the_parameter_count_is_the_models(run):
    count = sum(parameter.numel() for parameter in timm.create_model(NAME).parameters())
    assert ["parameters", f"{count:,}"] in rows(card_of(run))


def test_data_that_is_on_no_hub_is_no_hub_data_set(run):
    change(run / "metrics.json", data="CIFAR-10 (JPEG q75 copy)", data_revision="")
    data = ModelCard(card_of(run)).data
    assert data.datasets is None
    assert {(result.dataset_type, result.dataset_revision) for result in data.eval_results} == {
        ("cifar-10-jpeg-q75-copy", None)
    }


@pytest.mark.parametrize(
    ("init", "base"),
    [
        ("hf-hub:somebody/model@v1", "somebody/model"),
        ("resnet18.a1_in1k", "timm/resnet18.a1_in1k"),
        ("local-dir:runs/other", None),
    ],
)
def test_a_fine_tuned_model_names_the_one_it_started_from(run, init, base):
    (run / "train.toml").write_text(f'[model]\nname = "{NAME}"\ninit = "{init}"\n')
    card = card_of(run)
    assert ModelCard(card).data.base_model == base
    assert f"Starts from the weights of {init.partition(':')[2] or init}" in card


@pytest.mark.parametrize("base", ["timm/resnet18.a1_in1k", ""])
def test_a_converted_model_names_its_network_and_what_the_conversion_changed(run, base):
    assert "## Conversion" not in card_of(run)
    conversion = {"layers": "layer4.*", "alpha": 4.5, "content": True, "logits": 0.0123}
    change(run / "metrics.json", base_model=base, conversion=conversion)
    card = card_of(run)
    assert ModelCard(card).data.base_model == (base or None)
    assert f"The convolutions of {base}" in card or not base
    assert (
        "`layer4.*`" in card
        and "alpha 4.5, with content terms" in card
        and "was 1.2e-02 on" in card
    )


@pytest.mark.parametrize(
    ("init", "train", "said"),
    [
        ("", {"epochs": 7}, "resnet_tiny_cifar, trained for 7 epochs"),
        ("local-dir:before", {"epochs": 3}, "resnet_tiny_cifar, fine-tuned for 3 epochs"),
        ("", {}, "resnet_tiny_cifar"),
    ],
)
def test_a_baseline_measured_on_the_same_data_is_printed_next_to_the_result(
    run, tmp_path, init, train, said
):
    other = make_run(tmp_path / "baseline", "resnet_tiny_cifar")
    change(other / "metrics.json", test={**TEST, "top1": 0.8011}, train=train)
    (other / "train.toml").write_text(f'[model]\nname = "resnet_tiny_cifar"\ninit = "{init}"\n')
    assert "No baseline was measured" in card_of(run)
    name_baseline(run, other)
    card = card_of(run)
    assert [said, "test", "1009", "80.11 %", "99.11 %", "0.4127"] in rows(card)
    assert "No baseline was measured" not in card
    assert [result.metric_value for result in ModelCard(card).data.eval_results] == [
        TEST["top1"],
        TEST["top5"],
    ]


def test_a_baseline_with_an_empty_revision_is_on_the_same_images(run, tmp_path):
    other = make_run(tmp_path / "baseline", "resnet_tiny_cifar")
    change(run / "metrics.json", data_revision=None)
    change(other / "metrics.json", test=TEST, data_revision="")
    name_baseline(run, other)
    assert "No baseline was measured" not in card_of(run)


def test_a_baseline_on_other_images_is_refused(run, tmp_path):
    other = make_run(tmp_path / "baseline", "resnet_tiny_cifar")
    change(other / "metrics.json", data_revision="another")
    with pytest.raises(ValueError, match=r"^--baseline: got .*baseline, measured on .*another"):
        name_baseline(run, other)


def test_figures_that_exist_are_shown(run):
    assert "![" not in card_of(run)
    (run / "figures").mkdir()
    names = [
        "learning_curve",
        "confusion_matrix",
        "reliability",
        "head_positions",
        "head_paths",
        "head_maps",
        "head_depth",
    ]
    for index, name in enumerate(names, start=1):
        (run / "figures" / f"{name}.png").write_bytes(b"")
        shown = re.findall(r"!\[[^]]+\]\(figures/(.*?).png\)", card_of(run))
        assert shown == names[:index]


def test_a_card_links_the_explorer_of_a_folder_that_has_one(run):
    assert "explorer.html" not in card_of(run)
    (run / "explorer.html").write_text("<!doctype html>")
    assert "[explorer.html](explorer.html)" in card_of(run)


def test_only_a_folder_with_its_own_code_is_offered_as_remote_code(run):
    assert "trust_remote_code" not in card_of(run)
    change(run / "config.json", auto_map={"AutoModel": "modeling.Model"})
    assert "trust_remote_code=True" in card_of(run)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_code_for_timm_runs_for_any_number_of_channels(tmp_path, channels):
    folder = make_run(tmp_path / "run", NAME, in_chans=channels)
    card = card_of(folder)
    (code,) = re.findall(r"```python\n(import timm.*?)```", card, re.DOTALL)
    found = {}
    exec(code.replace("hf-hub:you/sa_quadratic_tiny_cifar", f"local-dir:{folder}"), found)
    assert found["probabilities"].shape == (1, 10)
    assert ("With transformers" in card) == (
        channels == 3
    )  # its pipeline makes three channels of any image


def test_the_licence_of_weights_of_others_is_theirs(tmp_path):
    run = make_run(tmp_path / "run", "test_resnet", num_classes=10)
    assert ModelCard(card_of(run)).data.license == "apache-2.0"
    cfg = json.loads((run / "config.json").read_text())["pretrained_cfg"]
    for given, shown in (("mit", "mit"), (None, "unknown")):
        change(run / "config.json", pretrained_cfg={**cfg, "license": given})
        assert ModelCard(card_of(run)).data.license == shown


@pytest.mark.parametrize("baseline", ["resnet18", "runs/typo", ""])
def test_a_baseline_that_is_not_a_run_is_named(run, tmp_path, baseline):
    before = files(run)
    with pytest.raises(
        ValueError, match=r"^--baseline: got .*expected the folder of a finished run"
    ):
        name_baseline(run, tmp_path / baseline)
    assert files(run) == before


def files(folder):
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_card_is_published_with_the_name_of_its_repository_and_the_folder_stays_as_it_is(run):
    write_card(open_folder(run))
    before = files(run)
    for repo_id in ("them/model", "others/copy"):
        card = published_card(open_folder(run), repo_id)
        assert "you/" not in card and card.count(repo_id) == 3
        assert card.replace(repo_id, f"you/{NAME}") == (run / "README.md").read_text()
    assert files(run) == before


def test_a_folder_without_a_card_is_published_with_one(run):
    before = files(run)
    assert published_card(open_folder(run), "them/model") == card_of(run, "them/model")
    assert files(run) == before


def test_what_a_person_wrote_is_published(run):
    path = write_card(open_folder(run))
    path.write_text(path.read_text() + "\nA word of my own.\n")
    card = published_card(open_folder(run), "them/model")
    assert card == card_of(run, "them/model") + "\nA word of my own.\n"


def test_classes_may_have_the_names_of_placeholders(run):
    change(run / "config.json", label_names=["TODO", "{{x}}", *"cdefghij"])
    assert "TODO, {{x}}" in published_card(open_folder(run), "them/model")
    write_card(open_folder(run))
    assert published_card(open_folder(run), "them/model") == card_of(run, "them/model")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "## Limitations",
            "## Limitations\n\n[More Information Needed]",
            r"got '\[More Information Needed\]'",
        ),
        ("## Limitations", "## TODO", "got 'TODO'"),
        ("value: 0.8711", "value: 0.9711", "as model-index"),
        ("license: apache-2.0", "license: mit", "got 'mit' as license"),
        (f"you/{NAME}", "them/another", "without them/model, expected usage code"),
    ],
)
def test_a_card_that_says_something_else_than_the_folder_is_refused(run, old, new, words):
    path = write_card(open_folder(run))
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=words):
        published_card(open_folder(run), "them/model")


def test_a_card_of_other_weights_is_refused(run):
    write_card(open_folder(run))
    weights = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"expected the current sha256 of model\.safetensors"):
        published_card(open_folder(run), "them/model")


def test_a_folder_of_the_catalogue_with_a_tag_has_a_repository_of_its_own(run):
    tagged = run.rename(run.with_name(f"{NAME}.long"))
    card = card_of(tagged)
    assert (
        f"# {NAME}.long" in card
        and card.count(f"you/{NAME}.long") == card.count(f"you/{NAME}") == 3
    )
    assert ModelCard(card).data.model_name == f"{NAME}.long"


def test_a_run_on_a_folder_is_repeated_with_a_folder_of_ones_own(run):
    recipe = run / "train.toml"
    assert "\nsa-zoo train train.toml\n" in card_of(run)
    recipe.write_text(recipe.read_text() + '[data]\nname = "data/cifar10"\ntitle = "some images"\n')
    assert "\nsa-zoo train train.toml --set data.name=FOLDER\n" in card_of(run)
