// Residual trunks of 16 to 64 channels, all lanes at once; images are [lanes, batch, H, W, C] in bf16.
//
// One kernel per convolution and direction. What libraries do in separate passes happens as a tile enters shared
// memory or leaves it: BatchNorm, ReLU and the shortcut on the way in, BatchNorm's sums on the way out. So of a layer
// only the convolution's results are stored (and, once per block, what the shortcut reads). A program works through
// `per` tiles of one lane; its sums over pixels go to memory as one row, and the kernel that reads the layer next adds
// the rows up in a fixed order, so the same step gives the same bits.
//
// Sizes are compile-time constants, given as macros GIVEN_... (see trunk_kernels.py, which launches all this).

#ifdef ON_CPU
#include "cuda.h"
#else
#define SHARED(type, name) extern __shared__ __align__(16) type name[]
__device__ __forceinline__ unsigned place(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// Four 8x8 matrices: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix4(unsigned (&r)[4], const void *p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(place(p)) : "memory");
}
__device__ __forceinline__ void ldmatrix4t(unsigned (&r)[4], const void *p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(place(p)) : "memory");
}
// d += a b for 16x16 a and 16x8 b.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void copy16(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy16_if(void *shared, const void *global, bool there) {
    asm volatile("{ .reg .pred q; setp.ne.b32 q, %2, 0; @q cp.async.cg.shared.global [%0], [%1], 16; }"
                 ::"r"(place(shared)), "l"(global), "r"((int)there) : "memory");
}
// 16 bytes, or zeros; no branch. Neither .nc nor without volatile: the kernel before may write them until `follow`, which
// a compiler may move a load of constant memory across.
__device__ __forceinline__ uint4 load_if(const void *p, bool there) {
    uint4 v;
    asm volatile("{ .reg .pred q; setp.ne.b32 q, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
                 "@q ld.global.v4.u32 {%0,%1,%2,%3}, [%4]; }"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"((int)there) : "memory");
    return v;
}
__device__ __forceinline__ void store_if(void *p, const uint4 &v, bool there) {
    asm volatile("{ .reg .pred q; setp.ne.b32 q, %5, 0; @q st.global.v4.u32 [%0], {%1,%2,%3,%4}; }"
                 ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((int)there) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// A kernel may begin while the one before it ends: what that one wrote is there behind `follow`, and `lead` lets the
// next one begin. Who is launched early follows in every thread, and leads only behind that: so all kernels before the
// last one have ended too, and packed weights, which are older than the first layer, can be read before it.
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void lead() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
// The same behind a ReLU, which lets pass what is not a number (fmaxf would hide it).
__device__ __forceinline__ unsigned pack_relu(float low, float high) {
    unsigned both;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float low(unsigned both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(unsigned both) { return __uint_as_float(both & 0xffff0000u); }
#endif

typedef unsigned short bf16;

#define THREADS 256
constexpr int WARPS = THREADS / 32;
enum { IMAGE, NORM, RESIDUAL, PLAIN };  // what a tile is made of

// ------------------------------------------------------------------------------------------------ eight channels

__device__ __forceinline__ uint4 nothing() { return make_uint4(0, 0, 0, 0); }

__device__ __forceinline__ void unpack8(const uint4 &q, float (&v)[8]) {
    v[0] = low(q.x), v[1] = high(q.x), v[2] = low(q.y), v[3] = high(q.y);
    v[4] = low(q.z), v[5] = high(q.z), v[6] = low(q.w), v[7] = high(q.w);
}

__device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
    return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

__device__ __forceinline__ void read8(const float *p, float (&v)[8]) {
    const float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

__device__ __forceinline__ uint4 peek(const bf16 *p) { return *(const uint4 *)p; }
__device__ __forceinline__ void store(bf16 *p, const uint4 &q) { *(uint4 *)p = q; }

// ------------------------------------------------------------------------------------------------ sums over pixels

// The rows' two sums per channel, added up in a fixed order: total[0..C) and total[C..2C).
template <int C>
__device__ __forceinline__ void add_up(const float *rows, int count, float *work, float *total) {
    constexpr int COLUMNS = 2 * C / 4, GROUPS = THREADS / COLUMNS;
    const int column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int t = group; t < count; t += GROUPS) {
        const float4 v = ((const float4 *)rows)[t * COLUMNS + column];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    ((float4 *)work)[group * COLUMNS + column] = sum;
    __syncthreads();
    if (threadIdx.x < 2 * C) {
        float s = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) s += work[g * 2 * C + threadIdx.x];
        total[threadIdx.x] = s;
    }
    __syncthreads();
}

// Every thread's two sums of eight channels (the threads of one remainder by C / 8 share theirs) become one row.
template <int C>
__device__ __forceinline__ void sum_up(float (&first)[8], float (&second)[8], float *work, float *row, int stride) {
    constexpr int OCT = C / 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int step = OCT; step < 32; step *= 2) {
            first[i] += __shfl_xor_sync(0xffffffffu, first[i], step);
            second[i] += __shfl_xor_sync(0xffffffffu, second[i], step);
        }
    }
    if (lane < OCT) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            work[(warp * 2) * C + lane * 8 + i] = first[i];
            work[(warp * 2 + 1) * C + lane * 8 + i] = second[i];
        }
    }
    __syncthreads();
    if (threadIdx.x < 2 * C) {
        float s = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) s += work[w * 2 * C + threadIdx.x];
        row[(threadIdx.x / C) * stride + threadIdx.x % C] = s;
    }
}

// BatchNorm's scale and shift of each channel from the sums of the layer before: coefficients[0..C), [C..2C). The
// first program of a lane keeps mean, 1/std, scale and shift for the way back, and moves the running statistics.
//
// FIXED: of the running statistics instead, as a network that is not trained has them.
template <int C, bool FIXED>
__device__ __forceinline__ void normalise(const float *rows, int count, const float *gamma, const float *beta,
                                          float *mean, float *var, float *stats, int lane, int lanes, float pixels,
                                          float momentum, float eps, int track, bool keeps, float *work,
                                          float *coefficients) {
    if (!FIXED) add_up<C>(rows + (size_t)lane * count * 2 * C, count, work, coefficients);
    if (threadIdx.x < C) {
        const int at = lane * C + threadIdx.x;
        const float m = FIXED ? mean[at] : coefficients[threadIdx.x] / pixels;
        const float v = FIXED ? var[at] : fmaxf(coefficients[C + threadIdx.x] / pixels - m * m, 0.0f);
        const float rstd = 1.0f / sqrtf(v + eps);
        const float scale = gamma[at] * rstd, shift = beta[at] - m * scale;
        if (!FIXED && keeps) {
            stats[at] = m;
            stats[lanes * C + at] = rstd;
            stats[2 * lanes * C + at] = scale;
            stats[3 * lanes * C + at] = shift;
            if (track) {
                mean[at] += momentum * (m - mean[at]);
                var[at] += momentum * (v * (pixels / (pixels - 1)) - var[at]);
            }
        }
        coefficients[threadIdx.x] = scale;
        coefficients[C + threadIdx.x] = shift;
    }
    __syncthreads();
}

