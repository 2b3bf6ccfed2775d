"""Samples of calibration data as the token ids of one model."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2
import torch
import transformers

from msmodelslim.errors import InvalidDatasetError, InvalidModelError
from msmodelslim.model.checkpoint import read_json_object
from msmodelslim.model.remote_code import one_at_a_time
from msmodelslim.model.skeleton import refuse_remote_code

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tiktoken.model")
_log = logging.getLogger(__name__)


class Sample(Protocol):
    """What is read of a `calibration.Sample`: one of text, messages and input_ids is there."""

    @property
    def place(self) -> str: ...
    @property
    def text(self) -> str | None: ...
    @property
    def messages(self) -> list[dict[str, Any]] | None: ...
    @property
    def input_ids(self) -> list[int] | None: ...


def load_tokenizer(model_path: Path, trust_remote_code: bool) -> Any:
    """The model's own tokenizer, from its directory alone.

    Raises:
        InvalidModelError: the directory has no tokenizer, or one that transformers cannot read.
        SecurityError: it needs code that is not allowed.
    """
    if not any((model_path / file).is_file() for file in _FILES):
        raise InvalidModelError(
            f"{model_path} has no tokenizer ({_FILES[0]} or the like)",
            "fetch it, or give calibration data as input_ids",
        )
    problems: list[str] = []
    config, whole = model_path / "tokenizer_config.json", model_path / "tokenizer.json"
    if config.is_file():
        refuse_remote_code(config, read_json_object(config, problems), trust_remote_code)
    if whole.is_file():
        read_json_object(whole, problems)
    if problems:
        raise InvalidModelError(f"{model_path}: {'; '.join(problems)}", "fetch the tokenizer's files again")
    try:
        with one_at_a_time(trust_remote_code):
            return transformers.AutoTokenizer.from_pretrained(
                model_path, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise InvalidModelError(
            f"{model_path}: transformers cannot load its tokenizer: {type(error).__name__} {error}",
            "fetch the tokenizer's files again",
        ) from error


def tokenize(
    samples: Sequence[Sample], tokenizer: Callable[[], Any], vocabulary: int, max_length: int, device: torch.device
) -> list[dict[str, Any]]:
    """`{"input_ids": LongTensor [1, T]}` a sample, T at most `max_length` tokens whatever form the sample has.

    Text gets the special tokens that the tokenizer puts there by itself; messages go through its chat template.

    Args:
        tokenizer: called only if a sample is text or messages.
        vocabulary: rows of the model's embedding.

    Raises:
        InvalidDatasetError: a sample without tokens, with one that the model does not have, or that the chat template
            refuses; names the sample.
    """
    found, longest, cut = [], ("", 0), 0
    for sample in samples:
        ids = _ids(sample, tokenizer)
        if len(ids) > max_length:
            cut, longest = cut + 1, max(longest, (sample.place, len(ids)), key=lambda entry: entry[1])
        ids = ids[:max_length]
        if not ids:
            raise InvalidDatasetError(f"{sample.place}: the sample has no token", "take it out")
        strange = [number for number in ids if not 0 <= number < vocabulary]
        if strange:
            raise InvalidDatasetError(
                f"{sample.place}: token id {strange[0]} is not one of the model's {vocabulary} (0 to {vocabulary - 1})",
                "tokenize the sample with this model's tokenizer",
            )
        found.append({"input_ids": torch.tensor([ids], dtype=torch.long, device=device)})
    if cut:
        _log.warning(
            "%d of %d samples are cut to %d tokens; the longest, %s, has %d", cut, len(found), max_length, *longest
        )
    return found


def _ids(sample: Sample, tokenizer: Callable[[], Any]) -> list[int]:
    if sample.input_ids is not None:
        return sample.input_ids
    if sample.text is not None:
        return tokenizer()(sample.text, verbose=False)["input_ids"]
    template = tokenizer()
    if template.chat_template is None:
        raise InvalidDatasetError(
            f"{sample.place}: has messages, but the model's tokenizer has no chat template", "give text instead"
        )
    try:
        return template.apply_chat_template(sample.messages, return_dict=True)["input_ids"]
    except (jinja2.TemplateError, TypeError) as error:
        raise InvalidDatasetError(
            f"{sample.place}: the model's chat template refuses the messages: {error}", "correct the messages"
        ) from error
