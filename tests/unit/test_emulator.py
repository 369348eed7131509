"""The emulator of CUDA (`cuda_on_cpu`): against torch, and that it reports what a GPU forbids."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cuda_on_cpu import Kernel, KernelError, arguments, emulated, guarded, needs_compiler

pytestmark = needs_compiler

ONE_BLOCK = (1, 1, 1)


def kernel(folder: Path, fields: str, body: str, **defines: object) -> Kernel:
    source = folder / "kernel.cu"
    source.write_text(
        '#include "cuda.h"\n'
        f"struct Given {{ {fields} }};\n"
        'extern "C" __global__ void __launch_bounds__(512) test(const Given a) {\n'
        f"    SHARED(unsigned char, memory); unsigned t = threadIdx.x; {body} }}\n"
    )
    return emulated(source, defines, "test")


def test_ldmatrix_and_mma_multiply_matrices(tmp_path: Path) -> None:
    run = kernel(
        tmp_path,
        "const unsigned short *a, *b; float *d; int k;",
        """
        unsigned short *A = (unsigned short *)memory, *B = A + 16 * K;      // A is 16 x K, B is K x 16
        for (int i = t; i < 2 * K; i += 32) copy16(A + 8 * i, a.a + 8 * i), copy16(B + 8 * i, a.b + 8 * i);
        copies_done();
        __syncthreads();
        float d[2][4] = {};
        #pragma unroll
        for (int k = 0; k < K; k += 16) {
            unsigned x[4], y[4];
            ldmatrix4(x, A + (t % 16) * K + k + t / 16 * 8);
            ldmatrix4t(y, B + (k + t % 16) * 16 + t / 16 * 8);
            mma(d[0], x, y[0], y[1]);
            mma(d[1], x, y[2], y[3]);
        }
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < 4; i++) a.d[(t / 4 + i / 2 * 8) * 16 + 8 * half + t % 4 * 2 + i % 2] = d[half][i];
        """,
        K=32,
    )
    a, b = torch.randn(16, 32).bfloat16(), torch.randn(32, 16).bfloat16()
    d = torch.empty(16, 16)
    run(ONE_BLOCK, 32, 2048, arguments(a, b, d, 32))
    torch.testing.assert_close(d, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_mma_takes_the_fragments_that_ptx_names_and_adds(tmp_path: Path) -> None:
    run = kernel(
        tmp_path,
        "const unsigned short *a, *b; float *d;",
        """
        int g = t / 4, c = t % 4 * 2;
        auto at = [&](int row, int k) { return a.a[16 * row + k] | (unsigned)a.a[16 * row + k + 1] << 16; };
        auto bt = [&](int k, int n) { return a.b[8 * k + n] | (unsigned)a.b[8 * (k + 1) + n] << 16; };
        unsigned x[4] = {at(g, c), at(g + 8, c), at(g, c + 8), at(g + 8, c + 8)};
        float d[4] = {1, 2, 3, 4};
        mma(d, x, bt(c, g), bt(c + 8, g));
        for (int i = 0; i < 4; i++) a.d[(g + i / 2 * 8) * 8 + c + i % 2] = d[i];
        """,
    )
    a, b = torch.randint(-9, 9, (16, 16)).bfloat16(), torch.randint(-9, 9, (16, 8)).bfloat16()
    d = torch.empty(16, 8)
    run(ONE_BLOCK, 32, 0, arguments(a, b, d))
    before = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat_interleave(8, 0).repeat(1, 4)
    assert torch.equal(d, before + a.float() @ b.float())


def test_ldmatrix_gives_the_halves_that_ptx_names(tmp_path: Path) -> None:
    run = kernel(
        tmp_path,
        "unsigned *plain, *transposed;",
        """
        unsigned short *m = (unsigned short *)memory;
        for (int i = 0; i < 8; i++) m[8 * t + i] = t / 8 * 100 + t % 8 * 10 + i;      // matrix, row, column
        __syncthreads();
        unsigned r[4];
        ldmatrix4(r, m + 8 * t);
        for (int i = 0; i < 4; i++) a.plain[4 * t + i] = r[i];
        ldmatrix4t(r, m + 8 * t);
        for (int i = 0; i < 4; i++) a.transposed[4 * t + i] = r[i];
        """,
    )
    plain, transposed = torch.empty(2, 32, 4, dtype=torch.int32).unbind()
    run(ONE_BLOCK, 32, 512, arguments(plain, transposed))
    for t in range(32):
        for i in range(4):
            g, c = t // 4, t % 4 * 2
            assert plain[t, i] == (100 * i + 10 * g + c) | (100 * i + 10 * g + c + 1) << 16
            assert transposed[t, i] == (100 * i + 10 * c + g) | (100 * i + 10 * (c + 1) + g) << 16


def test_bfloat16_is_torchs(tmp_path: Path) -> None:
    run = kernel(
        tmp_path,
        "const float *x; unsigned *packed, *positive; float *back; int count;",
        "for (int i = t; i < a.count / 2; i += 32) { unsigned p = pack(a.x[2 * i], a.x[2 * i + 1]); a.packed[i] = p;"
        "a.back[2 * i] = low(p); a.back[2 * i + 1] = high(p);"
        "a.positive[i] = pack_relu(a.x[2 * i], a.x[2 * i + 1]); }",
    )
    special = [0.0, -0.0, float("inf"), -float("inf"), 1e-40, 3.4e38, 1.00390625, 1.01171875, float("nan"), 1.0]
    x = torch.cat([torch.tensor(special), torch.randn(1000)])
    (packed, positive), back = torch.empty(2, len(x) // 2, dtype=torch.int32), torch.empty(len(x))
    run(ONE_BLOCK, 32, 0, arguments(x, packed, positive, back, len(x)))
    expected = x.bfloat16()
    torch.testing.assert_close(back, expected.float(), rtol=0, atol=0, equal_nan=True)
    seen = packed.view(torch.bfloat16)
    assert torch.equal(seen.view(torch.int16)[~x.isnan()], expected.view(torch.int16)[~x.isnan()])
    assert seen.view(torch.int16)[8] == 0x7FFF
    torch.testing.assert_close(positive.view(torch.bfloat16), expected.relu(), rtol=0, atol=0, equal_nan=True)


SUM = """
    float s = a.x[blockIdx.x * blockDim.x + t], *sums = (float *)memory;
    for (int step = 16; step; step /= 2) s += __shfl_xor_sync(0xFFFFFFFF, s, step);
    sums[t / 32] = s;      // all lanes: without the barrier only the order of warps can make it wrong
    BARRIER
    s = 0;
    for (int i = 0; i < blockDim.x / 32; i++) s += sums[i];
    if (t == blockDim.x - 1) a.sums[blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)] = s;
