"""The command line: words to values, errors without a traceback, exit codes.

Exit codes: 0 done, 1 a user's error, 2 usage, 130 interrupted (SIGINT), 143 terminated (SIGTERM). Results go to
standard output, everything else to standard error. Whatever is slow to import is imported by the command that needs it,
so that `--help` and a usage error answer at once.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from msmodelslim import __version__, cli_analyze
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
from msmodelslim.errors import EnvError, ModelslimError
from msmodelslim.git_commit import version_words

LOG_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
LOG_VARIABLE = "MSMODELSLIM_LOG_LEVEL"
_SIGNAL_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
_CODES: dict[Any, signal.Signals] = {128 + signum: signum for signum in _SIGNAL_WORDS}
log = logging.getLogger("msmodelslim")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    words = [_underscored(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        args = _parse(words)
    except SystemExit as stop:  # argparse has said what there is to say
        return int(stop.code or 0)
    try:
        with _terminable(), _logging(args):
            code = int(args.run(args) or 0)
            sys.stdout.flush()
            return code
    except ModelslimError as error:
        if args.debug:
            traceback.print_exc()
        notes = [str(note) for note in vars(error).get("__notes__", ())]
        print("\n  ".join([f"error: {error}", *notes]), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT)
    except _TerminatedError:
        return _ended_by(signal.SIGTERM)
    except SystemExit as stop:  # a run on several devices, after its ranks are gone
        if outer_rank() is None and stop.code in _CODES:
            return _ended_by(_CODES[stop.code])
        raise
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _ended_by(signum: signal.Signals) -> int:
    print(_SIGNAL_WORDS[signum], file=sys.stderr)
    return 128 + signum


def quant(args: argparse.Namespace) -> None:
    """Quantize a checkpoint, or with --dry_run say what would happen."""
    _in_one_job(_quant, args)


def _in_one_job(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Run the command; as one rank of an outer launcher's job, where there is one."""
    if outer_rank() is None:
        run(args)
        return
    from msmodelslim.distributed.outer_launcher import as_one_job

    with as_one_job():
        run(args)


def _quant(args: argparse.Namespace) -> None:
    from msmodelslim.paths import refuse_unsafe_paths

    check_paths = partial(refuse_unsafe_paths, args.model_path, args.save_path, args.overwrite)
    if not args.config_path:
        check_paths()  # before anything slow is imported; a recipe's mistakes are told together with theirs
    from msmodelslim import device, plugins, practice
    from msmodelslim.model.families import open_model
    from msmodelslim.quant_service import QuantJob, quantize, rehearse

    plugins.load_plugins(args.plugin)
    _, (kind, indices), own, adapter = all_of(
        lambda: check_paths() if args.config_path else None,
        lambda: device.parse_present(args.device, args.device_id),
        lambda: practice.from_file(args.config_path) if args.config_path else None,
        # Without that directory the first check has told it.
        lambda: (
            open_model(args.model_path, args.model_type, args.trust_remote_code) if args.model_path.is_dir() else None
        ),
    )
    names = {adapter.model_type, adapter.registered_name, args.model_type or adapter.model_type}
    choice = own or practice.choose(adapter.pedigree, names, args.quant_type, args.tag, args.yes)
    if not outer_rank():  # the first of the ranks that torchrun started says it for all
        print(f"model:  {adapter.model_type} (family {adapter.registered_name})")
        print(f"recipe: {choice.recipe.config_id} ({choice.recipe.source})")
        print(f"why:    {choice.why}")
        if choice.others:
            print(f"others: {', '.join(choice.others)}; take one with --tag, or with --config_path and its name")
    if not choice.exact:
        log.warning("%s", choice.why)
    job = QuantJob(
        model_path=args.model_path,
        save_path=args.save_path,
        recipe_text=choice.recipe.text,
        recipe_source=choice.recipe.source,
        model_type=args.model_type,
        device=kind,
        device_ids=indices,
        trust_remote_code=args.trust_remote_code,
        dataset=args.dataset,
        debug=args.debug,
        overwrite=args.overwrite,
        threads=args.threads,
        plugins=plugins.absolute(args.plugin),
    )
    (rehearse if args.dry_run else quantize)(job)


