"""What a served model needs besides its weights: the source's files, as they are, less what would mislead a loader."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

#: Weights in any spelling. A stray one in the output is loaded in place of ours, or makes the loader fail.
WEIGHT_SUFFIXES = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ggml", ".onnx", ".onnx_data"),
    *(".npz", ".tflite", ".ot", ".pkl"),
}
#: Files that a tokenizer, a processor or custom code may need, however large.
KNOWN_SUFFIXES = {
    *(".json", ".jinja", ".py", ".txt", ".model", ".tiktoken", ".spm", ".bpe", ".vocab", ".merges", ".md", ".yaml"),
}
LARGE_BYTES = 64 << 20
_LEFT_FOLDERS = {"original", "__pycache__"}
_OWN_NAMES = {"config.json", "quant_model_description.json", "quant_report.json", "quant_report.png"}


@dataclass
class SideFiles:
    """What is copied beside the weights, and what is not.

    Args:
        copied: paths relative to the source, sorted.
        left_out: the same, for files that are no weights in use, no index and not hidden, and yet stay behind.
        nbytes: size of what is copied.
    """

    copied: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    nbytes: int = 0


def side_files(source: Path, shards: set[str]) -> SideFiles:
    """Sort the files below `source`.

    Args:
        source: directory of the source checkpoint.
        shards: weight files in use, relative to `source`.
    """
    found = SideFiles()
    for folder, subfolders, files in os.walk(source):
        relative = Path(folder).relative_to(source)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in _LEFT_FOLDERS)
        found.left_out += [f"{relative / name}/" for name in subfolders if (Path(folder) / name).is_symlink()]
        for file in sorted(files):
            name, path = str(relative / file), Path(folder) / file
            if file.startswith(".") or name in shards or name in _OWN_NAMES or file.endswith(".index.json"):
                continue
            size = path.stat().st_size
            suffix = path.suffix.lower()
            weights = suffix in WEIGHT_SUFFIXES or file.startswith("consolidated")
            if weights or (size > LARGE_BYTES and suffix not in KNOWN_SUFFIXES):
                found.left_out.append(name)
            else:
                found.copied.append(name)
                found.nbytes += size
    found.copied.sort()
    found.left_out.sort()
    return found


def copy_side_files(found: SideFiles, source: Path, target: Path) -> None:
    """Copy their bytes; permissions are those of new files, since hub caches are read-only."""
    for name in found.copied:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
