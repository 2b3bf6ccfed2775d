"""YAML to a recipe: the only reader of recipes. Every mistake of a file is reported at once, each with its line.

A step's schema is the `Config` of the class that its `type` names, so a new processor brings its own options. Values
are read strictly: text is not a number, and a number is not text.
"""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from msmodelslim import registry
from msmodelslim.errors import SchemaValidateError
from msmodelslim.schema_words import meant, sentence
from msmodelslim.yaml_lines import Document, KeyPath, Mistake, read_yaml, spell

APIVERSION = "modelslim_v1"
#: schemas of other tools of this kind; their `spec` has another shape, so nothing else of such a file is checked
_FOREIGN = ("modelslim_v0", "modelslim_convert", "multimodal_sd_modelslim_v1", "multimodal_vlm_modelslim_v1")
_OLD_TYPES = {"mindie_format_saver": "write ascendv1_saver, whose files MindIE reads too"}
_MAX_FILE_BYTES = 1 << 20
_OTHER_KIND = {"processor": ("saver", "spec.save"), "saver": ("processor", "spec.process")}
_LOOKS_LIKE = 0.7  # likeness from which an unknown top-level key is taken for a misspelt one

M = TypeVar("M", bound=BaseModel)


class _StepClass(Protocol):
    """What every registered processor and saver class declares."""

    Config: type[BaseModel]
    nested_field: ClassVar[str]


class Label(BaseModel, frozen=True, extra="forbid"):
    """What a practice quantizes, as the lookup compares it with a quant type (w8a8, w4a8c8 ...)."""

    w_bit: int = Field(ge=1, le=16, description="bits of a weight")
    a_bit: int = Field(ge=1, le=16, description="bits of a linear's input; 16 leaves it alone")
    is_sparse: bool = Field(False, description="weights are sparse")
    kv_cache: bool = Field(False, description="the key-value cache has 8 bits")
    fa_quant: bool | None = Field(None, description="attention itself is quantized")
    fa_bit: int | None = Field(None, ge=1, le=16, description="bits of the attention; 8 when only fa_quant is given")

    @property
    def attention_bits(self) -> int | None:
        """Bits of the quantized attention, None when it stays in float."""
        if self.fa_quant is False:
            return None
        return self.fa_bit or (8 if self.fa_quant else None)


class Metadata(BaseModel, frozen=True, extra="forbid"):
    """How a practice is found; a recipe of one's own may leave it out."""

    config_id: str = Field("Unknown", min_length=1, max_length=200, description="name; a practice's file is named so")
    score: float = Field(100, ge=0, description="of several practices that fit, the highest score is taken")
    label: Label | None = Field(None, description="what is quantized to how many bits")
    verified_model_types: tuple[str, ...] = Field((), description="models it was tried with, whatever the tags")
    verified_tags: dict[str, tuple[tuple[str, ...], ...]] = Field(
        default_factory=dict, description="model → sets of tags (engine, hardware) it was tried with"
    )


class PriorStage(BaseModel, frozen=True, extra="forbid"):
    """A stage that runs completely before the main one."""

    process: tuple[Any, ...] = Field(min_length=1, description="steps of this stage")
    dataset: str | None = Field(None, min_length=1, max_length=4096, description="its data; spec.dataset when left out")


