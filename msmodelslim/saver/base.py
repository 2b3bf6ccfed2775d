"""What all save formats share: plan every file before the run, write in place, carry the rest over, appear whole.

Which tensors a layer becomes is known from a rehearsal on meta tensors, so file names, sizes and offsets stand before
the first weight is read. During the run each tensor goes straight to its place. Whatever nobody replaced is copied from
the source byte for byte. A format is a subclass with `export` for one linear and `documents` for its JSON files.
"""

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field
from torch import Tensor, nn

from msmodelslim.distributed import watchdog
from msmodelslim.distributed.failure import when_told
from msmodelslim.errors import EnvError, UnsupportedError
from msmodelslim.ir.input_scale import ScaledInputLinear
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext
from msmodelslim.saver.json_text import set_everywhere
from msmodelslim.saver.output_directory import OutputDirectory
from msmodelslim.saver.ownership import module_of, owners, unite
from msmodelslim.saver.shards import ShardPlan, ShardWriter, TensorSpec, canonical_order, spec_of
from msmodelslim.saver.side_files import SideFiles, copy_side_files, side_files
from msmodelslim.saver.stored import BaseReader
from msmodelslim.saver.tied_head import TiedHead, tied_head

_SCALE_INV = ".weight_scale_inv"
T = TypeVar("T")


@dataclass(frozen=True)
class SavePlan:
    """What a run will write.

    Args:
        files: weight files → bytes.
        tensors: tensor name → file.
        total_bytes: weight files, JSON documents and copied side files.
        removed: source tensors that have no successor of the same name.
        decoded: block-FP8 weights of the source that stay float and are written in the model's type.
        left_out: files of the source that are neither weights in use nor copied.
        kinds: module → the format's word for how it is quantized.
    """

    files: dict[str, int]
    tensors: dict[str, str]
    total_bytes: int
    removed: tuple[str, ...]
    decoded: tuple[str, ...]
    left_out: tuple[str, ...]
    kinds: dict[str, str]


