"""A whole run without recipe, runner and calibration: min-max weights, a made-up range of every input."""

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.quantize import act_qparam, quantize_weight
from msmodelslim.ir.scheme import FLOAT, LinearScheme, QDType, QScheme, QScope
from msmodelslim.model.base import ModelSlimPipelineInterfaceV1
from msmodelslim.model.families import open_model
from msmodelslim.processor.base import BatchProcessRequest, RunContext, RunRecord
from msmodelslim.saver.ascendv1 import AscendV1Saver
from msmodelslim.saver.base import BaseSaver
from msmodelslim.saver.compressed_tensors import CompressedTensorsSaver

INT8 = QScheme(QDType.INT8, QScope.PER_CHANNEL)
INT8_ASYM = QScheme(QDType.INT8, QScope.PER_CHANNEL, False)
INT8_G32 = QScheme(QDType.INT8, QScope.PER_GROUP, group_size=32)
INT4 = QScheme(QDType.INT4, QScope.PER_CHANNEL)
INT4_G32 = QScheme(QDType.INT4, QScope.PER_GROUP, group_size=32)
INT4_G32_ASYM = QScheme(QDType.INT4, QScope.PER_GROUP, False, group_size=32)
TWO_LEVEL = QScheme(QDType.INT4, QScope.PER_GROUP, group_size=32, two_level=True)
TWO_LEVEL_ASYM = QScheme(QDType.INT4, QScope.PER_GROUP, False, group_size=32, two_level=True)
FP8 = QScheme(QDType.FP8_E4M3, QScope.PER_CHANNEL)
FP8_TENSOR = QScheme(QDType.FP8_E4M3, QScope.PER_TENSOR)
FP8_BLOCK = QScheme(QDType.FP8_E4M3, QScope.PER_BLOCK, block=(128, 128))
MXFP8 = QScheme(QDType.MXFP8, QScope.PER_BLOCK)
MXFP4 = QScheme(QDType.MXFP4, QScope.PER_BLOCK)
DUAL_SCALE = QScheme(QDType.MXFP4, QScope.DUAL_SCALE, dual_block=64)
A8 = QScheme(QDType.INT8, QScope.PER_TOKEN)
A8_ASYM = QScheme(QDType.INT8, QScope.PER_TOKEN, False)
A8_STATIC = QScheme(QDType.INT8, QScope.PER_TENSOR)
A8_STATIC_ASYM = QScheme(QDType.INT8, QScope.PER_TENSOR, False)
A8_MIX = QScheme(QDType.INT8, QScope.PD_MIX, False)
A4 = QScheme(QDType.INT4, QScope.PER_TOKEN)
AFP8 = QScheme(QDType.FP8_E4M3, QScope.PER_TOKEN)
AFP8_STATIC = QScheme(QDType.FP8_E4M3, QScope.PER_TENSOR)
AFP8_BLOCK = QScheme(QDType.FP8_E4M3, QScope.PER_BLOCK, block=(1, 128))

W8A8 = LinearScheme(INT8, A8_STATIC_ASYM)
W8A8_SYM = LinearScheme(INT8, A8_STATIC)
W8A8_DYNAMIC = LinearScheme(INT8, A8)
W8A8_MIX = LinearScheme(INT8, A8_MIX)
W8A16 = LinearScheme(INT8)
W4A8 = LinearScheme(INT4, A8)
W4A16_G32 = LinearScheme(INT4_G32)
W4A4 = LinearScheme(INT4, A4)
FP8_DYNAMIC = LinearScheme(FP8, AFP8)

LOW, HIGH = -3.1, 4.3  # of every input, where a static scheme needs a range
Pick = Callable[[str], LinearScheme | None]


def only(scheme: LinearScheme, *patterns: str) -> Pick:
    """Quantize what matches a pattern ("*" if none is given), leave the rest float."""
    return lambda name: scheme if any(fnmatch.fnmatch(name, pattern) for pattern in patterns or ("*",)) else None


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def quantized(linear: nn.Linear, scheme: LinearScheme, dtype: torch.dtype, name: str = "weight") -> QuantLinear:
    codes = quantize_weight(linear.weight, scheme.weight, scale_dtype=dtype, name=name)
    scale, offset = (None, None)
    if scheme.act.is_static:
        scale, offset = act_qparam(torch.tensor([LOW]), torch.tensor([HIGH]), scheme.act, scale_dtype=dtype)
    return QuantLinear(scheme, codes, bias=linear.bias, act_scale=scale, act_offset=offset)


class Run:
    """A saver driven over a model; each step can be called by itself."""

    def __init__(
        self, model_path: Path, save_path: Path, pick: Pick, saver: type[BaseSaver] = AscendV1Saver, **config: Any
    ) -> None:
        self.adapter: ModelSlimPipelineInterfaceV1 = open_model(model_path, None)
        self.device = torch.device("cpu")
        self.context = RunContext(self.adapter, self.adapter.init_model(self.device), self.device, RunRecord())
        self.saver = saver(saver.Config(**config), self.context, save_path)
        self.pick = pick

    def rehearse(self) -> Any:
        for layer_name in self.adapter.layer_names:
            layer = self.context.model.get_submodule(layer_name)
            for name, linear in self._chosen(layer_name, layer):
                bias = None if linear.bias is None else linear.bias.dtype
                scheme = self.pick(name) or LinearScheme(FLOAT)
                self._put(
                    layer_name, layer, name, QuantLinear.on_meta(scheme, linear.out_features, linear.in_features, bias)
                )
            self.saver.rehearse(BatchProcessRequest(layer_name, layer))
        return self.saver.finish_rehearsal()

    def write(self, change: Callable[[str, nn.Module], None] = lambda name, layer: None) -> None:
        self.context.model = self.adapter.init_model(self.device)
        self.saver.pre_run()
        with torch.no_grad():
            for step in self.adapter.generate_model_visit(self.context.model, self.device):
                for name, linear in self._chosen(step.name, step.module):
                    scheme = self.pick(name)
                    assert scheme is not None
                    self._put(step.name, step.module, name, quantized(linear, scheme, self.adapter.dtype, name))
                change(step.name, step.module)
                self.saver.postprocess(BatchProcessRequest(step.name, step.module))
        self.saver.post_run()

    def _chosen(self, layer_name: str, layer: nn.Module) -> list[tuple[str, nn.Linear]]:
        return [
            (name, module)
            for name, module in layer.named_modules(prefix=layer_name)
            if isinstance(module, nn.Linear) and self.pick(name) is not None
        ]

    def _put(self, layer_name: str, layer: nn.Module, name: str, module: nn.Module) -> None:
        layer.set_submodule(name.removeprefix(layer_name + "."), module)


def save(
    model_path: Path, save_path: Path, pick: Pick | LinearScheme, saver: type[BaseSaver] = AscendV1Saver, **config: Any
) -> Run:
    """Quantize and write; the run, for what it recorded and the modules it made."""
    run = Run(model_path, save_path, only(pick) if isinstance(pick, LinearScheme) else pick, saver, **config)
    run.rehearse()
    run.write()
    run.saver.commit()
    return run


def save_ct(model_path: Path, save_path: Path, pick: Pick | LinearScheme, **config: Any) -> Run:
    return save(model_path, save_path, pick, CompressedTensorsSaver, **config)
