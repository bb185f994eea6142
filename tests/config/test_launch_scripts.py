"""Launch scripts of volcengine/verl: their keys, with how many of 212 scripts have each (release 0.6.1), and what they
mean here."""

from __future__ import annotations

import copy
import logging
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests import forked
from verl.config import load_config, to_yaml
from verl.config.document import describe
from verl.config.load import build_config
from verl.config.other_names import NAMES
from verl.config.unused_names import UNUSED, is_unused, refusal
from verl.errors import ConfigError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from launch_scripts import MADE_MODEL, Launch, Meaning, check, launches, make_local_names, means, run_small  # noqa: E402

KEYS = {
    line.partition(" ")[0]: int(line.partition(" ")[2])
    for line in (Path(__file__).parent / "verl_launch_keys.txt").read_text().splitlines()
}
#: What their source reads in data, sampling, rewards, advantages, losses, the optimizer or its schedule.
LEARNS = """
    data.*_files data.*_batch_size data.max_* data.truncation data.filter_* data.shuffle data.seed data.*_key
    data.sampler.* data.custom_cls.* data.*_max_samples data.apply_chat_template_kwargs* data.accuracy_*
    data.oversample_factor *.rollout.n *.rollout.temperature *.rollout.top_* *.rollout.do_sample
    *.rollout.val_kwargs.* *.rollout.max_model_len *.rollout.*_length *.rollout.multi_turn.*
    *.rollout.over_sample_rate *.rollout.quantization *.rollout.ignore_eos *.agent.default_agent_loop
    *.agent.agent_loop_config_path *.rollout.logprobs_mode *.rollout.dtype custom_reward_function.*
    reward_model.enable reward_model.model.path reward_model.reward_manager *.overlong_buffer*.len
    *.overlong_buffer*.enable *.overlong_buffer*.penalty_factor reward_model.reward_kwargs.max_resp_len
    reward_model.sandbox_fusion.url reward_model.model.update algorithm.* *.actor.clip_* *.actor.*entropy_coeff
    *.policy_loss.* *.actor.loss_* *.use_kl_loss *.kl_loss_* *.ppo_epochs *.ppo_mini_batch_size *.grad_clip
    *.clip_grad *.shuffle *.tau_* *.optim.lr* *.optim.*warmup* *.optim.weight_decay *.optim.betas
    *.optim.total_training_steps *.optim.optimizer *.optim.min_lr* *.optim.num_cycles *.model.path
    *.model.lora_* *.model.target_modules *.model.override_config* *.model.lora* *.fsdp_config.model_dtype
    *.mixed_precision.* critic.cliprange_value trainer.total_* trainer.critic_warmup trainer.val_*
    trainer.resume_* trainer.ref_update_freq async_training.* *.mtp.* *.router_replay.* *.freeze_vision_tower
    *.moe_router_dtype *.moe_aux_loss_coeff *.attention_dropout
""".split()  # noqa: SIM905
SPEED_THERE = {
    "data.val_batch_size", "data.filter_overlong_prompts_workers", "async_training.checkpoint_engine.",
    "async_training.use_trainer_do_validate",
}  # fmt: skip
#: A script in their manner.
SCRIPT = r"""
set -xeuo pipefail
export NODES=${NODES:-2}
HOME_DIR=$HOME/somewhere
prompts=32; mini=$((prompts / 4))
actor_args="
    actor_rollout_ref.actor.policy_loss.loss_mode=${1:-gspo} actor_rollout_ref.actor.clip_ratio_low=3e-4"
rollout=(
    actor_rollout_ref.rollout.n=4
    actor_rollout_ref.rollout.name=sglang
)
rm -rf "$HOME_DIR" ; touch /tmp/launch-script-was-here ; curl http://localhost/ > /tmp/launch-script-was-here
[ "$NODES" -gt 1 ] && length=64
python3 -m verl.trainer.main_ppo --config-name=ppo_trainer algorithm.adv_estimator=grpo \
    data.train_files="['$HOME_DIR/train.parquet']" data.val_files=$HOME_DIR/test.parquet \
    data.train_batch_size=${prompts} \
    data.max_response_length=${length} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B \
    actor_rollout_ref.actor.ppo_mini_batch_size=${mini} $actor_args "${rollout[@]}" \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 trainer.nnodes=$NODES trainer.n_gpus_per_node=8 \
    trainer.logger='["console","wandb"]' trainer.total_training_steps=100 trainer.total_epochs=2 "$@" 2>&1 | tee log.txt
"""
BASE = [
    "algorithm.adv_estimator=grpo", "data.train_files=train.parquet", "data.train_batch_size=32",
    "actor_rollout_ref.model.path=MODEL", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    forked.run([sys.executable, str(MADE_MODEL), "tiny", str(folder / "model")], check=True)
    make_local_names(folder)
    return folder


def test_a_script_is_read_and_reaches_nothing(tmp_path: Path, names: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    (launch,) = launches(tmp_path / "run.sh")
    assert launch.module == "verl.trainer.main_ppo"
    assert {"data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=8"} <= {*launch.settings}
    assert "actor_rollout_ref.actor.policy_loss.loss_mode=gspo" in launch.settings
    assert check(launch, names).refusals == ()
    assert not Path("/tmp/launch-script-was-here").exists() and {*tmp_path.iterdir()} == {tmp_path / "run.sh"}


def test_a_refusal_names_the_key(names: Path) -> None:
    bad = Launch(Path("x.sh"), "verl.trainer.main_ppo", (*BASE, "trainer.critic_warmup=5", "data.image_key=pictures"))
    said = "\n".join(check(bad, names).refusals)
    assert "trainer.critic_warmup" in said and "data.image_key" in said and "leave it out" in said


def test_a_script_that_asks_for_arguments_gets_some(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        '[ "$#" -lt 2 ] && exit 1; torchrun --nproc_per_node=$1 -m verl.trainer.fsdp_sft_trainer a.b=$2'
    )
    (launch,) = launches(tmp_path / "run.sh")
    assert (launch.module, launch.settings) == ("verl.trainer.fsdp_sft_trainer", ("a.b=saved",))


def test_what_no_setting_tells_is_refused(names: Path) -> None:
    assert check(Launch(Path("x.sh"), "recipe.sppo.main_sppo", (*BASE,)), names).refusals != ()
    images = (*BASE, "data.val_files=/data/geo3k/test.parquet")
    assert "text alone" in check(Launch(Path("x.sh"), "verl.trainer.main_ppo", images), names).refusals[0]


def test_what_settings_mean_by_their_source() -> None:
    actor = "actor_rollout_ref.actor"
    usual = means([])
    assert usual == Meaning(1024, 4, (1e-6, 1e-6), "gae vanilla [0.2, 0.2] token-mean, no KL, entropy 0.0")
    some = [*BASE, f"{actor}.ppo_epochs=2", f"{actor}.optim.lr_warmup_steps=2", f"{actor}.use_kl_loss=True"]
    assert means(some).is_as(
        Meaning(
            128, 8, (9e-6 / 32, 25e-6 / 32), "grpo vanilla [0.2, 0.2] token-mean, KL 0.001 in the loss, entropy 0.0"
        )
    )
    streamed = [*some, "rollout.total_rollout_steps=64", "async_training.trigger_parameter_sync_step=2"]
    assert (means(streamed).samples, means(streamed).updates) == (64, 4)
    assert not means(some).is_as(usual)


@pytest.mark.slow
def test_two_steps_do_what_the_settings_mean(names: Path) -> None:
    actor = "actor_rollout_ref.actor"
    settings = (
        *BASE,
        f"{actor}.optim.lr_warmup_steps=10",
        f"{actor}.clip_ratio_high=0.28",
        f"{actor}.use_kl_loss=True",
    )
    meaning, deed = run_small(Launch(Path("x.sh"), "verl.trainer.main_ppo", settings), names)
    assert deed.is_as(meaning) and (meaning.samples, meaning.updates) == (32, 4)
    assert "[0.2, 0.28]" in deed.loss and "KL 0.001 in the loss" in deed.loss


def test_every_key_has_an_answer() -> None:
    ours = {key.path for key in describe()}
    answered = {
        key for key in KEYS
        if key in NAMES or key in ours or is_unused(key) or refusal(key, "x") is not None
    }  # fmt: skip
    share = sum(KEYS[key] for key in answered) / sum(KEYS.values())
    print(f"keys with an answer: {len(answered)} of {len(KEYS)}; {share:.4f} of their uses")
    assert share > 0.995 and {key for key in KEYS if KEYS[key] >= 5} <= answered


def test_what_teaches_is_never_of_no_effect() -> None:
    assert set(UNUSED) == {"logging", "speed", "memory", "placement"}
    resolved = [*KEYS, *(name.strip("*") for names in UNUSED.values() for name in names.split())]
    stray = {
        key for key in resolved
        if is_unused(key) and any(fnmatchcase(key, pattern) for pattern in LEARNS) and key not in SPEED_THERE
    }  # fmt: skip
    assert stray == set()


_ACTOR = "actor_rollout_ref.actor"
_OVERLONG = [
    "reward_model.reward_manager=dapo", "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.len=16", "data.max_response_length=64",
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], {"name": "grpo", "kl_in": "none", "rollout_is": None}),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean"], {"name": "gmpo", "clip_ratio_low": 0.2}),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "actor_rollout_ref.actor.clip_ratio_high=4e-4"],
         {"name": "gspo", "clip_ratio_low": 0.2, "clip_ratio_high": 4e-4}),
        (["actor_rollout_ref.actor.use_kl_loss=True"],
         {"kl_in": "loss", "kl_coef": 0.001, "kl_estimator": "low_var_kl"}),
        ([*_OVERLONG, "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5"],
         {"name": "dapo", "filter_groups": False, "overlong_length": 64, "overlong_buffer": 16,
          "overlong_penalty": 0.5, "clip_ratio_high": 0.2}),
        ([f"{_ACTOR}.policy_loss.loss_mode=geo_mean", *_OVERLONG, "algorithm.filter_groups.enable=True",
          "algorithm.filter_groups.metric=seq_reward"],
         {"name": "gmpo", "filter_groups": True, "filter_metric": "outcome", "overlong_buffer": 16,
          "clip_ratio_low": 0.2}),
        ([f"{_ACTOR}.policy_loss.loss_mode=gspo", *_OVERLONG], {"name": "gspo", "overlong_length": 64}),
        ([f"{_ACTOR}.policy_loss.loss_mode=sapo", f"{_ACTOR}.tau_neg=1.1", f"{_ACTOR}.clip_ratio_high=0.3"],
         {"name": "sapo", "temperature_neg": 1.1}),
        (["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=3.0"],
         {"rollout_is": "token", "rollout_is_threshold": 3.0}),
    ],
)  # fmt: skip
def test_the_loss_they_mean(settings: list[str], expected: dict[str, object]) -> None:
    algorithm = load_config(None, [*BASE, *settings]).algorithm
    assert expected.items() <= {"name": algorithm.name, **algorithm.options}.items()


