"""What launches sets of training runs: the quick start and the fine-tuning of `select`."""
