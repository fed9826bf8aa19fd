"""What other trainers need of us, one folder or file for each: t5x, big_vision, Kauldron.

Each imports its host, which docs/hosts.md says how to get. Nothing else of the project knows one.
"""
