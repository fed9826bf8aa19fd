"""Runs t5x's mains one after the other in a process of their own, where the names of the trainer
are t5x's. Argument: a JSON file with a list of [main, gin files, bindings].
"""

import importlib
import json
import os
import sys

import gin

FUNCTIONS = {'train': 'train', 'eval': 'evaluate', 'infer': 'infer'}


def register(functions):
  """As t5x.main does: its gin files look for them in __main__."""
  for module, name in functions.items():
    function = getattr(importlib.import_module(f't5x.{module}'), name)
    setattr(sys.modules['__main__'], name, function)
    gin.external_configurable(function, module='__main__')


def run(main, files, bindings):
  import t5x
  from t5x import gin_utils

  gin.clear_config()
  gin_utils.parse_gin_flags(['.', os.path.dirname(t5x.__path__[0])], files, bindings)
  gin.get_configurable(FUNCTIONS[main])()


if __name__ == '__main__':
  register(FUNCTIONS)
  with open(sys.argv[1]) as file:
    for job in json.load(file):
      try:
        run(*job)
        print('DONE', flush=True)
      except ValueError as error:
        print('ValueError:', ' '.join(str(error).split()), flush=True)
