"""JobSets have the documented form and the requested settings."""

import dataclasses
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from het_plugin.planning import slices
from launch import sweep
from launch.gke import render
from launch.processes import PREEMPTED

PODS = render.Pods(image='registry/het_plugin:1', topology='v5e:4x4')
(JOB,) = sweep.make_jobs('gs://bucket/run', ['gin/runs/digits_smoke.gin'], ['A.flag = True'])

# Fields of the JobSet API (https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2)
# and, below `replicatedJobs.template`, of Kubernetes' batch/v1 Job and core/v1 Pod
# (https://kubernetes.io/docs/reference/kubernetes-api/workload-resources). `map` has strings as
# values, | separates the values of an enum, a list has items of one form, and fields with * may be
# absent. Other fields are errors, as in the API server's strict validation.
JOBSET = yaml.safe_load("""
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: str, namespace*: str, labels*: map, annotations: map}
spec:
  failurePolicy:
    maxRestarts: int
    rules:
      - name: str
        action: FailJobSet|RestartJobSet|RestartJobSetAndIgnoreMaxRestarts
        onJobFailureReasons: [BackoffLimitExceeded|DeadlineExceeded|PodFailurePolicy]
  replicatedJobs:
    - name: str
      replicas: int
      template:
        spec:
          parallelism: int
          completions: int
          backoffLimit: int
          podFailurePolicy:
            rules:
              - action: FailJob|FailIndex|Ignore|Count
                onExitCodes*: {containerName: str, operator: In|NotIn, values: [int]}
                onPodConditions*: [{type: str, status: 'True|False'}]
          template:
            spec:
              restartPolicy: Never
              hostNetwork: bool
              dnsPolicy: ClusterFirstWithHostNet
              terminationGracePeriodSeconds: int
              serviceAccountName*: str
              nodeSelector: map
              tolerations:
                - {key: str, operator: Exists|Equal, value*: str, effect: NoSchedule|NoExecute}
              containers:
                - name: str
                  image: str
                  command: [str]
                  args: [str]
                  env: [{name: str, value: str}]
                  ports: [{containerPort: int}]
                  resources: {limits: {google.com/tpu: int}}
                  securityContext*: {privileged: bool, runAsUser: int}
""")
TYPES = {'str': str, 'int': int, 'bool': bool}


def conform(value, form, path='JobSet'):
  if isinstance(form, dict):
    forms = {name.rstrip('*'): inner for name, inner in form.items()}
    assert value.keys() <= forms.keys(), f'{path} has {value.keys() - forms.keys()}'
    assert {name for name in form if not name.endswith('*')} <= value.keys(), path
    for name, inner in value.items():
      conform(inner, forms[name], f'{path}.{name}')
  elif isinstance(form, list):
    assert isinstance(value, list) and value, f'{path} is {value!r}'
    for index, item in enumerate(value):
      conform(item, form[0], f'{path}[{index}]')
  elif form == 'map':
    assert all(type(x) is str for pair in value.items() for x in pair), f'{path} is {value!r}'
  elif form in TYPES:
    assert type(value) is TYPES[form], f'{path} is {value!r}'
  else:
    assert value in form.split('|'), f'{path} is {value!r}'


def rendered(job=JOB, name='het-xl', **changes):
  """A JobSet, written as YAML and read again."""
  text = render.to_yaml(render.jobset(name, dataclasses.replace(PODS, **changes), job))
  return yaml.safe_load(text)


def parts(document):
  """(Job spec, Pod spec, container)."""
  job = document['spec']['replicatedJobs'][0]['template']['spec']
  pod = job['template']['spec']
  return job, pod, pod['containers'][0]


EVERYTHING = {
  'num_slices': 3,
  'namespace': 'team',
  'service_account': 'trainer',
  'queue': 'tpus',
  'priority': 'high',
  'spot': True,
  'privileged': False,
  'node_selector': ('cloud.google.com/reservation-name=ours',),
  'env': ('NUMBER=1', 'FLAG=true'),
}


@pytest.mark.parametrize('changes', [{}, EVERYTHING], ids=['least', 'everything'])
def test_the_form_is_that_of_the_api(changes):
  conform(rendered(**changes), JOBSET)


