"""`msmodelslim analyze`: its options, its older spellings, and what it does. Imports nothing slow before the run."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from msmodelslim.analysis.metrics import METRICS, default_metric
from msmodelslim.cli_options import (
    add_device,
    add_plugin,
    add_recipe_choice,
    add_trust,
    all_of,
    nearest,
    outer_rank,
    positive,
)

DEFAULT_SCOPE = "linear"
_NO_ATTENTION = (
    "attention is not analysed by this version; "
    "`analyze linear` ranks the linears around it, `analyze layer` whole blocks"
)
_OLD_ATTENTION = "attention_mse"
#: options that say which quantization is tried out
_RECIPE_OPTIONS = ("quant_type", "config_path", "tag", "yes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options, of both scopes: which fit together is checked afterwards, so that one page of help tells all."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _epilog()
    add = parser.add_argument
    add("scope", choices=list(METRICS), help=f"what is ranked (default {DEFAULT_SCOPE})")
    add("--model_path", type=Path, required=True, metavar="DIR", help="the checkpoint to look at")
    add("--model_type", metavar="NAME", help="model or family, such as Qwen3-32B or default; found in config.json")
    add("--metrics", metavar="METRIC", help="how sensitivity is measured; see below")
    add(
        *("--pattern", "--patterns"),
        nargs="+",
        metavar="P",
        help="linears to rank (default '*'), patterns as in `include` of a recipe",
    )
    add("--quant_modules", nargs="+", metavar="P", help="linears of a block to quantize (default '*'), such patterns")
    add("--topk", "--top_k", type=positive, default=15, metavar="K", help="how many are listed (default 15); ties stay")
    add("--save_path", type=Path, metavar="PATH", help="write list and plot: a .yaml file, or a directory for them")
    add(
        *("--calib_dataset", "--calibration_dataset", "--dataset"),
        default="mix_calib.jsonl",
        metavar="FILE",
        help="calibration data (default mix_calib.jsonl)",
    )
    add("--max_samples", type=positive, metavar="N", help="use the first N samples (default all)")
    add("--max_length", type=positive, metavar="TOKENS", help="tokens kept of a sample (default 2048)")
    add_recipe_choice(parser, "try the practice of this type out: w8a8, w8a16, w4a8, w4a16, w4a4 ...")
    add_device(parser)
    add_trust(parser)
    add_plugin(parser)


def with_scope(words: list[str], fail: Callable[[str], NoReturn]) -> list[str]:
    """The words behind `analyze` with the scope first: `linear` where none is given; `fail` tells a usage error."""
    if words[:1] == ["attn"]:
        fail(_NO_ATTENTION)
    for one, following in zip(words, [*words[1:], ""], strict=True):
        if one == f"--metrics={_OLD_ATTENTION}" or (one == "--metrics" and following == _OLD_ATTENTION):
            fail(f"--metrics {_OLD_ATTENTION} is the old spelling of `analyze attn --metrics mse`; {_NO_ATTENTION}")
    if not words or words[0].startswith("-"):
        return [DEFAULT_SCOPE, *words]
    if words[0] not in METRICS:
        fail(f"{words[0]!r} is no scope; {nearest(words[0], list(METRICS))}")
    return words


def refuse_mismatch(args: argparse.Namespace, fail: Callable[[str], NoReturn]) -> None:
    """Options that do not fit the scope or the metric are a usage error; sets the metric where none is given."""
    args.metrics = args.metrics or default_metric(args.scope)
    known = METRICS[args.scope]
    if args.metrics not in known:
        homes = [scope for scope, metrics in METRICS.items() if args.metrics in metrics]
        where = f"it is of `analyze {homes[0]}`; here " if homes else ""
        choices = nearest(args.metrics, list(known))
        fail(f"--metrics {args.metrics!r} is no metric of `analyze {args.scope}`; {where}{choices}")
    if args.scope == "layer" and args.pattern:
        fail("--pattern is for `analyze linear`; which linears of a block are quantized is --quant_modules")
    if args.scope == "linear" and args.quant_modules:
        fail("--quant_modules is for `analyze layer`; which linears are ranked is --pattern")
    asked = [f"--{name}" for name in _RECIPE_OPTIONS if vars(args)[name]]
    if asked and not known[args.metrics].quantizes:
        able = [name for name, metric in known.items() if metric.quantizes]
        fail(f"{asked[0]} is for metrics that quantize ({', '.join(able)}); {args.metrics} looks at inputs alone")
    if args.quant_modules and (args.quant_type or args.config_path):
        fail("--quant_modules is for the built-in scheme; with a recipe its include and exclude decide")
    if (args.tag or args.yes) and not args.quant_type:
        fail("--tag and --yes choose among practices, so give --quant_type with them")


def run(args: argparse.Namespace) -> None:
    """Check everything, analyse, show, and with --save_path write."""
    from msmodelslim import device, plugins, practice
    from msmodelslim.analysis.result import print_result, refuse_unsafe_result, result_file, save_result
    from msmodelslim.analysis_service import AnalysisJob, analyze
    from msmodelslim.calibration import find_dataset
    from msmodelslim.model.families import open_model

    plugins.load_plugins(args.plugin)
    (kind, indices), own, adapter, _ = all_of(
        lambda: device.parse_present(args.device, args.device_id),
        lambda: practice.from_file(args.config_path) if args.config_path else None,
        lambda: open_model(args.model_path, args.model_type, args.trust_remote_code),
        lambda: find_dataset(args.calib_dataset),
    )
    choice = own
    if args.quant_type:
        names = {adapter.model_type, adapter.registered_name, args.model_type or adapter.model_type}
        choice = practice.choose(adapter.pedigree, names, args.quant_type, args.tag, args.yes)
    file = result_file(args.save_path, adapter.model_type, args.metrics) if args.save_path else None
    if file is not None:
        refuse_unsafe_result(args.model_path, file)
    if not outer_rank():
        print(f"model:  {adapter.model_type} (family {adapter.registered_name})")
        if choice is not None:
            print(f"recipe: {choice.recipe.config_id} ({choice.recipe.source})")
    patterns = args.pattern or args.quant_modules or ["*"]
    job = AnalysisJob(
        model_path=args.model_path,
        scope=args.scope,
        metric=args.metrics,
        patterns=tuple(patterns),
        recipe_text=choice.recipe.text if choice else None,
        recipe_source=choice.recipe.source if choice else "",
        model_type=args.model_type,
        device=kind,
        device_ids=indices,
        trust_remote_code=args.trust_remote_code,
        dataset=args.calib_dataset,
        max_samples=args.max_samples,
        max_length=args.max_length,
        threads=args.threads,
        plugins=plugins.absolute(args.plugin),
    )
    result = analyze(job)
    if result is None:
        return
    print_result(result, args.topk)
    if file is not None:
        for path in save_result(result, args.topk, file):
            print(f"written: {path}")


def _epilog() -> str:
    lines = []
    for scope, metrics in METRICS.items():
        lines.append(f"metrics of {scope} (default {default_metric(scope)}); a higher score is more sensitive:")
        lines += [f"  {name:15} {metric.meaning}" for name, metric in metrics.items()]
        lines.append("")
    return "\n".join(
        [
            *lines,
            "kurtosis, std and quantile rank how hard inputs are to quantize and ignore the weights; a constant input",
            "scores 0. mse and the metrics of layer try a quantization out: mxfp4 blocks of weights and inputs, or",
            "that of --quant_type or --config_path. For L blocks, *_model_wise costs about L/2 forwards of the whole",
            "model a sample, and memory for L copies of all hidden states: begin with --max_samples 8.",
        ]
    )
