"""Will a loader read what was meant? The format's rules, the values, and the source the directory was made from.

Memory: one linear at a time.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from msmodelslim.artifact.directory import open_directory
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.model.checkpoint import Checkpoint
from msmodelslim.model.shard_header import TensorInfo
from msmodelslim.report import REPORT_FILE
from msmodelslim.saver.rounding_bound import row_errors
from msmodelslim.saver.side_files import side_files
from msmodelslim.saver.stored import BaseReader, Finding, StoredModel
from msmodelslim.saver.tied_head import EMBEDDING_NAMES, HEAD_NAMES, outermost, says_tied, tied_head

_SLACK = 1.05  # of what plain rounding may move a row
#: Error feedback may move a row further, but few by this share of their size; a scale twice too large does, by 1.
_SEARCHED_SHARE, _SEARCHED_ROWS, _SEARCHED_MOST = 0.7, 0.01, 2.0
_LEFTOVERS = ("*.bin", "*.pt", "*.pth", "consolidated*")


@dataclass
class Verification:
    """What was found.

    Args:
        format_name: the format, in words.
        findings: broken rules; none for a good directory.
        modules: kind → quantized linears.
        worst: kind → (largest ‖W − Ŵ‖ / ‖W‖, its module); only with a source.
    """

    format_name: str
    findings: list[Finding] = field(default_factory=list)
    modules: dict[str, int] = field(default_factory=dict)
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)


def verify_directory(
    path: Path,
    source: Path | None = None,
    rewritten: Collection[str] | None = None,
    searched: Collection[str] | None = None,
    signed: Collection[str] | None = None,
) -> list[Finding]:
    """Broken rules of a written directory; none for a good one.

    Args:
        path: the directory.
        source: the checkpoint it was made from; then weights are rebuilt and compared, and nothing may be missing.
        rewritten: tensors that a step changed or added on purpose, by their name in the source ("….up_proj.weight"), so
            that they cannot be compared; None takes the list `rewritten` of the directory's report.
        searched: linears whose codes were chosen for the layer's outputs, so that a row may move further than plain
            rounding moves it; None takes those that the report gives another method than minmax.
        signed: linears whose method was allowed scales below zero; None takes those that the report says have some.

    Raises:
        InvalidModelError: `path` holds no model, or `source` is no whole checkpoint.
    """
    return verify(Path(path), None if source is None else Path(source), rewritten, searched, signed).findings


def verify_main(path: Path, source: Path | None) -> int:
    """Check, print a table and the findings on standard output; 0 for a good directory, 1 for any other."""
    found = verify(Path(path), None if source is None else Path(source))
    table = Table(title=f"{path}: {found.format_name}", title_justify="left")
    for heading in ("kind", "linears", "worst weight error", "in"):
        table.add_column(heading, justify="right" if heading in ("linears", "worst weight error") else "left")
    for kind, count in sorted(found.modules.items()):
        error, module = found.worst.get(kind, (None, ""))
        table.add_row(kind, str(count), "" if error is None else f"{error:.3%}", module)
    console = Console(highlight=False)
    console.print(table)
    for finding in found.findings:
        console.print(str(finding), markup=False, soft_wrap=True)
    count = len(found.findings)
    console.print(f"{count or 'no'} finding{'' if count == 1 else 's'}")
    return 1 if found.findings else 0


def verify(
    path: Path,
    source: Path | None,
    rewritten: Collection[str] | None = None,
    searched: Collection[str] | None = None,
    signed: Collection[str] | None = None,
) -> Verification:
    """As `verify_directory`, with what was counted and measured."""
    opened = open_directory(path)
    stored, reader, findings = opened.stored, opened.reader, opened.findings
    if reader is None:
        formats = "quant_model_description.json or a quantization_config of compressed-tensors"
        return Verification("no known format", [*findings, Finding(str(path), f"is in no known format: no {formats}")])
    found = Verification(reader.format_name, findings)
    if not opened.whole:
        return found
    checkpoint = None if source is None else Checkpoint(source)
    changed = _rewritten_by_report(path) if rewritten is None else set(rewritten)
    free = _searched_by_report(path) if searched is None else set(searched)
    allowed = _signed_by_report(path) if signed is None else set(signed)
    kinds = reader.kinds()
    for kind in kinds.values():
        found.modules[kind] = found.modules.get(kind, 0) + 1
    found.findings += _check_files(stored, reader)
    rules = list(reader.check())
    found.findings += rules
    found.findings += _check_numbers(stored, allowed)
    found.findings += _check_head(stored)
    broken = {module for module in kinds for finding in rules if finding.place.startswith(module)}
    for module, kind in kinds.items():
        if module not in broken:
            known = None if f"{module}.weight" in changed else checkpoint
            _check_linear(reader, module, kind, known, found, module in free)
    if checkpoint is not None:
        found.findings += _check_carried(stored, kinds, checkpoint, changed)
        found.findings += _check_side_files(path, checkpoint)
    return found


def _check_files(stored: StoredModel, reader: BaseReader) -> Iterator[Finding]:
    """Files that a loader would take for weights or for the index, and the index itself."""
    for pattern in _LEFTOVERS:
        for path in sorted(stored.path.glob(pattern)):
            yield Finding(path.name, "is a weight file of another format; loaders may take it instead")
    for path in sorted(stored.path.glob("*.index.json")):
        if path.name != reader.index_name:
            yield Finding(path.name, "is the index of other files; vLLM stops when those are not there")
    index = stored.path / reader.index_name
    files = {info.file for info in stored.infos.values()}
    if not index.is_file():
        return
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        where, total = content["weight_map"], content["metadata"]["total_size"]
    except (ValueError, KeyError, TypeError) as error:
        yield Finding(index.name, f"is no index: {error!r}")
        return
    for name, file in where.items():
        info = stored.infos.get(name)
        if info is None or info.file != file:
            yield Finding(index.name, f"places {name} in {file}, and it is {f'in {info.file}' if info else 'nowhere'}")
    for file in sorted(files - set(where.values())):
        yield Finding(file, f"is not in {index.name}: a stray weight file, which vLLM loads all the same")
    missing = [name for name, info in stored.infos.items() if name not in where and info.file in where.values()]
    for name in missing:
        yield Finding(index.name, f"lacks {name}")
    real = sum(info.nbytes for info in stored.infos.values())
    if total != real:
        yield Finding(index.name, f"says {total} bytes in all, and the tensors have {real}")


def _check_numbers(stored: StoredModel, signed: Collection[str]) -> Iterator[Finding]:
    """Infinities, NaNs, and scales that are not above zero; those of the weights of `signed` may be below."""
    for name, info in stored.infos.items():
        module, _, suffix = name.rpartition(".")
        exponents = info.dtype is torch.uint8 and suffix == "weight_scale"
        scale = suffix.endswith("scale") or suffix == "weight_scale_second"
        if not (info.dtype.is_floating_point or exponents or suffix == "deq_scale"):
            continue
        may_be_below = suffix == "weight_scale" and module in signed
        bad = low = 0
        for piece in stored.pieces(name):
            numbers = _as_numbers(piece, suffix)
            bad += int((~numbers.isfinite()).sum())
            low += int((numbers == 0 if may_be_below else numbers <= 0).sum()) if scale else 0
        if bad:
            yield Finding(name, f"{bad} of its numbers are infinite or NaN")
        if low:
            yield Finding(name, f"{low} of its scales are {'zero' if may_be_below else 'not above zero'}")


def _check_head(stored: StoredModel) -> Iterator[Finding]:
    """A head that the config calls tied is dropped by loaders, so it must be the embedding."""
    head, embedding = (outermost(stored.infos, names) for names in (HEAD_NAMES, EMBEDDING_NAMES))
    if head is None or embedding is None or not says_tied(stored.config):
        return
    same = (stored.infos[head].dtype, stored.infos[head].shape) == (
        stored.infos[embedding].dtype,
        stored.infos[embedding].shape,
    )
    pairs = zip(stored.pieces(head), stored.pieces(embedding), strict=False)
    if not same or not all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs):
        yield Finding(head, f"differs from {embedding}, and config.json says they are tied: loaders drop it")


def _as_numbers(piece: Tensor, suffix: str) -> Tensor:
    if piece.dtype is torch.uint8:  # E8M0 exponents: 255 is NaN, all others are powers of two
        return torch.where(piece == 255, torch.nan, 1.0)
    if suffix == "deq_scale" and piece.dtype is torch.int64:
        return torch.where(piece >> 31 == 0, piece.to(torch.int32).view(torch.float32), torch.nan)
    return piece if piece.dtype in (torch.float32, torch.float64) else piece.float()


def _check_linear(
    reader: BaseReader, module: str, kind: str, checkpoint: Checkpoint | None, found: Verification, free: bool
) -> None:
    """Its tensors among each other, and its weight against the source's."""
    linear = reader.restore(module)
    found.findings += _check_consistent(reader, module, linear)
    if checkpoint is None:
        return
    name = f"{module}.weight"
    if name not in checkpoint.tensors:
        found.findings.append(Finding(module, "is quantized, and the source has no such weight"))
        return
    weight_OI = checkpoint.weight(name, torch.float32) if checkpoint.is_fp8_block(name) else checkpoint.tensor(name)
    if weight_OI.shape != linear.codes.shape:
        found.findings.append(
            Finding(module, f"is {tuple(linear.codes.shape)}, in the source {tuple(weight_OI.shape)}")
        )
        return
    errors = row_errors(weight_OI, linear.weight_codes, linear.scheme.weight)
    found.worst[kind] = max(found.worst.get(kind, (0.0, module)), (errors.relative, module))
    rows = errors.beyond(_SEARCHED_SHARE, _SEARCHED_MOST, _SEARCHED_ROWS) if free else errors.unexplained(_SLACK)
    if len(rows):
        row = int(rows[0])
        size = float(errors.sizes[row]) or 1.0
        found.findings.append(
            Finding(
                module,
                f"{len(rows)} of {len(errors.errors)} rows of its weight are further from the source than rounding "
                f"moves them; row {row} is off by {float(errors.errors[row]) / size:.2%}, at most "
                f"{float(errors.bounds[row]) / size:.2%} is explained: its scale, offset or codes are wrong",
            )
        )