@pytest.mark.parametrize(
  ('topology', 'accelerator', 'num_slices', 'chips_per_host', 'hosts'),
  [
    ('v3:2x2', 'tpu-v3-device', 1, None, 1),
    ('v4:2x2x1', 'tpu-v4-podslice', 1, None, 1),
    ('v6e:1x1', 'tpu-v6e-slice', 1, None, 1),
    ('v6e:2x4', 'tpu-v6e-slice', 1, None, 2),
    ('v6e:2x4', 'tpu-v6e-slice', 1, 8, 1),
    ('v6e:4x8', 'tpu-v6e-slice', 2, 4, 8),
    ('tpu7x:4x4x8', 'tpu7x', 1, None, 32),
  ],
)
def test_one_pod_per_host_and_one_job_per_slice(
  topology, accelerator, num_slices, chips_per_host, hosts
):
  document = rendered(topology=topology, num_slices=num_slices, chips_per_host=chips_per_host)
  job, pod, container = parts(document)
  assert job['parallelism'] == job['completions'] == hosts
  assert document['spec']['replicatedJobs'][0]['replicas'] == num_slices
  annotations = document['metadata']['annotations']
  assert annotations['alpha.jobset.sigs.k8s.io/exclusive-topology'] == (
    'cloud.google.com/gke-nodepool'
  )
  assert pod['nodeSelector']['cloud.google.com/gke-tpu-accelerator'] == accelerator
  shape = pod['nodeSelector']['cloud.google.com/gke-tpu-topology']
  chips = math.prod(map(int, shape.split('x')))
  assert container['resources']['limits']['google.com/tpu'] * hosts == chips
  assert {port['containerPort'] for port in container['ports']} == {8471, 8080, 8482}
  # The nodes of both kinds of 2x4 slices have the labels above.
  machine = {'2x4': f'ct6e-standard-{8 // hosts}t'}.get(shape)
  assert pod['nodeSelector'].get('node.kubernetes.io/instance-type') == machine


@pytest.mark.parametrize(
  ('changes', 'commands'),
  [
    (
      {'num_slices': 2, 'spot': True},
      [
        f'gcloud container node-pools create x-{index} --cluster=CLUSTER --location=REGION '
        '--node-locations=ZONE --machine-type=ct5lp-hightpu-4t --num-nodes=4 --tpu-topology=4x4 '
        '--spot'
        for index in range(2)
      ],
    ),
    (
      {'topology': 'v5e:2x4', 'chips_per_host': 8},  # one host: the machine has the topology
      [
        'gcloud container node-pools create x-0 --cluster=CLUSTER --location=REGION '
        '--node-locations=ZONE --machine-type=ct5lp-hightpu-8t --num-nodes=1'
      ],
    ),
    (
      {'topology': 'tpu7x:2x2x2'},
      [
        'gcloud compute resource-policies create workload-policy x --region=REGION '
        '--type=HIGH_THROUGHPUT --accelerator-topology=2x2x2',
        'gcloud container node-pools create x-0 --cluster=CLUSTER --location=REGION '
        '--node-locations=ZONE --machine-type=tpu7x-standard-4t --num-nodes=2 --placement-policy=x',
      ],
    ),
  ],
)
def test_commands_create_a_node_pool_per_slice(changes, commands):
  assert render.node_pools('x', dataclasses.replace(PODS, **changes)) == commands


def test_a_preemption_restarts_all_and_does_not_count():
  document = rendered()
  job, pod, container = parts(document)
  assert job['backoffLimit'] == 0 and pod['restartPolicy'] == 'Never'
  code, condition = job['podFailurePolicy']['rules']
  assert code['onExitCodes'] == {
    'containerName': container['name'],
    'operator': 'In',
    'values': [PREEMPTED],
  }
  assert condition['onPodConditions'] == [{'type': 'DisruptionTarget', 'status': 'True'}]
  assert {code['action'], condition['action']} == {'FailJob'}
  (rule,) = document['spec']['failurePolicy']['rules']
  assert rule['action'] == 'RestartJobSetAndIgnoreMaxRestarts'
  assert rule['onJobFailureReasons'] == ['PodFailurePolicy']
  assert document['spec']['failurePolicy']['maxRestarts'] == 5
  assert pod['terminationGracePeriodSeconds'] == 300


def test_arguments_are_those_of_training_with_the_slices_first():
  container = parts(rendered(num_slices=2))[2]
  assert container['command'] == ['python', '-m', 'het_plugin.train']
  assert container['args'] == [
    '--gin.PjitPartitioner.num_replicas=2',
    '--gin_file=gin/runs/digits_smoke.gin',
    '--gin.A.flag=True',
    "--gin.MODEL_DIR='gs://bucket/run'",
  ]
  # Kubernetes turns $$ into $ and expands only a $( that is not escaped.
  (job,) = sweep.make_jobs('gs://b/x', ['x.gin'], ["a = '$(HOME) $$(HOME) $x'"])
  assert "--gin.a='$$(HOME) $$$$(HOME) $$x'" in parts(rendered(job))[2]['args']


