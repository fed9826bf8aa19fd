"""One compilation in a process of its own: the compiler keeps gigabytes until its process ends.

`compile_in_process` starts a Python that runs `main`, which reads a request from standard input and
leaves the result, or the one-sentence error, in a file.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from het_plugin.planning import topology
from het_plugin.planning.request import Request

_RUN = 'from het_plugin.planning import worker; worker.main()'


def compile_in_process(request: Request) -> dict[str, Any]:
  """`planning.step.plan` of the request in a fresh process.

  Raises:
    ValueError: what the plan raised.
    ChildProcessError: the process died; with the end of what it wrote.
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


def main() -> None:
  # Imported by the one who compiles: the trainer and its data take seconds to import.
  from het_plugin.config import command_line
  from het_plugin.planning import step

  request = Request(**json.load(sys.stdin))
  try:
    result = step.plan(request)
  except (ValueError, OSError, SyntaxError, ImportError) as error:
    result = {'error': command_line.one_sentence(error)}
  Path(sys.argv[1]).write_text(json.dumps(result))
