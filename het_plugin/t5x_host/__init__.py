"""What t5x (https://github.com/google-research/t5x) needs to be the host of
a run of ours: docs/t5x.md.

The modules import t5x, which is on GitHub only; `configurables.register_t5x` registers them.
Models, heads and seqio tasks know nothing of them, and work under t5x without.
"""