def test_kueue_has_its_labels():
  assert rendered(**EVERYTHING)['metadata']['labels'] == {
    'kueue.x-k8s.io/queue-name': 'tpus',
    'kueue.x-k8s.io/priority-class': 'high',
  }
  assert 'labels' not in rendered()['metadata']


@pytest.mark.parametrize(
  ('topology', 'name'),
  [
    ('v5e:4x4', 'v5litepod-4x4'),
    ('v5p:4x4x16', 'v5p-4x4x16'),  # v5p-512 is 4x8x8
    ('v6e:4x8', 'v6e-4x8'),
    ('tpu7x:2x2x2', 'tpu7x-2x2x2'),
  ],
)
def test_xpk_gets_the_same_command(topology, name):
  changes = {'topology': topology, 'num_slices': 2, 'priority': 'high', 'spot': True}
  settings = dataclasses.replace(PODS, **changes)
  job = sweep.make_jobs('gs://bucket/run', ['x.gin'], ["a = '$x y'"])[0]
  words = shlex.split(render.xpk_command('het-xl', settings, job))
  assert words[:3] == ['xpk', 'workload', 'create'] and words.pop() == '--spot'
  options = dict(word.removeprefix('--').split('=', 1) for word in words[3:])
  assert options['tpu-type'] == name and options['num-slices'] == '2'
  assert options['priority'] == 'high' and options['env'] == 'JAX_PLATFORMS=tpu,cpu'
  assert shlex.split(options['command']) == [
    'python',
    '-m',
    'het_plugin.train',
    '--gin.PjitPartitioner.num_replicas=2',
    *job.arguments(),
  ]


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'queue': 'tpus'}, '--queue is for --format=jobset'),
    ({'service_account': 'trainer'}, '--service_account is for --format=jobset'),
    ({'privileged': False}, '--privileged=false is for --format=jobset'),
    ({'priority': 'urgent'}, '--priority=urgent must be one of very-low, low, '),
    ({'topology': 'v5e:2x2'}, '--topology=v5e:2x2: the smallest .* is 2x4'),
  ],
)
def test_what_xpk_cannot_do_is_one_sentence(changes, words):
  with pytest.raises(ValueError, match=words):
    render.xpk_command('het-xl', dataclasses.replace(PODS, **changes), JOB)


def test_xpk_knows_the_names_of_all_slices():
  """Where xpk is installed; its names with numbers of cores stand for other shapes."""
  known = pytest.importorskip('xpk.core.system_characteristics')
  for generation in ('v4', 'v5e', 'v5p', 'v6e', 'tpu7x'):
    for shape in slices.GENERATIONS[generation].shapes:
      if max(map(int, shape.split('x'))) > 256 or (generation == 'v5e' and shape in ('1x1', '2x2')):
        continue
      name = slices.xpk_type(generation, shape)
      found, _ = known.get_system_characteristics_by_device_type(name)
      hosts = slices.hosts(f'{generation}:{shape}')
      theirs = (found.topology, found.vms_per_slice, found.gce_machine_type, found.gke_accelerator)
      assert theirs == (shape, hosts.count, hosts.machine, hosts.label), name


@pytest.mark.slow
def test_xpk_takes_the_command(tmp_path):
  """Where xpk is installed: its JobSet runs the same command on as many hosts."""
  xpk = Path(sys.executable).with_name('xpk')
  if not xpk.exists():
    pytest.skip('xpk is not installed')
  changes = {'num_slices': 2, 'priority': 'high', 'namespace': 'team', 'spot': True}
  job = sweep.make_jobs('gs://bucket/run', ['x.gin'], ["a = '$x y'"])[0]
  words = shlex.split(render.xpk_command('het-xl', dataclasses.replace(PODS, **changes), job))
  words = [str(xpk), *words[1:], '--project=p', '--zone=us-east5-a', '--dry-run']
  words = [word.replace('=CLUSTER', '=c') for word in words]
  file = tmp_path / 'jobset.yaml'
  subprocess.run(
    [*words, '--skip-validation', f'--output-manifest-file={file}'],
    env={'HOME': str(tmp_path), 'PATH': os.environ['PATH']},
    check=True,
    capture_output=True,
  )
  document = yaml.safe_load(file.read_text())
  ours = parts(rendered(job, **changes))
  theirs = parts(document)
  assert theirs[0]['parallelism'] == ours[0]['parallelism']
  for field in ('terminationGracePeriodSeconds', 'nodeSelector'):
    expected = ours[1][field]
    if field == 'nodeSelector':  # of the cluster that xpk has made
      expected = {name: x for name, x in expected.items() if name != render.SPOT}
    assert theirs[1][field] == expected
  assert theirs[2]['resources'] == ours[2]['resources'] and theirs[2]['env'] == ours[2]['env']
  (line,) = [x for x in theirs[2]['command'][-1].splitlines() if 'het_plugin.train' in x]
  command = shlex.split(line.strip().removeprefix('(').partition(') & PID')[0])
  assert command == [*ours[2]['command'], *[x.replace('$$', '$') for x in ours[2]['args']]]


