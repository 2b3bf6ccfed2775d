"""The lookup of practices: what fits exactly, what is a fall-back, and that every shipped practice can be found."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from msmodelslim import practice, registry
from msmodelslim.errors import EnvError, SchemaValidateError, SecurityError, UnsupportedError
from msmodelslim.ir.scheme import LinearScheme
from msmodelslim.practice import choose, from_file, practices, quant_type_word
from msmodelslim.processor.base import BaseSessionProcessor
from msmodelslim.recipe import Recipe
from msmodelslim.saver import ascendv1, compressed_tensors

SHIPPED = sorted(practice.SHIPPED.glob("*/*.yaml"))
FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
#: (quant type, engine) → the practice, from the tables of docs/formats.md: what the engine reads of a dense model
SERVED = {
    ("w8a8", "vLLM-Ascend"): "w8a8_ascend",
    ("w8a8", "vLLM"): "w8a8",
    ("w8a8", "transformers"): "w8a8",
    ("w8a8", "SGLang"): "w8a8",
    ("w8a16", "vLLM-Ascend"): "w8a16_ascend",
    ("w8a16", "vLLM"): "w8a16",
    ("w8a16", "transformers"): "w8a16",
    ("w4a8", "vLLM-Ascend"): "w4a8_ascend",
    ("w4a8", "vLLM"): "w4a8",
    ("w4a8", "transformers"): "w4a8",
    ("w4a16", "vLLM"): "w4a16",
    ("w4a16", "transformers"): "w4a16",
    ("w4a4", "vLLM-Ascend"): "w4a4_ascend",
}


class Nothing(BaseSessionProcessor):
    pass


class Disk(BaseSessionProcessor):
    kind: ClassVar[str] = "saver"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty store that stands in for the shipped one, and a registry that holds the two classes above alone."""
    monkeypatch.setattr(registry, "_CLASSES", {})
    monkeypatch.setattr(registry, "_import_all", lambda kind: None)
    registry.register("nothing")(Nothing)
    registry.register("disk")(Disk)
    monkeypatch.setattr(practice, "SHIPPED", tmp_path / "shipped")
    monkeypatch.delenv(practice.CUSTOM_STORE, raising=False)
    return tmp_path / "shipped"


def write(store: Path, place: str, *, w: int = 8, a: int = 8, score: float = 100, **metadata: Any) -> Path:
    """A practice at `pedigree/config_id`."""
    path = store / f"{place}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    label = {"w_bit": w, "a_bit": a} | metadata.pop("label", {})
    content = {
        "apiversion": "modelslim_v1",
        "metadata": {"config_id": path.stem, "score": score, "label": label} | metadata,
        "spec": {"process": [{"type": "nothing"}], "save": [{"type": "disk"}]},
    }
    path.write_text(yaml.safe_dump(content))
    return path


def verified(*scenarios: list[str], name: str = "Qwen3-8B") -> dict[str, Any]:
    return {"verified_tags": {name: list(scenarios)}}


def find(
    quant_type: str | None = None, *tags: str, yes: bool = False, names: tuple[str, ...] = ("qwen3-8b", "qwen3")
) -> str:
    return choose("dense", names, quant_type, tags, yes).recipe.config_id


def test_the_highest_score_wins_and_names_break_ties(store: Path) -> None:
    for name, score in (("c", 90), ("b", 95), ("a", 95)):
        write(store, f"dense/{name}", score=score, **verified([]))
    assert [found.name for found in practices("dense")] == ["a", "b", "c"]
    assert find("w8a8") == "a"


def test_names_and_tags_are_compared_without_case(store: Path) -> None:
    write(store, "dense/a", **verified(["vLLM", "CPU"]))
    assert find("W8A8", "vllm", "cpu", names=("QWEN3-8B",)) == "a"


def test_the_familys_name_fits_as_well_as_the_models(store: Path) -> None:
    write(store, "dense/a", verified_model_types=["Qwen3"])
    assert find("w8a8", names=("Qwen3-32B", "qwen3")) == "a"


def test_verified_model_types_fit_whatever_the_tags(store: Path) -> None:
    write(store, "dense/a", verified_model_types=["qwen3"])
    assert find("w8a8", "MindIE") == "a"