// BatchNorm's way back, dy = k (g - mean g - xhat mean(g xhat)) = coefficients[0] g + [C] y + [2C]; sums stay in
// [3C..5C).
template <int C>
__device__ __forceinline__ void backward(const float *rows, int count, const float *gamma, const float *stats, int lane,
                                         int lanes, float pixels, float *work, float *coefficients) {
    add_up<C>(rows + (size_t)lane * count * 2 * C, count, work, coefficients + 3 * C);
    if (threadIdx.x < C) {
        const int at = lane * C + threadIdx.x;
        const float m = stats[at], rstd = stats[lanes * C + at], k = gamma[at] * rstd;
        const float first = coefficients[3 * C + threadIdx.x] / pixels, second = coefficients[4 * C + threadIdx.x] / pixels;
        coefficients[threadIdx.x] = k;
        coefficients[C + threadIdx.x] = -k * second * rstd;
        coefficients[2 * C + threadIdx.x] = k * (second * rstd * m - first);
    }
    __syncthreads();
}

// ------------------------------------------------------------------------------------------------ tiles

// What a tile is made of: `first` loads the eight channels of a pixel, or `fetch` has them copied to shared memory ahead of
// time, from where `fetched` takes them; `second` makes of them what the tile holds, with numbers that each thread reads
// once a tile. SOURCES is how many tensors are fetched.

// relu(scale y + shift), or with the shortcut: + x, at every XS-th pixel, channels padded with zeros.
template <int SOURCE, int ALL, int H, int W, int XC, int XS, int XH, int XW>
struct Activations {
    static constexpr int SOURCES = SOURCE == RESIDUAL ? 2 : 1, EXTRA = (ALL - XC) / 2;
    const bf16 *y, *x;
    const float *scale, *shift;
    int from;  // the first of the eight channels
    struct Held { uint4 y, x; };
    struct Own { float scale[8], shift[8]; };

    __device__ __forceinline__ Own own() const {
        Own own;
        if (SOURCE != PLAIN) read8(scale, own.scale), read8(shift, own.shift);
        return own;
    }

    __device__ __forceinline__ bool known() const { return XC == ALL || (from >= EXTRA && from < EXTRA + XC); }

    __device__ __forceinline__ const bf16 *shortcut(int pixel) const {
        if (XC == ALL && XS == 1) return x + pixel * ALL + from;
        return x + ((pixel / (W * H) * XH + pixel / W % H * XS) * XW + pixel % W * XS) * XC + from - EXTRA;
    }

    __device__ __forceinline__ Held first(int pixel, bool there) const {
        Held held;
        held.y = load_if(y + pixel * ALL + from, there);
        if (SOURCE == RESIDUAL) held.x = load_if(shortcut(pixel), there && known());
        return held;
    }

    __device__ __forceinline__ void fetch(int pixel, bool there, bf16 *ahead, int apart) const {
        copy16_if(ahead, y + pixel * ALL + from, there);
        if (SOURCE == RESIDUAL) copy16_if(ahead + apart, shortcut(pixel), there && known());
    }

    __device__ __forceinline__ Held fetched(const bf16 *ahead, int apart) const {
        Held held;
        held.y = peek(ahead);
        if (SOURCE == RESIDUAL) held.x = known() ? peek(ahead + apart) : nothing();
        return held;
    }

    __device__ __forceinline__ uint4 second(const Held &held, const Own &own) const {
        if (SOURCE == PLAIN) return held.y;
        float v[8], x[8];
        unpack8(held.y, v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = v[i] * own.scale[i] + own.shift[i];
        if (SOURCE == RESIDUAL) {
            unpack8(held.x, x);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] += x[i];
        }
        return make_uint4(pack_relu(v[0], v[1]), pack_relu(v[2], v[3]), pack_relu(v[4], v[5]), pack_relu(v[6], v[7]));
    }
};

// The first channels of an image's pixel, the others zero; too short to be fetched.
template <int REAL>
struct Pixels {
    static constexpr int SOURCES = 0;
    const bf16 *x;
    int from;
    struct Held { uint4 x; };
    struct Own {};

    __device__ __forceinline__ Own own() const { return {}; }
    __device__ __forceinline__ Held first(int pixel, bool there) const {
        Held held = {nothing()};
        if (there && from == 0) {
            const bf16 *p = x + pixel * REAL;
            held.x.x = p[0];
            if (REAL > 1) held.x.x |= (unsigned)p[1 % REAL] << 16;
            if (REAL > 2) held.x.y = p[2 % REAL];
            if (REAL > 3) held.x.y |= (unsigned)p[3 % REAL] << 16;
        }
        return held;
    }
    __device__ __forceinline__ void fetch(int, bool, bf16 *, int) const {}
    __device__ __forceinline__ Held fetched(const bf16 *, int) const { return {nothing()}; }
    __device__ __forceinline__ uint4 second(const Held &held, const Own &) const { return held.x; }
};

// BatchNorm's way back: a g + b y + c.
template <int ALL>
struct Gradients {
    static constexpr int SOURCES = 2;
    const bf16 *g, *y;
    const float *a, *b, *c;
    int from;
    struct Held { uint4 g, y; };
    struct Own { float a[8], b[8], c[8]; };

