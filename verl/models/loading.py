"""The one place that reads models and tokenizers from files.

Weights come from safetensors alone: a checkpoint that has only pickled weights is refused, since reading a
pickle runs the code in it. Python code that comes with a model runs only with `trust_remote_code=True`.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging

from verl.data.chat import ChatTokenizer
from verl.errors import ModelError, nearest
from verl.models.blank import blank
from verl.models.heads import ValueModel, read_head
from verl.models.int4 import to_int4

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_DTYPES: dict[str, Any] = {
    "auto": "auto",
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int4": "auto",
}
_HALF = (torch.bfloat16, torch.float16)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_model(
    path_or_name: str | Path,
    *,
    dtype: str = "auto",
    kind: Literal["causal", "value", "score", "classifier"] = "causal",
    trust_remote_code: bool = False,
) -> Any:
    """A model in evaluation mode, on CPU, from a directory or a hub name.

    Args:
        dtype: "float32", "bfloat16", "float16", "float64" or "auto": as stored, but see `slow_in_half_precision`;
            "int4": as "auto", then frozen and its linear layers in 4 bits (see `to_int4`).
        kind: "causal": a `PreTrainedModel` with its language-model head. "value" (one value a position) and
            "score" (one number a sequence): a `ValueModel` over the same backbone, with the head that the
            checkpoint has, else a new one (see `ValueModel.new_head`). "classifier": a transformers
            sequence classifier with one label, as a reward model; its head must be in the checkpoint.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        ModelError: nothing is there, it is no model, it has no safetensors weights, or it is not loadable.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"dtype '{dtype}' is not one that a model can be loaded in: {nearest(dtype, _DTYPES)}")
    name = _located(path_or_name, "model")
    options = {"dtype": _DTYPES[dtype], "use_safetensors": True, "trust_remote_code": trust_remote_code}
    with _explained(name, "model"), _quiet():
        if kind == "causal":
            model: Any = AutoModelForCausalLM.from_pretrained(name, **options)
        elif kind == "classifier":
            model = _load_classifier(name, options)
        else:
            model = ValueModel(AutoModel.from_pretrained(name, **options), read_head(name))
    if _DTYPES[dtype] == "auto" and next(model.parameters()).dtype in _HALF and slow_in_half_precision():
        model = model.float()
    model.eval()
    if dtype == "int4":
        to_int4(model)
    return model


def blank_model(
    path_or_name: str | Path,
    device: torch.device | str = "cpu",
    *,
    dtype: str,
    kind: Literal["causal", "value", "score"] = "causal",
    trust_remote_code: bool = False,
) -> Any:
    """The model that `load_model` loads, without weights, see `verl.models.blank`.

    Raises:
        ModelError: nothing is there, or it is no model.
    """
    name = _located(path_or_name, "model")
    with _explained(name, "model"), _quiet():
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        auto = AutoModelForCausalLM if kind == "causal" else AutoModel
        options = {"dtype": _DTYPES[dtype], "trust_remote_code": trust_remote_code}
        model = blank(partial(auto.from_config, config, **options), device)
        if kind != "causal":
            return ValueModel(model, read_head(name)).eval()
        with suppress(OSError):  # it has none
            model.generation_config = GenerationConfig.from_pretrained(name)
        return model


def configured_model(
    path_or_name: str | Path, *, dtype: str, kind: Literal["causal", "score"], trust_remote_code: bool = False
) -> Any:
    """The model that a configuration describes, without weights and whether or not there are files of them; "score": up
    to its head. "auto" is the dtype of the files, whatever this machine would take instead.

    Raises:
        ModelError: nothing is there, or it is no model.
    """
    name = _located(path_or_name, "configuration")
    with _explained(name, "model"), _quiet():
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        auto = AutoModelForCausalLM if kind == "causal" else AutoModel
        stored = getattr(config.get_text_config(), "dtype", None) or torch.float32
        options = {"dtype": stored if dtype == "auto" else _DTYPES[dtype], "trust_remote_code": trust_remote_code}
        return blank(partial(auto.from_config, config, **options))


def resolved_dtype(path_or_name: str | Path, dtype: str, *, trust_remote_code: bool = False) -> str | None:
    """The name of the dtype in which `load_model` loads; None: the files alone say it.

    Raises:
        ModelError: nothing is there, or it is no model.
    """
    if dtype != "auto":
        return dtype
    name = _located(path_or_name, "model")
    with _explained(name, "model"), _quiet():
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    stored = getattr(config.get_text_config(), "dtype", None)
    if stored in _HALF and slow_in_half_precision():
        return "float32"
    return next((name for name, kind in _DTYPES.items() if kind == stored), None)


