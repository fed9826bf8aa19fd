"""What watches a run and never changes its result: `operations.Operations` is the observer that the
main of training hands to `train`.
"""