    __device__ __forceinline__ Own own() const {
        Own own;
        read8(a, own.a), read8(b, own.b), read8(c, own.c);
        return own;
    }
    __device__ __forceinline__ Held first(int pixel, bool there) const {
        return {load_if(g + pixel * ALL + from, there), load_if(y + pixel * ALL + from, there)};
    }
    __device__ __forceinline__ void fetch(int pixel, bool there, bf16 *ahead, int apart) const {
        copy16_if(ahead, g + pixel * ALL + from, there);
        copy16_if(ahead + apart, y + pixel * ALL + from, there);
    }
    __device__ __forceinline__ Held fetched(const bf16 *ahead, int apart) const { return {peek(ahead), peek(ahead + apart)}; }
    __device__ __forceinline__ uint4 second(const Held &held, const Own &own) const {
        float g[8], y[8];
        unpack8(held.g, g);
        unpack8(held.y, y);
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] = own.a[i] * g[i] + (own.b[i] * y[i] + own.c[i]);
        return pack8(g);
    }
};

__device__ constexpr int largest(int a, int b) { return a > b ? a : b; }

template <int COUNT>
__device__ __forceinline__ void clear(bf16 *tile) {
    for (int i = threadIdx.x * 8; i < COUNT; i += THREADS * 8) store(tile + i, nothing());
}

// A tile in shared memory: IMAGES x SH x SW pixels of C channels each, C + 8 numbers apart, so that eight neighbours lie
// in different banks. Its pixels lie in a row in memory too: whole images, or with BANDED rows of one; around them are
// TOP rows and LEFT columns of zeros. A thread's pixels are STEP apart.
template <int C, int IMAGES, bool BANDED, int SH, int SW, int TOP, int LEFT, int H, int W>
struct Tile {
    static constexpr int OCT = C / 8, STEP = THREADS / OCT, ALL = (BANDED ? SH : IMAGES * H) * W;
    static constexpr int EACH = (ALL + STEP - 1) / STEP, SIZE = IMAGES * SH * SW * (C + 8);
    static constexpr int APART = ALL * C;  // of what is fetched of two tensors
    // Whether a thread's pixels stand below each other, whole rows apart, so that their places differ by constants.
    static constexpr bool EVEN = STEP % W == 0 && (BANDED || H % (STEP / W) == 0);
    static constexpr int DOWN = EVEN ? STEP / W : 1;
    int image, batch, top;  // the first image and row

    __device__ __forceinline__ int pixel(int k) const { return threadIdx.x / OCT + k * STEP; }
    __device__ __forceinline__ int place(int k) const { return (image * H + (BANDED ? top : 0)) * W + pixel(k); }
    __device__ __forceinline__ bool within(int k) const { return (k + 1) * STEP <= ALL || pixel(k) < ALL; }
    __device__ __forceinline__ int row(int k) const {
        return EVEN ? threadIdx.x / OCT / W + k * DOWN : pixel(k) / W;
    }
    __device__ __forceinline__ int number(int k) const { return BANDED ? 0 : (EVEN ? k * DOWN : row(k)) / H; }
    __device__ __forceinline__ bool there(int k) const {
        return BANDED ? (unsigned)(top + row(k)) < H : IMAGES == 1 || image + number(k) < batch;
    }
    __device__ __forceinline__ int at(int k) const {
        const int r = BANDED ? row(k) : EVEN ? threadIdx.x / OCT / W + k * DOWN % H + TOP : row(k) % H + TOP;
        const int w = EVEN ? threadIdx.x / OCT % W : pixel(k) % W;
        return ((number(k) * SH + r) * SW + w + LEFT) * (C + 8) + threadIdx.x % OCT * 8;
    }

    // Zeros around the inside.
    __device__ __forceinline__ void edge(bf16 *tile) const {
        constexpr int SIDES = SW - W, ENDS = BANDED ? 0 : SH - H;
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < IMAGES * SH * SIDES * OCT; i += THREADS) {
            const int c = i / OCT % largest(SIDES, 1), row = i / (OCT * largest(SIDES, 1));
            store(tile + (row * SW + (c < LEFT ? c : W + c)) * (C + 8) + i % OCT * 8, nothing());
        }
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < IMAGES * ENDS * W * OCT; i += THREADS) {
            const int w = i / OCT % W, e = i / (OCT * W) % largest(ENDS, 1), image = i / (OCT * W * largest(ENDS, 1));
            store(tile + ((image * SH + (e < TOP ? e : H + e)) * SW + LEFT + w) * (C + 8) + i % OCT * 8, nothing());
        }
    }

    // Begin to copy what the inside is made of; each thread takes up its own copies.
    template <class Make>
    __device__ __forceinline__ void fetch(bf16 *ahead, const Make &make) const {
#pragma unroll
        for (int k = 0; k < EACH; k++)
            make.fetch(place(k), there(k) && within(k), ahead + (k * THREADS + threadIdx.x) * 8, APART);
    }

    // Fill the inside, DEEP loads at a time, or from what was fetched; with OWN, `kept` receives that many rows behind
    // the first TOP.
    template <int OWN, int DEEP, bool FETCHED, class Make>
    __device__ __forceinline__ void fill(bf16 *tile, const Make &make, bf16 *kept, const bf16 *ahead) const {
        const typename Make::Own own = make.own();
#pragma unroll
        for (int round = 0; round < EACH; round += DEEP) {
            typename Make::Held held[DEEP];
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                const int k = round + d;
                if (k >= EACH || (FETCHED && !within(k))) continue;
                if (FETCHED) held[d] = make.fetched(ahead + (k * THREADS + threadIdx.x) * 8, APART);
                if (!FETCHED) held[d] = make.first(place(k), there(k) && within(k));
            }
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                const int k = round + d;
                if (k >= EACH || !within(k)) continue;
                uint4 value = make.second(held[d], own);
                if (!there(k)) value = nothing();
                if (OWN && kept) {
                    const bool mine = there(k) && (!BANDED || (row(k) >= TOP && row(k) < TOP + OWN));
                    store_if(kept + place(k) * C + threadIdx.x % OCT * 8, value, mine);
                }
                store(tile + at(k), value);
            }
        }
    }
};

// Rows of N numbers, `stride` apart, into shared memory, N + 8 apart.
template <int ROWS, int N>
__device__ __forceinline__ void copy_rows(bf16 *shared, const bf16 *from, int stride) {
    constexpr int OCT = N / 8;
    for (int chunk = threadIdx.x; chunk < ROWS * OCT; chunk += THREADS) {
        const int row = chunk / OCT, oct = chunk % OCT;
        copy16(shared + row * (N + 8) + oct * 8, from + (size_t)row * stride + oct * 8);
    }
}

