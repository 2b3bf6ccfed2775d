"""docs/recipe.md, made from the classes that recipes are checked with.

`python -m msmodelslim.recipe_docs > docs/recipe.md` makes it anew.
"""

import enum
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from msmodelslim import registry
from msmodelslim.recipe import Label, Metadata, PriorStage, Recipe, Spec, load_recipe

_PRACTICES = Path(__file__).parent / "practices"
_EXAMPLE = _PRACTICES / "dense" / "w8a8_static.yaml"
_HEAD = """# Recipes

<!-- Made by `python -m msmodelslim.recipe_docs`; a test compares. Change the Config classes, then make it anew. -->

A recipe says what a run does to a model. `msmodelslim quant --config_path FILE` runs your own; without it a shipped
one, a *practice*, is looked up by model, `--quant_type` and `--tag`.

```yaml
{example}```

How a file is read:

* Every mistake is reported at once, each with its line, its path, the value and what to write instead.
* Unknown and duplicate keys are mistakes. At the top of a file keys of your own are legal, as homes for YAML anchors.
* Values are read strictly: `"8"` is text and no number, `8` is no text. `yes`, `no`, `on` and `off` are booleans.
* `apiversion` is always `modelslim_v1`.
* A pattern (`include`, `exclude`) is a module's full name with `*`, `?`, `[..]` and `{a,b}`; `*` crosses dots.
"""
_LOOKUP = """
## How a practice is found

1. Practices of the model's pedigree (the folder of its family) with the quant type asked for, or `w8a8` when none is.
   They are tried by descending `score`, then by name. `label` must say what the quant type says.
2. It fits exactly if `verified_model_types` lists the model or its family, or `verified_tags` lists it with one set of
   tags that holds every `--tag`. Case does not matter. An exact fit is used; which one and why is printed.
3. Otherwise the nearest is a fall-back: other tags first, then the pedigree `default` (any decoder-only model), then
   `w8a8`. A fall-back needs `--yes`; without it the run stops and lists what there is. Nothing is ever asked.

`--config_path` takes a practice's name, too. Your own practices live in a directory of the same shape,
`<pedigree>/<config_id>.yaml`, that `MSMODELSLIM_CUSTOM_PRACTICE_REPO` names; they are searched together with the
shipped ones. "Verified" means for shipped practices that the engine has a reader for every tensor the recipe writes; a
shipped practice verified for `default` belongs to the pedigree `default`, too.
"""

_CALIBRATION = """
## How a layer is calibrated

Steps observe the samples in the order of `process`, each sample alone. Steps that leave alone what the next one
observes share one forward. So do smoothing steps and the `linear_quant` steps behind them: extrema and Gram matrices of
the inputs are divided by the factors that smoothing chose. (`histogram`, `aggregation_type: mean` and steps behind an
`iter_smooth` with a shift need a forward of their own.) `quant_report.json` has the number of forwards of each layer.
What the next layer is given are the outputs of the last of these forwards: they have what was changed before it, and
lack what was rounded after it. With `propagate_error: true` in a `linear_quant` step the
finished layer is forwarded once more, and the next layer is calibrated on what it will be given when it is served. One
step's word holds for the whole run. A recipe in which nothing is calibrated has no use for it and is refused.

The scope `per_tensor`, and the half of `pd_mix` that is for one token, have a calibrated range (`act.method`):

* `minmax`: nothing is clipped.
* `histogram` counts all values in 4096 bins of a power of two, the same on any number of ranks, and then picks the
  range once. `criterion: mse` loses the least square error of the input, `percentile` keeps what lies between `lower`
  and `upper` per cent of the values, `kl` changes the distribution least (not for fp8). The range, and the extrema that
  were seen, are in `quant_report.json`.

Neither is a free gain. Language models have few, very large activations that their outputs depend on, so clipping can
cost more than finer steps bring; smooth first. `gptq` makes up for the errors it sees, minmax cannot. Measured on
SmolLM2-135M, 16 samples of 512 tokens, perplexity on 8 windows (float: 28.8): W8A8 static, asymmetric, and the same
after `iter_smooth`; W4A16 in groups of 64 by `gptq`.

| | `minmax` | `mse` | `percentile` | `kl` |
|---|---|---|---|---|
| W8A8 static | 48.8 | 40.0 | 154.3 | 516.1 |
| after `iter_smooth` | 30.0 | 31.0 | 31.7 | 38.6 |

| | without | with `propagate_error` |
|---|---|---|
| W4A16 `gptq` | 34.4 | 33.7 |
| W8A8 static, `mse` | 40.0 | 40.8 |
| W8A8 static, `minmax`, after `iter_smooth` | 30.0 | 30.2 |
"""