def test_the_batch_and_schedule_they_mean() -> None:
    config = load_config(None, [
        *BASE, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=50",
        "trainer.total_epochs=3", "data.val_files=test.parquet", "trainer.val_before_train=False",
        "actor_rollout_ref.rollout.val_kwargs.top_p=0.7", "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "data.gen_batch_size=null", "actor_rollout_ref.actor.ppo_micro_batch_size=64", "trainer.n_gpus_per_node=8",
    ])  # fmt: skip
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    assert (config.data.batch_size, config.data.max_prompt_length, actor.mini_batch_size) == (32, 512, 32)
    assert (config.actor_rollout_ref.rollout.max_new_tokens, actor.micro_batch_size, actor.strategy) == (512, 8, "fsdp")
    assert (actor.optim.warmup_steps, actor.optim.weight_decay, actor.optim.adam_eps) == (
        20,
        0.01,
        1e-8,
    )
    assert (trainer.total_steps, trainer.total_epochs, trainer.eval_every, trainer.save_every) == (50, None, None, None)
    assert (trainer.eval_top_p, trainer.eval_temperature, trainer.eval_before) == (0.7, 1.0, False)
    assert (config.reward.name, trainer.placement) == ("data_source", "cuda:0-7")


def test_sizes_of_megatron() -> None:
    megatron = "actor_rollout_ref.actor.megatron"
    sizes = [f"{megatron}.tensor_model_parallel_size=2", f"{megatron}.pipeline_model_parallel_size=4"]
    actor = load_config(None, [*BASE, *sizes, "trainer.n_gpus_per_node=8"]).actor_rollout_ref.actor
    assert (actor.strategy, actor.tensor_parallel_size, actor.pipeline_parallel_size) == ("megatron", 2, 4)
    more = [*sizes, f"{megatron}.context_parallel_size=2", "actor_rollout_ref.actor.strategy=megatron"]
    actor = load_config(None, [*BASE, *more]).actor_rollout_ref.actor
    assert (actor.strategy, actor.ulysses_sequence_parallel_size) == ("fsdp", 2)