constexpr int COEFFICIENTS = 7 * 64;  // numbers per channel that a program holds in shared memory

// Numbers of bf16 that a tile, the results of its convolution, and sums may take turns in.
__device__ constexpr int room(int tile, int results) { return largest(largest(tile, results), 8 * THREADS); }

// Whether pixel m of a tile, one of every STEP, is beyond its end, the last row or the last image.
template <int H, int W, int ROWS, int IMAGES, int STEP>
__device__ __forceinline__ bool outside(int m, int image, int row, int batch) {
    return (IMAGES * ROWS * W % STEP && m >= IMAGES * ROWS * W) || (H % ROWS && row + m / W % ROWS >= H) ||
           (IMAGES > 1 && image + m / (ROWS * W) >= batch);
}

#if defined(CONV) || defined(BACK)
// Both directions: 16 MT pixels by 8 NT channels per warp, NB channels per program, tiles of IMAGES x ROWS x all columns.
constexpr int CI = GIVEN_CI, CO = GIVEN_CO, H = GIVEN_H, W = GIVEN_W, STRIDE = GIVEN_STRIDE, ROWS = GIVEN_ROWS;
constexpr int IMAGES = GIVEN_IMAGES, NB = GIVEN_NB, MT = GIVEN_MT, DEPTH = GIVEN_DEPTH, AHEAD = GIVEN_AHEAD;
constexpr int HO = (H + STRIDE - 1) / STRIDE, WO = (W + STRIDE - 1) / STRIDE;
constexpr int ACROSS = NB == 64 ? 2 : 1, NT = NB / 8 / ACROSS;

// Add a warp's products of 16 channels: its pixels' rows begin at these places of the tile, b holds the weights.
__device__ __forceinline__ void multiply(float (&acc)[MT][NT][4], const bf16 *tile, const int (&at)[MT],
                                         const unsigned (&b)[NT / 2][4]) {
#pragma unroll
    for (int i = 0; i < MT; i++) {
        unsigned c[4];
        ldmatrix4(c, tile + at[i]);
#pragma unroll
        for (int j = 0; j < NT / 2; j++) {
            mma(acc[i][2 * j], c, b[j][0], b[j][1]);
            mma(acc[i][2 * j + 1], c, b[j][2], b[j][3]);
        }
    }
}

// The products of a warp, from fragments to a tile of results [pixels][NB + 8] in bf16.
template <int PIXELS>
__device__ __forceinline__ void put(bf16 *results, const float (&acc)[MT][NT][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < MT; i++) {
        const int m = (warp / ACROSS * MT + i) * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const int n = (warp % ACROSS * NT + j) * 8 + lane % 4 * 2;
            if (m < PIXELS) *(unsigned *)(results + m * (NB + 8) + n) = pack(acc[i][j][0], acc[i][j][1]);
            if (m + 8 < PIXELS) *(unsigned *)(results + (m + 8) * (NB + 8) + n) = pack(acc[i][j][2], acc[i][j][3]);
        }
    }
}
#endif

#ifdef CONV
// ------------------------------------------------------------------------------------------------ forward

constexpr int SOURCE = GIVEN_SOURCE, KEEP = GIVEN_KEEP, REAL = GIVEN_REAL, FIXED = GIVEN_FIXED;
constexpr int XC = GIVEN_XC, XS = GIVEN_XS, XH = GIVEN_XH, XW = GIVEN_XW;

struct Conv {
    const bf16 *in, *extra;  // images, or the convolution before; what the shortcut reads
    bf16 *kept;              // the activations, for those who read them later
    const float *part, *gamma, *beta;
    float *mean, *var, *stats;  // of the BatchNorm between
    const bf16 *weight;         // [lanes, 9, CI, CO]
    bf16 *out;
    float *sums;  // [lanes, programs, 2, CO]
    int batch, lanes, rows, per, tiles, track;
    float momentum, eps;
};

