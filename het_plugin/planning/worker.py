"""One compilation in a process of its own, since the compiler keeps gigabytes until it ends.

`compile_in_process` starts a Python that runs `step.main`, which reads a request from standard
input and writes the result, or an error in one sentence, to a file.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from het_plugin.planning import topology

_RUN = 'from het_plugin.planning import step; step.main()'


@dataclasses.dataclass(frozen=True)
class Request:
  """What to compile.

  Attributes:
    gin_files, gin_bindings, gin_search_paths: the configuration, as training takes it.
    topology: see `topology.parse`.
    mesh: (data, model) or (replica, data, model) devices; None takes the configuration's.
    num_slices: TPU slices.
    steps: 'train', 'eval' or both.
  """

  gin_files: Sequence[str]
  gin_bindings: Sequence[str]
  gin_search_paths: Sequence[str]
  topology: str
  mesh: Sequence[int] | None = None
  num_slices: int = 1
  steps: Sequence[str] = ('train', 'eval')

  def for_train_step(
    self, batch: int | None = None, num_samples: int | None = None, head: str | None = None
  ) -> 'Request':
    """The same run with another batch size, S or head, where given; only its train step."""
    files, bindings = [*self.gin_files], [*self.gin_bindings]
    if head is not None:
      files.append(f'het_plugin/gin/heads/{head}.gin')
    if batch is not None:
      bindings.append(f'BATCH_SIZE = {batch}')
    if num_samples is not None:
      bindings += [f'{name}/Integrator.num_samples = {num_samples}' for name in ('train', 'eval')]
    return dataclasses.replace(self, gin_files=files, gin_bindings=bindings, steps=('train',))


def compile_in_process(request: Request) -> dict[str, Any]:
  """`planning.step.plan` of the request in a fresh process.

  Raises:
    ValueError: the plan raised an error.
    ChildProcessError: the process died; the message has the end of its output.
  """
  environment = os.environ | topology.environment(request.topology)
  environment['PYTHONPATH'] = os.pathsep.join(filter(None, sys.path))
  with tempfile.TemporaryDirectory() as folder:
    answer = Path(folder) / 'answer.json'
    process = subprocess.run(
      [sys.executable, '-c', _RUN, str(answer)],
      input=json.dumps(dataclasses.asdict(request)),
      capture_output=True,
      text=True,
      env=environment,
      check=False,
    )
    if not answer.exists():
      end = ' / '.join(process.stderr.strip().splitlines()[-5:])
      raise ChildProcessError(
        f'the process that compiles for {request.topology} ended with code {process.returncode}, '
        f'as it does where memory runs out (up to 4 GiB are needed): {end}'
      )
    result = json.loads(answer.read_text())
  if 'error' in result:
    raise ValueError(result['error'])
  return result
