"""The module tree of a checkpoint without its weights: parameters on `meta`, buffers that no file holds made real."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping

from msmodelslim.errors import InvalidModelError, SecurityError, UnsupportedError
from msmodelslim.model.checkpoint import Checkpoint
from msmodelslim.model.remote_code import one_at_a_time

_SHOWN = 20  # names in an error message


def refuse_remote_code(path: Path, content: dict[str, Any], allowed: bool) -> None:
    """Raise SecurityError if the JSON file names Python files of the model's directory and they may not run."""
    if content.get("auto_map") and not allowed:
        wanted = ", ".join(str(value) for value in content["auto_map"].values())
        raise SecurityError(
            f"{path}: auto_map: the model wants to run Python code of its own ({wanted})",
            "read that code, then allow it with --trust_remote_code True, or take auto_map out",
        )


def load_config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """transformers' configuration of the checkpoint, without a word about the quantization of the files.

    Raises:
        SecurityError: it needs code that is not allowed.
        UnsupportedError: transformers does not know the `model_type`.
        InvalidModelError: a value is of the wrong type or out of range.
    """
    place = checkpoint.path / "config.json"
    refuse_remote_code(place, checkpoint.config, trust_remote_code)
    word = checkpoint.config.get("model_type")
    if not checkpoint.config.get("auto_map") and word not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(
            f"{place}: model_type: transformers {transformers.__version__} does not know {word!r}",
            "install a version of transformers that does",
        )
    try:
        with one_at_a_time(trust_remote_code):
            config = transformers.AutoConfig.from_pretrained(
                checkpoint.path, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except (StrictDataclassError, LookupError, TypeError, ValueError) as error:
        raise InvalidModelError(f"{place}: transformers refuses it: {error}", "correct config.json") from error
    vars(config).pop("quantization_config", None)
    return config


def build(config: Any, dtype: torch.dtype, attention: str | None, trust_remote_code: bool) -> nn.Module:
    """The causal language model on `meta`, in evaluation mode, its floating types as transformers would load them.

    Args:
        attention: name of transformers' attention function, None for its choice.

    Raises:
        UnsupportedError: the configuration belongs to no causal language model.
    """
    options = {} if attention is None else {"attn_implementation": attention}
    mapped = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if not mapped and "AutoModelForCausalLM" not in (vars(config).get("auto_map") or {}):
        raise UnsupportedError(f"{type(config).__name__} belongs to no causal language model", "give a text model")
    with torch.device("meta"), one_at_a_time(trust_remote_code):
        model = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code, **options
        )
    plan = {re.compile(key.replace("*", ".*")): kept for key, kept in model._get_dtype_plan(dtype).items()}
    for name, _, _, tensor in persistent_tensors(model):
        for pattern, kept in plan.items():
            if pattern.search(name):
                tensor.data = tensor.data.to(kept)
    model.config.use_cache = False
    return model.requires_grad_(False).eval()


def fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Give the non-persistent buffers (rotary frequencies, mostly) the values their model computes for them.

    The model initializes each of them twice over different rubbish: values that differ were not initialized.

    Raises:
        UnsupportedError: the model's class leaves a buffer as it is.
    """
    owners: dict[nn.Module, Any] = {}
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            owners |= dict.fromkeys(part.modules(), part)
    for path, module in model.named_modules():
        names = [name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None]
        if not names:
            continue
        filled: list[dict[str, Tensor]] = []
        for rubbish in (0, 1):
            for name in names:
                buffer = module._buffers[name]
                assert buffer is not None
                module._buffers[name] = torch.full_like(buffer, rubbish, device="cpu")
            with torch.no_grad():
                owners[module]._init_weights(module)
            filled.append({name: module.get_buffer(name) for name in names})
        for name in names:
            if not torch.equal(filled[0][name], filled[1][name]):
                raise UnsupportedError(
                    f"{type(module).__name__} at {path} does not initialize its buffer {name}, which no file holds",
                    "use a model class of transformers itself",
                )
            module._buffers[name] = filled[1][name].to(device)


def persistent_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(path, owner, key, tensor) of all that a checkpoint holds for the module: parameters and persistent buffers."""
    for prefix, owner in module.named_modules():
        for key, tensor in (owner._parameters | owner._buffers).items():
            if tensor is not None and key not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, owner, key, tensor


def decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Path and list of the decoder layers: of all lists as long as `num_hidden_layers` the one with most weights.

    Raises:
        UnsupportedError: there is none.
    """
    length = model.config.get_text_config().num_hidden_layers
    found = [
        (sum(tensor.numel() for tensor in module.parameters()), path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == length
    ]
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no list of {length} decoder layers", "use a decoder-only model"
        )
    _, path, layers = max(found, key=lambda entry: entry[0])
    return path, layers


def tied_names(model: Any, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Tensor name → the names it shares its values with. Names that are stored each for itself are not tied."""
    groups: dict[str, set[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        groups.setdefault(source, {source}).add(target)
    tied = {}
    for group in groups.values():
        stored = group & checkpoint.tensors.keys()
        names = group if len(stored) < 2 else group - stored
        for name in names:
            tied[name] = tuple(sorted(group - {name}, key=lambda other: (other not in stored, other)))
    return tied


def compare(model: Any, checkpoint: Checkpoint, tied: dict[str, tuple[str, ...]]) -> list[str]:
    """Names that the tree needs and the checkpoint lacks; refuses shapes that differ.

    Raises:
        InvalidModelError: tensors of another shape than config.json makes them.
    """
    missing, differing = [], []
    for name, _, _, tensor in persistent_tensors(model):
        stored = next((other for other in (name, *tied.get(name, ())) if other in checkpoint.tensors), None)
        if stored is None:
            missing.append(name)
        elif checkpoint.tensors[stored].shape != tuple(tensor.shape):
            differing.append(f"{name} {checkpoint.tensors[stored].shape}, not {tuple(tensor.shape)}")
    if differing:
        raise InvalidModelError(
            f"{checkpoint.path}: {len(differing)} tensors have another shape than config.json says: {_some(differing)}",
            "give the config.json that belongs to these weights",
        )
    return missing


def refuse_missing(model: Any, checkpoint: Checkpoint, missing: list[str]) -> None:
    """Raise what is to be said about missing tensors: damaged files, or a layout nobody here can take apart."""
    if not missing:
        return
    if get_model_conversion_mapping(model, add_legacy=False):
        raise UnsupportedError(
            f"{type(model).__name__} holds {len(missing)} tensors that are put together from differently named ones in "
            f"the files ({missing[0]}, ...), and no model family here takes them apart",
            "use a model whose files name the tensors as its modules do",
        )
    unindexed = sorted(set(missing) & checkpoint.stray_tensors.keys())
    hint = f"; the index leaves out {_some(unindexed)}, which its shards hold" if unindexed else ""
    raise InvalidModelError(
        f"{checkpoint.path} lacks {len(missing)} tensors that {type(model).__name__} needs: {_some(missing)}{hint}",
        "fetch the checkpoint again, or correct config.json",
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
