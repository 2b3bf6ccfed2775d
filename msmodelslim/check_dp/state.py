"""Digests of what a step holds: tensors of a layer, and tensors and floats in attributes of steps and observers.

Only tensors and floats count: names, counters and lists of samples may well differ between ranks.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim.distributed import DistHelper, StatStore
from msmodelslim.processor.base import BaseSessionProcessor

_DEPTH = 8
#: packages whose objects hold no statistics of a step, or hold the whole model
_FOREIGN = ("torch", "transformers", "safetensors", "pydantic", "msmodelslim.model", "msmodelslim.distributed")
_CONTEXT = ("config", "context")  # every step has them; they hold the model
_MODULE_OWN = frozenset(vars(nn.Module()))


def module_digests(layer: nn.Module, name: str) -> dict[str, str]:
    """Full name → digest of every parameter and buffer of a layer."""
    tensors = [*layer.named_parameters(name, remove_duplicate=False), *layer.named_buffers(name)]
    return {path: digest(tensor) for path, tensor in tensors}


def attribute_digests(step: BaseSessionProcessor, layer: nn.Module, name: str) -> dict[str, str]:
    """Path → digest of what lies in attributes of the step, and of those modules of the layer that are not torch's."""
    found: dict[str, str] = {}
    seen = {id(module) for module in layer.modules()}
    own = {key: value for key, value in vars(step).items() if key not in _CONTEXT}
    _walk(own, step.registered_name, found, seen, _DEPTH)
    for path, module in layer.named_modules(prefix=name):
        if not _is_foreign(module):
            own = {key: value for key, value in vars(module).items() if key not in _MODULE_OWN}
            _walk(own, path, found, seen, _DEPTH)
    return found


def digest(value: Tensor | float) -> str:
    """Short digest of type, shape and bytes; -0.0 and 0.0 differ."""
    if not isinstance(value, Tensor):
        return f"{value!r}"
    form = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value.is_meta or value.layout != torch.strided:
        return form
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{form} {hashlib.sha256(data.numpy().data).hexdigest()[:16]}"


def _walk(value: Any, path: str, found: dict[str, str], seen: set[int], depth: int) -> None:
    """Note digests of what lies in `value`; a sequence of tensors is one entry, so that lists of samples stay short."""
    if isinstance(value, (Tensor, float)):
        found[path] = digest(value)
    if depth == 0 or id(value) in seen or isinstance(value, (str, bytes, int, float, Tensor, type)):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        for key, one in value.items():
            _walk(one, f"{path}[{key!s}]" if depth < _DEPTH else f"{path}.{key}", found, seen, depth - 1)
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(one, (Tensor, float)) for one in value):
            parts = hashlib.sha256("\n".join(map(digest, value)).encode()).hexdigest()[:16]
            found[path] = f"{len(value)} entries {parts}"
            return
        for index, one in enumerate(value):
            _walk(one, f"{path}[{index}]", found, seen, depth - 1)
    elif not callable(value) and not _is_foreign(value):
        for key, one in _attributes(value).items():
            if key not in _CONTEXT:
                _walk(one, f"{path}.{key}", found, seen, depth - 1)


def _attributes(value: Any) -> dict[str, Any]:
    try:
        return dict(vars(value))
    except TypeError:  # an object without attributes of its own, such as a set
        return {}


def _is_foreign(value: Any) -> bool:
    module = type(value).__module__
    known = any(module == one or module.startswith(one + ".") for one in _FOREIGN)
    return known or isinstance(value, (DistHelper, StatStore))