// out = conv3x3(activations of in), and its sums.
extern "C" __global__ void __launch_bounds__(THREADS, GIVEN_TOGETHER) conv(const Conv a) {
    constexpr int SH = (ROWS - 1) * STRIDE + 3, SW = (WO - 1) * STRIDE + 3, PIXEL = CI + 8, WIDE = NB + 8;
    constexpr int PIXELS = IMAGES * ROWS * WO, BANDS = (HO + ROWS - 1) / ROWS;
    typedef Tile<CI, IMAGES, (BANDS > 1), SH, SW, 1, 1, H, W> Read;
    SHARED(unsigned char, memory);
    float *coefficients = (float *)memory;
    bf16 *tile = (bf16 *)(coefficients + COEFFICIENTS), *weights = tile + room(Read::SIZE, PIXELS * WIDE);
    bf16 *ahead = weights + 9 * CI * WIDE;
    float *work = (float *)tile;  // before the first tile and behind the last
    const int lane = blockIdx.y, n0 = blockIdx.z * NB, thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    const size_t pixels = (size_t)lane * a.batch * H * W;

    copy_rows<9 * CI, NB>(weights, a.weight + (size_t)lane * 9 * CI * CO + n0, CO);
    follow();
#if GIVEN_SOURCE == 0
    Pixels<REAL> make;
    make.x = a.in + pixels * REAL;
#else
    Activations<SOURCE, CI, H, W, XC, XS, XH, XW> make;
    make.y = a.in + pixels * CI;
    make.x = a.extra + (size_t)lane * a.batch * XH * XW * XC;
    make.scale = coefficients + threadIdx.x % (CI / 8) * 8;
    make.shift = make.scale + CI;
#endif
    make.from = threadIdx.x % (CI / 8) * 8;
    constexpr bool FETCHED = AHEAD && make.SOURCES;
    const auto read = [&](int t) { return Read{t / BANDS * IMAGES, a.batch, t % BANDS * ROWS * STRIDE - 1}; };
    const int begin = blockIdx.x * a.per, end = begin + a.per < a.tiles ? begin + a.per : a.tiles;
    if (FETCHED) read(begin).fetch(ahead, make);
#if GIVEN_SOURCE != 0
    normalise<CI, FIXED>(a.part, a.rows, a.gamma, a.beta, a.mean, a.var, a.stats, lane, a.lanes, (float)a.batch * H * W,
                         a.momentum, a.eps, a.track, blockIdx.x == 0 && blockIdx.z == 0, work, coefficients);
#endif
    bf16 *kept = KEEP && blockIdx.z == 0 ? a.kept + pixels * CI : 0;
    bf16 *out = a.out + (size_t)lane * a.batch * HO * WO * CO + n0;

    int at[MT];  // where this thread's row of each product begins
#pragma unroll
    for (int i = 0; i < MT; i++) {
        int m = (warp / ACROSS * MT + i) * 16 + thread % 16;
        m = m < PIXELS ? m : PIXELS - 1;
        at[i] = ((m / (ROWS * WO) * SH + m / WO % ROWS * STRIDE) * SW + m % WO * STRIDE) * PIXEL + thread / 16 * 8;
    }
    const int column = (thread / 8 % 2 * 8 + thread % 8) * WIDE + warp % ACROSS * NT * 8 + thread / 16 * 8;
    float first[8] = {}, second[8] = {};

    for (int t = begin; t < end; t++) {
        const int image = t / BANDS * IMAGES, row = t % BANDS * ROWS;
        copies_done();
        read(t).edge(tile);
        read(t).template fill<KEEP * ROWS * STRIDE, DEPTH, FETCHED>(tile, make, kept, ahead);
        __syncthreads();
        if (FETCHED && t + 1 < end) read(t + 1).fetch(ahead, make);
        float acc[MT][NT][4] = {};
#pragma unroll
        for (int tap = 0; tap < 9; tap++) {
#pragma unroll
            for (int k = 0; k < CI; k += 16) {
                unsigned b[NT / 2][4];
#pragma unroll
                for (int j = 0; j < NT / 2; j++) ldmatrix4t(b[j], weights + (tap * CI + k) * WIDE + column + j * 16);
                multiply(acc, tile + (tap / 3 * SW + tap % 3) * PIXEL + k, at, b);
            }
        }
        if (t + 1 == end) lead();
        __syncthreads();
        put<PIXELS>(tile, acc);
        __syncthreads();
        const int oct = threadIdx.x % (NB / 8), from = (image * HO + row) * WO;
#pragma unroll
        for (int k = 0; k < PIXELS; k += THREADS / (NB / 8)) {
            const int m = threadIdx.x / (NB / 8) + k;
            const bool there = !outside<HO, WO, ROWS, IMAGES, THREADS / (NB / 8)>(m, image, row, a.batch);
            uint4 q = peek(tile + (PIXELS % (THREADS / (NB / 8)) == 0 || m < PIXELS ? m : 0) * WIDE + oct * 8);
            store_if(out + (from + m) * CO + oct * 8, q, there);
            if (!there) q = nothing();
            float v[8];
            unpack8(q, v);
#pragma unroll
            for (int i = 0; i < 8; i++) first[i] += v[i], second[i] += v[i] * v[i];
        }
        __syncthreads();
    }
    if (!FIXED) sum_up<NB>(first, second, work, a.sums + ((size_t)lane * gridDim.x + blockIdx.x) * 2 * CO + n0, CO);
}
#endif

#ifdef BACK
// ------------------------------------------------------------------------------------------------ backward

constexpr int OUTER = GIVEN_OUTER;

struct Back {
    const bf16 *g, *y;  // the gradient behind the convolution's BatchNorm, and the convolution
    const float *part, *gamma, *stats;
    const bf16 *weight;  // [lanes, 9, CI, CO]
    const bf16 *before;  // the convolution before, and its BatchNorm's statistics
    const float *known;
    const bf16 *x, *shortcut;  // OUTER: the input, and the gradient of the shortcut that it went into too
    bf16 *out;
    float *sums;  // [lanes, programs, 2, CI]
    int batch, lanes, rows, per, tiles;
};