def recipe_page() -> str:
    """The page, in Markdown."""
    parts = [_HEAD.replace("{example}", _EXAMPLE.read_text())]
    for title, model in (
        ("`spec`", Spec),
        ("`spec.prior[]`", PriorStage),
        ("`metadata`", Metadata),
        ("`metadata.label`", Label),
    ):
        parts.append(f"\n## {title}\n\n{_lead(model)}\n\n{options_table(model)}")
    parts += [_CALIBRATION, _LOOKUP, "\n## Shipped practices\n\n", _shipped()]
    for kind, title in (
        ("processor", "Steps: items of `spec.process`"),
        ("weight", "Weight methods: `weight.method`, with their options in `weight.ext`"),
        ("saver", "Savers: the item of `spec.save`"),
    ):
        parts.append(f"\n## {title}\n")
        for name in registry.names(kind):
            cls: Any = registry.lookup(kind, name)
            model = cls.Ext if kind == "weight" else cls.Config
            options = options_table(model) if model.model_fields else "No options.\n"
            parts.append(f"\n### `{name}`\n\n{_lead(cls)}\n\n{options}")
    return "".join(parts)


def _shipped() -> str:
    recipes = [load_recipe(path) for path in sorted(_PRACTICES.glob("*/*.yaml"))]
    rows = ["| name | quant type | score | verified with | for | saver |", "|---|---|---|---|---|---|"]
    return "\n".join([*rows, *(_practice_row(recipe) for recipe in recipes)]) + "\n"


def _practice_row(recipe: Recipe) -> str:
    metadata, saver = recipe.metadata, recipe.save[0].type
    assert metadata.label is not None, "shipped practices have labels, as their test says"
    scenarios = [scenario for found in metadata.verified_tags.values() for scenario in found]
    tags = ", ".join(dict.fromkeys(" + ".join(f"`{tag}`" for tag in scenario) for scenario in scenarios))
    label = f"w{metadata.label.w_bit}a{metadata.label.a_bit}"
    cells = (
        f"`{metadata.config_id}`",
        label,
        f"{metadata.score:g}",
        tags,
        ", ".join(metadata.verified_tags),
        f"`{saver}`",
    )
    return "| " + " | ".join(cells) + " |"


def _lead(cls: type) -> str:
    """The first paragraph of a class's docstring."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())


def options_table(model: type[BaseModel]) -> str:
    """Every option of a schema, one row each."""
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, field in _fields(model):
        cells = (f"`{key}`", _type_words(field.annotation) + _limits(field), _default(field), field.description or "")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option, dotted; a nested mapping is given by its own options."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _fields(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _type_words(annotation: Any) -> str:
    """The values an option takes, in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_words(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_words(argument) for argument in arguments if argument is not type(None))
    if origin in (tuple, list):
        inner = _type_words(arguments[0])
        return "list" if inner == "anything" else f"list of {inner}"
    if origin is dict:
        return f"mapping to {_type_words(arguments[1])}" if arguments[1] is not Any else "mapping"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}.get(annotation, "anything")


def _limits(field: FieldInfo) -> str:
    found = ""
    for limit in field.metadata:
        match limit:
            case Ge(ge=value):
                found += f", at least {value}"
            case Gt(gt=value):
                found += f", above {value}"
            case Le(le=value):
                found += f", at most {value}"
            case Lt(lt=value):
                found += f", below {value}"
            case MultipleOf(multiple_of=value):
                found += f", a multiple of {value}"
    return found


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(repr(item) for item in value)}]`"
    return f"`{value.value if isinstance(value, enum.Enum) else value}`"


if __name__ == "__main__":
    sys.stdout.write(recipe_page())
