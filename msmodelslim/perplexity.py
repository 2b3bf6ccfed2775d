"""How well a checkpoint predicts text: perplexity of a source or of a result, one decoder layer in memory at a time.

Windows of text go through the layers like calibration samples. For a result, each quantized linear is the one its files
describe, read back by the format's own rules, so that formats can be compared that no single library loads.

Letters: T tokens, C channels of the residual stream, V vocabulary.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from msmodelslim import device as devices
from msmodelslim.artifact.directory import open_directory
from msmodelslim.calibration import SHIPPED
from msmodelslim.errors import InvalidDatasetError, InvalidModelError, SchemaValidateError
from msmodelslim.model import skeleton
from msmodelslim.model.base import ModelSlimPipelineInterfaceV1
from msmodelslim.model.families import open_model
from msmodelslim.model.head import LOGITS_AT_ONCE, logits, without_layers
from msmodelslim.model.sample_tokens import load_tokenizer
from msmodelslim.saver.stored import BaseReader

DEFAULT_TEXT = SHIPPED / "eval.txt"


@dataclass(frozen=True)
class Perplexity:
    """What was found.

    Args:
        value: exp of the mean negative log-likelihood of a token given those before it in its window.
        windows: how many were used; fewer than asked for when the text is short.
        tokens: how many were predicted.
        seconds: wall time without opening the model.
    """

    value: float
    windows: int
    tokens: int
    seconds: float


def evaluate(
    path: Path,
    text: Path | None = None,
    windows: int = 32,
    window_length: int = 512,
    device: torch.device | str = "cpu",
    *,
    model_type: str | None = None,
    trust_remote_code: bool = False,
    shown: bool = False,
) -> Perplexity:
    """Perplexity of a source checkpoint or of a result in any format that a saver writes.

    Args:
        path: the directory.
        text: UTF-8 text; None takes the built-in one.
        windows: how many windows, spread evenly over the text.
        window_length: tokens a window; no special token is added.
        shown: draw progress on standard error.

    Raises:
        InvalidDatasetError: the text cannot be read or is shorter than a window.
        SchemaValidateError: no window, or windows too short to predict anything.
        ModelslimError: the directory cannot be opened.
    """
    if windows < 1 or window_length < 2:
        raise SchemaValidateError(
            f"{windows} windows of {window_length} tokens predict nothing", "give 1 window or more, of 2 tokens or more"
        )
    with _opened(Path(path), model_type, trust_remote_code) as (adapter, reader):
        tokens_NT = _windows(adapter, text or DEFAULT_TEXT, windows, window_length, trust_remote_code)
        start = time.perf_counter()
        with torch.no_grad():
            loss = _loss(adapter, reader, tokens_NT, torch.device(device), shown)
    count = tokens_NT.shape[0] * (window_length - 1)
    return Perplexity(math.exp(loss / count), tokens_NT.shape[0], count, time.perf_counter() - start)


def eval_main(
    path: Path,
    text: Path | None,
    windows: int,
    window_length: int,
    device: str,
    threads: int | None = None,
    device_index: int = 0,
    trust_remote_code: bool = False,
) -> None:
    """`msmodelslim eval`: measure and print a table on standard output."""
    if threads is not None:
        devices.set_threads(device, threads)
    place = devices.torch_device(device, device_index)
    found = evaluate(path, text, windows, window_length, place, trust_remote_code=trust_remote_code, shown=True)
    table = Table(title="perplexity", title_justify="left", show_header=False)
    asked = f" (of {windows} asked: the text has no more)" if found.windows < windows else ""
    for row in (
        ("checkpoint", str(path)),
        ("text", str(text) if text else "built-in"),
        ("windows", f"{found.windows} x {window_length} tokens{asked}"),
        ("perplexity", f"{found.value:.4f}"),
        ("seconds", f"{found.seconds:.1f}"),
    ):
        table.add_row(*row)
    Console().print(table)


@contextmanager
def _opened(
    path: Path, model_type: str | None, trust_remote_code: bool
) -> Iterator[tuple[ModelSlimPipelineInterfaceV1, BaseReader | None]]:
    """The model, and for a result the reader of its format."""
    opened = open_directory(path)
    reader = opened.reader
    if reader is None:
        yield open_model(path, model_type, trust_remote_code), None
        return
    if opened.findings:
        raise InvalidModelError(f"{path} is damaged: {'; '.join(map(str, opened.findings))}", "write it again")
    with TemporaryDirectory(prefix="msmodelslim-eval-") as folder:
        try:
            _write_float_part(reader, Path(folder))
            adapter = open_model(Path(folder), model_type, trust_remote_code)
            _stand_in(adapter, reader, trust_remote_code)
            yield adapter, reader
        except InvalidModelError as error:
            raise InvalidModelError(error.message.replace(folder, str(path)), error.action) from error


def _write_float_part(reader: BaseReader, folder: Path) -> None:
    """What a result holds in float, as a source checkpoint: links to its files, an index without quantized linears."""
    stored = reader.stored
    for entry in stored.path.iterdir():
        if entry.name != "config.json" and not entry.name.endswith(".index.json"):
            (folder / entry.name).symlink_to(entry.resolve())
    quantized = reader.kinds()
    weight_map = {name: info.file for name, info in stored.infos.items() if name.rpartition(".")[0] not in quantized}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(_without_quantization(stored.config)), encoding="utf-8")


def _without_quantization(config: Any) -> Any:
    if not isinstance(config, Mapping):
        return config
    return {key: _without_quantization(value) for key, value in config.items() if key != "quantization_config"}


def _stand_in(adapter: ModelSlimPipelineInterfaceV1, reader: BaseReader, trust_remote_code: bool) -> None:
    """Tell the adapter that the weights of quantized linears exist: they are put into the tree before it reads a layer.

    What it may do with such a name is to compare shapes and to prefetch, so the entry says where the codes lie.
    """
    checkpoint = adapter.checkpoint
    config = skeleton.load_config(checkpoint, trust_remote_code)
    tree = skeleton.build(config, adapter.dtype, None, trust_remote_code)
    for module in _in_tree(tree, reader.kinds()):
        place = max(reader.stored.modules[module].values(), key=lambda info: info.nbytes)
        for key, empty in tree.get_submodule(module).named_parameters():
            name = f"{module}.{key}"
            checkpoint.tensors[name] = replace(place, name=name, dtype=empty.dtype, shape=tuple(empty.shape))


def _in_tree(tree: nn.Module, modules: Iterable[str]) -> list[str]:
    """Those of the modules that the tree has: extra prediction blocks, for one, are stored but not built."""
    present = {name for name, _ in tree.named_modules()}
    return [module for module in modules if module in present]


def _restore(model: nn.Module, reader: BaseReader, prefix: str, device: torch.device) -> None:
    """Put the quantized linears below `prefix` into the tree."""
    for module in _in_tree(model, reader.kinds()):
        if module.startswith(prefix):
            parent, _, key = module.rpartition(".")
            setattr(model.get_submodule(parent), key, reader.restore(module).to(device))


def _windows(
    adapter: ModelSlimPipelineInterfaceV1, text: Path, windows: int, window_length: int, trust_remote_code: bool
) -> Tensor:
    """Token ids, int64 [windows, window_length]; fewer windows when the text has fewer that do not overlap."""
    try:
        content = text.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = f"not UTF-8 at byte {error.start}" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise InvalidDatasetError(f"{text} cannot be read: {why}", "give a plain text file in UTF-8") from error
    tokenizer = load_tokenizer(adapter.model_path, trust_remote_code)
    ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    whole = len(ids) // window_length
    if whole == 0:
        raise InvalidDatasetError(
            f"{text} has {len(ids)} tokens and a window {window_length}", "give a longer text or shorter windows"
        )
    used = min(windows, whole)
    starts = [index * whole // used * window_length for index in range(used)]
    return torch.tensor([ids[start : start + window_length] for start in starts])


def _loss(
    adapter: ModelSlimPipelineInterfaceV1,
    reader: BaseReader | None,
    tokens_NT: Tensor,
    device: torch.device,
    shown: bool,
) -> float:
    """Summed negative log-likelihood of every token but the first of each window, in nats."""
    model = adapter.init_model(device)
    adapter.enable_kv_cache(model, False)
    ids = [tokens_1T.to(device) for tokens_1T in tokens_NT.split(1)]
    flows = [adapter.generate_model_forward(model, {"input_ids": ids_1T}, device) for ids_1T in ids]
    visit = adapter.generate_model_visit(model, device)
    outputs: list[Any] = [None] * len(flows)
    with Progress(console=Console(stderr=True), disable=not shown, transient=True) as progress:
        task = progress.add_task("eval", total=len(adapter.layer_names) * len(flows) + len(flows))
        for name in adapter.layer_names:
            progress.update(task, description=name)
            if reader is not None:
                _restore(model, reader, name + ".", device)
            layer = next(visit).module
            for index, flow in enumerate(flows):
                step = next(flow) if outputs[index] is None else flow.send(outputs[index])
                outputs[index] = layer(*step.args, **step.kwargs)
                progress.advance(task)
            layer.to("meta")
            devices.empty_cache(device.type)
        visit.close()
        for flow in flows:
            flow.close()
        progress.update(task, description="head")
        _load_rest(adapter, model, reader, device)
        loss = 0.0
        for ids_1T, output in zip(ids, outputs, strict=True):
            loss += _window_loss(adapter, model, ids_1T, output)
            progress.advance(task)
    return loss


def _load_rest(
    adapter: ModelSlimPipelineInterfaceV1, model: nn.Module, reader: BaseReader | None, device: torch.device
) -> None:
    """Load what stands outside the decoder layers: final norm, head, and the embedding if it is not there yet."""
    with without_layers(adapter, model):
        if reader is not None:
            _restore(model, reader, "", device)
        adapter.load_module("", model, device)


def _window_loss(adapter: ModelSlimPipelineInterfaceV1, model: Any, ids_1T: Tensor, output: Any) -> float:
    """Loss of one window whose last layer gave `output`; only a few rows of logits exist at a time."""
    hidden_1TC, *others = output if isinstance(output, tuple) else (output,)
    rows = max(1, LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)
    loss = 0.0
    for start in range(0, ids_1T.shape[1] - 1, rows):
        stop = min(start + rows, ids_1T.shape[1] - 1)
        logits_TV = logits(adapter, model, hidden_1TC[:, start:stop], tuple(others))
        loss += functional.cross_entropy(logits_TV, ids_1T[0, start + 1 : stop + 1], reduction="sum").item()
    return loss
