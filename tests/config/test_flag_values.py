"""Numbers of flags, and what is said of others."""

import pytest

from het_plugin.config import flag_values


def test_numbers():
  assert flag_values.integers('k', ['3', '1', '3']) == [3, 1, 3]
  assert flag_values.integers('mesh', ['2', '4'], least=1, lengths=(2, 3)) == [2, 4]
  assert flag_values.positive_or_word('l2', '1e-3', ['loo']) == 1e-3
  assert flag_values.positive_or_word('l2', 'loo', ['loo', 'heldout']) == 'loo'


def test_what_is_no_number():
  for values in (['1', 'x'], ['-1'], ['1.0'], ['1', ''], []):
    with pytest.raises(ValueError, match=f'--n={",".join(values)} must be whole numbers of at'):
      flag_values.integers('n', values)
  with pytest.raises(ValueError, match='--n=4 must be 2 or 3 whole numbers of at least 1'):
    flag_values.integers('n', ['4'], least=1, lengths=(2, 3))
  for value in ('x', '', '0', '-1', 'nan', 'inf'):
    with pytest.raises(ValueError, match=f'--l2={value} must be a number > 0, or loo, heldout'):
      flag_values.positive_or_word('l2', value, ['loo', 'heldout'])
