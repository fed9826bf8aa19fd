"""Launchers that build training's command line take its flags and hand them on."""

import pytest
from absl import flags

from het_plugin.commands import train
from launch import sweep, xm_launch
from launch.gke import render

GIVEN = [
  '--heartbeat_timeout_seconds=30',
  '--accept_config_changes',
  '--stall_timeout_seconds=60',
  '--allow_imports=mine',
]


@pytest.mark.parametrize('launcher', [render, xm_launch])
def test_all_flags_of_training_are_taken(launcher, parsed_flags):
  before = set(flags.FLAGS)
  with parsed_flags(train):
    of_training = set(flags.FLAGS) - before
  with parsed_flags(launcher, *GIVEN):
    assert of_training <= set(flags.FLAGS)
    assert sorted(sweep.given_flags()) == sorted(GIVEN)
  with parsed_flags(launcher):
    assert sweep.given_flags() == []


def test_a_jobset_hands_them_on(run_main):
  text = run_main(
    render,
    '--gin_file=x.gin',
    '--name=a',
    '--image=i',
    '--topology=v5e:4x4',
    '--model_dir=gs://b/x',
    *GIVEN,
  )
  assert all(f'- {flag}\n' in text for flag in GIVEN)