class BaseSaver(BaseSessionProcessor):
    """Writes the run's result; a processor that comes after all others.

    Lifecycle: `rehearse` per layer, `finish_rehearsal`, `pre_run`, `postprocess` per layer, `post_run`, then `commit`;
    `abort` instead of what is left of it.

    Args:
        config: the format's `Config`.
        context: model, source checkpoint, record.
        save_path: the directory to write; replaced as a whole if it exists. Whether it may be replaced is the caller's
            question, to be asked before the run.
        leader: process that leads the job, on several ranks; names the hidden directory they share.
    """

    kind = "saver"
    #: name of a weight file; `{suffix}` is "" or "-00001-of-00002"
    file_pattern: ClassVar[str]
    #: a single file is numbered, too, where a size limit is set
    numbered: ClassVar[bool] = False
    #: the index is written for a single file, too
    always_index: ClassVar[bool] = False
    #: a head with the embedding's bytes is written a second time when the config says they are tied
    keeps_equal_head: ClassVar[bool] = False
    #: how engines read the format
    reader: ClassVar[type[BaseReader]]

    class Config(BaseModel, frozen=True, extra="forbid"):
        part_file_size: int = Field(4, ge=0, description="GiB of tensors a weight file; 0 writes one file")
        ext: dict[str, Any] = Field({}, max_length=0, description="must stay empty")
        target: str

    def __init__(self, config: Any, context: RunContext, save_path: Path, leader: int | None = None) -> None:
        super().__init__(config, context)
        self.part_file_bytes: int = config.part_file_size << 30
        self.kinds: dict[str, str] = {}
        self.float_linears: list[str] = []
        self.row_parallel: set[str] = set()
        self.notes: list[str] = []
        self.remarks: list[str] = []  # of the tensors that this rank has written
        self._output = OutputDirectory(save_path, leader)
        self._rank, self._world_size = 0, 1
        self._owners: dict[str, int] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._consumed: set[str] = set()
        self._decoded: dict[str, None] = {}
        self._head = TiedHead(None)
        self._side = SideFiles()
        self._documents: dict[str, str] = {}
        self._unknown: dict[str, str] = {}  # layer → why its parts are not known
        self._layers = frozenset(context.adapter.layer_names)
        self._writer: ShardWriter | None = None
        self._plan: ShardPlan | None = None

    @property
    def directory(self) -> Path:
        """Where the files are until `commit`."""
        return self._output.partial

    @abstractmethod
    def export(self, name: str, module: QuantLinear) -> tuple[dict[str, Tensor], str]:
        """The linear as stored: full tensor name → values (meta for a meta linear), and the format's word for its kind.

        Raises:
            UnsupportedError: the format or the target cannot express its scheme; names module, scheme, format, target
                and the kinds there are.
        """

    @abstractmethod
    def documents(self, config_text: str, tensors: dict[str, TensorSpec]) -> dict[str, str]:
        """JSON files of the format, config.json last: file name → text.

        Args:
            config_text: the source's config.json, less what no output keeps.
            tensors: everything that will be written, in canonical order.
        """

    def is_data_free(self) -> bool:
        return True

    # --- before the run

    def rehearse(self, request: BatchProcessRequest) -> None:
        linears = _linears(request)
        self._refuse_mixed_groups(request, linears)
        structure, self._unknown[request.name] = self.context.structure_if_known(request.module)
        self.row_parallel |= {f"{request.name}.{part}" for part in structure.row_parallel}
        source = self.context.adapter.checkpoint.tensors
        for name, module in request.module.named_modules(prefix=request.name):
            if isinstance(module, ScaledInputLinear):
                raise UnsupportedError(
                    f"{name}: it has a multiplication in front of it (non-fusion smoothing), and no engine that reads "
                    f"{self.registered_name} computes one",
                    f"exclude {name} from smoothing",
                )
        for name, module in linears.items():
            tensors, self.kinds[name] = self.export(name, module)
            self._specs |= {tensor_name: spec_of(tensor) for tensor_name, tensor in tensors.items()}
            self._consumed |= {name + part for part in (".weight", ".bias", _SCALE_INV)} & source.keys()
        for name, tensor in _float_state(request, linears).items():
            if name not in source:
                self._specs[name] = spec_of(tensor)
        self.float_linears += [
            name
            for name, module in request.module.named_modules(prefix=request.name)
            if name not in linears and _is_linear_like(module)
        ]

    def finish_rehearsal(self) -> SavePlan:
        """Place everything, after the last layer's `rehearse`. Reads no weight but a head that may be tied.

        Raises:
            UnsupportedError: the modules' schemes do not fit into one model of this format.
        """
        adapter = self.context.adapter
        checkpoint = adapter.checkpoint
        self._meet()
        self._head = tied_head(checkpoint)
        dropped = {self._head.name} if self._head.equal and not self.keeps_equal_head else set()
        scales = {checkpoint.scale_name(name) for name in checkpoint.tensors if checkpoint.is_fp8_block(name)}
        for name, info in checkpoint.tensors.items():
            if name in self._specs or name in self._consumed or name in dropped or name in scales:
                continue
            if checkpoint.is_fp8_block(name):
                self._decoded[name] = None
            dtype = adapter.dtype if checkpoint.is_fp8_block(name) else info.dtype
            self._specs[name] = TensorSpec(dtype, tuple(info.shape))
        by_rank = self._exchange(self._specs)
        self._owners = owners(by_rank, self._layer_of)
        united = unite(by_rank)
        specs = {name: united[name] for name in canonical_order(united)}
        plan = ShardPlan.make(specs, self.part_file_bytes, self.file_pattern, numbered=self.numbered)
        self._plan = plan
        self._side = side_files(checkpoint.path, set(checkpoint.files))
        self._documents = self._all_documents(plan, specs)
        sizes = [plan.file_bytes, self._side.nbytes, *(len(text.encode()) for text in self._documents.values())]
        return SavePlan(
            files=plan.sizes,
            tensors={name: slot.file for name, slot in plan.slots.items()},
            total_bytes=sum(sizes),
            removed=tuple(name for name in checkpoint.tensors if name not in specs),
            decoded=tuple(self._decoded),
            left_out=tuple(self._side.left_out),
            kinds=dict(self.kinds),
        )

    # --- the run

    def pre_run(self) -> None:
        assert self._plan is not None, "finish_rehearsal comes before pre_run"
        if self._rank == 0:
            self._output.open()
            self._writer = ShardWriter(self._plan, self.directory)
        self._refuse_separate_disks()
        if self._writer is None:
            self._writer = ShardWriter(self._plan, self.directory, create=False)
        self.context.record.warnings += [*self.notes, *self._own_notes()]

    def postprocess(self, request: BatchProcessRequest) -> None:
        writer = self._open_writer()
        linears = _linears(request)
        self._refuse_unequal_act_scales(request, linears)
        for name, module in linears.items():
            if name in self.context.record.modules:
                self.context.record.modules[name]["kind"] = self.kinds[name]
            if self._owners[name] != self._rank:
                continue
            for tensor_name, tensor in self.export(name, module)[0].items():
                writer.write(tensor_name, tensor)
        for name, tensor in _float_state(request, linears).items():
            self._write_float(name, tensor)

    def post_run(self) -> None:
        writer = self._open_writer()
        checkpoint = self.context.adapter.checkpoint
        for name, tensor in self.context.model.state_dict(keep_vars=True).items():
            if name in writer.plan.slots and name not in writer.written and not tensor.is_meta:
                self._write_float(name, tensor)
        for name in writer.missing():
            if self._owners[module_of(name)] != self._rank:
                continue
            info, spec = checkpoint.tensors.get(name), writer.plan.slots[name].spec
            if name in self._decoded:
                writer.write(name, checkpoint.weight(name, spec.dtype))
            elif info is not None and TensorSpec(info.dtype, tuple(info.shape)) == spec:
                writer.write_bytes_from(name, info, checkpoint.path)
        by_rank = self._exchange((sorted(writer.written), self.remarks))
        written = Counter(name for part, _ in by_rank for name in part)
        self.context.record.warnings += sorted(sentence for _, remarks in by_rank for sentence in remarks)
        if missing := [name for name in writer.plan.slots if not written[name]]:
            raise RuntimeError(f"{len(missing)} planned tensors were never written: {', '.join(missing[:5])}")
        assert max(written.values()) == 1, f"two ranks wrote {written.most_common(1)[0][0]}"
        if self._rank:
            return
        copy_side_files(self._side, checkpoint.path, self.directory)
        for file, text in self._documents.items():
            (self.directory / file).write_bytes(text.encode())

    def commit(self) -> None:
        """Put the finished directory in its place, at once."""
        self._output.commit()

    def abort(self) -> None:
        if self._world_size > 1:  # the other ranks may still write there
            when_told(self._output.discard)
        else:
            self._output.discard()

    # --- parts

    def _write_float(self, name: str, tensor: Tensor) -> None:
        """A tensor that is not quantized: the source's bytes unless a processor changed the value."""
        if self._owners[module_of(name)] != self._rank:
            return
        writer = self._open_writer()
        checkpoint = self.context.adapter.checkpoint
        spec = writer.plan.slots[name].spec
        info = checkpoint.tensors.get(name)
        if info is not None and tensor.dtype != spec.dtype and info.dtype == spec.dtype:
            # The layer computes in another type than the source is stored in: going there and back would lose bits.
            source = checkpoint.tensor(name)
            if tensor.shape == source.shape and torch.equal(tensor, source.to(tensor.device, tensor.dtype)):
                writer.write_bytes_from(name, info, checkpoint.path)
                return
        writer.write(name, tensor.to(spec.dtype))

    def _meet(self) -> None:
        """Which of how many ranks this is, and what the others' rehearsals found in modules this one lacks."""
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        for kinds, floats, consumed in self._exchange((self.kinds, self.float_linears, sorted(self._consumed))):
            self.kinds |= {name: kind for name, kind in kinds.items() if name not in self.kinds}
            self.float_linears += [name for name in floats if name not in set(self.float_linears)]
            self._consumed |= set(consumed)

    def _exchange(self, own: T) -> list[T]:
        """Everybody's `own`, by rank; names and sizes only."""
        found: list[Any] = [own]
        if self._world_size > 1:
            found = [None] * self._world_size
            with watchdog.waiting(f"{self.registered_name}: plan and written tensors"):
                dist.all_gather_object(found, own)
        return found

    def _refuse_separate_disks(self) -> None:
        """All ranks see the directory that rank 0 has made, or all refuse, before any layer."""
        self._exchange(None)  # rank 0 has made it now
        lacking = [rank for rank, sees in enumerate(self._exchange(self.directory.is_dir())) if not sees]
        if lacking:
            raise EnvError(
                f"ranks {lacking} do not see {self.directory.parent} as rank 0 does",
                "give a --save_path on a file system that all machines share",
            )

    def unknown_parts(self, module: str) -> str:
        """Why it is not known how the parts of the module's layer hang together; "" where it is."""
        return self._unknown.get(self._layer_of(module), "")

    def _layer_of(self, module: str) -> str:
        layers = self._layers
        parts = module.split(".")
        return next((name for i in range(len(parts), 0, -1) if (name := ".".join(parts[:i])) in layers), "")

    def _all_documents(self, plan: ShardPlan, specs: dict[str, TensorSpec]) -> dict[str, str]:
        text = (self.context.adapter.checkpoint.path / "config.json").read_bytes().decode()
        if self._head.unequal:
            text = set_everywhere(text, "tie_word_embeddings", False)
        documents = {}
        if self.always_index or len(plan.sizes) > 1:
            documents[self.reader.index_name] = json.dumps(plan.index(), indent=2, ensure_ascii=False) + "\n"
        return documents | self.documents(text, specs)

    def _open_writer(self) -> ShardWriter:
        assert self._writer is not None, "pre_run comes before any writing"
        return self._writer

    def _own_notes(self) -> Iterator[str]:
        if self._head.unequal:
            yield (
                f"config.json says the embeddings are tied, but {self._head.name} differs from them: both are written, "
                "and tie_word_embeddings is false now"
            )
        for why in dict.fromkeys(filter(None, self._unknown.values())):
            yield f"{why}; so nobody checked that linears which engines fuse have one scheme and one input scale"
        if self._decoded:
            word = str(self.context.adapter.dtype).removeprefix("torch.")
            yield f"{len(self._decoded)} block-FP8 weights that stay float are written in {word}"
        if self._side.left_out:
            yield f"files of the source that were not copied: {', '.join(self._side.left_out)}"

    def _refuse_mixed_groups(self, request: BatchProcessRequest, linears: dict[str, QuantLinear]) -> None:
        for group in self._fused(request):
            schemes = {name: str(linears[name].scheme) if name in linears else "float" for name in group}
            if len(set(schemes.values())) > 1:
                what = ", ".join(f"{name} is {scheme}" for name, scheme in schemes.items())
                raise UnsupportedError(
                    f"engines compute {' and '.join(schemes)} as one linear, so they need one scheme: {what}",
                    "include or exclude them together, in one step",
                )

    def _refuse_unequal_act_scales(self, request: BatchProcessRequest, linears: dict[str, QuantLinear]) -> None:
        for group in self._fused(request):
            found = {name: _act_qparam(linears[name]) for name in group if name in linears}
            if len(set(found.values())) > 1:
                what = ", ".join(f"{name} has {value}" for name, value in found.items())
                raise UnsupportedError(
                    f"engines quantize the input of {' and '.join(found)} once, with one scale and offset: {what}",
                    "calibrate them in one step, from the same input",
                )

    def _fused(self, request: BatchProcessRequest) -> Iterator[list[str]]:
        known = {name for name, _ in request.module.named_modules()}
        structure, _ = self.context.structure_if_known(request.module)
        for parts in structure.fused:
            present = [f"{request.name}.{part}" for part in parts if part in known]
            if len(present) > 1:
                yield present


def _linears(request: BatchProcessRequest) -> dict[str, QuantLinear]:
    """Quantized linears of a layer by full name, in the layer's order."""
    return {
        name: module
        for name, module in request.module.named_modules(prefix=request.name)
        if isinstance(module, QuantLinear)
    }


def _float_state(request: BatchProcessRequest, linears: dict[str, QuantLinear]) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a layer that no quantized linear owns, by full name."""
    state = request.module.state_dict(prefix=f"{request.name}.", keep_vars=True)
    return {name: tensor.detach() for name, tensor in state.items() if name.rpartition(".")[0] not in linears}


def _is_linear_like(module: nn.Module) -> bool:
    """True for a linear, and for modules that hold a matrix to multiply with, such as a router."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _act_qparam(linear: QuantLinear) -> tuple[float | None, float | None]:
    scale, offset = (None if t is None else float(t) for t in (linear.act_scale, linear.act_offset))
    return scale, offset
