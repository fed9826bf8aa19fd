"""One compilation in a separate process, because the compiler keeps gigabytes until it ends.

`compile_in_process` starts a Python that runs `step.main`, which reads a request from a file and
writes the result, or an error in one sentence, to another.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from het_plugin.planning import topology

_RUN = 'from het_plugin.planning import step; step.main()'


@dataclasses.dataclass(frozen=True)
class Request:
  """A request to compile steps of a run, 'train', 'eval' or both.

  `topology` is as in `topology.parse`, and `mesh` has (data, model) or (replica, data, model)
  devices; None takes the configuration's. `needs_samples` refuses a training loss without samples.
  `asked` has the batch_size, num_samples or num_microbatches that a search or a grid compiles for.
  `quick` compiles for a TPU without most of the compiler's optimizations.
  `heads` and `batches` are those of a grid: the run must allow each batch size, and one of the
  heads must use what a binding sets.
  """

  gin_files: Sequence[str]
  gin_bindings: Sequence[str]
  gin_search_paths: Sequence[str]
  topology: str
  mesh: Sequence[int] | None = None
  num_slices: int = 1
  steps: Sequence[str] = ('train', 'eval')
  needs_samples: bool = False
  heads: Sequence[str] = ()
  batches: Sequence[int] = ()
  quick: bool = False
  asked: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def for_train_step(
    self, batch: int | None = None, num_samples: int | None = None, head: str | None = None
  ) -> 'Request':
    """The train step of the same run, optionally with another batch size, S or head."""
    files = [*self.gin_files]
    bindings = [*self.gin_bindings]
    if head is not None:
      files.append(file_of_head(head))
    if batch is not None:
      bindings.append(f'BATCH_SIZE = {batch}')
    if num_samples is not None:
      bindings += [f'{name}/Integrator.num_samples = {num_samples}' for name in ('train', 'eval')]
    asked = {'batch_size': batch, 'num_samples': num_samples}
    asked = {name: value for name, value in asked.items() if value is not None}
    return dataclasses.replace(
      self, gin_files=files, gin_bindings=bindings, steps=('train',), asked=asked
    )

  def for_layout(self, mesh: Sequence[int], num_microbatches: int) -> 'Request':
    """The train step of the same run on another mesh, with the batch in so many microbatches."""
    bindings = [*self.gin_bindings, f'Trainer.num_microbatches = {num_microbatches}']
    asked = {'num_microbatches': num_microbatches}
    return dataclasses.replace(
      self, gin_bindings=bindings, mesh=mesh, steps=('train',), asked=asked
    )


def file_of_head(head: str) -> str:
  return f'het_plugin/gin/heads/{head}.gin'


def compile_in_process(request: Request) -> dict[str, Any]:
  """`planning.step.plan` of the request in a fresh process, whose `step.Progress` goes to stderr.

  Raises:
    ValueError: the plan raised an error.
    ChildProcessError: the process died; the message has the end of its output.
  """
  environment = os.environ | topology.environment(request.topology)
  environment['PYTHONPATH'] = os.pathsep.join(filter(None, sys.path))
  with tempfile.TemporaryDirectory() as name, (Path(name) / 'log').open('w+') as log:
    asked = Path(name) / 'asked.json'
    answer = Path(name) / 'answer.json'
    asked.write_text(json.dumps(dataclasses.asdict(request)))
    command = [sys.executable, '-c', _RUN, str(asked), str(answer)]
    with subprocess.Popen(
      command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
    ) as process:
      try:
        for line in process.stdout:  # of step.Progress; the compiler's own words are in the log
          print(line, end='', file=sys.stderr, flush=True)
        process.wait()
      except BaseException:
        process.kill()
        raise
    if not answer.exists():
      log.seek(0)
      end = ' / '.join(log.read().strip().splitlines()[-5:])
      raise ChildProcessError(
        f'the process that compiles for {request.topology} ended {_how(process.returncode)}: {end}'
      )
    result = json.loads(answer.read_text())
  if 'error' in result:
    raise ValueError(result['error'])
  return result


def _how(code: int) -> str:
  if code >= 0:
    return f'with code {code}'
  killed = ', perhaps because this machine ran out of memory (it needs up to 4 GiB)'
  return f'by {signal.Signals(-code).name}{killed if code == -signal.SIGKILL else ""}'
