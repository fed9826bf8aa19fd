"""A file per command: its settings, which are its flags, and what it does."""
