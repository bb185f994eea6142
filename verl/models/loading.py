"""The one place that reads models and tokenizers from files.

Weights come from safetensors alone: a checkpoint that has only pickled weights is refused, since reading a
pickle runs the code in it. Python code that comes with a model runs only with `trust_remote_code=True`.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from verl.data.chat import ChatTokenizer
from verl.errors import ModelError, nearest, shown
from verl.models.fit import Fit, compare, weight_sources
from verl.models.heads import ValueModel, head_names, read_head, weight_files
from verl.models.int4 import to_int4
from verl.models.lora import has_adapters
from verl.models.options import DTYPES
from verl.weights.shards import on_meta

logger = logging.getLogger(__name__)

_DTYPES: dict[str, Any] = {name: "auto" if name in ("auto", "int4") else getattr(torch, name) for name in DTYPES}
#: Heads of our own are over a model without one.
_AUTO: dict[str, Any] = {
    "causal": transformers.AutoModelForCausalLM,
    "classifier": transformers.AutoModelForSequenceClassification,
}
_HALF = (torch.bfloat16, torch.float16)
_ADAPTERS = (
    "{} holds adapters of peft, not a model: give their base and lora, or write the model that they make with it by "
    "PeftModel.from_pretrained(base, ...).merge_and_unload().save_pretrained(...)"
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_model(
    path_or_name: str | Path,
    *,
    dtype: str = "auto",
    kind: Literal["causal", "value", "score", "classifier"] = "causal",
    trust_remote_code: bool = False,
    positions: int | None = None,
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
        positions: its `max_position_embeddings`, which longer rotary embeddings need no weights for; None: as stored.

    Raises:
        ModelError: nothing is there, it is no model, it has no safetensors weights, these are not all that the model
            wants and nothing else (see `verl.models.fit`), or it is not loadable.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"dtype '{dtype}' is not one that a model can be loaded in: {nearest(dtype, _DTYPES)}")
    with _loading(path_or_name, "model") as (name, logged):
        config = _config(name, kind, trust_remote_code, positions)
        model, report = _read(name, config, kind, trust_remote_code, _DTYPES[dtype], logged)
        _check_files(name, model, kind, report)
        _tie_config(model)
    if _DTYPES[dtype] == "auto" and next(model.parameters()).dtype in _HALF and slow_in_half_precision():
        model = model.float()
    model.eval()
    if dtype == "int4":
        to_int4(model)
    return model


def meta_model(
    path_or_name: str | Path,
    device: torch.device | str = "cpu",
    *,
    dtype: str,
    kind: Literal["causal", "value", "score"] = "causal",
    trust_remote_code: bool = False,
    positions: int | None = None,
) -> Any:
    """The model that `load_model` loads, without weights, see `verl.weights.shards`.

    Raises:
        ModelError: nothing is there, or it is no model.
    """
    with _loading(path_or_name, "model") as (name, _):
        config = _config(name, kind, trust_remote_code, positions)
        model = _from_config(name, config, kind, trust_remote_code, _DTYPES[dtype], device)
        files, aliases = weight_files(name), _check_files(name, model, kind)
        if any(not torch.equal(*(files[key].read() for key in pair)) for pair in aliases):
            config.tie_word_embeddings = False
            model = _from_config(name, config, kind, trust_remote_code, _DTYPES[dtype], device)
        with suppress(OSError):  # it has none
            if kind == "causal":
                model.generation_config = transformers.GenerationConfig.from_pretrained(name)
        return model


def configured_model(
    path_or_name: str | Path, *, dtype: str, kind: Literal["causal", "score"], trust_remote_code: bool = False
) -> Any:
    """The model that a configuration describes, without weights and whether or not there are files of them; "score": up
    to its head. "auto" is the dtype of the files, whatever this machine would take instead.

    Raises:
        ModelError: nothing is there, or it is no model.
    """
    with _loading(path_or_name, "configuration") as (name, _):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        for size in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "head_dim"):
            value = getattr(text, size, None)
            # A model without weights still has a module for each layer: one of a billion would never be made.
            if value is not None and not (type(value) is int and 0 < value < 1 << 24):
                raise ModelError(f"{size} of {name}, by its config.json, is {value!r}, no number of them")
        stored = getattr(text, "dtype", None) or torch.float32
        kind_of = "causal" if kind == "causal" else "backbone"
        return _from_config(name, config, kind_of, trust_remote_code, stored if dtype == "auto" else _DTYPES[dtype])


def resolved_dtype(path_or_name: str | Path, dtype: str, *, trust_remote_code: bool = False) -> str | None:
    """The name of the dtype in which `load_model` loads; None: the files alone say it.

    Raises:
        ModelError: nothing is there, or it is no model.
    """
    if dtype != "auto":
        return dtype
    with _loading(path_or_name, "model") as (name, _):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
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


def _config(name: str, kind: str, trust_remote_code: bool, positions: int | None) -> Any:
    """The configuration in the files, changed as asked; what of it an export restores is noted there, see
    `verl.models.rope.own_positions`."""
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    if kind == "classifier":
        config.num_labels = 1
    if positions is not None:
        config.stored_max_position_embeddings = config.max_position_embeddings
        config.max_position_embeddings = positions
    return config


def _read(
    name: str, config: Any, kind: str, trust_remote_code: bool, dtype: Any, logged: list[logging.LogRecord]
) -> tuple[Any, dict[str, Any]]:
    """The model, and transformers' report of it.

    Args:
        logged: what transformers logs meanwhile, for its errors that refer to its report there.
    """
    options = {"config": config, "dtype": dtype, "trust_remote_code": trust_remote_code, "use_safetensors": True}
    try:
        model, report = _AUTO.get(kind, AutoModel).from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except Exception as error:
        outline = None
        with suppress(Exception):
            outline = _from_config(name, config, kind, trust_remote_code, torch.float32)
        if outline is not None:  # says by name what is wrong, where that is names or shapes
            _check_files(name, outline, kind)
        texts = (re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage()) for record in logged)
        raise RuntimeError("\n".join([str(error), *(text for text in texts if "LOAD REPORT" in text)])) from error
    if has_adapters(model):
        raise ModelError(_ADAPTERS.format(name))
    return (ValueModel(model, read_head(name)) if kind in ("value", "score") else model), report


def _from_config(
    name: str, config: Any, kind: str, trust_remote_code: bool, dtype: Any, device: torch.device | str = "cpu"
) -> Any:
    """The model without weights."""
    make = partial(_AUTO.get(kind, AutoModel).from_config, config, dtype=dtype, trust_remote_code=trust_remote_code)
    model = on_meta(make, device)
    return ValueModel(model, read_head(name)).eval() if kind in ("value", "score") else model


def _check_files(name: str, model: Any, kind: str, report: dict[str, Any] | None = None) -> list[tuple[str, str]]:
    """Raises ModelError: the files do not fit the model, by their names, shapes and kinds of numbers or by
    transformers' `loading_info`. Returns `Fit.aliases`."""
    fits = [compare(model, weight_files(name))]
    if report is not None:
        reshaped = {key: (tuple(there), tuple(here)) for key, there, here in report["mismatched_keys"]}
        fits.append(Fit(sorted(report["missing_keys"]), sorted(report["unexpected_keys"]), reshaped))
    for fit in filter(None, fits):
        fit.check(name, model, _spare_names(name, model, kind))
    return fits[0].aliases if fits[0] else []