// out = the gradient of a convolution's input, behind the ReLU before it, and the sums that BatchNorm's way back needs.
extern "C" __global__ void __launch_bounds__(THREADS, GIVEN_TOGETHER) back(const Back a) {
    constexpr int EDGE = STRIDE == 1, SH = EDGE ? ROWS + 2 : ROWS / 2 + 1, SW = EDGE ? W + 2 : WO + 1;
    constexpr int PIXEL = CO + 8, WIDE = NB + 8, LONG = CO + 8, PIXELS = IMAGES * ROWS * W, BANDS = (H + ROWS - 1) / ROWS;
    typedef Tile<CO, IMAGES, (BANDS > 1), SH, SW, EDGE, EDGE, HO, WO> Read;
    constexpr int ZERO = Read::SIZE;  // a pixel of zeros, for taps that meet nothing
    SHARED(unsigned char, memory);
    float *coefficients = (float *)memory;
    bf16 *tile = (bf16 *)(coefficients + COEFFICIENTS), *weights = tile + room(ZERO + PIXEL, PIXELS * WIDE);
    bf16 *ahead = weights + 9 * NB * LONG;
    float *work = (float *)tile;
    const int lane = blockIdx.y, n0 = blockIdx.z * NB, thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    const size_t behind = (size_t)lane * a.batch * HO * WO * CO, here = (size_t)lane * a.batch * H * W * CI + n0;

    for (int tap = 0; tap < 9; tap++)
        copy_rows<NB, CO>(weights + tap * NB * LONG, a.weight + ((size_t)(lane * 9 + tap) * CI + n0) * CO, CO);
    follow();
    Gradients<CO> make;
    make.g = a.g + behind;
    make.y = a.y + behind;
    make.from = threadIdx.x % (CO / 8) * 8;
    make.a = coefficients + make.from;
    make.b = make.a + CO;
    make.c = make.b + CO;
    const auto read = [&](int t) {
        return Read{t / BANDS * IMAGES, a.batch, EDGE ? t % BANDS * ROWS - 1 : t % BANDS * ROWS / 2};
    };
    const int begin = blockIdx.x * a.per, end = begin + a.per < a.tiles ? begin + a.per : a.tiles;
    if (AHEAD) read(begin).fetch(ahead, make);
    backward<CO>(a.part, a.rows, a.gamma, a.stats, lane, a.lanes, (float)a.batch * HO * WO, work, coefficients);

    int at[MT];
#pragma unroll
    for (int i = 0; i < MT; i++) {
        int m = (warp / ACROSS * MT + i) * 16 + thread % 16;
        at[i] = m < PIXELS ? m : PIXELS - 1;
        if (STRIDE == 1)
            at[i] = ((at[i] / (ROWS * W) * SH + at[i] / W % ROWS) * SW + at[i] % W) * PIXEL + thread / 16 * 8;
    }
    const int column = (warp % ACROSS * NT * 8 + thread / 16 * 8 + thread % 8) * LONG + thread / 8 % 2 * 8;
    const int oct = threadIdx.x % (NB / 8);
    const float *own = a.known + lane * CI + n0 + oct * 8;
    float first[8] = {}, second[8] = {};

    for (int t = begin; t < end; t++) {
        const int image = t / BANDS * IMAGES, row = t % BANDS * ROWS;
        copies_done();
        read(t).edge(tile);
        if (STRIDE > 1 && threadIdx.x < PIXEL / 8) store(tile + ZERO + threadIdx.x * 8, nothing());
        read(t).template fill<0, DEPTH, AHEAD>(tile, make, 0, ahead);
        __syncthreads();
        if (AHEAD && t + 1 < end) read(t + 1).fetch(ahead, make);
        float acc[MT][NT][4] = {};
#pragma unroll
        for (int tap = 0; tap < 9; tap++) {
            int from[MT];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                if (STRIDE == 1) {  // from left to right in dy is from right to left in the taps
                    from[i] = at[i] + ((2 - tap / 3) * SW + 2 - tap % 3) * PIXEL;
                } else {
                    const int h = at[i] / W % ROWS + 1 - tap / 3, w = at[i] % W + 1 - tap % 3;
                    const bool met = h % 2 == 0 && w % 2 == 0;
                    from[i] = met ? ((at[i] / (ROWS * W) * SH + h / 2) * SW + w / 2) * PIXEL : ZERO;
                    from[i] += thread / 16 * 8;
                }
            }
#pragma unroll
            for (int k = 0; k < CO; k += 16) {
                unsigned b[NT / 2][4];
#pragma unroll
                for (int j = 0; j < NT / 2; j++)
                    ldmatrix4(b[j], weights + (tap * NB + j * 16) * LONG + column + k);
                multiply(acc, tile + k, from, b);
            }
        }
        if (t + 1 == end) lead();
        __syncthreads();
        put<PIXELS>(tile, acc);
        __syncthreads();
        float scale[8], shift[8];
        if (!OUTER) read8(own + 2 * a.lanes * CI, scale), read8(own + 3 * a.lanes * CI, shift);
        const int pixels = (image * H + row) * W;
#pragma unroll
        for (int k = 0; k < PIXELS; k += THREADS / (NB / 8)) {
            const int m = threadIdx.x / (NB / 8) + k;
            const bool there = !outside<H, W, ROWS, IMAGES, THREADS / (NB / 8)>(m, image, row, a.batch);
            const size_t pixel = here + (pixels + m) * CI + oct * 8;
            float v[8], y[8], other[8];
            unpack8(load_if(a.before + pixel, there), y);
            unpack8(peek(tile + (PIXELS % (THREADS / (NB / 8)) == 0 || m < PIXELS ? m : 0) * WIDE + oct * 8), v);
            if (OUTER) {
                const int w = m % W, h = row + m / W % ROWS, b = image + m / (W * ROWS);
                const int from = STRIDE == 1 ? pixels + m : (b * HO + h / STRIDE) * WO + w / STRIDE;
                const bool met = there && (STRIDE == 1 || (h % STRIDE == 0 && w % STRIDE == 0));
                unpack8(load_if(a.shortcut + behind + from * CO + (CO - CI) / 2 + n0 + oct * 8, met), other);
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] += other[i];
                unpack8(load_if(a.x + pixel, there), other);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++) other[i] = there ? y[i] * scale[i] + shift[i] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = other[i] > 0 ? v[i] : 0.0f;
            const uint4 q = pack8(v);
            store_if(a.out + pixel, q, there);
            unpack8(q, v);
#pragma unroll
            for (int i = 0; i < 8; i++) first[i] += v[i], second[i] += v[i] * y[i];
        }
        __syncthreads();
    }
    float mean[8], rstd[8];
    read8(own, mean);
    read8(own + a.lanes * CI, rstd);
#pragma unroll
    for (int i = 0; i < 8; i++) second[i] = (second[i] - mean[i] * first[i]) * rstd[i];
    sum_up<NB>(first, second, work, a.sums + ((size_t)lane * gridDim.x + blockIdx.x) * 2 * CI + n0, CI);
}
#endif

#ifdef GRAD
// ------------------------------------------------------------------------------------------------ weights

constexpr int SOURCE = GIVEN_SOURCE, REAL = GIVEN_REAL, CI = GIVEN_CI, CO = GIVEN_CO, H = GIVEN_H, W = GIVEN_W;
constexpr int STRIDE = GIVEN_STRIDE, ROWS = GIVEN_ROWS, IMAGES = GIVEN_IMAGES, DEPTH = GIVEN_DEPTH, AHEAD = GIVEN_AHEAD;
constexpr int HO = (H + STRIDE - 1) / STRIDE, WO = (W + STRIDE - 1) / STRIDE;
constexpr int BI = CI < 32 ? CI : 32, BO = CO < 32 ? CO : 32;  // a program's channels

struct Grad {
    const bf16 *in;  // images, the convolution before, or activations
    const float *known;
    const bf16 *g, *y;
    const float *part, *gamma, *stats;
    float *dgamma, *dbeta, *out;  // [lanes, CO] each; [programs, lanes, 9, CI, CO]
    int batch, lanes, rows, per, tiles;
};

// A warp's sums to shared memory [9][BI][BO], or added to what it holds.
template <bool OUT>
__device__ __forceinline__ void exchange(float *total, float (&acc)[9][2][4], int ci, int co) {
    const int thread = threadIdx.x % 32;
#pragma unroll
    for (int tap = 0; tap < 9; tap++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = tap * BI + ci + j / 2 * 8 + thread / 4, column = co + j % 2 * 8 + thread % 4 * 2;
            float2 *p = (float2 *)(total + row * BO + column);
            float &x = acc[tap][j % 2][j / 2 * 2], &y = acc[tap][j % 2][j / 2 * 2 + 1];
            if (OUT) {
                *p = make_float2(x, y);
            } else {
                const float2 other = *p;
                x += other.x, y += other.y;
            }
        }
    }
}

