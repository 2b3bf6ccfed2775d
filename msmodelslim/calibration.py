"""Calibration data: from a file to samples, and from samples to the share of one rank.

A file is JSON (one list) or JSONL (one record a line). A record is a string, or an object whose first key of `KEYS` is
read. Nothing here knows a tokenizer: text stays text, and the model's adapter turns it into tokens. All mistakes of a
file are reported at once, before any weight is read.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msmodelslim.errors import InvalidDatasetError

T = TypeVar("T")

#: keys a record may have, the first one found is read
KEYS = ("input_ids", "messages", "inputs_pretokenized", "text", "prompt")
SHIPPED = Path(__file__).parent / "lab_calib"
SUFFIXES = (".json", ".jsonl")
SHOWN_MISTAKES = 20  # of a file, in one message
#: about 25,000 tokens; a text above it is worth a note, since only its beginning is used
LONG_TEXT_CHARACTERS = 100_000


@dataclass(frozen=True)
class Sample:
    """One record of a data set; exactly one of `text`, `messages` and `input_ids` is not None.

    Args:
        index: position among the samples that are kept; the global order that ranks share.
        place: file and line ("mix.jsonl:7"), or file and position in its list ("mix.json[6]").
        messages: a chat, each {"role": str, "content": str, ...}.
    """

    index: int
    place: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None


@dataclass(frozen=True)
class SampleSet:
    """What a data set holds.

    Args:
        source: path of the file that was read.
        fingerprint: sha256 over the samples as read, so that two spellings of the same data compare equal.
        notes: what was skipped or will be cut, as sentences for the closing summary.
    """

    samples: list[Sample]
    source: str
    fingerprint: str
    notes: list[str]


class _RecordError(Exception):
    """Why one record cannot be a sample; collected, so that all are shown at once."""


@dataclass(frozen=True)
class _Record:
    place: str
    value: Any
    error: _RecordError | None = None  # the line is not JSON


def load_samples(dataset: str) -> SampleSet:
    """Read a data set: an absolute path, an existing relative path, or the name of a shipped set.

    Blank lines and records without content are skipped and counted in `notes`. A byte-order mark, Windows line ends and
    a missing last newline change nothing.

    Raises:
        InvalidDatasetError: there is no such file; it is not UTF-8; records are malformed (the first 20 are named with
            line and reason); or no sample is left.
    """
    path = find_dataset(dataset)
    records, blank = _read(path)
    samples: list[Sample] = []
    mistakes: list[str] = []
    ambiguous = empty = 0
    for position, record in enumerate(records):
        try:
            content, keys = _content(record)
        except _RecordError as mistake:
            mistakes.append(f"\n  {record.place} (sample {position}) {mistake}")
            continue
        ambiguous += keys > 1
        if any(content.values()):
            samples.append(Sample(len(samples), record.place, **content))
        else:
            empty += 1
    if mistakes:
        shown = "".join(mistakes[:SHOWN_MISTAKES])
        more = f"\n  and {len(mistakes) - SHOWN_MISTAKES} more" if len(mistakes) > SHOWN_MISTAKES else ""
        raise InvalidDatasetError(
            f"{path}: {len(mistakes)} of {len(records)} records cannot be used; mend or remove them:{shown}{more}"
        )
    if not samples:
        raise InvalidDatasetError(
            f"{path}: {len(records)} records read, {empty} too short, 0 kept", "give at least one record with text"
        )
    notes = []
    if blank:
        notes.append(f"{path}: {blank} blank lines skipped")
    if empty:
        notes.append(f"{path}: {len(records)} records read, {empty} too short, {len(samples)} kept")
    if ambiguous:
        notes.append(f"{path}: {ambiguous} records hold several of {', '.join(KEYS)}; the first in this order was read")
    notes += _note_long_text(samples)
    return SampleSet(samples, str(path), _fingerprint(samples), notes)


def rank_share(items: list[T], rank: int, world_size: int) -> list[T]:
    """The share of `items` that `rank` handles: each item goes to exactly one rank, and a rank may get none.

    Raises:
        ValueError: `rank` is not one of 0 to `world_size` - 1.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} of {world_size}; it counts from 0 to {world_size - 1}")
    return items[rank::world_size]


