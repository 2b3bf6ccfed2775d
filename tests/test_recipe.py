"""Recipes: what a good one becomes, and every sentence a bad one earns. The steps here are stand-ins."""

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, model_validator

from msmodelslim import registry
from msmodelslim.errors import SchemaValidateError
from msmodelslim.processor.base import BaseSessionProcessor
from msmodelslim.recipe import load_recipe, parse_metadata, parse_recipe

GOOD = """
apiversion: modelslim_v1
metadata:
  config_id: mine
  score: 90
  label: {w_bit: 8, a_bit: 8}
  verified_tags: {Qwen3-8B: [[vLLM, CPU]]}
quarter: &quarter {scope: per_token, alpha: 0.25}
spec:
  runner: layer_wise
  prior:
    - process: [{type: plain}]
    - {process: [{type: plain}], dataset: other.jsonl}
  process:
    - type: box
      configs:
        - {type: rounding, qconfig: {weight: *quarter}, include: ["*.{q,k}_proj"]}
        - type: plain
  save:
    - {type: disk, part_file_size: 2}
  max_samples: 16
"""
FRAME = "apiversion: modelslim_v1\nspec:\n  process:\n    - type: rounding\n{step}  save: [{{type: disk}}]\n"


class Scope(StrEnum):
    TENSOR = "per_tensor"
    TOKEN = "per_token"


class Half(BaseModel, frozen=True, extra="forbid"):
    scope: Scope = Scope.TENSOR
    symmetric: bool = True
    alpha: float = Field(0.5, ge=0, lt=1)
    bits: int = Field(8, gt=0, le=16, multiple_of=2)
    word: str = Field("x", max_length=3, pattern="^[a-z]+$")
    ext: dict[str, Any] = {}


class Halves(BaseModel, frozen=True, extra="forbid"):
    act: Half = Half()
    weight: Half

    @model_validator(mode="after")
    def _agree(self) -> "Halves":
        if self.weight.bits > self.act.bits:
            raise ValueError(f"weight.bits {self.weight.bits} exceed act.bits {self.act.bits}; write fewer")
        return self


class Plain(BaseSessionProcessor):
    pass


class Rounding(BaseSessionProcessor):
    class Config(BaseModel, frozen=True, extra="forbid"):
        qconfig: Halves
        include: tuple[str, ...] = Field(("*",), min_length=1)
        either: int | list[int] | None = None


class Box(BaseSessionProcessor):
    nested_field: ClassVar[str] = "configs"

    class Config(BaseModel, frozen=True, extra="forbid"):
        configs: tuple[Any, ...] = Field(min_length=1)


