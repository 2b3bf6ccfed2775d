"""All about a decoder-only model that is the same for every family: one layer at a time, straight from the files.

A family adds its names and, where it differs from the usual one, the structure of its layer.
"""

from collections.abc import Generator, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from msmodelslim.errors import InvalidModelError
from msmodelslim.model import sample_tokens, skeleton
from msmodelslim.model.base import ModelSlimPipelineInterfaceV1, ProcessRequest
from msmodelslim.model.checkpoint import Checkpoint
from msmodelslim.model.layer_inputs import TensorPool, record_calls
from msmodelslim.model.structure import LayerStructure

_NORM_LINEARS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
)
_DOWN, _O = "mlp.down_proj", "self_attn.o_proj"


def usual_structure(layer: nn.Module, config: Any) -> LayerStructure:
    """The layer of Llama and its kin: two norms, q, k, v and o, a gated MLP; names as in their checkpoints.

    Args:
        layer: any decoder layer of the model, on any device.
        config: transformers' configuration of the text model.
    """
    heads = config.num_attention_heads
    return LayerStructure(
        norm_linears=_NORM_LINEARS,
        ov=(("self_attn.v_proj", _O),),
        up_down=(("mlp.up_proj", _DOWN),),
        fused=tuple(linears for _, linears in _NORM_LINEARS),
        row_parallel=frozenset({_O, _DOWN}),
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_width=layer.get_submodule(_O).in_features // heads,
    )


