"""Numbers of flags, and what is said of others."""

import pytest

from het_plugin.config import flag_values


def test_integers():
  assert flag_values.integers('k', ['3', '1', '3']) == [3, 1, 3]
  assert flag_values.integers('seeds', ['0']) == [0]
  assert flag_values.integers('mesh', ['2', '4'], least=1, lengths=(2, 3)) == [2, 4]


@pytest.mark.parametrize(
  'values,options,message',
  [
    (['1', 'x'], {}, '--n=1,x must be whole numbers of at least 0'),
    (['-1'], {}, '--n=-1 must be whole numbers of at least 0'),
    (['1.0'], {}, '--n=1.0 must be whole'),
    (['1', ''], {}, '--n=1, must be whole'),
    ([], {}, '--n= must be whole'),
    (['1', '0'], {'least': 1}, '--n=1,0 must be whole numbers of at least 1'),
    (['4'], {'least': 1, 'lengths': (2, 3)}, '--n=4 must be 2 or 3 whole numbers of at least 1'),
  ],
)
def test_no_integers(values, options, message):
  with pytest.raises(ValueError) as error:
    flag_values.integers('n', values, **options)
  assert str(error.value).startswith(message)


def test_a_positive_number_or_a_word():
  assert flag_values.positive_or_word('l2', '1e-3', ['loo']) == 1e-3
  assert flag_values.positive_or_word('l2', 'loo', ['loo', 'heldout']) == 'loo'
  for value in ('x', '', '0', '-1', 'nan', 'inf'):
    with pytest.raises(ValueError, match=f'--l2={value} must be a number > 0, or loo, heldout'):
      flag_values.positive_or_word('l2', value, ['loo', 'heldout'])