def _spare_names(name: str, model: Any, kind: str) -> Iterator[str]:
    """Names of tensors that the files may hold besides the model's weights: buffers that it fills itself; the head that
    is read separately, and the output layer of a language model, which a model with another head does not use."""
    inner, files = getattr(model, "backbone", model), weight_files(name)
    for buffer, _ in inner.named_buffers():
        yield from (buffer, f"{inner.base_model_prefix}.{buffer}")
    yield from (key for key in files if key.endswith(".masked_bias"))  # of attention in older releases
    if kind == "causal":
        return
    yield from head_names(files) if kind != "classifier" else ()
    with suppress(Exception):  # there may be no such language model
        whole = on_meta(partial(transformers.AutoModelForCausalLM.from_config, inner.config))
        sources, weights = weight_sources(whole, files), whole.state_dict()
        for target in weights.keys() - {f"{inner.base_model_prefix}.{key}" for key in whole.base_model.state_dict()}:
            yield from (target, *(source.key for source in sources.get(target, ())))


def _tie_config(model: Any) -> None:
    """Say in the configuration that weights are not tied where transformers found that the files have them apart."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if output is None or output.weight is model.get_input_embeddings().weight:
        return
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            logger.warning("the files of %s have an output layer of their own, which is not tied", model.name_or_path)
            config.tie_word_embeddings = False


def load_tokenizer(path_or_name: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A model's tokenizer. One without a padding token pads with its end-of-sequence token.

    Raises:
        ModelError: there is no tokenizer, or it is not loadable.
    """
    with _loading(path_or_name, "tokenizer") as (name, _):
        if os.path.isdir(name) and not any((Path(name) / file).is_file() for file in _TOKENIZER_FILES):
            raise ModelError(f"{name} has no tokenizer ({', '.join(_TOKENIZER_FILES)}): pass tokenizer=")
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return cast(PreTrainedTokenizerBase, tokenizer)