def _check_consistent(reader: BaseReader, module: str, linear: QuantLinear) -> Iterator[Finding]:
    """Derived tensors (deq_scale, quant_bias, scale_bias, zero offsets) must follow from the others."""
    for suffix, wanted in reader.export_again(module, linear).items():
        info = reader.stored.modules[module].get(suffix)
        if info is None:
            continue
        stored = reader.stored.tensor(info.name)
        if stored.dtype != wanted.dtype or stored.shape != wanted.shape:
            yield Finding(
                info.name, f"is {stored.dtype} {list(stored.shape)}, expected {wanted.dtype} {list(wanted.shape)}"
            )
        elif suffix == "deq_scale" and stored.dtype is torch.int64:
            if not torch.equal(stored, wanted):
                yield Finding(info.name, "does not follow from input_scale and weight_scale")
        elif wanted.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
            slack = 1e-5 * wanted.double().abs() + (1 if suffix == "quant_bias" else 0)
            off = int((~((stored.double() - wanted.double()).abs() <= slack)).sum())
            if off:
                yield Finding(info.name, f"{off} of its values do not follow from the module's other tensors")


def _modules_of_report(path: Path) -> dict[str, dict[str, Any]]:
    report = path / REPORT_FILE
    return json.loads(report.read_text(encoding="utf-8")).get("modules", {}) if report.is_file() else {}


