"""A tiny model directory with a byte-level tokenizer: real files, loaded as any model is."""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tests.properties  # noqa: F401 - its profiles
from tests import forked, leaks, session, setup_worker
from tests.session import (  # noqa: F401 - hooks
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_report_collectionfinish,
    pytest_runtest_protocol,
    pytest_terminal_summary,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

#: Libraries are imported where they are used: the first process of xdist, which runs no test, needs none of them.


@pytest.fixture(autouse=True)
def rewards_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards of a test tell it what they were called with, unless it is about their processes. Runs that a test
    starts as processes are as a user's are."""
    if request.node.get_closest_marker("reward_processes") is None:
        monkeypatch.setattr("verl.rewards.functions.can_travel", lambda function: False)


@pytest.fixture(autouse=True, scope="session")
def warm_ray() -> None:
    forked.warm_ray()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(leaks)
    session.pytest_configure(config)
    if count := config.getoption("numprocesses", None):
        forked.start(config.args)
        config.option.tx = [f"popen//python={shlex.join([sys.executable, setup_worker.__file__])}"] * count


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Modules and tests stay to the end: without them the collector of garbage has a hundredth of the objects to walk
    through, again and again."""
    if session.config.getoption("numprocesses", None):
        return (yield)  # the tests are collected by other processes
    import torch

    torch.set_num_threads(THREADS)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


os.environ["HF_HUB_OFFLINE"] = "1"
#: OpenMP's, of a process; jobs of several ranks have one each.
THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))
os.environ["RAY_DEDUP_LOGS"] = "0"  # read when Ray is imported, which a test may do before the package
# A shell's background job ignores Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SCRIPT = Path(__file__).parent / "rollout" / "plain_server.py"
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IDS = {"vocab_size": 260, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def config_of(kind: str) -> Any:
    """The configuration of a tiny model."""
    from transformers import GPT2Config, LlamaConfig, Qwen2Config

    if kind == "gpt2":
        return GPT2Config(**IDS, n_embd=32, n_layer=2, n_head=4, n_positions=256)
    if kind == "qwen2":
        return Qwen2Config(**IDS, **SIZES, num_key_value_heads=2)
    # "wide": heads as wide as vLLM's CPU kernels want them.
    sizes = SIZES | ({"hidden_size": 128} if kind == "wide" else {})
    return LlamaConfig(**IDS, **sizes, num_key_value_heads=2, tie_word_embeddings=True)


def byte_tokenizer(merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """One token a byte, and one for each merge."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *letters, *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>", chat_template=CHAT)


def save_tiny(path: Path, kind: str = "llama", dtype: torch.dtype | None = None, seed: int = 0) -> Path:
    """A tiny random model (in fp32 unless `dtype` says otherwise) and its tokenizer, as a Hugging Face directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=dtype or torch.float32)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    assert AutoTokenizer.from_pretrained(path).eos_token_id == 0
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama directory in fp32."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def smol() -> Path:
    """SmolLM2-135M-Instruct, which `make test-slow` fetches and `make test` does not."""
    path = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct"
    if not path.is_dir():
        pytest.skip("`make model` gets SmolLM2-135M-Instruct")
    return path


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny model directories: `make_tiny(kind, dtype, seed)`."""
    models: dict[Any, Path] = {}

    def make(kind: str = "llama", dtype: torch.dtype | None = None, seed: int = 0) -> Path:
        folder = tmp_path_factory.mktemp("models")
        if (kind, dtype, seed) not in models:
            models[kind, dtype, seed] = save_tiny(folder / f"saved-{kind}", kind, dtype, seed)
        return Path(shutil.copytree(models[kind, dtype, seed], folder / f"tiny-{kind}"))

    return make


class Plain:
    """A server in a process of its own."""

    def __init__(self, name: int, mode: str = "good", port: int = 0, version: int | None = None) -> None:
        command = [
            sys.executable,
            str(SCRIPT),
            str(port),
            str(name),
            mode,
            *([] if version is None else [str(version)]),
        ]
        self.process = forked.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture
def serve() -> Iterator[Callable[..., Plain]]:
    started: list[Plain] = []

    def start(name: int, mode: str = "good", **options: int) -> Plain:
        started.append(Plain(name, mode, **options))
        return started[-1]

    yield start
    for server in started:
        server.kill()
