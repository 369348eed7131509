// What a training step does besides the trunks: its batch, the head, its count and Adam, for all lanes at once.
// 256 threads a block. Numbers in bf16 are stored as unsigned short.

#ifdef ON_CPU
#include "cuda.h"
#else
#define SHARED(type, name) extern __shared__ __align__(16) type name[]
// Two numbers in bf16, rounded to the nearest (even) one.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
#endif

#ifdef CHANNELS  // with HEIGHT, WIDTH, DRAWS and STRONG: constants, since every number of an image is divided by them

struct Images {
    const unsigned char* pool;   // [rows, CHANNELS, HEIGHT, WIDTH]
    const int* plan;             // [lanes, window, batch]: rows
    const unsigned char* draws;  // [lanes, window, batch, DRAWS]: the crop's row and column, the flip; strong: the
                                 // hole's centre, brightness and shift too, from 0 to 255
    const long long* place;      // [lanes]: the step within the window
    const long long* offset;     // [lanes]: where a lane's rows begin
    const float* mean;           // [CHANNELS]
    const float* std;
    unsigned short* out;         // [lanes, all, HEIGHT, WIDTH, CHANNELS], bf16
    float scale;
    int window, batch, all, first, pad;
#if STRONG
    const float* factors;  // [256]: by level of brightness
    const float* shifts;
    int tall, wide;  // the hole's rows and columns
#endif
};

// A batch of one stream from the pool of uint8 images: gathered, augmented, normalised, channels last.
// One block writes EACH numbers of image blockIdx.x of lane blockIdx.y.
extern "C" __global__ void images(Images a) {
    const int b = blockIdx.x, lane = blockIdx.y;
    const long long at = (lane * (long long)a.window + a.place[lane]) * a.batch + b;
    const long long row = a.plan[at] + a.offset[lane];
    int down = 0, right = 0;
    bool flipped = false;
#if DRAWS
    const unsigned char* draws = a.draws + at * DRAWS;
    down = draws[0] - a.pad;
    right = draws[1] - a.pad;
    flipped = draws[2] > 0;
#endif
#if STRONG
    const int above = draws[3] * HEIGHT / 256 - a.tall / 2, left = draws[4] * WIDTH / 256 - a.wide / 2;
    const float factor = a.factors[draws[5]], shift = a.shifts[draws[6]];
#endif
    const int numbers = CHANNELS * HEIGHT * WIDTH;
    const unsigned char* image = a.pool + row * numbers;
    unsigned short* out = a.out + ((long long)lane * a.all + a.first + b) * numbers;
    const int start = blockIdx.z * EACH, end = start + EACH < numbers ? start + EACH : numbers;
    for (int i = start + threadIdx.x; i < end; i += blockDim.x) {
        const int c = i % CHANNELS, w = i / CHANNELS % WIDTH, h = i / (CHANNELS * WIDTH), y = h + down;
        const int x = (flipped ? WIDTH - 1 - w : w) + right;
        const bool inside = y >= 0 && y < HEIGHT && x >= 0 && x < WIDTH;
#if STRONG  // each operation rounded by itself, as torch rounds it
        const float stored = inside ? image[(c * HEIGHT + y) * WIDTH + x] : 0.0f;
        const float lit = __fadd_rn(__fmul_rn(__fmul_rn(stored, a.scale), factor), shift);
        const bool hidden = h >= above && h < above + a.tall && w >= left && w < left + a.wide;
        out[i] = (unsigned short)pack(hidden ? 0.0f : __fdiv_rn(__fsub_rn(lit, a.mean[c]), a.std[c]), 0.0f);
#else
        const float value = inside ? image[(c * HEIGHT + y) * WIDTH + x] * a.scale : 0.0f;
        out[i] = (unsigned short)pack((value - a.mean[c]) / a.std[c], 0.0f);
#endif
    }
}

#endif

struct Rows {
    const void* pool;         // [rows, each]: items of 4 bytes, or of one
    const int* plan;          // [lanes, window, batch]: rows
    const long long* place;   // [lanes]: the step within the window
    const long long* offset;  // [lanes]: where a lane's rows begin
    void* out;                // [lanes, batch, each]
    int window, batch, each, wide;
};

// A column's batch of one stream, gathered from the pool. Block blockIdx.x of lane blockIdx.y: an item a thread.
extern "C" __global__ void rows(Rows a) {
    const int lane = blockIdx.y;
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, b = i / a.each;
    if (b >= a.batch) return;
    const long long row = a.plan[(lane * (long long)a.window + a.place[lane]) * a.batch + b] + a.offset[lane];
    const long long from = row * a.each + i % a.each, to = lane * (long long)a.batch * a.each + i;
    if (a.wide)
        ((unsigned*)a.out)[to] = ((const unsigned*)a.pool)[from];
    else
        ((unsigned char*)a.out)[to] = ((const unsigned char*)a.pool)[from];
}