class Disk(BaseSessionProcessor):
    kind = "saver"

    class Config(BaseModel, frozen=True, extra="forbid"):
        part_file_size: int = Field(4, ge=0)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry that holds the classes of this file alone."""
    monkeypatch.setattr(registry, "_CLASSES", {})
    monkeypatch.setattr(registry, "_import_all", lambda kind: None)
    for name, cls in (("plain", Plain), ("rounding", Rounding), ("box", Box), ("disk", Disk)):
        registry.register(name)(cls)
    return


def refusal(text: str) -> str:
    with pytest.raises(SchemaValidateError) as caught:
        parse_recipe(text, "my.yaml")
    return str(caught.value)


def step_refusal(step: str) -> str:
    """What is said of a recipe whose one step, of type rounding on line 4, goes on with these lines."""
    lines = "".join(f"      {line}\n" for line in step.split("\n"))
    return refusal(FRAME.format(step=lines))


def test_a_recipe_becomes_steps_with_configs_of_their_classes() -> None:
    recipe = parse_recipe(GOOD, "mine.yaml")
    [box] = recipe.process
    assert (box.type, [step.type for step in box.config.configs]) == ("box", ["rounding", "plain"])  # type: ignore[attr-defined]
    rounding = box.config.configs[0].config  # type: ignore[attr-defined]
    assert isinstance(rounding, Rounding.Config)
    assert rounding.qconfig.weight == Half(scope=Scope.TOKEN, alpha=0.25)
    assert rounding.include == ("*.{q,k}_proj",)
    assert [(step.type, step.config) for step in recipe.save] == [("disk", Disk.Config(part_file_size=2))]


def test_a_recipe_carries_what_a_run_needs_to_know() -> None:
    recipe = parse_recipe(GOOD, "mine.yaml")
    assert (recipe.source, recipe.config_id, recipe.runner, recipe.text) == ("mine.yaml", "mine", "layer_wise", GOOD)
    assert (recipe.dataset, recipe.max_length, recipe.max_samples) == ("mix_calib.jsonl", 2048, 16)
    assert [(len(stage.steps), stage.dataset) for stage in recipe.prior] == [(1, "mix_calib.jsonl"), (1, "other.jsonl")]
    assert recipe.metadata.verified_tags == {"Qwen3-8B": (("vLLM", "CPU"),)}


def test_metadata_may_be_left_out() -> None:
    recipe = parse_recipe("apiversion: modelslim_v1\nspec: {process: [], save: [{type: disk}]}\n", "x")
    assert (recipe.config_id, recipe.metadata.score, recipe.metadata.label) == ("Unknown", 100, None)


def test_metadata_alone_is_read_without_looking_at_the_steps() -> None:
    assert parse_metadata(GOOD.replace("type: box", "type: unheard_of"), "mine.yaml").config_id == "mine"


@pytest.mark.parametrize(
    ("fields", "bits"),
    [({}, None), ({"fa_quant": True}, 8), ({"fa_bit": 4}, 4), ({"fa_quant": False, "fa_bit": 8}, None)],
)
def test_attention_bits_follow_the_label(fields: dict[str, Any], bits: int | None) -> None:
    label = json.dumps({"w_bit": 8, "a_bit": 8, **fields})
    metadata = parse_metadata(f"apiversion: modelslim_v1\nmetadata: {{label: {label}}}", "x")
    assert metadata.label is not None
    assert metadata.label.attention_bits == bits


def test_byte_order_mark_and_windows_newlines_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_recipe(path).process == parse_recipe(GOOD, "mine.yaml").process


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist; give the path of a recipe, a YAML file"),
        (lambda path: path.mkdir(), "is a directory; give the path of a recipe, a YAML file"),
        (lambda path: path.write_bytes(b"a: \xff"), "byte 3 is not UTF-8; save the recipe as UTF-8"),
        (lambda path: path.write_bytes(b"#" * (1 << 21)), "has 2097152 bytes; a recipe is a YAML file below 1 MiB"),
    ],
)
def test_files_that_are_no_recipe_are_refused_by_name(tmp_path: Path, make: Any, words: str) -> None:
    path = tmp_path / "mine.yaml"
    make(path)
    with pytest.raises(SchemaValidateError) as caught:
        load_recipe(path)
    assert str(caught.value) == f"{path}: {words}"


def test_five_mistakes_of_different_kinds_are_told_at_once_in_the_order_of_the_file() -> None:
    text = """apiversion: modelslim_v1
spec:
  runner: layerwise
  process:
    - type: roundign
    - type: rounding
      qconfig: {weight: {simetric: true}}
      include: ["*"]
      include: []
  save: [{type: disk, part_file_size: "4"}]
