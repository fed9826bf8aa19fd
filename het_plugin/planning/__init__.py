"""Memory, FLOPs and collectives that a training run needs per device, from the compiler."""