def test_one_scenario_must_hold_all_tags(store: Path) -> None:
    write(store, "dense/a", score=99, **verified(["MindIE", "Atlas_A2_Inference"], ["vLLM", "CPU"]))
    write(store, "dense/b", score=1, **verified(["MindIE", "CPU"]))
    assert find("w8a8", "MindIE", "CPU") == "b"


def test_a_match_without_a_type_is_w8a8_and_no_fall_back(store: Path) -> None:
    write(store, "dense/a", **verified(["vLLM"]))
    choice = choose("dense", ["qwen3-8b"], None, [], False)
    assert (choice.recipe.config_id, choice.exact) == ("a", True)
    assert choice.why == "no quant type was given, so w8a8; verified for Qwen3-8B"


def test_why_names_the_model_and_the_tags_and_others_are_listed(store: Path) -> None:
    write(store, "dense/a", **verified(["vLLM", "CPU"]))
    write(store, "dense/b", score=1, **verified(["vLLM"], ["vLLM", "MindIE"]))
    choice = choose("dense", ["qwen3-8b"], "w8a8", ["vllm"], False)
    assert choice.why == "verified for Qwen3-8B with vllm"
    assert choice.others == ("b (vLLM MindIE)",)


@pytest.mark.parametrize(
    ("label", "quant_type"),
    [
        ({}, "w8a8"),
        ({"is_sparse": True}, "w8a8s"),
        ({"kv_cache": True}, "w8a8c8"),
        ({"fa_quant": True}, "w8a8f8"),
        ({"fa_bit": 8}, "w8a8f8"),
        ({"fa_quant": False, "fa_bit": 8}, "w8a8"),
    ],
)
def test_a_label_fits_the_type_that_says_the_same(store: Path, label: dict[str, Any], quant_type: str) -> None:
    write(store, "dense/a", label=label, **verified([]))
    assert find(quant_type) == "a"
    for other in {"w8a8", "w8a8s", "w8a8c8", "w8a8f8", "w4a8"} - {quant_type}:
        with pytest.raises(UnsupportedError):
            find(other)


def test_a_practice_verified_with_other_tags_is_a_fall_back(store: Path) -> None:
    write(store, "dense/a", **verified(["vLLM", "CPU"]))
    with pytest.raises(UnsupportedError) as caught:
        find("w8a8", "MindIE")
    assert str(caught.value) == (
        "there is no practice for w8a8 for qwen3 or qwen3-8b with MindIE; a is the nearest, but it is verified with "
        "vLLM CPU only; pedigree dense has a (vLLM CPU); give --yes to take it, another --quant_type or --tag, or your "
        "own recipe with --config_path"
    )
    choice = choose("dense", ["qwen3-8b"], "w8a8", ["MindIE"], True)
    assert (choice.exact, choice.why) == (False, "a fall-back that --yes accepted: it is verified with vLLM CPU only")


def test_the_default_pedigree_is_a_fall_back_of_a_family(store: Path) -> None:
    write(store, "default/any")
    with pytest.raises(
        UnsupportedError, match="any is the nearest, but it is made for any model, not for the pedigree dense"
    ):
        find("w8a8")
    assert find("w8a8", yes=True) == "any"


def test_the_default_pedigree_is_what_a_model_of_no_family_asks_for(store: Path) -> None:
    write(store, "default/any", score=1)
    write(store, "dense/shared", **verified(["vLLM"], name="default"))
    choice = choose("default", ["default"], "w8a8", [], False)
    assert (choice.recipe.config_id, choice.exact, choice.others) == (
        "shared",
        True,
        ("any (not verified for this model)",),
    )


def test_another_type_is_a_fall_back(store: Path) -> None:
    write(store, "dense/a", **verified([]))
    with pytest.raises(UnsupportedError, match=r"a is the nearest, but it is w8a8, not w4a4; pedigree dense has a"):
        find("w4a4")
    assert find("w4a4", yes=True) == "a"


def test_fall_backs_keep_their_order(store: Path) -> None:
    """Own pedigree with other tags, then the default pedigree, then w8a8 of the own, then w8a8 of the default one."""
    names = ["dense/d_other_tags", "default/c_default", "dense/b_w8a8", "default/a_default_w8a8"]
    paths = [
        write(store, names[0], w=4, a=4, **verified(["vLLM"])),
        write(store, names[1], w=4, a=4),
        write(store, names[2], verified_model_types=["qwen3"]),
        write(store, names[3]),
    ]
    for path in paths:
        assert find("w4a4", "MindIE", yes=True) == path.stem
        path.unlink()