def analyze(args: argparse.Namespace) -> None:
    """Rank linears or blocks by how much they suffer from quantization."""
    _in_one_job(cli_analyze.run, args)


def verify(args: argparse.Namespace) -> int:
    """Check a written directory against its format and, with --source, against the model it came from."""
    from msmodelslim import plugins
    from msmodelslim.artifact import verify_main

    plugins.load_plugins(args.plugin)
    return verify_main(args.directory, args.source)


def inspect(args: argparse.Namespace) -> None:
    """Say what a written directory, or a source, holds."""
    from msmodelslim import plugins
    from msmodelslim.artifact import inspect_directory

    plugins.load_plugins(args.plugin)
    inspect_directory(args.directory)


def evaluate(args: argparse.Namespace) -> None:
    """Perplexity of a source or of a result."""
    from msmodelslim import device, plugins
    from msmodelslim.perplexity import eval_main

    plugins.load_plugins(args.plugin)
    kind, indices = device.parse_present(args.device, args.device_id)
    eval_main(
        args.directory,
        args.text,
        args.windows,
        args.window_length,
        kind,
        threads=args.threads,
        device_index=indices[0],
        trust_remote_code=args.trust_remote_code,
    )


def check_dp(args: argparse.Namespace) -> int:
    """Say whether a recipe's steps give the same result on any number of ranks, and if not, where."""
    from msmodelslim import plugins
    from msmodelslim.check_dp import check_data_parallel, holds, print_findings
    from msmodelslim.recipe import read_text

    plugins.load_plugins(args.plugin)
    findings = check_data_parallel(
        read_text(args.recipe),
        str(args.recipe),
        args.model_path,
        ranks=args.ranks,
        samples=args.samples,
        plugins=plugins.absolute(args.plugin),
        timeout_s=args.timeout,
    )
    print_findings(findings, f"data-parallel check of {args.recipe}")
    return 0 if holds(findings) else 1


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the whole line, and the parser of each command."""
    shared = argparse.ArgumentParser(add_help=False)
    _add_shared(shared)
    parser = argparse.ArgumentParser(
        "msmodelslim",
        description="Quantize large language models to 8 and 4 bits.",
        epilog="Every option may be written with hyphens too: --model-path. `msmodelslim COMMAND --help` lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"msmodelslim {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    made: dict[str, argparse.ArgumentParser] = {}
    for name, needed, run, add in (
        ("quant", "--model_path DIR --save_path DIR", quant, _add_quant),
        ("analyze", "[linear|layer] --model_path DIR", analyze, cli_analyze.add_arguments),
        ("verify", "DIR", verify, _add_verify),
        ("inspect", "DIR", inspect, _add_directory),
        ("eval", "DIR", evaluate, _add_eval),
        ("check-dp", "RECIPE", check_dp, _add_check_dp),
    ):
        text = (run.__doc__ or "").partition("\n")[0]
        made[name] = commands.add_parser(
            name,
            usage=f"msmodelslim {name} {needed} [options]",
            help=text.rstrip("."),
            description=text,
            parents=[shared],
            allow_abbrev=False,
        )
        made[name].set_defaults(run=run)
        add(made[name])
    return parser, made


def _version() -> str:
    return version_words(__version__, Path(__file__).parent)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("messages")
    group.add_argument("-V", "--version", action="version", version=f"msmodelslim {_version()}")
    group.add_argument("--log_level", choices=list(LOG_LEVELS), help=f"wins over -v, -q and ${LOG_VARIABLE}")
    group.add_argument("-v", "--verbose", action="store_true", help="as --log_level debug")
    group.add_argument("-q", "--quiet", action="store_true", help="as --log_level warning")
    group.add_argument("--debug", action="store_true", help="as -v, and show the traceback of an error")


def _add_quant(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "On several devices: a rank without progress for $MSMODELSLIM_STUCK_AFTER_S (default 300) is named, with what "
        "each rank is doing; after $MSMODELSLIM_GIVE_UP_AFTER_S (default 3600) the run ends. inf waits for ever."
    )
    add = parser.add_argument
    add("--model_path", type=Path, required=True, metavar="DIR", help="the checkpoint to quantize")
    add("--save_path", type=Path, required=True, metavar="DIR", help="where the result goes")
    add("--model_type", metavar="NAME", help="model or family, such as Qwen3-32B or default; found in config.json")
    add_recipe_choice(parser, "w8a8 (default), w8a16, w4a8, w4a16, w4a4 ...")
    add_device(parser)
    add_trust(parser)
    add("--dataset", metavar="FILE", help="calibration data, instead of the recipe's")
    add("--dry_run", action="store_true", help="check everything that needs no weights, write nothing")
    add("--overwrite", action="store_true", help="replace an earlier result at --save_path")
    add_plugin(parser)


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="a checkpoint")
    add_plugin(parser)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    parser.add_argument("--source", type=Path, metavar="MODEL", help="the checkpoint it was made from, to compare with")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="plain text, instead of the built-in one")
    add("--windows", type=positive, default=32, metavar="N", help="windows of text (default 32)")
    add("--window_length", type=positive, default=512, metavar="TOKENS", help="tokens a window (default 512)")
    add_device(parser)
    add_trust(parser)


def _add_check_dp(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", type=Path, metavar="RECIPE", help="a recipe, a YAML file")
    add("--model_path", type=Path, metavar="DIR", help="a checkpoint, instead of a tiny random model")
    add("--ranks", type=positive, nargs="+", default=[1, 2, 3], metavar="N", help="numbers of ranks (default 1 2 3)")
    add(
        *("--samples",),
        type=positive,
        nargs="+",
        default=[7, 1],
        metavar="N",
        help="numbers of calibration samples, each run on every number of ranks (default 7 1)",
    )
    add("--timeout", type=positive, default=300, metavar="S", help="seconds without progress that end a run")
    add_plugin(parser)


def _parse(words: list[str]) -> argparse.Namespace:
    """The values of a command line. Raises SystemExit after a usage error, help or version."""
    parser, commands = build_parser()
    if not words:
        parser.print_help()
        parser.exit()
    if words[0].startswith("-"):
        _refuse_unknown(parser, words)
        parser.parse_args(words)
        parser.error(f"name a command first: {', '.join(commands)}")
    if words[0] not in commands:
        parser.error(f"{words[0]!r} is no command; {nearest(words[0], list(commands))}")
    fail = commands[words[0]].error
    if words[0] == "analyze":
        words = ["analyze", *cli_analyze.with_scope(words[1:], fail)]
    _refuse_unknown(commands[words[0]], words[1:])
    args = parser.parse_args(words)
    if words[0] == "analyze":
        cli_analyze.refuse_mismatch(args, fail)
    return args


def _refuse_unknown(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """A usage error for options that do not exist, before argparse complains of what is missing in their place."""
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    options = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    wrong = [f"{option} is no option; {nearest(option, known)}" for option in options if option not in known]
    if wrong:
        parser.error("\n  ".join(wrong))


def _underscored(word: str) -> str:
    """Options may be spelt with hyphens: --model-path=X is --model_path=X."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _log_level(args: argparse.Namespace) -> int:
    """--log_level, then -v or --debug, then -q, then the environment, then info."""
    if args.log_level:
        return LOG_LEVELS[args.log_level]
    if args.verbose or args.debug:
        return logging.DEBUG
    if args.quiet:
        return logging.WARNING
    word = os.environ.get(LOG_VARIABLE, "info")
    if word.lower() not in LOG_LEVELS:
        raise EnvError(f"{LOG_VARIABLE} is {word!r}", f"write one of {', '.join(LOG_LEVELS)}")
    return LOG_LEVELS[word.lower()]


@contextmanager
def _logging(args: argparse.Namespace) -> Iterator[None]:
    """Messages of the package on standard error: coloured on a terminal, else `LEVEL message` lines."""
    level = _log_level(args)
    handler: logging.Handler
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="[%X]")
    else:
        handler = logging.StreamHandler(sys.stderr)
        rank = outer_rank()
        mark = "" if rank is None else f" rank {rank}:"
        handler.setFormatter(logging.Formatter(f"%(levelname)s{mark} %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


class _TerminatedError(BaseException):
    """SIGTERM, as an exception, so that `finally` blocks run; no `except Exception` stops it."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Within it SIGTERM unwinds the run. A second one is ignored, so that the clean-up ends."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _TerminatedError

    before: Any = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
