import json
import shutil
import sys
import time
from pathlib import Path

import torch
from transformers import dynamic_module_utils

from msmodelslim.model.families import open_model
from tests import fixtures
from tests.run_ranks import RankRunner

_FILLER = "# a long file, so that half of it is no program\n" * 500
CODE = {
    "configuration_own.py": "from transformers import LlamaConfig\n\n\n"
    "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n",
    "modeling_own.py": "from transformers import LlamaForCausalLM\n\nfrom .configuration_own import OwnConfig\n\n\n"
    "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n",
}


def open_with_slow_copies(rank: int, model: str, cache: str) -> str:
    """The class of the model, opened a little after the rank before, while copies into the cache take long."""

    def copy_slowly(source: str, target: str) -> None:
        data = Path(source).read_bytes()
        share = len(data) // 5 + 1
        with Path(target).open("wb", buffering=0) as file:
            for start in range(0, len(data), share):
                file.write(data[start : start + share])
                time.sleep(0.03)

    dynamic_module_utils.HF_MODULES_CACHE = cache
    # An earlier test of this process may have used the cache of the machine, which Python would look into first.
    sys.path[:] = [path for path in sys.path if not (Path(path) / "transformers_modules").is_dir()]
    shutil.copyfile = copy_slowly
    time.sleep(0.04 * rank)
    return type(open_model(Path(model), None, True).init_model(torch.device("cpu"))).__name__


def test_ranks_that_import_a_models_own_code_at_once_do_not_disturb_each_other(
    tmp_path: Path, run_ranks: RankRunner
) -> None:
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    model = fixtures.t_dense(tmp_path / "model", architectures=["OwnForCausalLM"], auto_map=auto_map)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    for name, text in CODE.items():
        (model / name).write_text(_FILLER + text)
    for number in range(5):
        found = run_ranks(4, open_with_slow_copies, str(model), str(tmp_path / f"cache{number}"))
        assert found == ["OwnForCausalLM"] * 4
