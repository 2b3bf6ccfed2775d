"""Practices: recipes by family and quant type, and how one is found for a model. Nothing is asked on standard input.

A practice is `<store>/<pedigree>/<config_id>.yaml`. The stores are the package's own folder and the directory that the
environment variable MSMODELSLIM_CUSTOM_PRACTICE_REPO names. A shipped practice that is verified for `default` belongs
to the pedigree `default` too, so that it is written once.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msmodelslim.errors import EnvError, SchemaValidateError, SecurityError, UnsupportedError
from msmodelslim.recipe import Label, Metadata, Recipe, load_recipe, parse_metadata, parse_recipe, read_text
from msmodelslim.registry import nearest

SHIPPED = Path(__file__).parent / "practices"
CUSTOM_STORE = "MSMODELSLIM_CUSTOM_PRACTICE_REPO"
DEFAULT = "default"  # the pedigree, and the model name, of whatever no family knows
DEFAULT_TYPE = "w8a8"

#: w<bits of a weight>a<bits of an input>, then c8: key-value cache, f8 or f4: attention, s: sparse
QUANT_TYPES = [
    *("w8a8", "w8a16", "w4a8", "w4a16", "w4a4", "w8a8s", "w16a16s"),
    *("w8a8c8", "w4a8c8", "w4a4c8", "w8a8f8", "w4a4f8", "w4a4f4"),
]
TAGS = [
    *("vLLM-Ascend", "MindIE", "SGLang", "vLLM", "transformers"),
    *("Atlas_A2_Inference", "Atlas_A3_Inference", "Atlas_A2_Training", "Atlas_A3_Training"),
    *("Atlas_300I_Duo", "Ascend_950", "CPU"),
]


@dataclass(frozen=True)
class Practice:
    """A practice as found in a store; its spec is not read yet."""

    path: Path
    metadata: Metadata
    text: str

    @property
    def name(self) -> str:
        return self.metadata.config_id


@dataclass(frozen=True)
class Choice:
    """The recipe to run.

    Args:
        why: how it was found, a sentence for the user.
        exact: it is what was asked for; False for a fall-back that the user accepted.
        others: further practices that fit as well, with their tags.
    """

    recipe: Recipe
    why: str
    exact: bool = True
    others: tuple[str, ...] = ()


def from_file(path: Path) -> Choice:
    """The user's own recipe, or the practice of this name.

    Raises:
        SchemaValidateError: neither exists, several practices have the name, or the recipe breaks the schema.
    """
    if path.exists() or path.suffix:
        return Choice(load_recipe(path), "the recipe that --config_path names")
    known = [file for store in _stores() for file in sorted(store.glob("*/*.yaml"))]
    found = [file for file in known if file.stem == str(path)]
    if not found:
        raise SchemaValidateError(
            f"--config_path {path} is no file and no practice",
            f"give a recipe's path, or {nearest(str(path), sorted({file.stem for file in known}))}",
        )
    if len(found) > 1:
        raise SchemaValidateError(
            f"--config_path {path} fits {len(found)} practices", f"give the path of one: {', '.join(map(str, found))}"
        )
    return Choice(_load(_read(found[0])), "the practice that --config_path names")


def quant_type_word(word: str) -> str:
    """The quant type as practices spell it.

    Raises:
        SchemaValidateError: no such type; holds the nearest one.
    """
    if word.lower() not in QUANT_TYPES:
        raise SchemaValidateError(f"{word!r} is not a quant type", f"write {nearest(word.lower(), QUANT_TYPES)}")
    return word.lower()


def practices(pedigree: str) -> list[Practice]:
    """Every practice of a pedigree, the highest score first, then by name; the user's own before the shipped one.

    Raises:
        EnvError: MSMODELSLIM_CUSTOM_PRACTICE_REPO names no directory.
        SecurityError: a file is not named as its config_id.
        SchemaValidateError: a file is no YAML, its metadata breaks the schema, or it has no label.
    """
    found = [_read(path) for store in _stores() for path in sorted((store / pedigree).glob("*.yaml"))]
    if pedigree == DEFAULT:
        shared = (_read(path) for path in sorted(SHIPPED.glob("*/*.yaml")) if path.parent.name != DEFAULT)
        found += [practice for practice in shared if _scenarios(practice.metadata, {DEFAULT})]
    return sorted(found, key=lambda practice: (-practice.metadata.score, practice.name))


def choose(
    pedigree: str, model_names: Iterable[str], quant_type: str | None, tags: Sequence[str], accept_fallback: bool
) -> Choice:
    """The practice for a model.

    Args:
        pedigree: the folder of the model's family.
        model_names: what the model is called: the user's --model_type, its family; case does not matter.
        quant_type: None asks for w8a8.
        tags: engines and hardware it must be verified with; case does not matter.
        accept_fallback: take the best there is when nothing fits exactly.

    Raises:
        SchemaValidateError: no such quant type or tag, or the practice found breaks the recipe schema.
        UnsupportedError: nothing fits exactly and no fall-back is accepted, or there is none; says what there is.
    """
    asked = quant_type_word(quant_type or DEFAULT_TYPE)
    names = {name.lower() for name in model_names}
    own, default = practices(pedigree), practices(DEFAULT)
    wanted = _known_tags(tags, own + default)
    matches, _ = _fitting(own, pedigree, names, asked, wanted)
    if matches:
        others = tuple(_describe(practice, names, pedigree) for practice in matches[1:])
        said = f"verified for {_verified_name(matches[0], names, pedigree)}" + (
            f" with {', '.join(tags)}" if tags else ""
        )
        lead = "" if quant_type else f"no quant type was given, so {DEFAULT_TYPE}; "
        return Choice(_load(matches[0]), f"{lead}{said}", others=others)
    found = _fallback(pedigree, own, default, names, asked, wanted)
    request = f"{asked} for {' or '.join(sorted(names))}" + (f" with {', '.join(tags)}" if tags else "")
    existing = _existing(pedigree, own, default, names)
    if found is None:
        raise UnsupportedError(
            f"there is no practice for {request}, and nothing near it; {existing}",
            "give another --quant_type, or your own recipe with --config_path",
        )
    practice, reason = found
    if not accept_fallback:
        raise UnsupportedError(
            f"there is no practice for {request}; {practice.name} is the nearest, but {reason}; {existing}",
            "give --yes to take it, another --quant_type or --tag, or your own recipe with --config_path",
        )
    return Choice(_load(practice), f"a fall-back that --yes accepted: {reason}", exact=False)


def _stores() -> list[Path]:
    custom = os.environ.get(CUSTOM_STORE)
    if not custom:
        return [SHIPPED]
    if not Path(custom).is_dir():
        raise EnvError(f"{CUSTOM_STORE} is {custom!r}, which is no directory", "name the directory of your practices")
    return [Path(custom), SHIPPED]


def _read(path: Path) -> Practice:
    text = read_text(path)
    metadata = parse_metadata(text, str(path))
    if metadata.config_id != path.stem:
        raise SecurityError(
            f"{path}: metadata.config_id is {metadata.config_id!r}, which is not the file's name",
            f"name the file {metadata.config_id}.yaml or write config_id: {path.stem}",
        )
    if metadata.label is None:
        raise SchemaValidateError(f"{path}: metadata.label is missing", "write what it quantizes, with w_bit and a_bit")
    return Practice(path, metadata, text)


def _load(practice: Practice) -> Recipe:
    return parse_recipe(practice.text, str(practice.path))


def _known_tags(tags: Sequence[str], existing: list[Practice]) -> set[str]:
    """The tags in lower case, each of them one that exists."""
    known = {tag.lower(): tag for tag in TAGS}
    for practice in existing:
        for scenarios in practice.metadata.verified_tags.values():
            known |= {tag.lower(): known.get(tag.lower(), tag) for scenario in scenarios for tag in scenario}
    for tag in tags:
        if tag.lower() not in known:
            raise SchemaValidateError(f"{tag!r} is not a tag", f"write {nearest(tag, list(known.values()))}")
    return {tag.lower() for tag in tags}


def _quantizes(label: Label | None, quant_type: str) -> bool:
    """Whether a label says what a quant type says."""
    form = re.fullmatch(r"w(\d+)a(\d+)(c8)?(?:f(\d))?(s)?", quant_type)
    assert form and label, "quant types are checked, and practices without a label refused, before"
    attention = int(form[4]) if form[4] else None
    return (label.w_bit, label.a_bit, label.kv_cache, label.attention_bits, label.is_sparse) == (
        *(int(form[1]), int(form[2]), bool(form[3]), attention, bool(form[5])),
    )


def _scenarios(metadata: Metadata, names: set[str]) -> list[set[str]]:
    """The sets of tags, in lower case, that it is verified with for a model of these names."""
    return [
        {tag.lower() for tag in scenario}
        for name, scenarios in metadata.verified_tags.items()
        if name.lower() in names
        for scenario in scenarios
    ]


def _fitting(
    candidates: list[Practice], pedigree: str, names: set[str], quant_type: str, tags: set[str]
) -> tuple[list[Practice], list[Practice]]:
    """Practices of this type that are verified for the model with all tags, and those verified with other tags only."""
    matches, standbys = [], []
    names = names | {DEFAULT} if pedigree == DEFAULT else names
    for practice in candidates:
        metadata = practice.metadata
        if not _quantizes(metadata.label, quant_type):
            continue
        scenarios = _scenarios(metadata, names)
        if metadata.verified_model_types and pedigree != DEFAULT:
            if names & {name.lower() for name in metadata.verified_model_types}:
                matches.append(practice)
        elif scenarios and tags and not any(tags <= scenario for scenario in scenarios):
            standbys.append(practice)
        elif scenarios or pedigree == DEFAULT:
            matches.append(practice)
    return matches, standbys


def _fallback(
    pedigree: str, own: list[Practice], default: list[Practice], names: set[str], asked: str, tags: set[str]
) -> tuple[Practice, str] | None:
    """The first practice that comes near, and in what it differs from what was asked."""
    for quant_type in dict.fromkeys((asked, DEFAULT_TYPE)):
        other_type = "" if quant_type == asked else f"it is {quant_type}, not {asked}"
        for place, candidates in ((pedigree, own), (DEFAULT, default)):
            for verified, practices_found in zip(
                (True, False), _fitting(candidates, place, names, quant_type, tags), strict=True
            ):
                if practices_found:
                    practice = practices_found[0]
                    reasons = [
                        other_type,
                        "" if place == pedigree else f"it is made for any model, not for the pedigree {pedigree}",
                        "" if verified else f"it is verified with {_tag_words(practice, names | {DEFAULT})} only",
                    ]
                    return practice, " and ".join(reason for reason in reasons if reason)
    return None


def _existing(pedigree: str, own: list[Practice], default: list[Practice], names: set[str]) -> str:
    """What there is, one clause a pedigree."""
    clauses = []
    seen: set[Path] = set()
    for place, candidates in {pedigree: own, DEFAULT: default}.items():
        listed = [_describe(practice, names, place) for practice in candidates if practice.path not in seen]
        seen |= {practice.path for practice in candidates}
        if place != pedigree and not listed:
            continue
        clauses.append(f"pedigree {place} has " + (", ".join(listed) or "none"))
    return "; ".join(clauses)


def _describe(practice: Practice, names: set[str], pedigree: str) -> str:
    names = names | {DEFAULT} if pedigree == DEFAULT else names
    words = _tag_words(practice, names) or "not verified for this model"
    return f"{practice.name} ({words})"


def _tag_words(practice: Practice, names: set[str]) -> str:
    metadata = practice.metadata
    if names & {name.lower() for name in metadata.verified_model_types}:
        return "any tags"
    tags = [
        tag
        for name, scenarios in metadata.verified_tags.items()
        if name.lower() in names
        for scenario in scenarios
        for tag in scenario
    ]
    return " ".join(dict.fromkeys(tags))


def _verified_name(practice: Practice, names: set[str], pedigree: str) -> str:
    listed = [*practice.metadata.verified_model_types, *practice.metadata.verified_tags]
    fitting = [name for name in listed if name.lower() in names]
    return fitting[0] if fitting else "any model"
