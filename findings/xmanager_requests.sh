#!/usr/bin/env bash
# XManager: requests for TPUs and newer GPUs that no node of GKE can meet, and arguments that its cloud client refuses.
#
# Version: xmanager 0.8.5.post1.
# Behaviour: the Kubernetes executor leaves a TPU out of the limits and of the node selector, so the job runs where there
#   is none, and JAX trains on the CPU. A GPU is looked for by 'nvidia-tesla-NAME', which GKE has up to A100; its labels
#   of the others are nvidia-l4, nvidia-h100-80gb and nvidia-a100-80gb. XManager on Cloud asks for tpu7x by the name of a
#   machine type, where GKE's label is tpu7x. It makes a mapping of text to text of the arguments: a list of them, which
#   all executors of xm_local take, is a TypeError, and a flag that is given twice could not be in it.
# Output seen:
#   tpu_v5e: limits {}, selector {}
#   h100: limits {'nvidia.com/gpu': '8'}, selector {'cloud.google.com/gke-accelerator': 'nvidia-tesla-h100'}
#   xm_cloud, tpu_v7x: tpu7x-standard-4t
#   xm_cloud, a list of arguments: TypeError
# Until it is right: a JobSet of your own for TPUs (`launch.gke.render`), and `args_list` as an attribute of the image.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" xmanager==0.8.5.post1
cd "$folder"
venv/bin/python - <<'PROGRAM'
from xmanager import xm, xm_local
from xmanager.cloud import kubernetes
from xmanager.xm_cloud import executor, experiment
from xmanager.xm_local import executables


def requested(**resources):
  job = xm_local.Kubernetes(xm.JobRequirements(**resources))
  limits = kubernetes.requirements_from_executor(job).limits
  selector = kubernetes.node_selector_from_executor(job)
  print(f'{next(iter(resources))}: limits {limits}, selector {selector}')
  return limits, selector


assert requested(tpu_v5e='4x4') == ({}, {})
assert requested(h100=8)[1] == {'cloud.google.com/gke-accelerator': 'nvidia-tesla-h100'}

image = executables.GoogleContainerRegistryImage(name='train', image_path='r/i:1')


def sent(**resources):
  asked = executor.KubernetesJobExecutor(xm.JobRequirements(**resources))
  job = xm.Job(image, asked, name='train', args=['--file=a', '--file=b'])
  return lambda args: experiment._convert_xm_job_to_ess_job(job, args(job))


label = sent(tpu_v7x='2x2x2')(lambda job: {}).spec.resources.tpu_resources.type
print('xm_cloud, tpu_v7x:', label)
assert label == 'tpu7x-standard-4t'
try:
  sent(tpu_v6e='4x4')(lambda job: experiment._collect_args_for_job(job, {}))
except TypeError as error:
  print('xm_cloud, a list of arguments:', type(error).__name__)
else:
  raise AssertionError('a list of arguments is accepted')
PROGRAM
