"""Adapters for other trainers, one folder or file for each: t5x, big_vision, Kauldron.

Each imports its host, and its page of docs/ says how to get that. Nothing else of the project knows
one.
"""