def test_streamed_samples_are_a_step_between_two_synchronisations() -> None:
    """`fully_async_policy`: batches of 4 mini-batches of 8 prompts, 2 of them on weights of one version."""
    streamed = [
        *(word for word in BASE if "train_batch_size" not in word), "data.train_batch_size=0", "data.gen_batch_size=1",
        "async_training.require_batches=4", "async_training.trigger_parameter_sync_step=2", "data.val_files=v.parquet",
        "async_training.staleness_threshold=0.5", "async_training.partial_rollout=True", "rollout.test_freq=10",
        "rollout.total_rollout_steps=6400", "rollout.total_epochs=10", "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
    ]  # fmt: skip
    config = load_config(None, [*streamed, "async_training.use_rollout_log_probs=True"])
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    assert (config.data.batch_size, actor.mini_batch_size, actor.optim.warmup_steps) == (64, 32, 40)
    assert (trainer.total_steps, trainer.total_epochs, trainer.eval_every, trainer.max_staleness) == (100, None, 10, 1)
    assert config.algorithm.options["rollout_is"] == "ratio"
    rejected = ["rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.99_1.01"]
    decoupled = [f"algorithm.rollout_correction.{word}" for word in rejected]
    algorithm = load_config(None, [*streamed, "async_training.compute_prox_log_prob=True", *decoupled]).algorithm
    assert {"rollout_is": None, "rollout_rs_lower": 0.99, "rollout_rs_threshold": 1.01}.items() <= (
        algorithm.options.items()
    )
    with pytest.raises(ConfigError, match=r"use_rollout_log_probs .*write async_training.compute_prox_log_prob=True"):
        load_config(None, [*streamed, "async_training.use_rollout_log_probs=False"])