class Spec(BaseModel, frozen=True, extra="forbid"):
    """What a run does."""

    runner: Literal["auto", "model_wise", "layer_wise", "dp_layer_wise"] = Field(
        "auto", description="auto: dp_layer_wise on several devices, else layer_wise"
    )
    prior: tuple[PriorStage, ...] = Field((), description="stages that run before")
    process: tuple[Any, ...] = Field(description="steps, in the order they are applied to each layer")
    save: tuple[Any, ...] = Field(description="the saver that writes the result; exactly one")
    dataset: str = Field(
        "mix_calib.jsonl",
        min_length=1,
        max_length=4096,
        description="calibration data: a path, or a shipped file's name",
    )
    max_length: int = Field(2048, ge=1, description="tokens kept of a sample")
    max_samples: int | None = Field(None, ge=1, description="samples used, the first ones; all when left out")

    @field_validator("save")
    @classmethod
    def _has_one_saver(cls, save: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(save) != 1:
            raise ValueError(f"has {len(save)} savers; a run writes one directory, so give exactly one")
        return save


class _File(BaseModel, frozen=True):
    apiversion: str
    metadata: Metadata = Metadata()
    spec: Spec


class _Header(BaseModel, frozen=True):
    apiversion: str
    metadata: Metadata = Metadata()


@dataclass(frozen=True)
class Step:
    """One processor or saver of a recipe: its registered name and an instance of its class's `Config`."""

    type: str
    config: BaseModel


@dataclass(frozen=True)
class Stage:
    """Steps that go through the whole model before the main stage does, and the data they calibrate on."""

    steps: tuple[Step, ...]
    dataset: str


@dataclass(frozen=True)
class Recipe:
    """A checked recipe.

    Args:
        source: path or name of the file, for messages.
        runner: auto, model_wise, layer_wise or dp_layer_wise.
        save: exactly one step, a saver.
        max_length: tokens kept of a sample.
        max_samples: samples used, None for all.
        text: the YAML it was read from.
    """

    source: str
    config_id: str
    runner: str
    prior: tuple[Stage, ...]
    process: tuple[Step, ...]
    save: tuple[Step, ...]
    dataset: str
    max_length: int
    max_samples: int | None
    metadata: Metadata
    text: str


def load_recipe(path: Path) -> Recipe:
    """The recipe in a file.

    Raises:
        SchemaValidateError: the file cannot be read, or breaks the schema; the message lists every mistake.
    """
    return parse_recipe(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a recipe file, UTF-8 with or without byte-order mark.

    Raises:
        SchemaValidateError: no such file, a directory, too large for a recipe, or not UTF-8.
    """
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise SchemaValidateError(f"{path}: {what}", "give the path of a recipe, a YAML file")
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise SchemaValidateError(f"{path}: has {path.stat().st_size} bytes", "a recipe is a YAML file below 1 MiB")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SchemaValidateError(f"{path}: byte {error.start} is not UTF-8", "save the recipe as UTF-8") from error
    except OSError as error:
        raise SchemaValidateError(f"{path}: {error.strerror}", "make the recipe readable") from error


def parse_recipe(text: str, source: str) -> Recipe:
    """The recipe that a YAML text holds; `source` names it in messages.

    Raises:
        SchemaValidateError: the text breaks the schema; the message lists every mistake.
    """
    check = _Check(read_yaml(text))
    file = check.document_of(_File)
    spec = check.document.value.get("spec") if isinstance(check.document.value, dict) else None
    raw = spec if isinstance(spec, dict) else {}
    prior = [
        check.steps(stage.get("process"), ("spec", "prior", index, "process"), "processor")
        for index, stage in enumerate(raw["prior"] if isinstance(raw.get("prior"), list) else [])
        if isinstance(stage, dict)
    ]
    process = check.steps(raw.get("process"), ("spec", "process"), "processor")
    save = check.steps(raw.get("save"), ("spec", "save"), "saver")
    check.raise_if_wrong(source)
    assert file is not None, "a file without mistakes is valid"
    return Recipe(
        source=source,
        config_id=file.metadata.config_id,
        runner=file.spec.runner,
        prior=tuple(
            Stage(steps, stage.dataset or file.spec.dataset)
            for steps, stage in zip(prior, file.spec.prior, strict=True)
        ),
        process=process,
        save=save,
        dataset=file.spec.dataset,
        max_length=file.spec.max_length,
        max_samples=file.spec.max_samples,
        metadata=file.metadata,
        text=text,
    )


def parse_metadata(text: str, source: str) -> Metadata:
    """The metadata of a recipe alone; its spec is not looked at, so no processor is imported.

    Raises:
        SchemaValidateError: the text is not YAML, or its metadata breaks the schema.
    """
    check = _Check(read_yaml(text))
    header = check.document_of(_Header)
    check.raise_if_wrong(source)
    assert header is not None, "a file without mistakes is valid"
    return header.metadata


class _Check:
    """One document being checked: what was read, and the mistakes found so far."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.mistakes = list(document.mistakes)

    def raise_if_wrong(self, source: str) -> None:
        """Raises SchemaValidateError with one line a mistake, in the order of the file."""
        found = sorted(set(self.mistakes), key=lambda mistake: (mistake.line, spell(mistake.path)))
        lines = [
            f"{source}:{mistake.line}: " + (f"{spell(mistake.path)}: " if mistake.path else "") + mistake.text
            for mistake in found
        ]
        if len(lines) == 1:
            raise SchemaValidateError(lines[0])
        if lines:
            raise SchemaValidateError("\n  ".join([f"{len(lines)} mistakes in {source}:", *lines]))

    def document_of(self, model: type[M]) -> M | None:
        """The whole document as `model`; None, with the mistakes noted, when it does not fit."""
        value = self.document.value
        if value is None and self.mistakes:
            return None
        if not isinstance(value, dict):
            what = "is empty" if value is None else "is not a mapping"
            self._note((), f"{what}; a recipe starts with `apiversion: {APIVERSION}`, then `spec:`")
            return None
        version = value.get("apiversion")
        if isinstance(version, str) and version != APIVERSION:
            self._note(("apiversion",), f"{version!r} cannot be run here; write {APIVERSION}, the only one there is")
        if version in _FOREIGN:
            self.document.value = None
            return None
        known = list(_File.model_fields)
        for key in value:
            # keys of their own are legal homes of anchors, unless they look like a slip of the pen
            if key not in known and difflib.get_close_matches(key, known, n=1, cutoff=_LOOKS_LIKE):
                self._note((key,), f"unknown key; write {registry.nearest(key, known)}")
        return self._validate(model, value, ())

    def steps(self, items: Any, path: KeyPath, kind: str) -> tuple[Step, ...]:
        """The steps that a list holds; items that are wrong are noted and left out."""
        if not isinstance(items, list):
            return ()  # said by the schema of the mapping that holds the list
        made = [self._step(item, (*path, index), kind) for index, item in enumerate(items)]
        return tuple(step for step in made if step is not None)

    def _step(self, item: Any, path: KeyPath, kind: str) -> Step | None:
        names = registry.names(kind)
        if not isinstance(item, dict):
            word = item if isinstance(item, str) else "NAME"
            shown = f"{item!r} is" if isinstance(item, str) else "this item is"
            self._note(path, f"{shown} not a mapping; write `- type: {word}` and indent its options below `type`")
            return None
        name = item.get("type")
        if not isinstance(name, str):
            what = "is missing" if "type" not in item else "is not text"
            self._note((*path, "type"), f"{what}; write the {kind}'s name, {registry.nearest('', names)}")
            return None
        if name not in names:
            self._note((*path, "type"), _unknown_type(name, kind, names))
            return None
        cls = cast(_StepClass, registry.lookup(kind, name))
        options = {key: value for key, value in item.items() if key != "type"}
        config = self._validate(cls.Config, options, path)
        nested = cls.nested_field
        children = self.steps(options.get(nested), (*path, nested), kind) if nested else ()
        if config is None:
            return None
        return Step(name, config.model_copy(update={nested: children}) if nested else config)

    def _validate(self, model: type[M], value: dict[str, Any], path: KeyPath) -> M | None:
        try:
            # As JSON, because pydantic's strict reading of JSON takes a list for a tuple and a word for an enum.
            return model.model_validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            places: dict[KeyPath, list[ErrorDetails]] = {}
            for found in error.errors(include_url=False):
                if found["type"] == "too_short" and len(found["input"]) >= found["ctx"]["min_length"]:
                    continue  # it counts the items that are right; the others have mistakes of their own
                places.setdefault(_place(value, found["loc"], found["type"] == "missing"), []).append(found)
            unknown = [place for place, errors in places.items() if errors[0]["type"] == "extra_forbidden"]
            misspelt = {meant(place, model) for place in unknown}
            for place, errors in places.items():
                if errors[0]["type"] == "missing" and place in misspelt:
                    continue  # what is written wrong beside it is the one mistake
                self._note((*path, *place), sentence(errors, place, model))
            return None

    def _note(self, path: KeyPath, text: str) -> None:
        self.mistakes.append(Mistake(self.document.line(path), path, text))


def _unknown_type(name: str, kind: str, names: list[str]) -> str:
    if name in _OLD_TYPES:
        return f"{name!r} is an older format that is not offered; {_OLD_TYPES[name]}"
    other, home = _OTHER_KIND[kind]
    if name in registry.names(other):
        return f"{name!r} is a {other}; put it under {home}"
    return f"{name!r} is not a {kind}; write {registry.nearest(name, names)}"


def _place(value: Any, location: tuple[int | str, ...], missing: bool) -> KeyPath:
    """The part of pydantic's location that the text has; names of union members and validators are left out."""
    place: list[str | int] = []
    for index, part in enumerate(location):
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            if missing and index == len(location) - 1:
                place.append(part)
            continue
        place.append(part)
    return tuple(place)
