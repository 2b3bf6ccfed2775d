"""A directory opened for reading, whatever its format: headers, config, and who can read it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msmodelslim import registry
from msmodelslim.errors import InvalidModelError
from msmodelslim.model.shard_header import TensorInfo, read_header
from msmodelslim.saver.base import BaseSaver
from msmodelslim.saver.stored import BaseReader, Finding, StoredModel


@dataclass(frozen=True)
class Opened:
    """A directory as far as it can be read.

    Args:
        stored: its tensors and config.
        reader: of its format; None for a float model.
        findings: damaged files and files that clash.
        whole: every weight file can be read.
    """

    stored: StoredModel
    reader: BaseReader | None
    findings: list[Finding]
    whole: bool


def open_directory(path: Path) -> Opened:
    """Read the headers and config.json of a directory, and find out its format.

    Raises:
        InvalidModelError: no such directory, or no safetensors file and no config.json in it.
    """
    if not path.is_dir():
        raise InvalidModelError(f"{path} is no directory", "give the directory that quant wrote")
    files = sorted(path.glob("*.safetensors"))
    if not files and not (path / "config.json").is_file():
        raise InvalidModelError(f"{path} holds no model", "give the directory that quant wrote")
    findings: list[Finding] = []
    infos: dict[str, TensorInfo] = {}
    whole = True
    for file in files:
        faults: list[str] = []
        for name, info in read_header(file, faults).items():
            if name in infos:
                findings.append(Finding(name, f"lies in {infos[name].file} and in {file.name}; either may be loaded"))
            infos[name] = info
        whole = whole and not faults
        findings += [Finding(place, message) for place, _, message in (fault.partition(": ") for fault in faults)]
    config: dict[str, Any] = {}
    try:
        content = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config = content if isinstance(content, dict) else {}
    except FileNotFoundError:
        findings.append(Finding("config.json", "is missing; no engine knows the model without it"))
    except ValueError as error:
        findings.append(Finding("config.json", f"is not JSON ({error})"))
    stored = StoredModel(path, config, infos)
    for saver in (registry.lookup("saver", name) for name in registry.names("saver")):
        assert issubclass(saver, BaseSaver)
        if saver.reader.recognizes(path):
            return Opened(stored, saver.reader(stored), findings, whole)
    return Opened(stored, None, findings, whole)
