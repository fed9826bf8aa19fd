"""Templates and names of classes: what is taken, what is refused."""

import pytest

from het_plugin.evaluation import prompts


def test_templates(tmp_path):
  assert prompts.fill('a {}, {x} {0}', ['b{}', '']) == ['a b{}, {x} {0}', 'a , {x} {0}']
  assert prompts.fill(*prompts.get_templates('photo'), ['cat']) == ['a photo of a cat.']
  assert prompts.get_templates(('the {}!', '{}')) == ('the {}!', '{}')
  file = tmp_path / 'mine.txt'
  file.write_text('une photo : {}\n\n  {} é\n', encoding='utf-8')
  assert prompts.get_templates(str(file)) == ('une photo : {}', '{} é')
  with pytest.raises(ValueError, match="templates='clip' .* none, photo, ensemble"):
    prompts.get_templates('clip')
  with pytest.raises(ValueError, match="'nothing' .*'{}'"):
    prompts.get_templates(('a {}', 'nothing'))
  with pytest.raises(ValueError, match='templates=5 must be'):
    prompts.get_templates(5)


def test_names_become_words(tmp_path):
  assert prompts.readable_names('t', ('aquarium_fish', 'crab'), None, 2) == (
    'aquarium fish',
    'crab',
  )
  assert prompts.readable_names('t', ('n01440764', 'b'), ('x', ' y_ z'), 2) == ('x', 'y z')
  file = tmp_path / 'names.txt'
  file.write_text('\ufefftench\ngoldfish\n', encoding='utf-8')  # with a byte-order mark
  assert prompts.readable_names('t', None, str(file), 2) == ('tench', 'goldfish')


@pytest.mark.parametrize(
  'own,given,message',
  [
    (None, None, "'t' .* class_names"),
    (('a', 'b'), ('x', 'y', 'z'), "class_names .* 3 .*'t' .* 2 "),
    (('n01440764', 'n01443537'), None, 'n01440764 .*class_names'),
    (('a', 'b'), '/no/such/file', "class_names='/no/such/file'"),
    (('a', 'b'), (1, 2), 'class_names: the name 1 must be a text'),
  ],
)
def test_wrong_names(own, given, message):
  with pytest.raises(ValueError, match=message):
    prompts.readable_names('t', own, given, 2)