"""


def sums(run: Kernel, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randint(100, (3, 512)).float()
    seen = torch.full((2, 2, 3), -1.0)
    run((3, 2, 2), 512, 64, arguments(x, seen), seed=seed)
    return seen, x.sum(1).expand(2, 2, 3)


def test_blocks_sum_by_shuffles_and_a_barrier(tmp_path: Path) -> None:
    run = kernel(tmp_path, "const float *x; float *sums;", SUM, BARRIER="__syncthreads();")
    for seed in range(3):
        assert torch.equal(*sums(run, seed))


def test_a_missing_barrier_shows(tmp_path: Path) -> None:
    seen, expected = sums(kernel(tmp_path, "const float *x; float *sums;", SUM, BARRIER=""))
    assert not torch.equal(seen, expected)


def test_a_missing_wait_for_copies_shows(tmp_path: Path) -> None:
    x, y = torch.arange(1024.0), torch.zeros(1024)
    for wait, right in (("copies_done();", True), ("", False)):
        run = kernel(
            tmp_path,
            "const float *x; float *y;",
            "float *m = (float *)memory; copy16(m + 4 * t, a.x + 4 * t); WAIT __syncthreads();"
            "for (int i = 0; i < 4; i++) a.y[4 * t + i] = m[4 * t + i];",
            WAIT=wait,
        )
        run(ONE_BLOCK, 256, 4096, arguments(x, y))
        assert torch.equal(x, y) is right


def test_shared_memory_starts_as_nan_in_every_block(tmp_path: Path) -> None:
    run = kernel(
        tmp_path, "float *y;", "float *m = (float *)memory; a.y[blockIdx.x * 32 + t] = m[t]; __syncthreads(); m[t] = 1;"
    )
    y = torch.zeros(4, 32)
    run((4, 1, 1), 32, 128, arguments(y))
    assert y.isnan().all()


def test_arguments_are_laid_out_as_in_c(tmp_path: Path) -> None:
    run = kernel(
        tmp_path,
        "int i; float *y; float f; float *z; short s;",
        "if (t == 0) a.y[0] = a.i, a.y[1] = a.f, a.z[0] = min(a.i, 3) + max(1.5f, a.f) + rsqrtf(4.0f);",
    )
    y, z = torch.zeros(2), torch.zeros(1)
    run(ONE_BLOCK, 32, 0, arguments(7, y, 0.5, z, 1))
    assert [*y.tolist(), *z.tolist()] == [7, 0.5, 5.0]


FAULTS = {
    "if (t < 32) __syncthreads();": "deadlock: thread .*(0 is at __syncthreads|0 at __syncthreads)",
    "if (t % 32 < 31) __syncthreads();": "at __syncthreads, thread .* of the same warp at the kernel's end",
    "if (t % 2) __shfl_xor_sync(~0u, 1, 1); else __syncthreads();": "__syncthreads.* same warp at __shfl_xor_sync",
    "__shfl_xor_sync(1, 1, 1);": "mask 0x1; only the whole warp",
    "ldmatrix4(r, memory + 8);": "ldmatrix4: shared address .* not a multiple of 16",
    "ldmatrix4t(r, memory + 16 * t);": "thread (64|95): ldmatrix4t: address is (1024|1520) bytes from .* has 1024",
    "copy16(memory, (char *)a.x + 4);": "copy16: global address .* not a multiple of 16",
    "copy16(memory + 1024, a.x);": "copy16: address is 1024 bytes",
    "if (t == 5) ((volatile int *)memory)[256] = 1;": "thread 5: access outside of memory",
    "if (t == 5) ((volatile float *)memory)[-1] = 1;": "shared memory was written .* bytes before its start",
    "if (t == 7) a.x[1024] = 1;": "thread 7: access outside of memory",
    "if (t == 7) r[0] = *(volatile float *)(a.x + 1024);": "thread 7: access outside of memory",
    "*(volatile int *)nullptr = 1;": "access outside of memory",
    "[]() __attribute__((noinline)) { volatile char much[100000]; much[0] = 1; }();": "access outside of memory",
    "*(uint4 *)(memory + 4) = make_uint4(1, 2, 3, 4);": "kernel.cu:4: misaligned access",
    "volatile int i = 4; a.x[0] = r[i];": "kernel.cu:4: index 4 is outside of the array",
    "volatile int zero = 0; a.x[0] = 7 / zero;": "division of an integer by zero",
}


def test_what_a_gpu_forbids_is_reported(tmp_path: Path) -> None:
    cases = " ".join(f"case {number}: {{ {fault} break; }}" for number, fault in enumerate(FAULTS))
    run = kernel(tmp_path, "float *x; int fault;", f"unsigned r[4]; switch (a.fault) {{ {cases} }}")
    x = guarded(torch.zeros(1024))
    for number, message in enumerate(FAULTS.values()):
        for seed in range(3):
            with pytest.raises(KernelError, match=message):
                run((2, 1, 1), 96, 1024, arguments(x, number), seed=seed)
        run((2, 1, 1), 96, 1024, arguments(x, -1))  # the next launch is not harmed


def test_blocks_do_not_run_in_order(tmp_path: Path) -> None:
    run = kernel(tmp_path, "float *x;", "if (t == 0) { a.x[blockIdx.x + 1] = a.x[0]; a.x[0] += 1; }")
    orders = set()
    for seed in range(3):
        x = torch.zeros(9)
        run((8, 1, 1), 32, 0, arguments(x), seed=seed)
        assert sorted(x[1:].tolist()) == list(range(8))
        orders.add(tuple(x[1:].tolist()))
    assert len(orders) == 3
    assert tuple(range(8)) not in orders


@pytest.mark.parametrize("shape", [(3, 5), (4096,), (1000, 3)])
def test_a_guarded_tensor_is_the_same_tensor(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        tensor = (100 * torch.randn(shape)).to(dtype)
        kept = guarded(tensor.t().contiguous().t() if tensor.ndim == 2 else tensor)
        assert torch.equal(kept, tensor)
        assert kept.is_contiguous()
        assert kept.data_ptr() % 16 == 0


def test_a_launch_that_cannot_be_is_reported(tmp_path: Path) -> None:
    run = kernel(tmp_path, "float *x;", "")
    given = arguments(torch.zeros(1))
    for grid, threads, shared, values, message in (
        (ONE_BLOCK, 32, 0, given + given, "takes 8 bytes of arguments, not 16"),
        (ONE_BLOCK, 48, 0, given, "48 threads: whole warps, at most 512"),
        (ONE_BLOCK, 544, 0, given, "544 threads"),
        (ONE_BLOCK, 32, 232449, given, "232449 bytes of shared memory: at most 232448"),
        ((0, 1, 1), 32, 0, given, "a grid of 0 x 1 x 1"),
    ):
        with pytest.raises(KernelError, match=message):
            run(grid, threads, shared, values)
    run(ONE_BLOCK, 32, 232448, given)  # and after errors it still works


def test_a_source_that_does_not_compile_is_reported(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"kernel.cu does not compile:[^$]*nonsense"):
        kernel(tmp_path, "float *x;", "nonsense;")


@pytest.mark.parametrize(
    ("body", "waits"), [("follow(); a.y[t] = a.x[t];", True), ("a.y[t] = a.x[t]; follow();", False)]
)
def test_what_another_kernel_still_writes_is_there_behind_the_wait(tmp_path: Path, body: str, waits: bool) -> None:
    run = kernel(tmp_path, "const float *x; float *y;", body)
    x, y = torch.full((32,), 2.0), torch.zeros(32)
    run(ONE_BLOCK, 32, 0, arguments(x, y), later=[x])
    assert (x == 2).all()
    assert (y == 2).all() == waits


def test_a_kernel_that_begins_early_has_to_wait(tmp_path: Path) -> None:
    run = kernel(tmp_path, "float *x;", "")
    x = torch.zeros(4)
    with pytest.raises(KernelError, match="did not wait"):
        run(ONE_BLOCK, 32, 0, arguments(x), later=[x])
    run(ONE_BLOCK, 32, 0, arguments(x))
