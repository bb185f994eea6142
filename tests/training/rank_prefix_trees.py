"""Trajectories that fork, over layouts; a job of 4 ranks.

Prints one line of JSON a case: how far gradient and log-probs are from those of flat rows in one process, and how many
tokens were computed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.training.cases import OPTIM, forked_batch, part, tiny_model
from verl.attention import prefix_tree
from verl.training.options import EngineOptions
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Layout, Mesh
from verl.workers.streams import gathered

LAYOUTS = (
    Layout(shard=4),
    Layout(shard=2, tp=2),
    Layout(tp=2, pp=2),
    Layout(sp=4),
    Layout(shard=2, sp=2),
    Layout(replicate=2, pp=2),
    Layout(pp=4),
)
FAST = [("llama", Layout(shard=2, tp=2)), ("window", Layout(sp=4)), ("gpt2", Layout(tp=2, pp=2))]
ALL = [(kind, layout) for kind in ("llama", "qwen2", "gpt2", "qwen3_moe", "window") for layout in LAYOUTS]
EXPERTS = [("qwen3_moe", Layout(shard=2, ep=2)), ("mixtral", Layout(ep=4))]
CASES = {"fast": FAST, "all": ALL + EXPERTS}
#: Without momentum the first moment after a step is the gradient.
FIRST = OPTIM.replace(betas=(0.0, 0.9), max_grad_norm=None)


def computed(kind: str, layout: Layout, group: Any = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Gradient and log-probs, and how many tokens they cost on all ranks that have rows of their own."""
    mesh = Mesh(tuple(range(layout.size)), layout)
    settings = EngineOptions(optim=FIRST, max_tokens_per_micro_batch=60, **options)
    engine = TorchEngine(tiny_model(kind, layers=4), settings, mesh=mesh, group=group)
    batch, counts, pack = forked_batch(), [], engine.forward.pack

    def counted(*args: Any) -> Any:
        flat = pack(*args)
        counts.append(sum(row.length for row in flat_rows(flat)))
        return flat

    engine.forward.pack = counted  # type: ignore[method-assign]
    log_probs = engine.predict(batch, ("log_probs",))["log_probs"]
    counts.clear()
    engine.update([part(batch, entropy=True)])
    tokens = torch.tensor(sum(counts))
    if group is not None:
        dist.all_reduce(tokens, group=group)
    state = {shard.name: shard.tensor for shard in gathered(engine.state()[0], group)}
    gradient = torch.cat([state[name].flatten() for name in sorted(state) if name.endswith(".exp_avg")])
    return gradient, log_probs, int(tokens) * layout.data_size // layout.size


def flat_rows(flat: Any) -> Any:
    """The rows of a micro-batch, of which a rank may have a slice of the tokens."""
    return getattr(flat.context, "_context", flat.context).rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    prefix_tree.LEAST = 3
    dist.init_process_group("gloo")
    ranks = dist.new_group([0, 1, 2, 3])
    flat_of: dict[str, Any] = {}
    for kind, layout in CASES[sys.argv[1]]:
        gradient, log_probs, tokens = computed(kind, layout, ranks)
        if dist.get_rank() == 0:
            if kind not in flat_of:
                flat_of[kind] = computed(kind, Layout(), share_prompts=False)
            expected, plain, flat = flat_of[kind]
            line = {
                "case": f"{kind} {layout}",
                "gradient": float((gradient - expected).norm() / expected.norm()),
                "predicted": float((log_probs - plain).abs().max()),
                "tokens": tokens,
                "flat": flat,
            }
            sys.stdout.write(json.dumps(line) + "\n")
    dist.destroy_process_group()
