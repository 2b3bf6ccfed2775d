"""Memory does not multiply by ranks: `python benchmarks/rank_memory.py`.

Quantizes a Llama-shaped checkpoint of 1.5 GB to W8A8 static on 1 and 4 ranks, one thread each, and compares the summed
proportional memory of all their processes. Nothing else may have torch loaded meanwhile, this process included: what is
shared with it would be missing from the sum.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from workload import measure, quant_command, store

RANKS = (1, 4)
_MAKE = """
import sys
from pathlib import Path
from memory_depth import RECIPES, SMALL, make_model, write_recipe
folder = Path(sys.argv[1])
make_model(folder / "model", SMALL, 54)
write_recipe(folder, RECIPES["W8A8 static"], int(SMALL["vocab_size"]))
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-c", _MAKE, name], cwd=Path(__file__).parent, check=True)
        size_gb = sum(path.stat().st_size for path in (folder / "model").iterdir()) / 1e9
        found = {}
        for ranks in RANKS:
            ids = [str(rank) for rank in range(ranks)]
            words = quant_command(
                folder / "model", folder / "out", folder / "recipe.yaml", "--threads", "1", "--device_id", *ids
            )
            found[ranks] = measure(words).peak_pss_mib
    ratio = found[RANKS[-1]] / found[RANKS[0]]
    sums = ", ".join(f"{mib:.0f} MiB on {ranks}" for ranks, mib in found.items())
    print(f"{size_gb:.2f} GB checkpoint, summed proportional memory: {sums} ranks ({ratio:.2f} x)")
    store("rank_memory", {"checkpoint_gb": size_gb, "pss_mib": found, "ratio": ratio})


if __name__ == "__main__":
    main()