# https://www.kubeflow.org/docs/components/trainer (2.3), with the fields that are used.
TRAIN_JOB = yaml.safe_load("""
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: str, namespace*: str, labels*: map}
spec:
  runtimeRef: {name: jax-distributed}
  trainer:
    numNodes: int
    image: str
    command: [str]
    args: [str]
    env: [{name: str, value: str}]
    resourcesPerNode: {limits: {google.com/tpu: int}}
  runtimePatches:
    - manager: str
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        serviceAccountName*: str
                        nodeSelector: map
                        terminationGracePeriodSeconds: int
                        tolerations:
                          - key: str
                            operator: Exists|Equal
                            value*: str
                            effect: NoSchedule|NoExecute
                        containers*:
                          - {name: node, securityContext: {privileged: bool, runAsUser: int}}
""")


def test_a_train_job_of_kubeflow_has_the_parts_of_the_jobset():
  changes = EVERYTHING | {'num_slices': 1, 'privileged': True}
  document = render.train_job('het-xl', dataclasses.replace(PODS, **changes), JOB)
  conform(document, TRAIN_JOB, 'TrainJob')
  _, pod, container = parts(rendered(**changes))
  trainer = document['spec']['trainer']
  assert trainer['numNodes'] == 4 and trainer['args'] == container['args']
  (patch,) = document['spec']['runtimePatches']
  (node,) = patch['trainingRuntimeSpec']['template']['spec']['replicatedJobs']
  placed = node['template']['spec']['template']['spec']
  assert placed['nodeSelector'] == pod['nodeSelector']
  assert placed['containers'][0]['securityContext'] == container['securityContext']
  assert document['metadata']['labels']['kueue.x-k8s.io/queue-name'] == 'tpus'
  with pytest.raises(ValueError, match='--num_slices=2: a TrainJob has one slice'):
    render.train_job('het-xl', dataclasses.replace(PODS, num_slices=2), JOB)


def test_spot_and_reservations_are_node_labels():
  pod = parts(rendered(**EVERYTHING))[1]
  assert pod['nodeSelector'] == {
    'cloud.google.com/gke-tpu-accelerator': 'tpu-v5-lite-podslice',
    'cloud.google.com/gke-tpu-topology': '4x4',
    'cloud.google.com/gke-spot': 'true',
    'cloud.google.com/reservation-name': 'ours',
  }
  assert {toleration['key'] for toleration in pod['tolerations']} == {
    'google.com/tpu',
    'cloud.google.com/gke-spot',
  }


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'topology': 'v2:4x4'}, '--topology=v2:4x4: '),
    ({'topology': None}, '--topology=: GKE has slices of v3, .* v5e:4x4'),
    ({'topology': 'v5e:2x2', 'num_slices': 2}, '--num_slices=2 .*v5e:2x2'),
    ({'topology': 'v5e:1x4'}, 'no 1x4 slice of v5e; the nearest that exist are 2x4 and 2x2'),
    ({'chips_per_host': 8}, '--chips_per_host=8: a slice v5e:4x4 has hosts of 4 chips'),
    ({'topology': 'v6e:2x4', 'chips_per_host': 1}, '--chips_per_host=1: .* 4 or 8 chips'),
    ({'name': 'Het_XL'}, '--name=Het_XL '),
    ({'image': ''}, '--image .*launch/Dockerfile'),
    ({'num_slices': 10**6}, '--num_slices=1000000 .*4000000'),
    ({'env': ('A=\x7f',)}, r"--env=A=\\x7f' "),
    ({'image': 'a\nb'}, r"--image=a\\nb' "),
  ],
)
def test_one_sentence_for_a_wrong_setting(changes, words):
  with pytest.raises(ValueError, match=words):
    rendered(**changes)


