"""`python -m het_plugin.export`: what it writes over."""

import json
import os

import pytest
import safetensors

from het_plugin import weights
from het_plugin.commands import export
from het_plugin.system import run_files


def test_a_file_says_what_it_is(digits_run, run_main, tmp_path):
  path = tmp_path / 'het_xl.safetensors'
  run_main(export, f'--checkpoint={digits_run[0]}', f'--output={path}')
  with safetensors.safe_open(path, framework='numpy') as file:
    about = json.loads(file.metadata()['het_plugin.parameters'])
  assert (about['head'], about['link'], about['num_classes']) == ('HetXL', 'softmax', 10)
  assert about['temperature'] == {'tau_min': 0.05, 'tau_max': 5.0} and about['image_size'] == 8
  assert about['class_names'] == [str(k) for k in range(10)]
  assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask():
  umask = os.umask(0)
  os.umask(umask)
  return umask


def test_a_file_and_what_cannot_be_written_over(digits_run, run_main, tmp_path):
  run = f'--checkpoint={digits_run[0]}'
  target = tmp_path / 'new' / 'het_xl.npz'
  assert str(target) in run_main(export, run, f'--output={target}')
  assert 'pre_logits' not in weights.read_arrays(target)
  file = tmp_path / 'notes'
  file.write_text('mine')
  assert 'no command has written it' in run_main(export, run, f'--output={file}', code=2)
  assert file.read_text() == 'mine'
  error = run_main(export, run, f'--output={tmp_path}', code=2)
  assert f'--output={tmp_path} is a folder with other files' in error
  assert {x.name for x in tmp_path.iterdir()} == {'new', 'notes'}
  (tmp_path / 'birds.v2').mkdir()  # its name alone might be that of a file
  assert 'A checkpoint of t5x' in run_main(export, run, f'--output={tmp_path}/birds.v2')
  folder = tmp_path / 'birds_v1.5'
  assert 'A checkpoint of t5x' in run_main(export, run, f'--output={folder}')
  assert (folder / 'checkpoint_2').is_dir()


def test_an_error_while_writing_leaves_what_was_there(tmp_path):
  path = tmp_path / 'x.npz'
  path.write_text('before')
  with pytest.raises(OSError, match='full'), run_files.replacing(path) as unfinished:
    unfinished.write_text('half')
    raise OSError('disk full')
  assert path.read_text() == 'before' and list(tmp_path.iterdir()) == [path]
