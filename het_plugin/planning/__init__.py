"""What a training run needs per device, from the compiler: memory, FLOPs and collectives."""