def test_the_ratio_may_be_to_the_engine() -> None:
    correction = "algorithm.rollout_correction"
    words = [f"{correction}.bypass_mode=true", f"{correction}.rollout_is=token", f"{correction}.rollout_is_threshold=3"]
    options = load_config(None, [*BASE, *words]).algorithm.options
    assert options["rollout_is"] == "ratio" and "rollout_is_threshold" not in options
    with pytest.raises(ConfigError, match="write one number, or LOWER_UPPER"):
        load_config(None, [*BASE, f"{correction}.rollout_rs=token_k1", f"{correction}.rollout_rs_threshold=high"])


def test_what_a_script_generates_is_its_batch() -> None:
    """Their loader's batches are of `gen_batch_size`, which filtering brings down to `train_batch_size`."""
    assert load_config(None, [*BASE, "data.gen_batch_size=48"]).data.batch_size == 48
    filtered = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"]
    assert load_config(None, [*BASE, "data.gen_batch_size=48", *filtered]).data.batch_size == 32


def test_their_trainer_of_demonstrations() -> None:
    """`fsdp_sft_trainer`, which has sections of its own, and a schedule of all epochs."""
    settings = [
        "data.train_files=train.parquet", "data.val_files=test.parquet", "data.prompt_key=extra_info",
        "data.response_key=extra_info", "data.prompt_dict_keys=[question]", "+data.response_dict_keys=[answer]",
        "data.micro_batch_size_per_gpu=4", "optim.lr=1e-4", "model.partial_pretrain=MODEL", "model.lora_rank=32",
        "model.target_modules=all-linear", "ulysses_sequence_parallel_size=2", "use_remove_padding=true",
        "trainer.default_local_dir=saved", "trainer.logger=console", "trainer.total_epochs=2",
    ]  # fmt: skip
    config = load_config(None, settings)
    policy, data = config.actor_rollout_ref, config.data
    assert (config.algorithm.name, policy.model.path, policy.model.lora.r) == ("sft", "MODEL", 32)
    assert (data.batch_size, data.chat) == (256, True)
    assert data.columns == {"prompt": "extra_info.question", "completion": "extra_info.answer"}
    optim = policy.actor.optim
    assert (optim.lr, optim.betas, optim.weight_decay, optim.schedule) == (1e-4, (0.9, 0.95), 0.01, "cosine")
    assert (optim.warmup_ratio, policy.actor.micro_batch_size, policy.actor.strategy) == (0.1, 4, "fsdp")
    assert (config.trainer.total_epochs, config.trainer.eval_before, config.trainer.save_every) == (2, False, None)
    chats = ["data.multiturn.enable=true", "data.multiturn.messages_key=turns", "data.max_length=64"]
    config = load_config(None, [*settings, *chats])
    assert (config.data.columns, config.data.chat) == ({"messages": "turns"}, None)
    with pytest.raises(ConfigError, match=r"(?s)data.truncation .*'left' is.*trainer.total_training_steps .* 5 is"):
        load_config(None, [*settings, "data.truncation=left", "trainer.total_training_steps=5"])
    with pytest.raises(ConfigError, match=r"model.lora_adapter_path .*merge the adapters"):
        load_config(None, [*settings, "model.lora_adapter_path=adapters"])


