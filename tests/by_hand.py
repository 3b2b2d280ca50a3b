"""A plan that no compiler made: y = 2 x for float32, in PTX written by hand."""
import numpy as np

from tinymlir.plan import Buffer, Launch, Plan, Pointer

DOUBLE = """
.version {version}
.target {chip}
.address_size 64

.visible .entry double_kernel(
	.param .u64 .ptr .align 1 double_kernel_param_0,
	.param .u64 .ptr .align 1 double_kernel_param_1
)
.maxntid 32, 1, 1
{{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<8>;
	.reg .b64 	%rd<8>;

	ld.param.b64 	%rd1, [double_kernel_param_0];
	cvta.to.global.u64 	%rd2, %rd1;
	ld.param.b64 	%rd3, [double_kernel_param_1];
	cvta.to.global.u64 	%rd4, %rd3;
	mov.u32 	%r1, %ctaid.x;
	mov.u32 	%r2, %tid.x;
	mad.lo.s32 	%r3, %r1, 32, %r2;
	setp.ge.s32 	%p1, %r3, {count};
	@%p1 bra 	$L__END;
	mul.wide.u32 	%rd5, %r3, 4;
	add.s64 	%rd6, %rd2, %rd5;
	ld.global.b32 	%r4, [%rd6];
	add.rn.f32 	%r5, %r4, %r4;
	add.s64 	%rd7, %rd4, %rd5;
	st.global.b32 	[%rd7], %r5;
$L__END:
	ret;

}}
"""


def doubling(count, launches=1, chip="sm_75", version="7.5", reach=None):
    """The plan of `lambda x: x * 2` for so many elements, launched again and again.

    The kernel works on `reach` elements, which should not be more than there are."""
    ptx = DOUBLE.format(chip=chip, version=version, count=count if reach is None else reach)
    blocks = -(-max(count, reach or 0) // 32)
    step = Launch("double_kernel", (blocks, 1, 1), (32, 1, 1), 0, (Pointer(0), Pointer(1)))
    return Plan(chip, ptx, (Buffer(4 * count, "argument", 0), Buffer(4 * count, "result", 0)),
                (), (step,) * launches)


def numbers(count, seed=0):
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)
