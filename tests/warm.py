"""Imports everything that a run needs, once, in the server that test ranks are forked from."""

import matplotlib.backends.backend_agg  # noqa: F401 - imported for its effect
import transformers.models.llama.modeling_llama
import transformers.models.mistral.modeling_mistral
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - imported for its effect

import msmodelslim.quant_service  # noqa: F401
from msmodelslim.registry import names

for kind in ("processor", "model", "saver"):
    names(kind)