def test_a_start_and_a_length_of_ones_own() -> None:
    model = "actor_rollout_ref.model"
    for override in ("override_config", "override_config.model_config"):
        config = load_config(None, [*BASE, f"{model}.{override}.max_position_embeddings=32768"])
        assert config.actor_rollout_ref.model.max_position_embeddings == 32768
    assert config.trainer.resume
    assert not load_config(None, [*BASE, "trainer.resume_mode=disable"]).trainer.resume
    assert load_config(None, [*BASE, "trainer.resume_from_path=x"]).trainer.resume, "read with resume_path alone"
    with pytest.raises(ConfigError, match=r"trainer.resume_mode .*trainer.output_dir"):
        load_config(None, [*BASE, "trainer.resume_mode=resume_path"])


def test_what_is_read_beside_another_key_alone() -> None:
    megatron, model = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.model"
    unread = [
        f"{megatron}.dist_checkpointing_path=saved", f"{megatron}.use_dist_checkpointing=False", f"{model}.lora_rank=0",
        f"{model}.exclude_modules=visual", "algorithm.filter_groups.metric=seq_reward", "+trainer.num_global_batch=1",
        f"{_ACTOR}.tau_pos=2.0", "algorithm.lam=0.95",
    ]  # fmt: skip
    more = ["trainer.experiment_name=grpo 8npu}", "+data.apply_chat_template_kwargs.enable_thinking=False"]
    config = load_config(None, [*BASE, *unread, *more])
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    assert (config.trainer.run_name, config.algorithm.name) == ("grpo-8npu", "grpo")
    assert config.actor_rollout_ref.model.lora is None
    with pytest.raises(ConfigError, match=r"exclude_modules .*'visual' is not taken: write the layers"):
        load_config(None, [*BASE, f"{model}.lora_rank=8", f"{model}.exclude_modules=visual"])
    with pytest.raises(ConfigError, match=r"use_dist_checkpointing .*True is not taken: leave it out"):
        load_config(None, [*BASE, f"{megatron}.dist_checkpointing_path=x", f"{megatron}.use_dist_checkpointing=True"])
    with pytest.raises(ConfigError, match=r"there is no vanilla with overlong_buffer or filter_groups for gpg"):
        load_config(None, ["algorithm.adv_estimator=gpg", *BASE[1:], *_OVERLONG])


def test_what_is_of_no_effect_may_decide_another_setting() -> None:
    """Where things stand says how they are trained: engines apart are a step behind, several machines share a model."""
    settings = load_config(None, [*BASE, "actor_rollout_ref.hybrid_engine=false"])
    assert settings.trainer.max_staleness == 1
    assert load_config(None, [*BASE, "actor_rollout_ref.hybrid_engine=true"]).trainer.max_staleness is None
    several = load_config(None, [*BASE, "trainer.nnodes=2", "trainer.n_gpus_per_node=1"])
    assert several.actor_rollout_ref.actor.strategy == "fsdp"


