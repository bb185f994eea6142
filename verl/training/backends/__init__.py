"""Back ends with an optimizer of their own: DeepSpeed, Megatron-LM.

Reading order: `deepspeed`, `megatron`.
"""
