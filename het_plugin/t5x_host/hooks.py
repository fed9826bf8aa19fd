"""Imported by gin/t5x/hooks.gin: our actions and optimizer beside a configuration of t5x's own."""

from het_plugin.config import registry

registry.register_t5x_hooks()
