"""Studies: sets of training runs that are compared."""