def test_their_resolved_settings(caplog: pytest.LogCaptureFixture) -> None:
    """A file with every key in it, most of them null or as they are by default."""
    optim = {"_target_": "x.Optim", "lr": 1e-6, "optimizer": "AdamW", "lr_warmup_steps": -1,
             "lr_warmup_steps_ratio": 0.0,
             "total_training_steps": -1, "betas": [0.9, 0.999], "clip_grad": 1.0, "min_lr_ratio": 0.0,
             "num_cycles": 0.5, "lr_scheduler_type": "constant", "warmup_style": None, "weight_decay": 0.01,
             "override_optimizer_config": None}  # fmt: skip
    profiler = {"_target_": "x.Profiler", "enable": False, "ranks": [], "tool_config": {"nsys": {"discrete": False}}}
    content = {
        "actor_rollout_ref": {
            "hybrid_engine": True, "nccl_timeout": 600,
            "model": {"path": "MODEL", "lora_rank": 0, "lora_alpha": 16, "exclude_modules": None, "override_config": {},
                      "mtp": {"_target_": "x.Mtp", "enable": False}, "use_shm": False},
            "actor": {"strategy": "fsdp", "ppo_mini_batch_size": 256, "ppo_micro_batch_size": None, "clip_ratio": 0.2,
                      "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "tau_pos": 1.0, "tau_neg": 1.05,
                      "optim": dict(optim),
                      "policy_loss": {"_target_": "x.Loss", "loss_mode": "vanilla", "kl_cov_ratio": 0.0002},
                      "profiler": copy.deepcopy(profiler), "router_replay": {"mode": "disabled"},
                      "loss_scale_factor": None},
            "ref": {"strategy": "fsdp", "use_torch_compile": True, "profiler": copy.deepcopy(profiler),
                    "fsdp_config": {"seed": 42}},
            "rollout": {"name": "vllm", "top_k": -1, "n": 5, "prompt_length": 512, "response_length": 512,
                        "over_sample_rate": 0,
                        "engine_kwargs": {"vllm": {}, "sglang": {}}, "val_kwargs": {"top_k": -1, "top_p": 1.0, "n": 1,
                        "temperature": 0, "do_sample": False},
                        "multi_turn": {"enable": False, "tool_config_path": None},
                        "agent": {"num_workers": 8, "default_agent_loop": "single_turn_agent"}, "max_model_len": None},
        },
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"_target_": "x", "type": "fixed"},
                      "use_pf_ppo": False, "pf_ppo": {"reweight_method": "pow", "weight_pow": 2.0},
                      "rollout_correction": {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}},
        "critic": {"strategy": "fsdp", "optim": dict(optim), "cliprange_value": 0.5},
        "data": {"train_files": "train.parquet", "val_files": "test.parquet", "train_batch_size": 1024, "seed": None,
                 "max_prompt_length": 512, "max_response_length": 512, "custom_cls": {"path": None, "name": None},
                 "image_key": "images", "apply_chat_template_kwargs": {}, "reward_fn_key": "data_source"},
        "reward_model": {"enable": False, "model": {"path": "RM", "input_tokenizer": None}, "reward_manager": "naive"},
        "custom_reward_function": {"path": None, "name": "compute_score"},
        "trainer": {"total_epochs": 15, "total_training_steps": None, "save_freq": -1, "test_freq": 5,
                    "logger": ["console"],
                    "resume_mode": "auto", "resume_from_path": None, "n_gpus_per_node": 8, "nnodes": 1},
        "transfer_queue": {"enable": False}, "ray_kwargs": {"ray_init": {"num_cpus": None}},
    }  # fmt: skip
    with caplog.at_level(logging.WARNING):
        config = build_config(content)
    assert (config.algorithm.name, config.trainer.total_epochs, config.trainer.eval_every) == ("grpo", 15, 5)
    assert "of no effect here" in caplog.text and "total_epochs: 15" in to_yaml(config)
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.actor.policy_loss.loss_mode \(.*clip_cov"):
        load_config(None, [*BASE, "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"])