def find_dataset(dataset: str) -> Path:
    """The file that a data set's name means.

    Raises:
        InvalidDatasetError: nothing is there (names every place that was looked at and the shipped sets), or it is a
            directory that does not hold exactly one .json or .jsonl file.
    """
    given = Path(dataset)
    candidates = [given.absolute()]
    if given.name == dataset:
        candidates.append(SHIPPED / dataset)
    found = next((path for path in candidates if dataset and path.exists()), None)
    if found is None:
        shipped = sorted(path.name for path in SHIPPED.iterdir() if path.suffix in SUFFIXES)
        raise InvalidDatasetError(
            f"data set {dataset!r} was not found; looked at {' and '.join(map(str, candidates))}",
            f"give a .json or .jsonl file, or a shipped set: {', '.join(shipped)}",
        )
    if not found.is_dir():
        return found
    inside = sorted(path for path in found.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if len(inside) == 1:
        return inside[0]
    names = f" ({', '.join(path.name for path in inside)})" if inside else ""
    raise InvalidDatasetError(
        f"data set {found} is a directory with {len(inside)} .json or .jsonl files{names}", "give one file"
    )


def _read(path: Path) -> tuple[list[_Record], int]:
    """(records, count of blank lines) of a file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidDatasetError(f"{path} cannot be read: {error.strerror}", "give a readable file") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        bad_line = data.count(b"\n", 0, error.start) + 1
        raise InvalidDatasetError(
            f"{path}:{bad_line} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}", "save it as UTF-8"
        ) from error
    if path.suffix == ".json":
        return _read_list(path, text), 0
    records: list[_Record] = []
    blank = 0
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028, as they are.
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        place = f"{path.name}:{number}"
        if not line.strip():
            blank += 1
            continue
        try:
            records.append(_Record(place, json.loads(line)))
        except (ValueError, RecursionError) as error:
            records.append(_Record(place, None, _RecordError(f"is not JSON ({error}): {_shorten(line)}")))
    return records, blank


def _read_list(path: Path, text: str) -> list[_Record]:
    if not text.strip():
        return []
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        action = "write one JSON list; a file with one record a line is named .jsonl"
        raise InvalidDatasetError(f"{path} is not JSON: {error}", action) from error
    if not isinstance(whole, list):
        raise InvalidDatasetError(f"{path} holds {_kind(whole)}, not a list", "write a JSON list of records")
    return [_Record(f"{path.name}[{position}]", value) for position, value in enumerate(whole)]


def _content(record: _Record) -> tuple[dict[str, Any], int]:
    """({field of Sample: content}, how many of KEYS the record has)."""
    if record.error is not None:
        raise record.error
    value = record.value
    if isinstance(value, str):
        return {"text": _text(value, "the record")}, 1
    if not isinstance(value, dict):
        raise _RecordError(f"is {_kind(value)}; write a string or an object with one of {', '.join(KEYS)}")
    keys = [key for key in KEYS if key in value]
    if not keys:
        found = ", ".join(sorted(value)) or "none"
        raise _RecordError(f"has none of the keys {', '.join(KEYS)}; keys found: {found}")
    key = keys[0]
    if key == "input_ids":
        return {"input_ids": _token_ids(value[key])}, len(keys)
    if key == "messages":
        return {"messages": _messages(value[key])}, len(keys)
    return {"text": _text(value[key], key)}, len(keys)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise _RecordError(f"{field} is {_kind(value)}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _RecordError(f"{field} holds an unpaired surrogate at character {error.start}") from error
    return value if value.strip() else ""


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise _RecordError(f"input_ids is {_kind(value)}, not a list of token numbers")
    for position, token in enumerate(value):
        if type(token) is not int or token < 0:
            raise _RecordError(f"input_ids[{position}] is {_shorten(json.dumps(token))}, not a token number")
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _RecordError(f"messages is {_kind(value)}, not a list")
    for position, message in enumerate(value):
        field = f"messages[{position}]"
        if not isinstance(message, dict):
            raise _RecordError(f"{field} is {_kind(message)}, not an object with role and content")
        for key in ("role", "content"):
            if key not in message:
                raise _RecordError(f"{field} has no {key}; keys found: {', '.join(sorted(message)) or 'none'}")
            _text(message[key], f"{field}.{key}")
    return value if any(message["content"].strip() for message in value) else []


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    words = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return words[type(value)]


def _shorten(text: str, width: int = 60) -> str:
    text = text.strip()
    return text if len(text) <= width else text[: width - 3] + "..."


def _note_long_text(samples: list[Sample]) -> Iterator[str]:
    lengths = [(len(sample.text or ""), sample) for sample in samples]
    length, longest = max(lengths, key=lambda pair: pair[0])
    if length > LONG_TEXT_CHARACTERS:
        yield f"{longest.place} is {length} characters long; only its first max_length tokens are used"


def _fingerprint(samples: list[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        line = json.dumps([sample.text, sample.messages, sample.input_ids], sort_keys=True)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()