def test_the_script_prints_and_writes_the_same(tmp_path, run_main):
  arguments = ['--gin_file=gin/runs/digits_smoke.gin', '--image=i', '--topology=v6e:4x4']
  arguments += ['--model_dir=gs://b/x', '--gin.SEED=3']
  printed = run_main(render, *arguments, '--env=A=b=c')
  assert printed.startswith('# gcloud container node-pools create het-plugin-0 ')
  document = yaml.safe_load(printed)
  conform(document, JOBSET)
  assert {'name': 'A', 'value': 'b=c'} in parts(document)[2]['env']
  assert '--gin.SEED=3' in parts(document)[2]['args']
  assert run_main(render, *arguments, '--env=A=b=c', f'--output={tmp_path}/x.yaml') == ''
  assert (tmp_path / 'x.yaml').read_text() == printed
  with pytest.raises(ValueError, match='--env=A .*NAME=VALUE'):
    render.pairs('env', ['A'])


def plan_of(request, fits, seconds=None):
  """A plan of the request, as `planning.step.plan` makes it."""
  mesh = request.mesh or (16, 1)
  microbatches = request.asked.get('num_microbatches', 1)
  fits = fits(mesh[-1], microbatches)
  return {
    'mesh': dict(zip(('replica', 'data', 'model')[-len(mesh) :], mesh, strict=True)),
    'num_devices': 16 * request.num_slices,
    'batch_size': 64,
    'num_samples': None,
    'num_microbatches': microbatches,
    'fits': fits,
    'peak_bytes_per_device': 2**30,
    'hbm_bytes_per_device': 2**34,
    'train': {'fits': fits, 'seconds': seconds and {'with_overlap': seconds(mesh[-1])}},
    'eval': {'fits': True},
    'bytes_per_device': {'activations, gradients and samples': 1},
  } | ({} if fits else {'train': {'fits': False, 'compiler_message': None, 'peak_bytes': 2**35}})


@pytest.fixture
def asked(monkeypatch):
  """Lets a test say which layouts fit; returns what was compiled."""

  def set_up(fits, seconds=None):
    requests = []

    def compile_in_process(request):
      requests.append(request)
      final = (
        {'num_microbatches': 2} if 'Trainer.num_microbatches = 2' in request.gin_bindings else {}
      )
      request = dataclasses.replace(request, asked={**final, **request.asked})
      if not request.mesh and any('num_partitions = 4' in x for x in request.gin_bindings):
        request = dataclasses.replace(request, mesh=(4, 4))
      return plan_of(request, fits, seconds)

    for module in (render.worker, render.search):
      monkeypatch.setattr(module, 'compile_in_process', compile_in_process)
    return requests

  return set_up


PLANNED = ['--gin_file=gin/runs/digits_smoke.gin', '--image=i', '--topology=v6e:4x4', '--plan']
PLANNED += ['--model_dir=gs://b/x']


def test_a_job_that_does_not_fit_is_not_written(asked, run_main, tmp_path):
  asked(lambda model, microbatches: False)
  error = run_main(render, *PLANNED, f'--output={tmp_path}/x.yaml', code=2)
  assert '--topology=v6e:4x4: It does not fit: 1.00 of 16.00 GiB. The largest part:' in error
  assert 'fits with no mesh' in run_main(render, *PLANNED, '--search', code=2)
  assert not [*tmp_path.iterdir()]
  requests = asked(lambda *_: True)
  assert '--name=X must be' in run_main(render, *PLANNED, '--name=X', code=2)
  assert not requests  # wrong settings are refused before anything is compiled
  assert '--search has an effect only with --plan' in run_main(
    render, *PLANNED, '--noplan', '--search', code=2
  )
  printed = run_main(render, *PLANNED)
  assert printed.startswith('# plan: mesh data 16 x model 1, 1 microbatches, batch 64, no samples')


def test_the_fastest_layout_that_fits_is_in_the_job(asked, run_main):
  """Of the meshes that fit with the fewest microbatches."""
  requests = asked(
    lambda model, microbatches: model >= 2 and microbatches >= 2,
    seconds=lambda model: abs(model - 4),
  )
  printed = run_main(render, *PLANNED, '--search')
  document = yaml.safe_load(printed)
  arguments = parts(document)[2]['args']
  assert {
    '--gin.BATCH_SIZE=64',
    '--gin.PjitPartitioner.num_partitions=4',
    '--gin.PjitPartitioner.model_parallel_submesh=None',
    '--gin.PjitPartitioner.num_replicas=1',
    '--gin.Trainer.num_microbatches=2',
  } <= {*arguments}
  assert '# plan: mesh data 4 x model 4, 2 microbatches' in printed
  meshes = [tuple(request.mesh) for request in requests[1:-1]]
  assert meshes == 2 * [(16, 1), (8, 2), (4, 4), (2, 8)]
