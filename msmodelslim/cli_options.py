"""What several commands of the command line share: kinds of values, groups of options, how mistakes are told."""

import argparse
import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msmodelslim.errors import ModelslimError, SchemaValidateError

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def add_recipe_choice(parser: argparse.ArgumentParser, quant_type_help: str) -> None:
    """`--quant_type`, `--config_path`, `--tag`, `--yes`: which recipe."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quant_type", type=quant_type, metavar="TYPE", help=quant_type_help)
    which.add_argument(
        "--config_path", "--config", type=Path, metavar="FILE", help="your own recipe, or a practice's name"
    )
    add = parser.add_argument
    add("--tag", "--tags", nargs="*", action="extend", default=[], metavar="TAG", help="engine or hardware to serve on")
    add("--yes", "-y", action="store_true", help="accept a practice that does not fit exactly")


def add_plugin(parser: argparse.ArgumentParser) -> None:
    """`--plugin`."""
    parser.add_argument(
        *("--plugin", "--plugins"),
        nargs="+",
        action="extend",
        default=[],
        metavar="MODULE|FILE.py",
        help="import it first, for processors, models and formats that are not part of msmodelslim",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`, `--device_id`, `--threads`."""
    add = parser.add_argument
    add("--device", default="auto", metavar="TYPE", help="auto (default), cpu, cuda, npu; also npu:0,1")
    add("--device_id", type=natural, nargs="+", metavar="N", help="which devices of that type")
    add("--threads", type=positive, metavar="N", help="CPU threads")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """`--trust_remote_code`."""
    parser.add_argument(
        "--trust_remote_code",
        nargs="?",
        const=True,
        default=False,
        type=boolean,
        metavar="True|False",
        help="let Python files of the checkpoint run",
    )


def all_of(*checks: Callable[[], Any]) -> list[Any]:
    """What each check returns; where several fail, one error that tells what all of them found."""
    found: list[Any] = []
    errors: list[ModelslimError] = []
    for check in checks:
        try:
            found.append(check())
        except ModelslimError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ModelslimError("\n  ".join(["several things are wrong:", *map(str, errors)])) from errors[0]
    return found


def nearest(word: str, choices: list[str]) -> str:
    """How a message offers the right word."""
    close = difflib.get_close_matches(word, choices, n=1)
    return f"write {close[0]}" if close else f"there are {', '.join(choices)}"


def boolean(word: str) -> bool:
    """True or False, in the usual spellings."""
    if word.lower() not in _BOOLEANS:
        raise argparse.ArgumentTypeError(f"{word!r} is neither True nor False")
    return _BOOLEANS[word.lower()]


def quant_type(word: str) -> str:
    """A quant type as practices spell it."""
    from msmodelslim.practice import quant_type_word

    try:
        return quant_type_word(word)
    except SchemaValidateError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def natural(word: str) -> int:
    """A whole number from 0 on."""
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 0 on")
    return int(word)


def positive(word: str) -> int:
    """A whole number from 1 on."""
    if not word.isdecimal() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 1 on")
    return int(word)


def outer_rank() -> int | None:
    """This process's rank where torchrun, or a launcher of its kind, has started it as one of several."""
    return int(os.environ["RANK"]) if {"RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys() else None
