"""Transformers models: the packed forward, log-probs, value heads, loading, weights as shards, memory.

Reading order: `loading`, `source`, `fit`, `heads`, `packed`, `log_probs`, `outputs`, `lora`,
`llama`, `rope`, `portable`, `save`, `options`, `memory`, `int4`, `check`.
"""

from verl._base.later import later

__all__ = ["get_actor_critic"]
#: A name of the handles, which import this package, for scripts that import it from here.
HOMES = {"get_actor_critic": "verl.roles.backends"}
__getattr__ = later(__name__, HOMES)
