"""Watches a run and never changes its result.

The main of training passes `operations.Operations` to `train` as its observer.
"""