// The gradient of a convolution's weights, a share of the pixels per program; and those of BatchNorm's scale and shift.
extern "C" __global__ void __launch_bounds__(THREADS, GIVEN_TOGETHER) grad(const Grad a) {
    constexpr int SH = (ROWS - 1) * STRIDE + 3, SW = (WO - 1) * STRIDE + 3, PI = BI + 8, PO = BO + 8;
    constexpr int PIXELS = IMAGES * ROWS * WO, STEPS = (PIXELS + 15) / 16, BANDS = (HO + ROWS - 1) / ROWS;
    constexpr int PAIRS = BI / 16 * (BO / 16), GROUPS = WARPS / PAIRS;
    typedef Tile<BI, IMAGES, (BANDS > 1), SH, SW, 1, 1, H, W> Left;
    typedef Tile<BO, IMAGES, (BANDS > 1), ROWS, WO, 0, 0, HO, WO> Right;
    SHARED(unsigned char, memory);
    float *coefficients = (float *)memory, *total = coefficients + COEFFICIENTS, *work = total;
    bf16 *left = (bf16 *)total, *right = left + Left::SIZE, *ahead = left + room(Left::SIZE + STEPS * 16 * PO, 0);
    const int lane = blockIdx.y, i0 = blockIdx.z % (CI / BI) * BI, o0 = blockIdx.z / (CI / BI) * BO;
    const int thread = threadIdx.x % 32, warp = threadIdx.x / 32, pair = warp % PAIRS, group = warp / PAIRS;
    const int ci = pair % (BI / 16) * 16, co = pair / (BI / 16) * 16;
    const size_t before = (size_t)lane * a.batch * H * W, behind = (size_t)lane * a.batch * HO * WO * CO;

    Gradients<CO> dy;
    dy.g = a.g + behind;
    dy.y = a.y + behind;
    dy.from = o0 + threadIdx.x % (BO / 8) * 8;
    dy.a = coefficients + dy.from;
    dy.b = dy.a + CO;
    dy.c = dy.b + CO;
#if GIVEN_SOURCE == 0
    Pixels<REAL> make;
    make.x = a.in + before * REAL;
    make.from = threadIdx.x % (BI / 8) * 8;
#else
    Activations<SOURCE, CI, H, W, CI, 1, H, W> make;
    make.y = a.in + before * CI;
    make.from = i0 + threadIdx.x % (BI / 8) * 8;
    make.scale = coefficients + 5 * 64 + make.from;
    make.shift = make.scale + CI;
    if (SOURCE == NORM && threadIdx.x < 2 * CI)
        coefficients[5 * 64 + threadIdx.x] = a.known[((2 + threadIdx.x / CI) * a.lanes + lane) * CI + threadIdx.x % CI];
#endif
    constexpr bool FETCHED = AHEAD && make.SOURCES;
    bf16 *next = ahead + (FETCHED ? Left::APART : 0);  // room for what is fetched of dy
    const auto reads = [&](int t) { return Left{t / BANDS * IMAGES, a.batch, t % BANDS * ROWS * STRIDE - 1}; };
    const auto meets = [&](int t) { return Right{t / BANDS * IMAGES, a.batch, t % BANDS * ROWS}; };
    const int begin = blockIdx.x * a.per, end = begin + a.per < a.tiles ? begin + a.per : a.tiles;
    if (FETCHED) reads(begin).fetch(ahead, make);
    if (AHEAD) meets(begin).fetch(next, dy);
    backward<CO>(a.part, a.rows, a.gamma, a.stats, lane, a.lanes, (float)a.batch * HO * WO, work, coefficients);
    if (blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x < CO) {
        a.dbeta[lane * CO + threadIdx.x] = coefficients[3 * CO + threadIdx.x];
        a.dgamma[lane * CO + threadIdx.x] = coefficients[4 * CO + threadIdx.x];
    }
    clear<Left::SIZE + STEPS * 16 * PO>(left);  // what is beyond the pixels counts nothing
    __syncthreads();
    float acc[9][2][4] = {};
    for (int t = begin; t < end; t++) {
        copies_done();
        reads(t).template fill<0, DEPTH, FETCHED>(left, make, 0, ahead);
        meets(t).template fill<0, DEPTH, AHEAD>(right, dy, 0, next);
        __syncthreads();
        if (FETCHED && t + 1 < end) reads(t + 1).fetch(ahead, make);
        if (AHEAD && t + 1 < end) meets(t + 1).fetch(next, dy);
#pragma unroll 1
        for (int step = group; step < STEPS; step += GROUPS) {
            unsigned b[4], c[4];
            ldmatrix4t(b, right + (step * 16 + thread / 8 % 2 * 8 + thread % 8) * PO + co + thread / 16 * 8);
            int m = step * 16 + thread / 16 * 8 + thread % 8;
            m = m < PIXELS ? m : PIXELS - 1;
            const int at = ((m / (ROWS * WO) * SH + m / WO % ROWS * STRIDE) * SW + m % WO * STRIDE) * PI + ci +
                           thread / 8 % 2 * 8;
#pragma unroll
            for (int tap = 0; tap < 9; tap++) {
                ldmatrix4t(c, left + at + (tap / 3 * SW + tap % 3) * PI);
                mma(acc[tap][0], c, b[0], b[1]);
                mma(acc[tap][1], c, b[2], b[3]);
            }
        }
        __syncthreads();
    }
    // Groups of warps hand over to the half of them, always in the same pairs, until one has it all.
#pragma unroll
    for (int half = GROUPS / 2; half >= 1; half /= 2) {
        if (group >= half && group < 2 * half) exchange<true>(total + (group - half) * 9 * BI * BO, acc, ci, co);
        __syncthreads();
        if (group < half) exchange<false>(total + group * 9 * BI * BO, acc, ci, co);
        __syncthreads();
    }
    if (group == 0) exchange<true>(total, acc, ci, co);
    __syncthreads();
    float *out = a.out + ((size_t)blockIdx.x * a.lanes + lane) * 9 * CI * CO;
    for (int i = threadIdx.x; i < 9 * BI * BO; i += THREADS)
        out[(i / (BI * BO) * CI + i0 + i / BO % BI) * CO + o0 + i % BO] = total[i];
}
#endif

