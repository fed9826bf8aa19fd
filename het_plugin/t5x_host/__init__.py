"""What t5x (https://github.com/google-research/t5x) needs of us to be the host of a model: docs/t5x.md.

The modules import t5x, which is on GitHub only; `configurables.register_t5x` registers them. Models, heads and
seqio tasks know nothing of them: they work under t5x without.
"""
