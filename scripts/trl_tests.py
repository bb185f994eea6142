"""Which of TRL's own tests pass with the import changed, and why the others do not.

    python scripts/trl_tests.py FOLDER [--trainers GRPO ...] [--only WORD] [--package trl] [--record FILE] [--work DIR]

FOLDER has TRL's `test_*_trainer.py`. They are copied, with `from trl import` as `from verl.trl import`, into a folder
where the models and data sets that they name are directories: tiny models of random weights, and made rows of the same
columns. Nothing is looked up. What a test needs besides (datasets, and TRL for what it tests of TRL's insides) is in
`.bench/trl` (`benchmarks/peer_env.sh trl`). `--package trl` runs them against TRL itself.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAINERS = ("GRPO", "RLOO", "DPO", "SFT", "KTO", "Reward")
_PEER = next(iter((ROOT / ".bench" / "trl" / "lib").glob("python*/site-packages")), Path())
#: What the copies begin with: they are run in a folder, `.`, that has everything.
_CONFTEST = """
import json, os, sys
sys.path.append(os.environ["TRL_SITE"])
import importlib
import pytest

# The tests may be of another release than the TRL that is installed.
def missing(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *arguments: False

for name in ["import_utils", *(f"trainer.{kind}_trainer" for kind in ("sft", "dpo", "kto", "reward"))]:
    importlib.import_module(f"trl.{name}").__getattr__ = missing

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if call.when == "call" or report.outcome != "passed":
        error = call.excinfo.value if call.excinfo else None
        kinds = [kind.__name__ for kind in type(error).__mro__] if error else []
        line = {"test": item.nodeid, "outcome": report.outcome, "kinds": kinds, "message": str(error)[:600]}
        with open("outcomes.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if any(word in item.nodeid.lower() for word in ("vlm", "vision", "image", "mm_token", "multimodal")):
            item.add_marker(pytest.mark.skip(reason="needs images"))

@pytest.fixture
def lazy_shared_datadir():
    import pathlib
    return pathlib.Path(__file__).parent / "tests" / "data"

if os.environ["TRL_PACKAGE"] == "trl":
    @pytest.fixture(autouse=True)
    def on_cpu(monkeypatch):
        from trl.trainer.base_config import _BaseConfig
        after = _BaseConfig.__post_init__
        monkeypatch.setattr(_BaseConfig, "__post_init__", lambda self: (setattr(self, "use_cpu", True), after(self))[1])
"""
#: Name of a stand-in -> kind of transformers' configuration, TRL's file of its chat template.
_MODELS = {
    "Qwen2ForCausalLM-2.5": ("qwen2", "qwen2_5"),
    "Qwen2ForSequenceClassification-2.5": ("qwen2", "qwen2_5"),
    "Qwen3ForCausalLM": ("qwen3", "qwen3"),
    "Qwen3ForSequenceClassification": ("qwen3", "qwen3"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "qwen3"),
    "Qwen3MoeForSequenceClassification": ("qwen3_moe", "qwen3"),
    "GptOssForCausalLM": ("gpt_oss", "gptoss"),
    "LlamaForCausalLM-3": ("llama", "llama3"),
    "LlamaForCausalLM-3.1": ("llama", "llama3_1"),
    "LlamaForCausalLM-3.2": ("llama", "llama3_2"),
    "LlamaForSequenceClassification-3.2": ("llama", "llama3_2"),
    "MistralForCausalLM-0.1": ("mistral", "llama3"),
    "MistralForCausalLM-0.2": ("mistral", "llama3"),
    "GPTNeoXForCausalLM": ("gpt_neox", None),
    "Cohere2ForCausalLM": ("cohere2", "cohere2"),
    "CohereForCausalLM": ("cohere", "cohere"),
    "Glm4MoeForCausalLM": ("glm4_moe", "glm4moe"),
    "Olmo3ForCausalLM": ("olmo3", "qwen2_5"),
    "GemmaForCausalLM": ("gemma", "gemma"),
    "Gemma2ForCausalLM": ("gemma2", "gemma"),
    "Phi3ForCausalLM": ("phi3", "phi3"),
    "Lfm2ForCausalLM": ("lfm2", "lfm2"),
    "Lfm2ForCausalLM-2.5": ("lfm2", "lfm2_2_5"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "deepseekv3"),
    "DeepseekV3ForCausalLM-0528": ("deepseek_v3", "deepseekv3"),
    "NemotronHForCausalLM-nano": ("nemotron_h", "nemotron_3_nano"),
}
_SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4,
    "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "qk_head_dim": 8, "v_head_dim": 4, "max_position_embeddings": 2048,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "sliding_window": 64, "mamba_num_heads": 4, "mamba_head_dim": 8,
    "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16, "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
#: Methods and attributes of TRL's trainers that are no names for scripts.
_INSIDES = {
    "compute_loss", "data_collator", "get_high_entropy_mask", "get_off_policy_mask", "liger_loss", "training_step",
    "get_eval_dataloader",
}  # fmt: skip
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
#: Rows to train, of 17 there.
_TRAIN = 4
#: Beginning, end, and another end.
_SENTENCES = [
    ("The kettle sings", " softly.", " loudly."), ("A long road is", " walked slowly.", " run at once."),
    ("Rain on the roof is", " music.", " noise."), ("Old maps show", " new ways.", " nothing."),
    ("Every door has", " two sides.", " one side."), ("The small boat", " comes home.", " sinks."),
    ("What is measured", " can be mended.", " is forgotten."), ("Bread needs", " time.", " haste."),
    ("A sharp knife is", " safer.", " worse."), ("The night train", " is late.", " is early."),
    ("Good tools are", " quiet.", " shiny."), ("Read the letter", " twice.", " never."),
    ("The garden waits", " for spring.", " in vain."), ("Half a plan is", " no plan.", " enough."),
    ("Cold water", " wakes you.", " burns."), ("The last page", " is blank.", " is torn."),
    ("Ask before", " you dig.", " you sleep."), ("One lamp is", " plenty.", " missing."),
    ("Keep the receipt", " for a year.", " in the rain."),
]  # fmt: skip


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def forms(conversational: bool) -> dict[str, list[dict[str, object]]]:
    """Rows by the name of their form."""

    def turn(role: str, text: str) -> object:
        return said(role, text.strip()) if conversational else text

    def whole(first: str, last: str) -> object:
        return said("user", first) + said("assistant", last.strip()) if conversational else first + last

    key = "messages" if conversational else "text"
    rows: dict[str, list[dict[str, object]]] = {}
    for number, (first, last, other) in enumerate(_SENTENCES):
        prompt, chosen, rejected = turn("user", first), turn("assistant", last), turn("assistant", other)
        for form, row in {
            "language_modeling": {key: whole(first, last)},
            "prompt_only": {"prompt": prompt},
            "prompt_completion": {"prompt": prompt, "completion": chosen},
            "preference": {"prompt": prompt, "chosen": chosen, "rejected": rejected},
            "implicit_prompt_preference": {"chosen": whole(first, last), "rejected": whole(first, other)},
            "unpaired_preference": {
                "prompt": prompt, "completion": rejected if number % 3 == 1 else chosen, "label": number % 3 != 1,
            },
        }.items():  # fmt: skip
            rows.setdefault(form, []).append(row)
    return rows


def tool_rows() -> dict[str, list[dict[str, object]]]:
    """Chats with tool calls, by the name of their form."""
    seconds = {"type": "integer", "description": "How long."}
    function = {
        "name": "start_timer",
        "description": "Starts a timer.",
        "parameters": {"type": "object", "properties": {"seconds": seconds}},
    }
    tool = {"type": "function", "function": function}
    rows: dict[str, list[dict[str, object]]] = {}
    for number in range(19):
        ask = said("user", f"Set a timer of {number} seconds")
        call = {"role": "assistant", "tool_calls": [
            {"type": "function", "function": {"name": "start_timer", "arguments": {"seconds": number}}}]}  # fmt: skip
        end = [{"role": "tool", "name": "start_timer", "content": f"{number}"}, *said("assistant", "It runs.")]
        reply = [call, *end]
        tools = json.dumps([tool])
        for form, row in {
            "language_modeling": {"messages": ask + reply, "tools": tools},
            "prompt_completion": {"prompt": ask, "completion": reply, "tools": tools},
            "preference": {"prompt": ask, "chosen": reply, "rejected": said("assistant", "No."), "tools": tools},
        }.items():
            rows.setdefault(form, []).append(row)
    return rows


def make_data(folder: Path) -> None:
    """Data sets as directories of JSON lines, with a configuration a form."""
    sets = {
        "zen": {f"{'conversational' if chats else 'standard'}_{form}": rows
                for chats in (False, True) for form, rows in forms(chats).items()},
        "toolcall": tool_rows(),
        "harmony": {form: forms(True)[form] for form in ("language_modeling", "prompt_completion", "preference")},
    }  # fmt: skip
    for name, configurations in sets.items():
        header = ["---", "configs:"]
        for form, rows in configurations.items():
            header += [f"- config_name: {form}", "  data_files:"]
            for split, part in (("train", rows[:_TRAIN]), ("test", rows[_TRAIN : _TRAIN + 2])):
                path = folder / name / form / f"{split}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(json.dumps(row) + "\n" for row in part))
                header += [f"  - split: {split}", f"    path: {form}/{split}.jsonl"]
        (folder / name / "README.md").write_text("\n".join([*header, "---", ""]))


def make_tokenizer(template: str | None):  # type: ignore[no-untyped-def]
    """Byte pairs of the rows and of the templates' words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    templates = sorted((_PEER / "trl" / "chat_templates").glob("*.jinja"))
    words = [" ".join(parts) + json.dumps(tool_rows()) for parts in _SENTENCES] + [
        path.read_text() for path in templates
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=_SPECIAL, initial_alphabet=letters, show_progress=False
    )
    core.train_from_iterator(words, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    if template:
        tokenizer.chat_template = (_PEER / "trl" / "chat_templates" / f"{template}.jinja").read_text()
    return tokenizer


def make_models(folder: Path) -> None:
    """Tiny models of random weights; one that transformers cannot make is named."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

    for name, (kind, template) in _MODELS.items():
        tokenizer = make_tokenizer(template)
        kinds = CONFIG_MAPPING[kind]
        plain = kinds()
        sizes = {key: value for key, value in _SIZES.items() if hasattr(plain, key)}
        scores = "Sequence" in name
        more = {"num_labels": 1} if scores else {}
        if kind == "gpt_oss":
            more["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        torch.manual_seed(0)
        try:
            config = kinds(vocab_size=len(tokenizer), **sizes, **more, **ends)  # type: ignore[arg-type]
            model = auto.from_config(config, dtype=torch.float32)
        except Exception as error:  # every one of them is a stand-in that some tests miss
            print(f"no stand-in for tiny-{name}: {error!r:.200}")
            continue
        model.save_pretrained(folder / f"tiny-{name}")
        tokenizer.save_pretrained(folder / f"tiny-{name}")
    make_remote(folder)


_REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
class RemoteConfig(LlamaConfig):
    model_type = "remote"
class RemoteModel(LlamaModel):
    config_class = RemoteConfig
class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
class RemoteForSequenceClassification(LlamaForSequenceClassification):
    config_class = RemoteConfig
"""


def make_remote(folder: Path) -> None:
    """A model whose code is beside it."""
    source, target = folder / "tiny-LlamaForCausalLM-3.2", folder / "tiny-RemoteForCausalLM"
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    kinds = {"AutoConfig": "RemoteConfig", "AutoModel": "RemoteModel", "AutoModelForCausalLM": "RemoteForCausalLM"}
    kinds["AutoModelForSequenceClassification"] = "RemoteForSequenceClassification"
    config |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"]}
    config["auto_map"] = {auto: f"remote.{name}" for auto, name in kinds.items()}
    (target / "config.json").write_text(json.dumps(config))
    (target / "remote.py").write_text(_REMOTE)


def copy_tests(source: Path, folder: Path, package: str, trainers: Sequence[str]) -> None:
    shutil.copytree(source / "data", folder / "tests" / "data", dirs_exist_ok=True)
    (folder / "conftest.py").write_text(_CONFTEST)
    for name in ["__init__.py", "testing_utils.py", "testing_constants.py", *(map(_file, trainers))]:
        text = (source / name).read_text()
        (folder / "tests" / name).write_text(re.sub(r"^from trl import", f"from {package} import", text, flags=re.M))


def _file(trainer: str) -> str:
    return f"test_{trainer.lower()}_trainer.py"


def insides(path: Path, package: str) -> dict[str, str]:
    """Test -> what it tests of TRL's insides, by the names that it and the helpers of its class read."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name: str(node.module)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    private = {name for name, module in imported.items() if module.startswith("trl.trainer.")} | _INSIDES
    public = {name for name, module in imported.items() if module == package}
    inside: dict[str, str] = {}
    for group in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        functions = {node.name: node for node in group.body if isinstance(node, ast.FunctionDef)}
        for name, function in functions.items():
            if not name.startswith("test_"):
                continue
            names = _names(function)
            for helper in names & functions.keys():
                names = names | _names(functions[helper])
            hidden = {one for one in names - functions.keys() if re.fullmatch(r"_[a-z]\w+", one)}
            symbols = sorted(names & private | hidden)
            if symbols or not names & public:
                module = imported.get(symbols[0], "") if symbols else "no trainer"
                inside[f"{group.name}::{name}"] = f"{module} {symbols[0]}".strip() if symbols else module
    return inside


def _names(node: ast.AST) -> set[str]:
    parts = [part for part in ast.walk(node) if isinstance(part, ast.Attribute | ast.Name)]
    return {part.attr if isinstance(part, ast.Attribute) else part.id for part in parts}


#: Letters of a message that are written down.
_SHOWN = 160


def outcomes(folder: Path, package: str) -> Iterator[tuple[str, str, str, str]]:
    """Trainer, test, what became of it, and why."""
    private = {
        trainer: insides(path, package) for trainer in TRAINERS if (path := folder / "tests" / _file(trainer)).exists()
    }
    for line in {line["test"]: line for line in _lines(folder)}.values():
        file, _, test = line["test"].partition("::")
        trainer = next(name for name in TRAINERS if file.endswith(_file(name)))
        symbol = private[trainer].get(re.sub(r"\[.*", "", test))
        message = re.sub(r"(?:/[\w.-]+)+/", "", " ".join(line["message"].split()))[:_SHOWN]  # no path of this machine
        ours = symbol is None or (line["outcome"] == "passed" and not symbol.startswith(("trl.", "no ")))
        if not ours and line["outcome"] != "skipped" and "VerlError" not in line["kinds"]:
            yield trainer, test, "private", str(symbol)
        elif line["outcome"] == "failed" and "VerlError" in line["kinds"]:
            yield trainer, test, "refused", message
        elif line["outcome"] == "failed":
            yield trainer, test, "failed", f"{line['kinds'][0]}: {message}"
        else:
            yield trainer, test, line["outcome"], message


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "outcomes.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=TRAINERS)
    parser.add_argument("--only", default="", help="tests whose name matches (pytest's -k)")
    parser.add_argument("--package", default="verl.trl")
    parser.add_argument("--record", type=Path, help="write the outcomes there, one a line")
    parser.add_argument("--work", type=Path, help="keep copies, stand-ins and outcomes there")
    parser.add_argument("--again", action="store_true", help="with --work: only what did not pass there the last time")
    parser.add_argument("--seconds", type=int, default=120, help="of one test at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        stand_ins = folder / "trl-internal-testing"
        if not stand_ins.exists():
            stand_ins.mkdir(parents=True)
            make_data(stand_ins)
            make_models(stand_ins)
        copy_tests(options.folder.resolve(), folder, options.package, options.trainers)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TRL_SITE": str(_PEER), "TRL_PACKAGE": options.package,
               "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}  # fmt: skip
        files = [f"tests/{_file(trainer)}" for trainer in options.trainers]
        if options.again:
            last = {line["test"]: line["outcome"] for line in _lines(folder)}
            files = [test for test, what in last.items() if what == "failed" and test.partition("::")[0] in files]
        else:
            (folder / "outcomes.jsonl").unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts="]
        command += [f"--timeout={options.seconds}", f"--rootdir={folder}", *files]
        subprocess.run([*command, *(["-k", options.only] if options.only else [])], cwd=folder, env=env)
        rows = sorted(outcomes(folder, options.package))
    report = [
        f"{trainer} {test}: {what}" + (f": {why}" if why and what != "passed" else "")
        for trainer, test, what, why in rows
    ]
    if options.record:
        options.record.write_text("\n".join(report) + "\n")
    reasons = Counter((what, why[:160]) for _, _, what, why in rows if what in ("failed", "refused", "private"))
    for (what, why), count in reasons.most_common():
        print(f"{count:4}  {what}: {why}")
    columns = ("passed", "refused", "private", "skipped", "failed")
    print(f"{'':8}" + "".join(f"{column:>9}" for column in columns))
    for trainer in options.trainers:
        counts = Counter(what for name, _, what, _ in rows if name == trainer)
        print(f"{trainer:8}" + "".join(f"{counts[column]:9}" for column in columns))


if __name__ == "__main__":
    main()
