"""Compiled programs are read right: counts that are known by hand."""

import pytest

from meanflow_benchmarks import accelerators, topologies
from meanflow_benchmarks.hlo import Program, Work, array_bytes

LOOP = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%slice_of (p: f32[50,8], i: s32[]) -> f32[8] {
  %p = f32[50,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,8]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,8}
  ROOT %out = f32[8]{0} reshape(%row)
}

%body (t: (s32[], f32[8], f32[50,8])) -> (s32[], f32[8], f32[50,8]) {
  %t = (s32[], f32[8]{0}, f32[50,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %all = f32[50,8]{1,0} get-tuple-element(%t), index=2
  %row = f32[8]{0} fusion(%all, %i), kind=kLoop, calls=%slice_of
  %next = f32[8]{0} all-reduce(%row), to_apply=%add
  ROOT %out = (s32[], f32[8]{0}, f32[50,8]{1,0}) tuple(%i, %next, %all)
}

%condition (t: (s32[], f32[8], f32[50,8])) -> pred[] {
  %t = (s32[], f32[8]{0}, f32[50,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %end = s32[] constant(50)
  ROOT %more = pred[] compare(%i, %end), direction=LT
}

ENTRY %main (x: f32[8], all: f32[50,8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %all = f32[50,8]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %t = (s32[], f32[8]{0}, f32[50,8]{1,0}) tuple(%zero, %x, %all)
  %loop = (s32[], f32[8]{0}, f32[50,8]{1,0}) while(%t), condition=%condition, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


def test_a_loop_is_multiplied_out():
    program = Program(LOOP)
    (loop,) = program.loops
    # a round reads a row of the table, not the table; the sum over devices reads and writes that row
    assert loop.trips == 50 and program.step_loop(50) == loop
    assert loop.work == Work(kernels=2, collectives=1, traffic=4 + 4 * 32, flops=8, products=0)
    assert program.work.kernels == 100 and program.work.collectives == 50
    assert program.tiny_loops == [loop]


PRODUCT = """
ENTRY %main (x: f32[{left}], w: f32[{right}]) -> f32[{out}] {{
  %x = f32[{left}] parameter(0)
  %w = f32[{right}] parameter(1)
  ROOT %c = f32[{out}] {line}
}}
"""


@pytest.mark.parametrize(
    ("left", "right", "out", "line", "wanted"),
    [
        (
            "5,7",
            "7,3",
            "5,3",
            "dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            2 * 5 * 7 * 3,
        ),
        (
            "4,5,7",
            "4,7,3",
            "4,5,3",
            "dot(%x, %w), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}",
            2 * 4 * 5 * 7 * 3,
        ),
        (  # 22 of the 24 taps along an axis meet a pixel
            "2,8,8,4",
            "3,3,4,5",
            "2,8,8,5",
            "convolution(%x, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            2 * 2 * 5 * 4 * 22**2,
        ),
        (  # how a TPU writes 32 products of (64, 10) with (10, 128): only one place of the window meets the input
            "64,10,1",
            "32,10,128",
            "64,32,128",
            "convolution(%x, %w), window={size=32 pad=31_31 rhs_reversal=1}, dim_labels=bf0_0io->b0f",
            2 * 32 * 64 * 10 * 128,
        ),
    ],
)
def test_products_are_counted(left, right, out, line, wanted):
    work = Program(PRODUCT.format(left=left, right=right, out=out, line=line)).work
    assert work.products == work.flops == wanted


def test_padding_of_layouts():
    text = LOOP.replace(
        "%next = f32[8]{0} all", "%wide = f32[100000,2]{1,0:T(8,128)} copy(%all)\n  %next = f32[8]{0} all"
    )
    program = Program(text)
    assert program.largest[0] == 100_000 * 128 * 4 and len(program.padded) == 1
    assert array_bytes("(bf16[3,4]{1,0}, pred[5])") == 29


@pytest.mark.skipif(any(topologies.available().values()), reason="the compilers are installed")
def test_without_compilers_there_are_no_numbers():
    assert accelerators.roofline() == {} and accelerators.forces() == {}
