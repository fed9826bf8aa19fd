"""What a training run will need, from the compiler: memory, FLOPs and traffic of every device."""
