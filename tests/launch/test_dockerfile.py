"""The container: what it copies, and its steps in an empty folder with its own environment."""

import json
import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / 'launch' / 'Dockerfile').read_text()
TINY = ['--gin.vit.depth=1', '--gin.vit.width=16', '--gin.vit.mlp_dim=16', '--gin.BATCH_SIZE=16']
TINY += ['--gin.TRAIN_STEPS=1', '--gin.EVAL_STEPS=1', '--gin.WARMUP_STEPS=0']


def instructions():
  """[(name, arguments)] of the Dockerfile."""
  lines = [line for line in TEXT.splitlines() if line and not line.startswith('#')]
  joined = '\n'.join(lines).replace('\\\n', ' ')
  return [tuple(line.split(maxsplit=1)) for line in joined.splitlines()]


def test_what_is_copied_exists_and_is_not_ignored():
  ignore = (ROOT / 'launch' / 'Dockerfile.dockerignore').read_text().splitlines()
  assert ignore[0] == '*'
  allowed = {line.removeprefix('!') for line in ignore if line.startswith('!')}
  copied = {name for kind, x in instructions() if kind == 'COPY' for name in x.split()[:-1]}
  assert copied == allowed
  assert all((ROOT / name).exists() for name in copied)
  # What the wheel is made of, see tests/project/test_wheel.py.
  assert {'pyproject.toml', 'hatch_build.py', 'README.md', 'het_plugin', 'gin'} <= copied


def test_it_installs_an_extra_of_the_project():
  extra = re.search(r'^ARG ACCELERATOR=(\w+)$', TEXT, re.M)[1]
  assert f'\n{extra} = [' in (ROOT / 'pyproject.toml').read_text()


@pytest.mark.slow
def test_its_steps_make_a_folder_that_trains(tmp_path):
  """Without root and without downloads: the dependencies are those of this environment."""
  venv.create(tmp_path / 'venv', with_pip=True)
  (site,) = (tmp_path / 'venv' / 'lib').glob('*/site-packages')
  (site / 'dependencies.pth').write_text(str(Path(pytest.__file__).parents[1]))
  (tmp_path / 'bin').mkdir()
  for name in ('useradd', 'chown'):
    stub = tmp_path / 'bin' / name
    stub.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/as_root\n')
    stub.chmod(0o755)
  path = f'{tmp_path}/venv/bin:{tmp_path}/bin:/usr/bin:/bin'
  # pip's negated option: 0 switches the isolation off.
  pip = {'PIP_NO_DEPS': '1', 'PIP_NO_INDEX': '1', 'PIP_NO_BUILD_ISOLATION': '0'}
  tests = {key: x for key, x in os.environ.items() if key.startswith(('JAX_', 'XLA_'))}
  environment = {'PATH': path, 'HOME': str(tmp_path), **tests, **pip}
  folder = tmp_path
  done = []
  for name, arguments in instructions():
    done.append(name)
    if name == 'FROM':
      assert re.fullmatch(r'python:3\.1[1-3]-slim', arguments)
    elif name in ('ARG', 'ENV'):
      key, _, value = arguments.partition('=')
      environment[key] = value
    elif name == 'WORKDIR':
      folder = tmp_path / arguments.strip('/')
      folder.mkdir()
    elif name == 'COPY':
      *sources, target = arguments.split()
      for source in sources:
        place = folder / target / source if target.endswith('/') else folder / target
        if (ROOT / source).is_dir():
          ignored = shutil.ignore_patterns('__pycache__')
          shutil.copytree(ROOT / source, place, dirs_exist_ok=True, ignore=ignored)
        else:
          shutil.copy(ROOT / source, place)
    elif name == 'RUN':
      subprocess.run(['bash', '-ec', arguments], cwd=folder, env=environment, check=True)
    elif name == 'USER':
      assert f'useradd --create-home {arguments}' in (tmp_path / 'as_root').read_text()
    else:
      assert name == 'ENTRYPOINT'
      command = json.loads(arguments)
  assert {'RUN', 'COPY', 'USER'} < {*done} and done[-1] == 'ENTRYPOINT'
  files = {path.name for path in folder.iterdir()}
  assert 'gin' in files and 'het_plugin' not in files  # the installed package is the one that runs
  job = ['--gin_file=gin/runs/digits_smoke.gin', '--gin_file=gin/heads/det.gin']
  job += [f"--gin.MODEL_DIR='{tmp_path}/run'"]
  subprocess.run([*command, *job, *TINY], cwd=folder, env=environment, check=True)
  assert (tmp_path / 'run' / 'checkpoint_1').exists()
