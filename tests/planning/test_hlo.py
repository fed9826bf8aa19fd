"""Collectives of compiled programs."""

import jax
import jax.numpy as jnp

from het_plugin.planning import hlo

P = jax.sharding.PartitionSpec


def mesh_of_8():
  return jax.make_mesh((2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def compiled(function, *specs):
  """The program of a function of one array [8, 16] float32 a spec."""
  mesh = mesh_of_8()
  args = [
    jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec))
    for spec in specs
  ]
  shard = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
  return jax.jit(shard).lower(*args).compile().as_text()


def test_kinds_counts_and_bytes():
  def function(x):  # [8, 4] on a device
    gathered = jax.lax.all_gather(x, 'model')  # [4, 8, 4]
    return jax.lax.psum(gathered.sum(0) * 2.0, 'model')

  got = {c.kind: c for c in hlo.collectives(compiled(function, P(None, 'model')))}
  assert set(got) == {'all-gather', 'all-reduce'}
  assert (got['all-gather'].count, got['all-gather'].bytes) == (1, 4 * 8 * 4 * 4)
  assert (got['all-reduce'].count, got['all-reduce'].bytes) == (1, 8 * 4 * 4)
  assert not got['all-reduce'].in_loops


def test_a_reduce_scatter_passes_what_it_reduces():
  """As much as the all-gather of the same array: each is half of an all-reduce."""

  def function(x):  # [8, 4] on a device
    return jax.lax.psum_scatter(x, 'model', scatter_dimension=0, tiled=True).sum()

  got = {c.kind: c for c in hlo.collectives(compiled(function, P(None, 'model')))}
  assert (got['reduce-scatter'].count, got['reduce-scatter'].bytes) == (1, 8 * 4 * 4)
  # libtpu names the instruction like the operation, and its layouts have parentheses.
  text = """HloModule m

ENTRY %main (p: f32[2048,8]) -> f32[256,8] {
  %p = f32[2048,8]{1,0:T(8,128)} parameter(0)
  ROOT %reduce-scatter.2 = f32[256,8]{1,0:T(8,128)S(1)} reduce-scatter(%p), dimensions={0}
}
"""
  assert hlo.collectives(text) == [hlo.Collective('reduce-scatter', 1, 2048 * 8 * 4, 0)]


def test_loops_count_as_often_as_they_run():
  def function(x):
    def body(carry, _):
      return jnp.sin(jax.lax.psum(carry, 'model')), None

    return jax.lax.scan(body, x, length=7)[0]

  (got,) = hlo.collectives(compiled(function, P(None, 'model')))
  assert got == hlo.Collective('all-reduce', count=7, bytes=7 * 8 * 4 * 4, in_loops=1)


def test_one_branch_of_a_conditional_runs():
  def function(x):
    def less():
      return jax.lax.psum(jnp.sin(x)[0], 'model')

    def more():
      return jax.lax.psum(jnp.cos(x), 'model')[0]

    return jax.lax.cond(jax.lax.axis_index('data') > 0, less, more)

  (got,) = hlo.collectives(compiled(function, P(None, 'model')))
  assert got == hlo.Collective('all-reduce', count=1, bytes=8 * 4 * 4, in_loops=0)


def test_loops_of_libtpu_run_up_to_the_bound_of_their_condition():
  text = """HloModule m

%cond (p: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(256)} constant(22)
  %p = (s32[]{:T(256)}, f32[8]{0:T(256)}) parameter(0)
  %i = s32[]{:T(256)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(1024)} compare(%i, %n), direction=LT
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[]{:T(256)}, f32[8]{0:T(256)}) parameter(0)
  %r = f32[8]{0:T(256)} all-reduce(%x), to_apply=%sum
  ROOT %t = (s32[]{:T(256)}, f32[8]{0:T(256)}) tuple(%i, %r)
}

ENTRY %main (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[]{:T(256)}, f32[8]{0:T(256)}) parameter(0)
  ROOT %w = (s32[]{:T(256)}, f32[8]{0:T(256)}) while(%p), condition=%cond, body=%body
}
"""
  assert hlo.collectives(text) == [hlo.Collective('all-reduce', 22, 22 * 8 * 4, 1)]
  other = text.replace('direction=LT', 'direction=NE')
  assert hlo.collectives(other) == [hlo.Collective('all-reduce', 1, 8 * 4, 1)]
  estimate = ', backend_config={"estimated_cycles":"70"}'
  text = text.replace('to_apply=%sum', 'to_apply=%sum' + estimate).replace(
    '=%body', '=%body' + estimate
  )
  assert hlo.cycles(text) == 70 + 22 * 70