// ---------------------------------------------------------------------------------------------------------- the head

const int HEAD_THREADS = 256, HEAD_ROWS = 8, HEAD_OUTPUTS = 32;  // the lines of a block, and a block's results of a line
const int HEAD_WIDE = 128 / 4, HEAD_STEP = HEAD_WIDE + 1;  // of a line at a time; one more keeps outputs in other banks

struct Head {
    const float* x;       // [lanes, batch, inputs]; inputs: a multiple of 4
    const float* weight;  // [lanes, outputs, inputs]
    const float* bias;    // [lanes, outputs]
    float* out;           // [lanes, batch, outputs]
    int batch, inputs, outputs;
};

// A linear layer. One block: HEAD_ROWS rows (blockIdx.x) x HEAD_OUTPUTS outputs (y) of lane z, a result each thread.
extern "C" __global__ void __launch_bounds__(HEAD_THREADS) head(Head a) {
    SHARED(float, work);
    float4* lines = (float4*)work;  // the rows', then the outputs'
    const int lane = blockIdx.z, first = blockIdx.x * HEAD_ROWS, begin = blockIdx.y * HEAD_OUTPUTS;
    const int r = threadIdx.x / HEAD_OUTPUTS, o = threadIdx.x % HEAD_OUTPUTS, all = a.inputs / 4;
    const bool there = first + r < a.batch && begin + o < a.outputs;
    const float4* x = (const float4*)a.x + ((size_t)lane * a.batch + first) * all;
    const float4* weight = (const float4*)a.weight + ((size_t)lane * a.outputs + begin) * all;
    const float bias = there ? a.bias[lane * a.outputs + begin + o] : 0.0f;
    float4 sum = make_float4(0, 0, 0, 0);
    for (int from = 0; from < all; from += HEAD_WIDE) {
        const int wide = all - from < HEAD_WIDE ? all - from : HEAD_WIDE;
        const int each = (HEAD_ROWS + HEAD_OUTPUTS) * HEAD_WIDE / HEAD_THREADS;
        float4 read[each];
#pragma unroll
        for (int k = 0; k < each; k++) {  // all at once under way
            const int i = k * HEAD_THREADS + threadIdx.x, line = i / HEAD_WIDE, column = i % HEAD_WIDE;
            const bool row = line < HEAD_ROWS;
            const int at = row ? line : line - HEAD_ROWS;
            const bool known = column < wide && (row ? first + at < a.batch : begin + at < a.outputs);
            read[k] = known ? (row ? x : weight)[at * all + from + column] : make_float4(0, 0, 0, 0);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < each; k++) {
            const int i = k * HEAD_THREADS + threadIdx.x;
            lines[i / HEAD_WIDE * HEAD_STEP + i % HEAD_WIDE] = read[k];
        }
        __syncthreads();
#pragma unroll 8
        for (int column = 0; column < wide; column++) {
            const float4 p = lines[r * HEAD_STEP + column], q = lines[(HEAD_ROWS + o) * HEAD_STEP + column];
            sum.x += p.x * q.x, sum.y += p.y * q.y, sum.z += p.z * q.z, sum.w += p.w * q.w;
        }
    }
    const float product = (sum.x + sum.y) + (sum.z + sum.w);
    if (there) a.out[((size_t)lane * a.batch + first + r) * a.outputs + begin + o] = product + bias;
}

struct HeadBack {
    const float* dz;  // [lanes, batch, outputs]
    const float* x;
    const float* weight;
    float* dx;
    float* dw;
    float* db;
    int batch, inputs, outputs, tiles;  // tiles: blocks (in x) for dx, which come first; the others are for dw and db
};

const int HEAD_COLUMNS = 64 / 4, HEAD_GROUPS = HEAD_THREADS / HEAD_COLUMNS;