def test_nothing_near_is_an_error_that_yes_does_not_help(store: Path) -> None:
    write(store, "dense/a", **verified(["vLLM"], name="Qwen2-7B"))
    with pytest.raises(UnsupportedError) as caught:
        find("w8a8", yes=True)
    assert str(caught.value) == (
        "there is no practice for w8a8 for qwen3 or qwen3-8b, and nothing near it; pedigree dense has a (not verified "
        "for this model); give another --quant_type, or your own recipe with --config_path"
    )


def test_an_unknown_pedigree_falls_back_to_the_default_one(store: Path) -> None:
    write(store, "default/any")
    assert choose("unheard_of", ["x"], "w8a8", [], True).recipe.config_id == "any"


def test_the_users_own_store_is_searched_too(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, "dense/a", score=90, **verified([]))
    write(tmp_path / "mine", "dense/b", score=91, **verified(["my_engine"]))
    monkeypatch.setenv(practice.CUSTOM_STORE, str(tmp_path / "mine"))
    assert find("w8a8") == "b"
    assert find("w8a8", "MY_ENGINE") == "b"


def test_a_store_that_is_no_directory_is_told(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(practice.CUSTOM_STORE, "/nowhere")
    with pytest.raises(EnvError) as caught:
        find("w8a8")
    assert str(caught.value) == (
        "MSMODELSLIM_CUSTOM_PRACTICE_REPO is '/nowhere', which is no directory; name the directory of your practices"
    )


def test_a_practice_is_named_as_its_file(store: Path) -> None:
    path = write(store, "dense/a", **verified([]))
    path.rename(path.with_name("b.yaml"))
    with pytest.raises(
        SecurityError, match=r"b.yaml: metadata.config_id is 'a', which is not the file's name; name the file a"
    ):
        find("w8a8")


def test_a_practice_needs_a_label(store: Path) -> None:
    path = write(store, "dense/a", **verified([]))
    path.write_text(
        path.read_text().replace("label:", "verified_model_types: []\nother:", 1).replace("\nother", "\n  #")
    )
    path.write_text("apiversion: modelslim_v1\nmetadata: {config_id: a}\nspec: {process: [], save: [{type: disk}]}\n")
    with pytest.raises(SchemaValidateError, match=r"a.yaml: metadata.label is missing; write what it quantizes"):
        find("w8a8")


def test_a_broken_practice_is_told_with_its_place(store: Path) -> None:
    write(store, "dense/a", **verified([])).write_text("apiversion: modelslim_v1\nmetadata: {scor: 1}\n")
    with pytest.raises(SchemaValidateError, match=r"a.yaml:2: metadata.scor: unknown key; write 'score'"):
        find("w8a8")


@pytest.mark.parametrize("word", ["w8a9", "W8A8C16", "int8", ""])
def test_a_type_nobody_knows_is_refused_with_the_list(word: str) -> None:
    with pytest.raises(SchemaValidateError, match=r"is not a quant type; write .*w8a8"):
        quant_type_word(word)


def test_a_tag_nobody_knows_is_refused_with_the_nearest(store: Path) -> None:
    write(store, "dense/a", **verified([]))
    with pytest.raises(SchemaValidateError, match=r"'vLM' is not a tag; write 'vLLM' \(of vLLM-Ascend, MindIE"):
        find("w8a8", "vLM")


def test_a_file_of_ones_own_is_taken_as_it_is(store: Path, tmp_path: Path) -> None:
    write(tmp_path, "mine", w=4)
    choice = from_file(tmp_path / "mine.yaml")
    assert (choice.recipe.config_id, choice.exact, choice.why) == ("mine", True, "the recipe that --config_path names")


def test_a_practices_name_is_as_good_as_its_path(store: Path) -> None:
    write(store, "dense/a")
    choice = from_file(Path("a"))
    assert (choice.recipe.source, choice.why) == (str(store / "dense/a.yaml"), "the practice that --config_path names")


def test_a_name_that_fits_none_or_several_practices_is_refused(store: Path) -> None:
    write(store, "dense/w8a8_x")
    with pytest.raises(
        SchemaValidateError, match=r"--config_path w8a8_y is no file and no practice; give a recipe's path, or 'w8a8_x'"
    ):
        from_file(Path("w8a8_y"))
    write(store, "default/w8a8_x")
    with pytest.raises(
        SchemaValidateError, match=r"w8a8_x fits 2 practices; give the path of one: .*default/w8a8_x.yaml"
    ):
        from_file(Path("w8a8_x"))


def test_a_missing_file_is_told(store: Path) -> None:
    with pytest.raises(SchemaValidateError, match=r"mine.yaml: does not exist; give the path of a recipe"):
        from_file(Path("mine.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("family", [*FAMILIES, "default"])
def test_every_shipped_practice_is_found_by_the_lookup(path: Path, family: str) -> None:
    label = yaml.safe_load(path.read_text())["metadata"]["label"]
    pedigree = "default" if family == "default" else "dense"
    choice = choose(pedigree, [family], f"w{label['w_bit']}a{label['a_bit']}", [], False)
    found = {choice.recipe.config_id, *(other.partition(" ")[0] for other in choice.others)}
    assert choice.exact
    assert path.stem in found


def schemes(recipe: Recipe) -> list[LinearScheme]:
    """Of every rounding step."""
    found = [step.config.qconfig.scheme() for step in recipe.process if step.type == "linear_quant"]  # type: ignore[attr-defined]
    assert found
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_practice_is_a_valid_recipe_with_its_label(path: Path) -> None:
    recipe = from_file(path).recipe
    bits = {"float": 16, "int8": 8, "int4": 4}
    label = recipe.metadata.label
    assert label is not None
    for scheme in schemes(recipe):
        assert (label.w_bit, label.a_bit) == (bits[scheme.weight.dtype], bits[scheme.act.dtype])
    assert recipe.save[0].type == ("ascendv1_saver" if "ascend" in path.stem else "compressed_tensors")


@pytest.mark.parametrize(
    ("asked", "config_id"), SERVED.items(), ids=lambda value: "-".join(value) if len(value) == 2 else ""
)
@pytest.mark.parametrize("family", ["qwen3", "default"])
def test_an_engines_tag_finds_what_it_can_serve(asked: tuple[str, str], config_id: str, family: str) -> None:
    quant_type, engine = asked
    pedigree = "default" if family == "default" else "dense"
    choice = choose(pedigree, [family], quant_type, [engine], False)
    assert (choice.recipe.config_id, choice.exact) == (config_id, True)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_an_engine_is_named_exactly_where_the_saver_knows_its_reader(path: Path) -> None:
    recipe = from_file(path).recipe
    saver = recipe.save[0]
    target = saver.config.target  # type: ignore[attr-defined]
    [scenarios] = {frozenset(frozenset(tags) for tags in found) for found in recipe.metadata.verified_tags.values()}
    for scheme in schemes(recipe):
        if saver.type == "ascendv1_saver":
            variants = ascendv1.TARGETS[target]["linear"].get(str(ascendv1.kind_of(scheme)), ())
            assert ascendv1.variant_of(scheme.weight) in variants
        else:
            kind, readers = compressed_tensors.kind_of(scheme), compressed_tensors.TARGETS
            assert ({"vLLM", "CPU"} in scenarios) == (kind in readers["vllm-0.32"])
            assert ({"transformers", "CPU"} in scenarios) == (kind in readers["transformers-5.24"])


def test_what_no_engine_serves_is_no_practice() -> None:
    for quant_type, engine in (("w4a16", "vLLM-Ascend"), ("w4a4", "vLLM"), ("w4a4", "transformers")):
        with pytest.raises(UnsupportedError, match="give --yes"):
            choose("dense", ["llama"], quant_type, [engine], False)


def test_without_a_tag_ascend_comes_first() -> None:
    for quant_type in ("w8a8", "w8a16", "w4a8", "w4a4"):
        assert choose("dense", ["llama"], quant_type, [], False).recipe.config_id == f"{quant_type}_ascend"
    assert choose("dense", ["llama"], "w4a16", [], False).recipe.config_id == "w4a16"