def test_asynchronous_pairs_count_once_and_their_results_only():
  text = """HloModule m

ENTRY %main (p: f32[8,4]) -> f32[32,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %s = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%p), dimensions={0}
  ROOT %d = f32[32,4]{1,0} all-gather-done(%s)
}
"""
  assert hlo.collectives(text) == [hlo.Collective('all-gather', 1, 32 * 4 * 4, 0)]
  text = text.replace(
    'f32[32,4]{1,0}) all-gather-', 'f32[8,4]{1,0:S(3)}, u32[]{:S(2)}, u32[]) all-gather-'
  )
  text = text.replace('all-gather', 'collective-permute')
  assert hlo.collectives(text) == [hlo.Collective('collective-permute', 1, 8 * 4 * 4, 0)]


def test_libtpu_repeats_an_asynchronous_collective_in_what_overlaps_with_it():
  gather = 'all-gather(%p), channel_id={}, backend_config={{"async_collective_fusion_config":{{}}}}'
  text = """HloModule m

%start (p: bf16[256,8]) -> bf16[2048,8] {
  %p = bf16[256,8]{1,0:T(8,128)(2,1)} parameter(0)
  %g.1 = bf16[2048,8]{1,0:T(8,128)(2,1)} GATHER
  ROOT %c = bf16[2048,8]{1,0} custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.15 (p: bf16[256,8]) -> bf16[2048,8] {
  %p = bf16[256,8]{1,0:T(8,128)(2,1)} parameter(0)
  %g.2 = bf16[2048,8]{1,0:T(8,128)(2,1)S(1)} GATHER
  ROOT %c = bf16[2048,8]{1,0} custom-call(%g.2), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: bf16[256,8]) -> bf16[2048,8] {
  %p = bf16[256,8]{1,0} parameter(0)
  %s = bf16[2048,8]{1,0} fusion(%p), kind=kCustom, calls=%start
  ROOT %d = bf16[2048,8]{1,0} fusion(%s), kind=kCustom, calls=%async_collective_fusion.15
}
"""
  same = text.replace('GATHER', gather.format(3))
  assert hlo.collectives(same) == [hlo.Collective('all-gather', 1, 2048 * 8 * 2, 0)]
  others = text.replace('GATHER', gather.format(3), 1).replace('GATHER', gather.format(4))
  assert hlo.collectives(others) == [hlo.Collective('all-gather', 2, 2 * 2048 * 8 * 2, 0)]


def test_an_all_reduce_scatter_of_libtpu_is_a_reduce_scatter():
  text = """HloModule m

%all-reduce-scatter.1 (input: f32[2048,8]) -> f32[256,8] {
  %input = f32[2048,8]{1,0:T(8,128)S(1)} parameter(0)
  %all-reduce.4 = f32[2048,8]{1,0:T(8,128)} all-reduce(%input), channel_id=6, to_apply=%add
  ROOT %slice = f32[256,8]{1,0:T(8,128)} dynamic-slice(%all-reduce.4, %i, %zero)
}

ENTRY %main (p: f32[2048,8]) -> f32[256,8] {
  %p = f32[2048,8]{1,0} parameter(0)
  ROOT %f = f32[256,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
  assert hlo.collectives(text) == [hlo.Collective('reduce-scatter', 1, 2048 * 8 * 4, 0)]
