"""het_plugin.train, which also writes down what each process does: launch/recorder.py says what.

python -m launch.recorded_train FOLDER --gin_file=...
"""

import sys
from pathlib import Path

from het_plugin import train
from het_plugin.config import command_line
from launch import recorder

if __name__ == '__main__':
  recorder.install(recorder.Recorder(Path(sys.argv.pop(1))))
  train.define_flags()
  command_line.run(train.main)