def as_tokenizer(tokenizer: Any) -> PreTrainedTokenizerBase:
    """A tokenizer as it is, or the one of this name or directory.

    Raises:
        ModelError: it is neither.
    """
    if isinstance(tokenizer, str):
        return load_tokenizer(tokenizer)
    if not hasattr(tokenizer, "get_vocab"):
        raise ModelError(f"tokenizer is a tokenizer of transformers, or its name or directory, not {shown(tokenizer)}")
    return cast(PreTrainedTokenizerBase, tokenizer)


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


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if the tokenizer has ids that the model does not embed. No error: many tokenizers carry a special token that
    no text contains."""
    size, highest = model.config.get_text_config().vocab_size, max(tokenizer.get_vocab().values(), default=0)
    if highest >= size:
        end = f"ids up to {highest}, the model embeds {size}: a text with one of the others will be refused"
        logger.warning("the tokenizer has token %s", end)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Every token that ends a response: by the generation config, the tokenizer, and its chat template, sorted."""
    ends: set[int] = set() if tokenizer is None else {*ChatTokenizer(tokenizer).ends}
    for owner in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ids = getattr(owner, "eos_token_id", None)
        ends.update([ids] if isinstance(ids, int) else ids or [])
    # Default configurations of small models name tokens beyond their vocabulary.
    return tuple(sorted(token for token in ends if 0 <= token < model.config.get_text_config().vocab_size))


def _located(path_or_name: str | Path, what: str) -> str:
    """The name as transformers wants it; directories are looked into first, for errors in plain words."""
    name = os.path.expanduser(os.fspath(path_or_name))
    directory = Path(name)
    if name and directory.is_dir():  # of no name `Path` makes the working directory
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
    if (directory / "adapter_config.json").is_file():
        raise ModelError(_ADAPTERS.format(directory))
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
def _loading(path_or_name: str | Path, what: str) -> Iterator[tuple[str, list[logging.LogRecord]]]:
    """Errors of transformers say what could not be loaded. Its reports are not shown, since what they say is checked
    here; yields the name for transformers, and what that logs, for its errors that refer to that."""
    name = _located(path_or_name, what)
    library = transformers_logging.get_logger("transformers")
    handlers, level, spreads = library.handlers, library.level, library.propagate
    bars = transformers_logging.is_progress_bar_enabled()
    kept = BufferingHandler(1 << 16)
    library.handlers, library.propagate = [kept], False
    library.setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        yield name, kept.buffer
    except ModelError:
        raise
    except Exception as error:  # transformers raises whatever a bad name, file or value leads it to
        reason = str(error).strip() or type(error).__name__
        if os.path.isdir(name):
            raise ModelError(f"the {what} in {name} cannot be loaded: {reason}") from error
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        state = "the hub is switched off by HF_HUB_OFFLINE" if offline else "the hub did not give it"
        raise ModelError(
            f"{what} '{name}' is neither a directory here nor loadable from the hub or its cache ({state}): {reason}"
        ) from error
    finally:
        library.handlers, library.propagate = handlers, spreads
        library.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