// The way back. dx = dz weight sums over outputs, dw = dz^T x over the batch: HEAD_ROWS lines of either are one block's,
// 64 columns of them (blockIdx.y). Each group of threads has every HEAD_GROUPS-th term; theirs are then added in order.
extern "C" __global__ void __launch_bounds__(HEAD_THREADS) head_back(HeadBack a) {
    SHARED(float, work);
    float* single = work + HEAD_THREADS * HEAD_ROWS * 4;
    const bool rows = (int)blockIdx.x < a.tiles;
    const int lane = blockIdx.z, first = (rows ? blockIdx.x : blockIdx.x - a.tiles) * HEAD_ROWS, all = a.inputs / 4;
    const int lines = rows ? a.batch : a.outputs, terms = rows ? a.outputs : a.batch;
    const int line_step = rows ? a.outputs : 1, term_step = rows ? 1 : a.outputs;
    const int group = threadIdx.x / HEAD_COLUMNS, own = threadIdx.x % HEAD_COLUMNS;
    const int column = blockIdx.y * HEAD_COLUMNS + own;
    const float* dz = a.dz + (size_t)lane * a.batch * a.outputs + first * line_step;
    const float4* from = (const float4*)(rows ? a.weight : a.x) + (size_t)lane * terms * all;
    float4 sum[HEAD_ROWS] = {};
    float alone[HEAD_ROWS] = {};
#pragma unroll 2
    for (int t = group; t < terms; t += HEAD_GROUPS) {
        const float4 v = column < all ? from[t * all + column] : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int r = 0; r < HEAD_ROWS; r++) {
            const float d = first + r < lines ? dz[r * line_step + t * term_step] : 0.0f;
            sum[r].x += d * v.x, sum[r].y += d * v.y, sum[r].z += d * v.z, sum[r].w += d * v.w;
            alone[r] += d;
        }
    }
#pragma unroll
    for (int r = 0; r < HEAD_ROWS; r++) {
        ((float4*)work)[(group * HEAD_ROWS + r) * HEAD_COLUMNS + own] = sum[r];
        if (own == 0) single[group * HEAD_ROWS + r] = alone[r];
    }
    __syncthreads();
    const int r = threadIdx.x / (2 * HEAD_COLUMNS), two = blockIdx.y * 2 * HEAD_COLUMNS + threadIdx.x % (2 * HEAD_COLUMNS);
    float2 total = make_float2(0, 0);  // two columns a thread
#pragma unroll
    for (int g = 0; g < HEAD_GROUPS; g++) {
        const float2 v = ((const float2*)work)[g * HEAD_THREADS + threadIdx.x];
        total.x += v.x, total.y += v.y;
    }
    float2* out = (float2*)(rows ? a.dx : a.dw) + ((size_t)lane * lines + first + r) * 2 * all;
    if (first + r < lines && two < 2 * all) out[two] = total;
    if (rows || blockIdx.y || threadIdx.x >= HEAD_ROWS || first + (int)threadIdx.x >= lines) return;
    float bias = 0;
    for (int g = 0; g < HEAD_GROUPS; g++) bias += single[g * HEAD_ROWS + threadIdx.x];
    a.db[lane * lines + first + threadIdx.x] = bias;
}

struct Tick {
    const float* loss;  // all: [lanes]
    double* total;
    double* finite;
    double* age;
    long long* at;
    long long* place;
    const double* lr;
    const double* length;
    const double* cosine;
    float* size;
    float* root;
    double log1, log2;  // of Adam's betas
    int lanes;
};

// A step more for every lane: its loss is added up, and Adam's step size and bias correction found, in float64.
extern "C" __global__ void tick(Tick a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.lanes) return;
    const double steps = a.age[i] + 1, whole = a.length[i] > 1 ? a.length[i] : 1;
    const double slower = 0.5 * (1 - cos(3.141592653589793 * (double)a.at[i] / whole));
    const double rate = a.lr[i] * (1 - a.cosine[i] * slower);
    const double total = a.total[i] + a.loss[i];
    a.total[i] = total;
    if (total - total == 0) a.finite[i] += 1;  // steps until the sum is not finite, which it then stays
    a.age[i] = steps;
    a.size[i] = (float)(rate / (1 - exp(steps * a.log1)));
    a.root[i] = (float)(1 / sqrt(1 - exp(steps * a.log2)));
    a.at[i] += 1;
    a.place[i] += 1;
}

const int PARTS = 4;

struct Adam {
    float* p;  // [n]: parameters of all lanes; m, v alike
    float* m;
    float* v;
    const float* g[PARTS];  // the gradient, in parts
    const int* lane;    // [n]: whose
    const float* size;  // [lanes]: step size and bias correction
    const float* root;
    int begin[PARTS];  // where each part begins; n, if there is none
    int n;
    float beta1, beta2, eps;
};

extern "C" __global__ void adam(Adam a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.n) return;
    const int own = a.lane[i];
    const float* part = a.g[0];
#pragma unroll
    for (int k = 1; k < PARTS; k++)  // constant indices, so that none of it is copied to local memory
        if (i >= a.begin[k]) part = a.g[k] - a.begin[k];
    const float grad = part[i], mean = a.m[i] + (grad - a.m[i]) * (1 - a.beta1);
    const float square = a.v[i] * a.beta2 + grad * grad * (1 - a.beta2);
    a.m[i] = mean;
    a.v[i] = square;
    a.p[i] -= a.size[own] * mean / (sqrtf(square) * a.root[own] + a.eps);
}
