"""`python -m het_plugin.export`: what it writes over."""

import pytest

from het_plugin import export, weights


def test_a_file_and_what_cannot_be_written_over(digits_run, run_main, tmp_path):
  run = f'--checkpoint={digits_run[0]}'
  target = tmp_path / 'new' / 'het_xl.npz'
  assert str(target) in run_main(export, run, f'--output={target}')
  assert 'pre_logits' not in weights.read_arrays(target)
  file = tmp_path / 'notes'
  file.write_text('mine')
  assert 'must end in .npz or .safetensors' in run_main(export, run, f'--output={file}', code=2)
  assert file.read_text() == 'mine'


def test_an_error_while_writing_leaves_what_was_there(tmp_path):
  path = tmp_path / 'x.npz'
  path.write_text('before')
  with pytest.raises(OSError, match='full'), weights.replacing(path) as unfinished:
    unfinished.write_text('half')
    raise OSError('disk full')
  assert path.read_text() == 'before' and list(tmp_path.iterdir()) == [path]