class DecoderAdapter(ModelSlimPipelineInterfaceV1):
    """A causal language model of transformers whose checkpoint names its tensors as its modules.

    Raises (on opening, and before a weight is read):
        InvalidModelError: the checkpoint is damaged, quantized in an unknown way, or is not what its config.json says.
        SecurityError: the model needs Python code of its own and may not run it.
        UnsupportedError: transformers does not know the model.
    """

    #: attention function of transformers; None leaves the choice to it
    attention: ClassVar[str | None] = "sdpa"

    def __init__(self, model_path: Path, model_type: str, trust_remote_code: bool = False) -> None:
        self.model_path = Path(model_path)
        self.model_type = model_type
        self.trust_remote_code = trust_remote_code
        self.checkpoint = Checkpoint(self.model_path)
        self.config = skeleton.load_config(self.checkpoint, trust_remote_code)
        self._newest: nn.Module | None = None
        self._tied: dict[str, tuple[str, ...]] = {}
        self._pool = TensorPool()

    @property
    def dtype(self) -> torch.dtype:
        return self.checkpoint.dtype

    @cached_property
    def layer_names(self) -> list[str]:
        path, layers = skeleton.decoder_layers(self._build())
        return [f"{path}.{index}" for index in range(len(layers))]

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when first asked for."""
        return sample_tokens.load_tokenizer(self.model_path, self.trust_remote_code)

    def handle_dataset(self, dataset: list[Any], device: torch.device, max_length: int) -> list[dict[str, Any]]:
        vocabulary = self.config.get_text_config().vocab_size
        return sample_tokens.tokenize(dataset, lambda: self.tokenizer, vocabulary, max_length, device)

    def missing_tensors(self) -> list[str]:
        """Parameters and persistent buffers of the model that the checkpoint has no values for."""
        model = self._build()
        return skeleton.compare(model, self.checkpoint, skeleton.tied_names(model, self.checkpoint))

    def init_model(self, device: torch.device) -> nn.Module:
        """The module tree with every parameter on `meta`; non-persistent buffers are real. Reads no weight.

        Raises:
            InvalidModelError: the checkpoint lacks a tensor of the tree, or has it in another shape.
            UnsupportedError: the files hold the tensors in an arrangement this adapter cannot take apart.
        """
        model = self._build()
        self._tied = skeleton.tied_names(model, self.checkpoint)
        skeleton.refuse_missing(model, self.checkpoint, skeleton.compare(model, self.checkpoint, self._tied))
        skeleton.fill_buffers(model, device)
        self._newest = model
        return model

    def load_module(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Read every parameter and persistent buffer below `name` that is on `meta` from the checkpoint to `device`.

        On the CPU they are views of the files unless their type has to change. A tied tensor becomes the one that the
        newest model of `init_model` holds already under its other name, if it does.

        Raises:
            InvalidModelError: the checkpoint has no such tensor.
        """
        for path, owner, key, tensor in skeleton.persistent_tensors(module):
            if tensor.is_meta:
                full = f"{name}.{path}" if name else path
                setattr(owner, key, self._read(full, tensor, device))

    def generate_decoder_layer(self, model: nn.Module, device: torch.device) -> Iterator[tuple[str, nn.Module]]:
        names = self.layer_names
        for index, name in enumerate(names):
            layer = model.get_submodule(name)
            if _on_meta(layer):
                self.load_module(name, layer, device)
                if index + 1 < len(names):
                    self._prefetch(names[index + 1], model.get_submodule(names[index + 1]))
            yield name, layer

    def generate_model_visit(self, model: nn.Module, device: torch.device) -> Generator[ProcessRequest, Any, None]:
        for name, layer in self.generate_decoder_layer(model, device):
            yield ProcessRequest(name, layer)

    def generate_model_forward(
        self, model: nn.Module, inputs: dict[str, Any], device: torch.device
    ) -> Generator[ProcessRequest, Any, None]:
        """The same layers in the same order with one sample's arguments; each layer's output is sent back in.

        Until the first layer is asked for nothing happens; then all that comes before the layers is computed. So ask
        before hooks are put on a layer: they would see the recording of its arguments as a call.
        """
        self._load_all_before_layers(model, device)
        layers = [model.get_submodule(name) for name in self.layer_names]
        use_cache = model.config.use_cache  # type: ignore[union-attr] # a transformers configuration
        calls = record_calls(model, layers, {**inputs, "use_cache": use_cache})
        output: Any = calls[0][0][0]
        calls = [(self._pool.shared(args[1:]), self._pool.shared(kwargs)) for args, kwargs in calls]
        for name, layer in self.generate_decoder_layer(model, device):
            args, kwargs = calls.pop(0)
            hidden = [output[0] if isinstance(output, tuple) else output]
            output = None  # while the caller works, only the caller holds the hidden states
            output = yield ProcessRequest(name, layer, (hidden.pop(), *args), kwargs)
            if output is None:
                raise ValueError(f"{name}: send the layer's output to get the next layer")

    def enable_kv_cache(self, model: nn.Module, need_kv_cache: bool) -> None:
        """Switch the key-value cache on or off. Each call of a layer appends to it, so call a layer once a sample."""
        model.config.use_cache = need_kv_cache  # type: ignore[union-attr] # a transformers configuration

    def _build(self) -> nn.Module:
        return skeleton.build(self.config, self.dtype, self.attention, self.trust_remote_code)

    def _read(self, name: str, empty: Tensor, device: torch.device) -> Tensor:
        others = self._tied.get(name, ())
        if self._newest is not None and others:
            tree = dict(self._newest.named_parameters(remove_duplicate=False))
            for other in others:
                if other in tree and tree[other].device.type == device.type:
                    return tree[other]
        stored = next((other for other in (name, *others) if other in self.checkpoint.tensors), None)
        if stored is None:
            raise InvalidModelError(f"{self.model_path} has no tensor {name}", "fetch the checkpoint again")
        value = self.checkpoint.weight(stored, empty.dtype).to(device)
        return nn.Parameter(value, requires_grad=False) if isinstance(empty, nn.Parameter) else value

    def _prefetch(self, name: str, layer: nn.Module) -> None:
        self.checkpoint.prefetch(f"{name}.{path}" for path, *_ in skeleton.persistent_tensors(layer))

    def _load_all_before_layers(self, model: Any, device: torch.device) -> None:
        """Embeddings and whatever else stands outside the layers, except the head."""
        head = model.get_output_embeddings()
        layers = self.layer_names[0].rpartition(".")[0] + "."
        for path, owner, key, tensor in skeleton.persistent_tensors(model):
            if tensor.is_meta and owner is not head and not path.startswith(layers):
                setattr(owner, key, self._read(path, tensor, device))


def _on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for _, _, _, tensor in skeleton.persistent_tensors(module))
