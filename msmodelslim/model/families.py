"""Which family opens a checkpoint: by the name the user gave, checked against config.json, or by config.json alone."""

from pathlib import Path
from typing import Any

from msmodelslim import registry
from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.model.base import ModelSlimPipelineInterfaceV1
from msmodelslim.model.checkpoint import read_config

_DEFAULT = "default"

Family = type[ModelSlimPipelineInterfaceV1]


def open_model(
    model_path: Path, model_type: str | None, trust_remote_code: bool = False
) -> ModelSlimPipelineInterfaceV1:
    """The adapter for a checkpoint, its headers checked, no weight read.

    Args:
        model_type: a family ("qwen3") or a model's name that begins like one ("Qwen3-32B"), in any case; "default" for
            the family of no model in particular; None to go by config.json.

    Raises:
        UnsupportedError: no family has this name.
        InvalidModelError: the name is one family's and config.json another's, or the checkpoint cannot be used.
        SecurityError: the model needs Python code of its own and may not run it.
    """
    config = read_config(Path(model_path))
    if model_type is None:
        family = _by_config(config)
        model_type = family.registered_name if family.architectures else str(config.get("model_type", _DEFAULT))
    else:
        family = _by_name(model_type)
        _refuse_other_architecture(Path(model_path), config, model_type, family)
    return family(Path(model_path), model_type, trust_remote_code)  # type: ignore[call-arg] # the class docstring


def _families() -> dict[str, Family]:
    return {name: registry.lookup("model", name) for name in registry.names("model")}


def _by_config(config: dict[str, Any]) -> Family:
    families = _families()
    for family in families.values():
        if set(family.architectures) & set(config.get("architectures") or ()):
            return family
    named = None if config.get("architectures") else families.get(config.get("model_type", ""))
    return named or families[_DEFAULT]


def _by_name(model_type: str) -> Family:
    families, word = _families(), model_type.lower()
    if word in families:
        return families[word]
    starts = [(start, family) for family in families.values() for start in family.model_names if word.startswith(start)]
    if starts:
        return max(starts, key=lambda entry: len(entry[0]))[1]
    known = sorted({*families, *(start for family in families.values() for start in family.model_names)})
    raise UnsupportedError(
        f"model type {model_type!r} begins like no known model",
        f"write {registry.nearest(word, known)}, or leave it out",
    )


def _refuse_other_architecture(path: Path, config: dict[str, Any], model_type: str, family: Family) -> None:
    found = config.get("architectures") or []
    if family.architectures and found and not set(family.architectures) & set(found):
        raise InvalidModelError(
            f"model type {model_type!r} is family {family.registered_name} ({', '.join(family.architectures)}), but "
            f"{path / 'config.json'} says {', '.join(found)}",
            "leave the model type out to go by config.json, or give the directory of that model",
        )
