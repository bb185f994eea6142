"""Roles that overlap in part, so that ranks are in unequal numbers of process groups; a job of 4 ranks.

Prints one line of JSON: by mesh dimension, the sums of rank numbers that rank 3 gets.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from verl.cluster.rank_context import RoleMeshes
from verl.cluster.world import World
from verl.training.ranks import Ranks
from verl.weights.layout import Layout, Mesh

if __name__ == "__main__":
    world = World(int(os.environ["RANK"]), 4, None, 60.0, "cpu")
    everyone = RoleMeshes("actor", {"train": Mesh((0, 1, 2, 3), Layout(replicate=2, sp=2))})
    pair = RoleMeshes("critic", {"train": Mesh((2, 3), Layout(shard=2))})
    found = {}
    for role in (pair, everyone):
        context = world.context(role)
        if context is None:
            continue
        ranks = Ranks(context.meshes["train"], context.groups["train"], context.parts)
        for dim in ("shard", "sp", "replicate"):
            total = torch.tensor(float(world.rank))
            ranks.all_reduce([total], dist.ReduceOp.SUM, [dim])
            found[f"{role.role} {dim}"] = float(total)
    if world.rank == 3:
        sys.stdout.write(json.dumps(found) + "\n")
    world.leave()