"""
    assert refusal(text).split("\n  ") == [
        "5 mistakes in my.yaml:",
        "my.yaml:3: spec.runner: 'layerwise' is not known here; write 'layer_wise' (of auto, model_wise, layer_wise, "
        "dp_layer_wise)",
        "my.yaml:5: spec.process[0].type: 'roundign' is not a processor; write 'rounding' (of box, plain, rounding)",
        "my.yaml:7: spec.process[1].qconfig.weight.simetric: unknown key; write 'symmetric' (of scope, symmetric, "
        "alpha, bits, word, ext)",
        "my.yaml:9: spec.process[1].include: 'include' is already on line 8; keep one of them",
        "my.yaml:10: spec.save[0].part_file_size: '4' is text; write it without quotes",
    ]


@pytest.mark.parametrize(
    ("step", "line", "said"),
    [
        ("qconfig: {weight: {symmetric: 'yes'}}", 5, "qconfig.weight.symmetric: 'yes' is text; write true or false"),
        ("qconfig: {weight: {symmetric: 1}}", 5, "qconfig.weight.symmetric: 1 is a whole number; write true or false"),
        ("qconfig: {weight: {bits: '8'}}", 5, "qconfig.weight.bits: '8' is text; write it without quotes"),
        ("qconfig: {weight: {bits: eight}}", 5, "qconfig.weight.bits: 'eight' is text; write a whole number"),
        ("qconfig: {weight: {bits: 8.5}}", 5, "qconfig.weight.bits: 8.5 is a number; write a whole number"),
        ("qconfig: {weight: {bits: yes}}", 5, "qconfig.weight.bits: true is a boolean; write a whole number"),
        ("qconfig: {weight: {bits: 0}}", 5, "qconfig.weight.bits: 0 is out of range; write a number above 0"),
        ("qconfig: {weight: {bits: 18}}", 5, "qconfig.weight.bits: 18 is out of range; write a number of at most 16"),
        (
            "qconfig: {weight: {bits: 7}}",
            5,
            "qconfig.weight.bits: 7 is out of range; write a number that is a multiple of 2",
        ),
        (
            "qconfig: {weight: {alpha: -1}}",
            5,
            "qconfig.weight.alpha: -1 is out of range; write a number of at least 0",
        ),
        ("qconfig: {weight: {alpha: 1}}", 5, "qconfig.weight.alpha: 1 is out of range; write a number below 1"),
        ("qconfig: {weight: {alpha: }}", 5, "qconfig.weight.alpha: is empty; write a number"),
        ("qconfig: {weight: {word: 8}}", 5, "qconfig.weight.word: 8 is a whole number; put it in quotes"),
        ("qconfig: {weight: {word: on}}", 5, "qconfig.weight.word: true is a boolean; put it in quotes"),
        ("qconfig: {weight: {word: [a]}}", 5, "qconfig.weight.word: is a list of 1; write text"),
        ("qconfig: {weight: {word: abcd}}", 5, "qconfig.weight.word: has 4 characters; give at most 3 characters"),
        ("qconfig: {weight: {word: A}}", 5, "qconfig.weight.word: 'A': string should match pattern '^[a-z]+$'"),
        ("qconfig: {weight: {ext: 3}}", 5, "qconfig.weight.ext: 3 is a whole number; write a mapping"),
        (
            "qconfig: {weight: {scope: per_tokn}}",
            5,
            "qconfig.weight.scope: 'per_tokn' is not known here; write 'per_token' (of per_tensor, per_token)",
        ),
        (
            "qconfig: {weight: {scope: 8}}",
            5,
            "qconfig.weight.scope: 8 is a whole number; write one of per_tensor, per_token",
        ),
        ("qconfig:\n  act: {}", 5, "qconfig.weight: is missing; add the key 'weight'"),
        ("include: ['*']", 4, "qconfig: is missing; add the key 'qconfig'"),
        (
            "qconfig: {weight: {bits: 16}}",
            5,
            "qconfig: weight.bits 16 exceed act.bits 8; write fewer",
        ),
        ("qconfig: {weight: {}}\ninclude: '*'", 6, "include: '*' is text; write a list, ['*']"),
        ("qconfig: {weight: {}}\ninclude:", 6, "include: is empty; indent a list below it, or take the key away"),
        ("qconfig: {weight: {}}\ninclude: []", 6, "include: has 0 items; give at least 1 item"),
        ("qconfig: {weight: {}}\ninclude: [3]", 6, "include[0]: 3 is a whole number; put it in quotes"),
        ("qconfig: {weight: {}}\ninclude: ['*', 3]", 6, "include[1]: 3 is a whole number; put it in quotes"),
        ("qconfig: {weight: {}}\neither: x", 6, "either: 'x' is text; write a whole number or a list"),
        (
            "qconfig: {weight: {}}\nsimetric: no",
            6,
            "simetric: unknown key; write qconfig.act.symmetric or qconfig.weight.symmetric, or one of qconfig, "
            "include, either",
        ),
        (
            "qconfig: {weight: {group-size: 64}}",
            5,
            "qconfig.weight.group-size: unknown key; write one of scope, symmetric",
        ),
        (
            f"qconfig: {{weight: {{scope: {'x' * 100}}}}}",
            5,
            f"qconfig.weight.scope: {'x' * 77 + '...'!r} is not known here; write one of per_tensor, per_token",
        ),
    ],
)
def test_a_wrong_option_is_told_with_line_path_value_and_mend(step: str, line: int, said: str) -> None:
    message = step_refusal(step)
    assert message.startswith(f"my.yaml:{line}: spec.process[0].{said}")


def test_a_required_key_that_is_misspelt_is_one_mistake() -> None:
    message = step_refusal("qconfg: {weight: {}}")
    assert "my.yaml:5: spec.process[0].qconfg: unknown key; write 'qconfig' (of qconfig, include, either)" in message
    assert "is missing" not in message
    message = step_refusal("other: {weight: {}}")
    assert "spec.process[0].other: unknown key" in message and "qconfig: is missing; add the key 'qconfig'" in message


def test_on_and_off_are_booleans() -> None:
    recipe = parse_recipe(FRAME.format(step="      qconfig: {weight: {symmetric: off}}\n"), "x")
    assert recipe.process[0].config.qconfig.weight.symmetric is False  # type: ignore[attr-defined]


def test_a_lost_indentation_is_told_as_such() -> None:
    message = step_refusal("qconfig:\nweight: {}")
    assert "my.yaml:5: spec.process[0].qconfig: is empty; indent a mapping below it, or take the key away" in message
    assert "my.yaml:6: spec.process[0].weight: unknown key; write qconfig.weight, or one of qconfig" in message


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (
            "rounding",
            ": 'rounding' is not a mapping; write `- type: rounding` and indent its options below `type`",
        ),
        ("[3]", ": this item is not a mapping; write `- type: NAME` and indent its options below `type`"),
        ("{include: []}", ".type: is missing; write the processor's name, one of box, plain, rounding"),
        ("{type: 3}", ".type: is not text; write the processor's name, one of box, plain, rounding"),
        ("{type: disk}", ".type: 'disk' is a saver; put it under spec.save"),
        ("{type: plain, x: 1}", ".x: unknown key; there are no options here"),
        ("{type: box, configs: []}", ".configs: has 0 items; give at least 1 item"),
        ("{type: box, configs: [{type: rounding}]}", ".configs[0].qconfig: is missing; add the key 'qconfig'"),
        (
            "{type: box, configs: [{type: box, configs: [{type: plane}]}]}",
            ".configs[0].configs[0].type: 'plane' is not a processor; write 'plain' (of box, plain, rounding)",
        ),
    ],
)
def test_a_wrong_step_is_told_with_its_place(item: str, said: str) -> None:
    text = f"apiversion: modelslim_v1\nspec:\n  process:\n    - {item}\n  save: [{{type: disk}}]\n"
    assert refusal(text) == f"my.yaml:4: spec.process[0]{said}"


@pytest.mark.parametrize(
    ("save", "said"),
    [
        ("[]", "spec.save: has 0 savers; a run writes one directory, so give exactly one"),
        ("[{type: disk}, {type: disk}]", "spec.save: has 2 savers; a run writes one directory, so give exactly one"),
        ("[{type: plain}]", "spec.save[0].type: 'plain' is a processor; put it under spec.process"),
        (
            "[{type: mindie_format_saver}]",
            "spec.save[0].type: 'mindie_format_saver' is an older format that is not offered; write ascendv1_saver, "
            "whose files MindIE reads too",
        ),
        ("disk", "spec.save: 'disk' is text; write a list, ['disk']"),
    ],
)
def test_a_recipe_has_exactly_one_saver(save: str, said: str) -> None:
    text = f"apiversion: modelslim_v1\nspec:\n  process: []\n  save: {save}\n"
    assert refusal(text) == f"my.yaml:4: {said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "my.yaml:1: is empty; a recipe starts with `apiversion: modelslim_v1`, then `spec:`"),
        ("- a\n", "my.yaml:1: is not a mapping; a recipe starts with `apiversion: modelslim_v1`, then `spec:`"),
        (
            "apiversion: modelslim_convert\nspec: {linears: []}\n",
            "my.yaml:1: apiversion: 'modelslim_convert' cannot be run here; write modelslim_v1, the only one there is",
        ),
        ("apiversion: modelslim_v1\n", "my.yaml:1: spec: is missing; add the key 'spec'"),
        (
            "apiversion: modelslim_v1\nspec:\n",
            "my.yaml:2: spec: is empty; indent a mapping below it, or take the key away",
        ),
        (
            "a: b: c",
            "my.yaml:1: is not YAML: mapping values are not allowed here; check the indentation, colons and quotes",
        ),
    ],
)
def test_a_file_that_is_no_recipe_says_how_one_starts(text: str, said: str) -> None:
    assert refusal(text).startswith(said)


def test_keys_of_ones_own_at_the_top_are_legal_unless_they_look_misspelt() -> None:
    text = "apiversion: modelslim_v1\nspec: {process: [], save: [{type: disk}]}\n"
    parse_recipe(text + "default_w8a8: {a: 1}\n", "x")
    said = "my.yaml:3: metdata: unknown key; write 'metadata' (of apiversion, metadata, spec)"
    assert refusal(text + "metdata: {}\n") == said


def test_values_of_metadata_are_checked_as_strictly() -> None:
    text = "apiversion: modelslim_v1\nmetadata:\n  score: -1\n  config_id: 8\n  verified_tags: {a: [vLLM]}\n"
    message = refusal(text + "spec: {process: [], save: [{type: disk}]}\n")
    assert "my.yaml:3: metadata.score: -1 is out of range; write a number of at least 0" in message
    assert "my.yaml:4: metadata.config_id: 8 is a whole number; put it in quotes" in message
    assert "my.yaml:5: metadata.verified_tags.a[0]: 'vLLM' is text; write a list, ['vLLM']" in message


def test_a_prior_stage_needs_steps() -> None:
    text = "apiversion: modelslim_v1\nspec:\n  prior:\n    - process: [{type: plane}]\n    - process: []\n    - 3\n"
    message = refusal(text + "  process: []\n  save: [{type: disk}]\n")
    assert "my.yaml:4: spec.prior[0].process[0].type: 'plane' is not a processor" in message
    assert "my.yaml:5: spec.prior[1].process: has 0 items; give at least 1 item" in message
    assert "my.yaml:6: spec.prior[2]: 3 is a whole number; write a mapping" in message


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_text_makes_anything_but_a_recipe_or_a_list_of_mistakes(data: st.DataObject) -> None:
    """Damage a good recipe in up to three places: any value at any depth, or any characters of the text."""
    content = yaml.safe_load(GOOD)
    for _ in range(data.draw(st.integers(0, 3))):
        holder, key = data.draw(st.sampled_from(list(_places(content))))
        holder[key] = data.draw(_VALUES)
    text = yaml.safe_dump(content, allow_unicode=True)
    cut = data.draw(st.integers(0, len(text)))
    text = data.draw(st.sampled_from([text, text[:cut] + data.draw(st.text(max_size=4)) + text[cut:]]))
    try:
        parse_recipe(text, "my.yaml")
    except SchemaValidateError as error:
        assert "my.yaml:" in str(error)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of every value inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def test_no_message_has_a_placeholder_or_an_empty_tail() -> None:
    steps = "[{type: rounding, qconfig: {weight: {a: {}, ext: 3}}}, 1, a, {type: }, {type: box, configs: {}}]"
    header, *lines = refusal(f"apiversion: x\nmetdata:\nspec:\n  prior: [{{}}]\n  process: {steps}\n").splitlines()
    assert header == "10 mistakes in my.yaml:"
    for line in lines:
        assert not re.search(r"[{}]|[:;]\s*$|None|<class", line), line