@lru_cache(maxsize=1)
def slow_in_half_precision() -> bool:
    """Whether this machine computes bf16 and fp16 slower than fp32: it has no accelerator, and a CPU without
    instructions for bf16. Models stored in half precision are then loaded in fp32 where the dtype is "auto"."""
    if torch.accelerator.is_available() or platform.machine() not in ("x86_64", "AMD64"):
        return False
    slow = not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    if slow:
        logger.info("this CPU has no instructions for bf16: dtype 'auto' means float32 here")
    return slow


def _load_classifier(name: str, options: dict[str, Any]) -> Any:
    load = AutoModelForSequenceClassification.from_pretrained
    model, report = load(name, num_labels=1, output_loading_info=True, **options)
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ModelError(f"{name} is no reward model: its checkpoint has no {missing}, which would be random")
    return model


def load_tokenizer(path_or_name: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model. One without a padding token pads with its end-of-sequence token.

    Raises:
        ModelError: there is none, or it is not loadable.
    """
    name = _located(path_or_name, "tokenizer")
    if os.path.isdir(name) and not any((Path(name) / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(f"{name} has no tokenizer ({', '.join(_TOKENIZER_FILES)}): pass tokenizer=")
    with _explained(name, "tokenizer"), _quiet():
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return cast("PreTrainedTokenizerBase", tokenizer)


def find_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer of a live model, by the name or path it was loaded from.

    Raises:
        ModelError: the model was not loaded from anywhere, or no tokenizer is there.
    """
    name = getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "")
    if not name:
        raise ModelError(f"this {type(model).__name__} was not loaded from a name or path: pass tokenizer=")
    try:
        return load_tokenizer(name)
    except ModelError as error:
        raise ModelError(f"no tokenizer was found by the model's name '{name}': pass tokenizer= ({error})") from error


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Every token that ends a response: those of the generation config, the tokenizer's, and the one that its chat
    template ends a reply with, sorted."""
    found: set[int] = set() if tokenizer is None else {*ChatTokenizer(tokenizer).ends}
    for owner in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ids = getattr(owner, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    # Default configurations of small models name tokens beyond their vocabulary.
    return tuple(sorted(token for token in found if 0 <= token < model.config.get_text_config().vocab_size))


def _located(path_or_name: str | Path, what: str) -> str:
    """The name as transformers wants it; directories are looked into first, for errors in plain words."""
    name = os.path.expanduser(os.fspath(path_or_name))
    directory = Path(name)
    if directory.is_dir():
        if what == "model":
            _check_directory(directory)
        return name
    if directory.is_file():
        raise ModelError(f"{name} is a file: pass the directory that holds config.json and the weights")
    if not name or name.startswith((".", os.sep)) or len(directory.parts) > 2:
        raise ModelError(f"there is no {what} at '{name}': no such directory (working directory {os.getcwd()})")
    return name


def _check_directory(directory: Path) -> None:
    of_run = next((path for path in (directory, directory.parent) if (path / "actor" / "probe.json").is_file()), None)
    has_config = (directory / "config.json").is_file()
    if of_run is not None or (not has_config and (directory / "checkpoints").is_dir()):
        raise ModelError(
            f"{directory} is a checkpoint or a run, not a model directory: `verl export {of_run or directory} OUT` "
            "writes its model as one"
        )
    if not has_config:
        raise ModelError(f"{directory} is not a model directory: it has no config.json")
    if any(directory.glob("*.safetensors")):
        return
    if pickled := sorted([*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")]):
        raise ModelError(
            f"{directory} has only pickled weights ({pickled[0].name}), which can run code when read: "
            "where you trust them, load them with transformers and save_pretrained() them as safetensors"
        )
    raise ModelError(f"{directory} has a config.json but no weights (*.safetensors)")


@contextmanager
def _explained(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # transformers raises whatever a bad name, file or value leads it to
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        if os.path.isdir(name):
            raise ModelError(f"the {what} in {name} cannot be loaded: {reason}") from error
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        state = "the hub is switched off by HF_HUB_OFFLINE" if offline else "the hub did not give it"
        raise ModelError(
            f"{what} '{name}' is neither a directory here nor loadable from the hub or its cache ({state}): {reason}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the reports of unused heads, which are meant here."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
