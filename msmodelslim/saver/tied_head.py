"""Is the output head the embedding? Decided by the stored values, not by what the config says alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msmodelslim.model.checkpoint import Checkpoint, TensorInfo

EMBEDDING_NAMES = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "embed_in.weight",
)
HEAD_NAMES = ("lm_head.weight", "embed_out.weight")
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class TiedHead:
    """What a checkpoint says about its head.

    Args:
        name: the stored head; None when there is none.
        equal: the config says tied, and the stored head has the embedding's bytes.
        unequal: the config says tied, but the stored head differs, so a loader that believes the config would drop it.
    """

    name: str | None
    equal: bool = False
    unequal: bool = False


def tied_head(checkpoint: Checkpoint) -> TiedHead:
    """Compare the head with the embedding where the config calls them tied and both are stored."""
    head = outermost(checkpoint.tensors, HEAD_NAMES)
    embedding = outermost(checkpoint.tensors, EMBEDDING_NAMES)
    if head is None or embedding is None or not says_tied(checkpoint.config):
        return TiedHead(head)
    equal = _same_bytes(checkpoint, checkpoint.tensors[head], checkpoint.tensors[embedding])
    return TiedHead(head, equal, not equal)


def says_tied(config: Mapping[str, Any]) -> bool:
    """True when config.json says so, for the model or for its language part."""
    return any(holder.get("tie_word_embeddings") is True for holder in (config, config.get("text_config") or {}))


def is_embedding(name: str) -> bool:
    """True for the tensor of a token embedding, wherever it is."""
    return any(name == ending or name.endswith("." + ending) for ending in EMBEDDING_NAMES)


def outermost(names: Iterable[str], endings: tuple[str, ...]) -> str | None:
    """The shortest name with one of these endings: extra prediction blocks may hold copies further in."""
    fitting = [name for name in names if any(name == ending or name.endswith("." + ending) for ending in endings)]
    return min(fitting, key=lambda name: (name.count("."), name), default=None)


def _same_bytes(checkpoint: Checkpoint, one: TensorInfo, other: TensorInfo) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with (checkpoint.path / one.file).open("rb") as left, (checkpoint.path / other.file).open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        for start in range(0, one.nbytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, one.nbytes - start)
            if left.read(size) != right.read(size):
                return False
    return True
