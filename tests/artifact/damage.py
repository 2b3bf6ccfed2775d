"""Ways to break a written directory: change a tensor, drop one, edit a JSON file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Change = Callable[[torch.Tensor], torch.Tensor | None]


def change_tensor(directory: Path, name: str, change: Change) -> None:
    """Replace a tensor by what `change` makes of it; None drops it."""
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            changed = change(tensors.pop(name))
            if changed is not None:
                tensors[name] = changed.contiguous()
            save_file(tensors, file, metadata={"format": "pt"})
            _follow_in_index(directory, tensors, file.name)
            return
    raise AssertionError(f"no {name} in {directory}")


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content, indent=2))


def row(index: int, factor: float) -> Change:
    """Multiply one row."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[index] = (tensor[index].float() * factor).to(tensor.dtype)
        return tensor

    return change


def _follow_in_index(directory: Path, tensors: dict[str, torch.Tensor], file: str) -> None:
    """The index of a directory with one file follows, so that only the tensor itself is wrong."""
    for index in directory.glob("*.index.json"):

        def follow(content: dict[str, Any]) -> None:
            content["weight_map"] = dict.fromkeys(sorted(tensors), file)
            content["metadata"]["total_size"] = sum(t.numel() * t.element_size() for t in tensors.values())

        edit_json(index, follow)
