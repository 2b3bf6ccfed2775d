"""docs/recipe.md says what the classes say."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from msmodelslim import registry
from msmodelslim.recipe_docs import options_table, recipe_page

PAGE = Path(__file__).parents[1] / "docs" / "recipe.md"


class Word(StrEnum):
    ONE = "one"
    TWO = "two"


class Inner(BaseModel, frozen=True):
    word: Word = Field(Word.ONE, description="which one")
    half: float = Field(gt=0, lt=1)


class Options(BaseModel, frozen=True):
    inner: Inner
    count: int = Field(2, ge=1, le=9, multiple_of=1)
    maybe: Annotated[int, Field(ge=1)] | None = None
    names: tuple[str, ...] = ("*",)
    switch: bool = True
    choice: Literal["a", "b"] = "a"
    either: int | list[int] = 3
    table: dict[str, tuple[str, ...]] = {}
    free: dict[str, Any] = {}
    several: tuple[Inner, ...] = ()
    anything: Any = None


ROWS = """\
| key | value | default | meaning |
|---|---|---|---|
| `inner.word` | `one`, `two` | `one` | which one |
| `inner.half` | number, above 0, below 1 | required |  |
| `count` | whole number, at least 1, at most 9, a multiple of 1 | `2` |  |
| `maybe` | whole number | none |  |
| `names` | list of text | `['*']` |  |
| `switch` | true or false | `true` |  |
| `choice` | `a`, `b` | `a` |  |
| `either` | whole number or list of whole number | `3` |  |
| `table` | mapping to list of text | none |  |
| `free` | mapping | none |  |
| `several` | list of mapping | none |  |
| `anything` | anything | none |  |
"""


def test_the_page_is_what_the_classes_make_of_it() -> None:
    assert PAGE.read_text() == recipe_page(), "run python -m msmodelslim.recipe_docs > docs/recipe.md"


def test_a_table_has_a_row_for_every_option_however_deep() -> None:
    assert options_table(Options) == ROWS


@pytest.mark.parametrize("kind", ["processor", "weight", "saver"])
def test_every_registered_class_and_each_of_its_options_is_on_the_page(kind: str) -> None:
    page = recipe_page()
    for name in registry.names(kind):
        section = page.partition(f"### `{name}`")[2].partition("\n##")[0]
        cls: Any = registry.lookup(kind, name)
        for option in (cls.Ext if kind == "weight" else cls.Config).model_fields:
            assert f"| `{option}" in section
