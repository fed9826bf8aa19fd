"""Imported by gin/t5x/*.gin: the names that run files bind are t5x's from here on."""

from het_plugin.config import registry

registry.register_t5x()
