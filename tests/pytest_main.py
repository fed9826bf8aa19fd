"""Runs the test files named on the command line; Bazel's tests have this as their main."""

import sys

import pytest

if __name__ == '__main__':
  sys.exit(pytest.main(sys.argv[1:]))
