// What a training step does besides the network: its batch, its count and Adam, for all lanes at once.
// 256 threads a block. Numbers in bf16 are stored as unsigned short.

#ifdef ON_CPU
#include "cuda.h"
#else
// Two numbers in bf16, rounded to the nearest (even) one.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
#endif

#ifdef CHANNELS  // with HEIGHT, WIDTH and AUGMENTS: constants, since every number of an image is divided by them

struct Images {
    const unsigned char* pool;   // [rows, CHANNELS, HEIGHT, WIDTH]
    const int* plan;             // [lanes, window, batch]: rows
    const unsigned char* draws;  // [lanes, window, batch, 3]: the crop's row and column, the flip
    const long long* place;      // [lanes]: the step within the window
    const long long* offset;     // [lanes]: where a lane's rows begin
    const float* mean;           // [CHANNELS]
    const float* std;
    unsigned short* out;         // [lanes, all, HEIGHT, WIDTH, CHANNELS], bf16
    float scale;
    int window, batch, all, first, pad;
};

// A batch of one stream from the pool of uint8 images: gathered, cropped, flipped, normalised, channels last.
// One block writes EACH numbers of image blockIdx.x of lane blockIdx.y.
extern "C" __global__ void images(Images a) {
    const int b = blockIdx.x, lane = blockIdx.y;
    const long long at = (lane * (long long)a.window + a.place[lane]) * a.batch + b;
    const long long row = a.plan[at] + a.offset[lane];
    int down = 0, right = 0;
    bool flipped = false;
#if AUGMENTS
    down = a.draws[at * 3] - a.pad;
    right = a.draws[at * 3 + 1] - a.pad;
    flipped = a.draws[at * 3 + 2] > 0;
#endif
    const int numbers = CHANNELS * HEIGHT * WIDTH;
    const unsigned char* image = a.pool + row * numbers;
    unsigned short* out = a.out + ((long long)lane * a.all + a.first + b) * numbers;
    const int start = blockIdx.z * EACH, end = start + EACH < numbers ? start + EACH : numbers;
    for (int i = start + threadIdx.x; i < end; i += blockDim.x) {
        const int c = i % CHANNELS, w = i / CHANNELS % WIDTH, y = i / (CHANNELS * WIDTH) + down;
        const int x = (flipped ? WIDTH - 1 - w : w) + right;
        const bool inside = y >= 0 && y < HEIGHT && x >= 0 && x < WIDTH;
        const float value = inside ? image[(c * HEIGHT + y) * WIDTH + x] * a.scale : 0.0f;
        out[i] = (unsigned short)pack((value - a.mean[c]) / a.std[c], 0.0f);
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

struct Tick {
    const float* loss;  // all: [lanes]
    double* total;
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
    a.total[i] += a.loss[i];
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