#ifdef COLLECT
constexpr int CI = GIVEN_CI, CO = GIVEN_CO, REAL = GIVEN_REAL;

struct Collect {
    const float *part;  // [programs, lanes, 9, CI, CO]
    float *out;         // [lanes, CO, REAL, 9]
    int lanes, programs;
};

// The shares of a gradient added up, in the order of the weights: 128 numbers per program, eight threads to each four.
extern "C" __global__ void __launch_bounds__(THREADS) collect(const Collect a) {
    SHARED(float4, sums);  // [8][32]
    const int lane = blockIdx.y, column = blockIdx.x * 32 + threadIdx.x % 32, group = threadIdx.x / 32;
    const float4 *part = (const float4 *)a.part + (size_t)lane * (9 * CI * CO / 4) + column;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int p = group; p < a.programs; p += 8) {
        const float4 v = part[(size_t)p * a.lanes * (9 * CI * CO / 4)];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    const int i = blockIdx.x * 128 + threadIdx.x, co = i % CO, ci = i / CO % CI, tap = i / (CO * CI);
    if (threadIdx.x >= 128 || ci >= REAL) return;
    float total = 0;
#pragma unroll
    for (int g = 0; g < 8; g++) total += ((const float *)sums)[g * 128 + threadIdx.x];
    a.out[(((size_t)lane * CO + co) * REAL + ci) * 9 + tap] = total;
}
#endif

#ifdef TAIL
// ------------------------------------------------------------------------------------------------ the trunk's end

constexpr int C = GIVEN_C, H = GIVEN_H, W = GIVEN_W, FIXED = GIVEN_FIXED;
constexpr int XC = GIVEN_XC, XS = GIVEN_XS, XH = GIVEN_XH, XW = GIVEN_XW;

struct Tail {
    const bf16 *in, *extra;
    bf16 *kept;
    const float *part, *gamma, *beta;
    float *mean, *var, *stats;
    float *features;  // [lanes, batch, C]
    int batch, lanes, rows, track;
    float momentum, eps;
};

// The last block's activations, and their means over pixels; one image per program.
extern "C" __global__ void __launch_bounds__(THREADS) tail(const Tail a) {
    SHARED(unsigned char, memory);
    float *work = (float *)memory, *coefficients = work + 4 * THREADS;
    const int lane = blockIdx.y, b = blockIdx.x, from = threadIdx.x % (C / 8) * 8;
    follow();
    normalise<C, FIXED>(a.part, a.rows, a.gamma, a.beta, a.mean, a.var, a.stats, lane, a.lanes, (float)a.batch * H * W,
                 a.momentum, a.eps, a.track, b == 0, work, coefficients);
    Activations<RESIDUAL, C, H, W, XC, XS, XH, XW> make;
    make.y = a.in + (size_t)lane * a.batch * H * W * C;
    make.x = a.extra + (size_t)lane * a.batch * XH * XW * XC;
    make.from = from;
    make.scale = coefficients + from;
    make.shift = coefficients + C + from;
    float sum[8] = {}, none[8] = {};
    for (int pixel = threadIdx.x / (C / 8); pixel < H * W; pixel += THREADS / (C / 8)) {
        const uint4 q = make.second(make.first(b * H * W + pixel, true), make.own());
        store_if(a.kept + (((size_t)lane * a.batch + b) * H * W + pixel) * C + from, q, true);
        float v[8];
        unpack8(q, v);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] += v[i] / (H * W);
    }
    __syncthreads();
    float *row = work + 2 * C * WARPS;
    sum_up<C>(sum, none, work, row, C);
    __syncthreads();
    if (threadIdx.x < C) a.features[((size_t)lane * a.batch + b) * C + threadIdx.x] = row[threadIdx.x];
}
#endif

#ifdef POOL
constexpr int C = GIVEN_C, H = GIVEN_H, W = GIVEN_W;

struct Pool {
    const float *df;  // [lanes, batch, C]
    const bf16 *kept, *y;
    const float *known;
    bf16 *out;
    float *sums;  // [lanes, programs, 2, C]
    int batch, lanes, images;
};

// The gradient behind the last ReLU, from that of the features; and the sums for BatchNorm's way back.
extern "C" __global__ void __launch_bounds__(THREADS) pool(const Pool a) {
    SHARED(float, work);
    const int lane = blockIdx.y, from = threadIdx.x % (C / 8) * 8;
    float mean[8], rstd[8], first[8] = {}, second[8] = {};
    lead();
    read8(a.known + lane * C + from, mean);
    read8(a.known + (a.lanes + lane) * C + from, rstd);
    for (int b = blockIdx.x * a.images; b < a.batch && b < (blockIdx.x + 1) * a.images; b++) {
        float df[8];
        read8(a.df + ((size_t)lane * a.batch + b) * C + from, df);
        for (int pixel = threadIdx.x / (C / 8); pixel < H * W; pixel += THREADS / (C / 8)) {
            const size_t at = (((size_t)lane * a.batch + b) * H * W + pixel) * C + from;
            float x[8], y[8], v[8];
            unpack8(load_if(a.kept + at, true), x);
            unpack8(load_if(a.y + at, true), y);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = x[i] > 0 ? df[i] / (H * W) : 0.0f;
            const uint4 q = pack8(v);
            store_if(a.out + at, q, true);
            unpack8(q, v);
#pragma unroll
            for (int i = 0; i < 8; i++) first[i] += v[i], second[i] += v[i] * ((y[i] - mean[i]) * rstd[i]);
        }
    }
    sum_up<C>(first, second, work, a.sums + ((size_t)lane * gridDim.x + blockIdx.x) * 2 * C, C);
}
#endif

#ifdef GATHER
struct Gather {
    const float *from;
    const int *order;
    bf16 *out;
    int count;
};

// Numbers in another order, in bf16; zero where the order says -1.
extern "C" __global__ void __launch_bounds__(THREADS) gather(const Gather a) {
    const int i = (blockIdx.x * THREADS + threadIdx.x) * 2;
    if (i >= a.count) return;
    const int j = a.order[i], k = a.order[i + 1];
    *(unsigned *)(a.out + i) = pack(j < 0 ? 0.0f : a.from[j], k < 0 ? 0.0f : a.from[k]);
}
#endif
