"""What every model family offers to a run. Its names are published; algorithms see nothing else of a model."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from msmodelslim.model.checkpoint import Checkpoint
from msmodelslim.model.structure import LayerStructure


@dataclass
class ProcessRequest:
    """One block of the model, and the arguments one sample calls it with (empty when only visiting)."""

    name: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class ModelSlimPipelineInterfaceV1(ABC):
    """One model, opened for quantization: its checkpoint, its layers in order, and how a sample flows through them.

    Args:
        model_path: directory of the source checkpoint.
        model_type: the name the user gave, or the one derived from `config.json`.
        trust_remote_code: allow the directory's own Python files to run.
    """

    kind: ClassVar[str] = "model"
    registered_name: ClassVar[str]
    #: words of `architectures` in config.json that select this family
    architectures: ClassVar[tuple[str, ...]] = ()
    #: names a user may give as --model_type, compared without case; a longer name that starts with one also fits
    model_names: ClassVar[tuple[str, ...]] = ()
    #: folder under practices/ whose recipes are made for this family
    pedigree: ClassVar[str] = "default"

    model_path: Path
    model_type: str
    trust_remote_code: bool
    checkpoint: Checkpoint

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Floating type the model computes and is served in (from config.json)."""

    @property
    @abstractmethod
    def layer_names(self) -> list[str]:
        """Full names of the decoder layers, in order."""

    @abstractmethod
    def handle_dataset(self, dataset: list[Any], device: torch.device, max_length: int) -> list[dict[str, Any]]:
        """`calibration.Sample`s → keyword arguments of the model: one dict a sample, batch 1, cut to `max_length`."""

    @abstractmethod
    def init_model(self, device: torch.device) -> nn.Module:
        """The module tree with every parameter on `meta`; non-persistent buffers are real. Reads no weight."""

    @abstractmethod
    def generate_decoder_layer(self, model: nn.Module, device: torch.device) -> Iterator[tuple[str, nn.Module]]:
        """(name, layer) in order; a layer still on `meta` is loaded to `device` when reached, the next prefetched."""

    @abstractmethod
    def generate_model_visit(self, model: nn.Module, device: torch.device) -> Generator[ProcessRequest, Any, None]:
        """Every decoder layer in order, without arguments."""

    @abstractmethod
    def generate_model_forward(
        self, model: nn.Module, inputs: dict[str, Any], device: torch.device
    ) -> Generator[ProcessRequest, Any, None]:
        """The same layers in the same order with one sample's arguments; each layer's output is sent back in."""

    @abstractmethod
    def enable_kv_cache(self, model: nn.Module, need_kv_cache: bool) -> None:
        """Switch the key-value cache of the forward on or off."""

    @abstractmethod
    def structure(self, layer: nn.Module) -> LayerStructure:
        """The parts of one decoder layer.

        Raises:
            UnsupportedError: they are not known; says which part is unusual.
        """

    @abstractmethod
    def load_module(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Read every parameter and persistent buffer below `name` that is on `meta` from the checkpoint to `device`."""