def _searched_by_report(path: Path) -> set[str]:
    return {name for name, entry in _modules_of_report(path).items() if entry.get("method", "minmax") != "minmax"}


def _signed_by_report(path: Path) -> set[str]:
    return {name for name, entry in _modules_of_report(path).items() if "negative_scales" in entry}


def _rewritten_by_report(path: Path) -> set[str]:
    report = path / REPORT_FILE
    return set(json.loads(report.read_text(encoding="utf-8")).get("rewritten", [])) if report.is_file() else set()


def _check_carried(
    stored: StoredModel, kinds: Mapping[str, str], checkpoint: Checkpoint, changed: set[str]
) -> Iterator[Finding]:
    """Everything of the source is here: quantized, unchanged, or gone for a reason."""
    scales = {checkpoint.scale_name(name) for name in checkpoint.tensors if checkpoint.is_fp8_block(name)}
    head = tied_head(checkpoint)
    for name, info in checkpoint.tensors.items():
        module, _, suffix = name.rpartition(".")
        if name in scales or (module in kinds and suffix == "weight"):
            continue
        found = stored.infos.get(name)
        if found is None:
            if not (name == head.name and head.equal):
                yield Finding(name, "is in the source and in no file here")
        elif name not in changed and not _same_values(stored, found, checkpoint, info, exact=module not in kinds):
            yield Finding(name, "differs from the source, and it is not quantized")
    for name in stored.infos:
        module, _, suffix = name.rpartition(".")
        if name not in checkpoint.tensors and module not in kinds and suffix != "bias" and name not in changed:
            yield Finding(name, "is not in the source; loaders have no place for it")


def _same_values(stored: StoredModel, found: TensorInfo, checkpoint: Checkpoint, info: TensorInfo, exact: bool) -> bool:
    """Byte for byte, or by value where the type may have changed (decoded FP8, the bias of a quantized linear)."""
    if tuple(found.shape) != tuple(info.shape):
        return False
    if found.dtype == info.dtype and not checkpoint.is_fp8_block(info.name):
        source = StoredModel(checkpoint.path, {}, {info.name: info})
        pairs = zip(stored.pieces(found.name), source.pieces(info.name), strict=True)
        return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)
    if exact and not checkpoint.is_fp8_block(info.name):
        return False
    return torch.equal(stored.tensor(found.name), checkpoint.weight(info.name, found.dtype))


def _check_side_files(path: Path, checkpoint: Checkpoint) -> Iterator[Finding]:
    for name in side_files(checkpoint.path, set(checkpoint.files)).copied:
        if not (path / name).is_file():
            yield Finding(name, "is missing; the source has it beside its weights")
        elif (path / name).read_bytes() != (checkpoint.path / name).read_bytes():
            yield Finding(name, "differs from the source's")
