"""The built-in t5x-style trainer: knows a model by t5x's surface, an action by its base class."""
