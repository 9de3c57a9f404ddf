// Kernels for one decoding step on a CPU, optimized for small row counts, where torch's matrix products are slowest.
//
// A step feeds about 1 to 20 rows, the leaves of all branches. Each kernel reads each weight, key and value from memory
// once, whatever the number of rows, so additional rows cost little. Up to MANY_ROWS rows the result of a row does not
// depend on the other rows (in attention: for the same slots).
//
// build.py compiles this file, with GCC or Clang. vectors.h has what differs between processors. All numbers are float32,
// except weights, which may be bfloat16, float16 or blocks of a GGUF file (blocks.h), and inputs that are rounded to
// bfloat16 (BF16_BOTH).

#include <atomic>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <sched.h>
#include <type_traits>
#include <unistd.h>
#include <vector>
#if defined(__AVX512F__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "vectors.h"

// GCC's names for a parallel region, in the OpenMP runtime that torch has loaded. Clang would call another runtime.
extern "C" {
void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace {

const long FIRST_CACHE = [] {  // floats in the first-level data cache
    long bytes = 0;
#ifdef _SC_LEVEL1_DCACHE_SIZE
    bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#endif
    return (bytes > 0 ? bytes : 32768) / long(sizeof(float));
}();
constexpr int BLOCK = 4;  // outputs
constexpr int FOUR = 4;   // vectors that sums() adds up at once
constexpr int LINE = 16;  // floats in a line of the cache
typedef uint16_t Half;  // bfloat16: the upper half of a float32
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));

INLINE Vec load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
INLINE Vec load(const Half* p) {
    return (Vec)(__builtin_convertvector(*reinterpret_cast<const Halves*>(p), Ints) << 16);
}
INLINE float one(const F16* p) { return of_half(p->bits); }
INLINE float one(const float* p) { return *p; }
INLINE float one(const Half* p) {
    const uint32_t bits = uint32_t(*p) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Per-thread memory aligned to a cache line. Each call of of() discards the previous contents.
class Scratch {
    std::vector<float> memory;

  public:
    static long padded(long count) { return (count + LINE - 1) / LINE * LINE; }
    float* of(long count) {
        if (long(memory.size()) < count + LINE) memory.resize(count + LINE);
        const uintptr_t bytes = LINE * sizeof(float);
        return reinterpret_cast<float*>((uintptr_t(memory.data()) + bytes - 1) / bytes * bytes);
    }
};

#if defined(PAIRS)
struct Paired {  // a bfloat16 weight of a layer whose inputs are rounded to bfloat16
    Half bits;
};
INLINE Vec load(const Paired* p) { return load(&p->bits); }
INLINE float one(const Paired* p) { return one(&p->bits); }
#else
typedef Half Paired;  // without an instruction for both, rounding the inputs has no use
#endif

INLINE void store(float* p, Vec v) { *reinterpret_cast<Unaligned*>(p) = v; }

#include "blocks.h"

// ---- linear layers -------------------------------------------------------------------------------------------------

template <typename W>
struct Linear {  // y = x W^T + b
    const float* x;
    long x_stride, rows, in;
    const W* weight;    // [out, in]; blocks: [out, in / W::COUNT]
    const float* bias;    // [out], or null
    float* y;
    long y_stride;
    bool add;  // y += x W^T + b
    const Half* rounded = nullptr;  // x as bfloat16, for weights of the type Paired; null: not rounded yet
};

// Reads a row of weights, one vector at a time.
template <typename W, bool LINES>
struct Weights {
    const W* at;
    INLINE_LAMBDA void start(const W* w) { at = w; }
    INLINE_LAMBDA Vec next() {
        const W* here = at;
        at += LANES;
        return load(here);
    }
};

#ifdef __AVX512F__
// A vector is as long as a cache line, and tensors read from a file are seldom aligned to one. A load across two lines
// costs twice as much, so this loads whole lines and combines two of them.
template <>
struct Weights<float, true> {
    const float* line;  // the last line loaded
    Vec loaded;
    Ints lanes;
    INLINE_LAMBDA void start(const float* w) {
        const int past = uintptr_t(w) % sizeof(Vec) / sizeof(float);
        line = w - (past ? past : LANES);
        loaded = past ? *reinterpret_cast<const Vec*>(line) : Vec{};
        lanes = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (past ? past : LANES);
    }
    INLINE_LAMBDA Vec next() {
        const Vec before = loaded;
        loaded = *reinterpret_cast<const Vec*>(line += LANES);
        return (Vec)_mm512_permutex2var_ps((__m512)before, (__m512i)lanes, (__m512)loaded);
    }
};
#endif

struct Whole {  // sums products lane by lane
    Vec sum{};
    INLINE_LAMBDA void add(Vec w, Vec x) { sum += w * x; }
    INLINE_LAMBDA Vec total() const { return sum; }
};

#if defined(__AVX512F__) && !defined(__clang__)  // Clang would multiply whole vectors and not fuse the sum
struct Halved {  // the same result bit for bit, with products of 8 lanes
    Vec8 low{}, high{};
    INLINE_LAMBDA void add(Vec w, Vec x) {
        KEEP(x);  // loaded once
        low += lower(w) * lower(x);
        high += upper(w) * upper(x);
    }
    INLINE_LAMBDA Vec total() const {
        return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
};
#else
typedef Whole Halved;
#endif

// Weights are prefetched in reading order, as far ahead as the memory latency requires. On Zen 5, a core that waits
// with many 16-lane products queued falls further behind memory; the cause is not known. The choices below were found
// by measurement: with 5 or 6 rows all rows but two are multiplied in halves, and with 7 or more rows the weights are
// prefetched several times.
constexpr bool in_halves(int rows) { return LANES == 16 && (rows == 5 || rows == 6); }
constexpr int WHOLE_BESIDE_HALVES = 2;

template <int ROWS>
INLINE void fetch(const void* weights) {
    const char* const here = static_cast<const char*>(weights);
    __builtin_prefetch(here + 8192, 0, 0);  // each weight is used only once
    if (ROWS >= 7)
        for (long bytes : {6144, 3072, 1536}) __builtin_prefetch(here + bytes, 0, 0);
}

// Writes ROWS x OUTS results. total(o * ROWS + r) has the products of the first ``i`` inputs, summed lane by lane; the
// products of the other inputs are added here.
template <int ROWS, int OUTS, typename W, typename F>
INLINE void finish(const Linear<W>& job, long row, long out, long i, F total) {
    constexpr int FOURS = (OUTS * ROWS + 3) / 4 * 4;  // summed four at a time, padded with zeros
    [[maybe_unused]] const float* x = job.x + row * job.x_stride;
    [[maybe_unused]] const W* w = job.weight + out * job.in;
    float products[FOURS];
    UNROLL
    for (int n = 0; n < FOURS; n += 4) {
        Vec4 four = sums(total(n), total(n + 1), total(n + 2), total(n + 3));
        memcpy(products + n, &four, sizeof four);
    }
    UNROLL
    for (int n = 0; n < OUTS * ROWS; n++) {
        const int r = n % ROWS, o = n / ROWS;
        float y = products[n];
        if constexpr (!Blocks<W>::value)
            for (long t = i; t < job.in; t++) y += x[r * job.x_stride + t] * one(w + o * job.in + t);
        if (job.bias) y += job.bias[out + o];
        float& target = job.y[(row + r) * job.y_stride + out + o];
        target = job.add ? target + y : y;
    }
}

// Few rows: lanes run along the inputs. Each weight is loaded once and multiplied with ROWS inputs.
template <int ROWS, int OUTS, typename W>
INLINE void dot_products(const Linear<W>& job, long row, long out) {
    constexpr int FOURS = (OUTS * ROWS + 3) / 4 * 4;
    constexpr int WHOLE = OUTS == 1 && in_halves(ROWS) ? WHOLE_BESIDE_HALVES : ROWS;
    Whole whole[FOURS];
    Halved halved[FOURS];
    const float* x = job.x + row * job.x_stride;
    const W* w = job.weight + out * job.in;
    Weights<W, OUTS == 1> weights[OUTS];
    UNROLL
    for (int o = 0; o < OUTS; o++) weights[o].start(w + o * job.in);
    long i = 0;
    for (; i + LANES <= job.in; i += LANES) {
        Vec xs[ROWS];
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            xs[r] = load(x + r * job.x_stride + i);
            if (OUTS > 1) KEEP(xs[r]);
        }
        UNROLL
        for (int o = 0; o < OUTS; o++) {
            Vec ws = weights[o].next();
            KEEP(ws);
            if (OUTS == 1)
                fetch<ROWS>(w + i);
            else  // the next block
                __builtin_prefetch(w + (OUTS + o) * job.in + i);
            UNROLL
            for (int r = 0; r < ROWS; r++)
                r < WHOLE ? whole[o * ROWS + r].add(ws, xs[r]) : halved[o * ROWS + r].add(ws, xs[r]);
        }
    }
    finish<ROWS, OUTS>(job, row, out, i, [&](int n) INLINE_LAMBDA {
        return n % ROWS < WHOLE ? whole[n].total() : halved[n].total();
    });
}

// A tile of OUTS outputs and ROWS rows. One output with few rows leaves the multipliers idle: each product
// waits for the sum before it, four cycles long, and needs a load of its own. OUTS sums of each row go on side by side,
// and every vector of weights or inputs is loaded once. The weights of the tiles that follow are prefetched in memory
// order, each line twice, because a processor drops prefetches while too many are under way.
constexpr int TILE_PREFETCH = 4096;  // bytes beyond the next tile

// Prefetches weights into the second-level cache. It can wait for more lines at a time than the first-level cache; into
// that one, memory and the multipliers would wait for each other (measured on Zen 4, with 16 lanes and with 8).
INLINE void fetch_ahead(const void* weights) { __builtin_prefetch(weights, 0, 2); }

template <int ROWS, int OUTS, typename W>
INLINE void tile_step(Whole* total, const W* w, long in, const float* x, long x_stride) {
    Vec ws[OUTS];
    UNROLL
    for (int o = 0; o < OUTS; o++) {
        ws[o] = load(w + o * in);
        KEEP(ws[o]);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        Vec xs = load(x + r * x_stride);
        KEEP(xs);
        UNROLL
        for (int o = 0; o < OUTS; o++) total[o * ROWS + r].add(ws[o], xs);
    }
}

template <int ROWS, int OUTS, typename W>
INLINE void tile_products(const Linear<W>& job, long row, long out) {
    constexpr int LINE_BYTES = LINE * sizeof(float), STEP = LINE_BYTES / sizeof(W);  // weights of a line of the cache
    Whole total[(OUTS * ROWS + 3) / 4 * 4];
    const float* x = job.x + row * job.x_stride;
    const W* w = job.weight + out * job.in;
    const char* ahead = reinterpret_cast<const char*>(w + OUTS * job.in) + TILE_PREFETCH;
    long i = 0;
    for (; i + STEP <= job.in; i += STEP, ahead += OUTS * LINE_BYTES) {
        UNROLL
        for (int at = 0; at < OUTS * LINE_BYTES; at += LINE_BYTES / 2)
            fetch_ahead(ahead + at);
        UNROLL
        for (int n = 0; n < STEP; n += LANES)
            tile_step<ROWS, OUTS>(total, w + i + n, job.in, x + i + n, job.x_stride);
    }
    for (; i + LANES <= job.in; i += LANES) tile_step<ROWS, OUTS>(total, w + i, job.in, x + i, job.x_stride);
    finish<ROWS, OUTS>(job, row, out, i, [&](int n) INLINE_LAMBDA { return total[n].total(); });
}

template <int ROWS, int OUTS, typename W>
ONCE long tiles(const Linear<W>& job, long row, long from, long to) {  // returns the first output that is left
    for (; from + OUTS <= to; from += OUTS) tile_products<ROWS, OUTS>(job, row, from);
    return from;
}

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls do_rows(first, Count<n>) for all rows, in chunks of nearly equal size n <= MOST.
template <int MOST, typename F>
INLINE void pick(long first, int n, F do_rows) {
    if (n == MOST) return do_rows(first, Count<MOST>{});
    if constexpr (MOST > 1) pick<MOST - 1>(first, n, do_rows);
}

template <int MOST, typename F>
INLINE void in_chunks(long rows, F do_rows) {
    const long chunks = (rows + MOST - 1) / MOST;
    for (long c = 0; c < chunks; c++) {
        const long first = rows * c / chunks;
        pick<MOST>(first, rows * (c + 1) / chunks - first, do_rows);
    }
}

template <int ROWS, typename W>
ONCE void dot_outputs(const Linear<W>& job, long row, long from, long to) {
    for (long out = from; out < to; out++) dot_products<ROWS, 1>(job, row, out);
}

template <int ROWS, typename W>
ONCE void dot_block(const Linear<W>& job, long row, long out) {
    dot_products<ROWS, BLOCK>(job, row, out);
}

// Whether float32 weights are read output by output instead of in tiles. Zen 5 (family 26) was measured to be faster so,
// and Zen 4 to be faster with tiles, by a quarter with two to four rows.
const bool IN_ORDER = [] {
#if defined(__AVX512F__)
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 15) + (a >> 20 & 255) == 26;
#else
    return false;
#endif
}();

// Found by measurement, with AVX-512 and with AVX2; NEON takes the numbers of AVX2.
constexpr int ROWS_IN_TILE = LANES < 16 ? 6 : 8;          // up to this many rows, one tile has all of them
constexpr int ROWS_IN_SHARING_TILE = LANES < 16 ? 6 : 7;  // with more, tiles have up to this many,
constexpr int SHARED_OUTPUTS = 12;                        // and share the weights of this many outputs
static_assert(ROWS_IN_TILE <= ROWS_AT_ONCE);

constexpr int tile_outputs(int rows) {
    if (LANES < 16) return TILE_OUTS;
    return rows == 4 ? 4 : rows >= 5 && rows <= 7 ? 3 : 2;
}

// Computes a range of outputs for all rows, in tiles. The inputs may come from the second-level cache. Tiles that share
// weights find them in a cache.
template <typename W>
void rows_in_tiles(const Linear<W>& job, long from, long to) {
    const auto tiled = [&](long row, auto n, long first, long end) INLINE_LAMBDA {
        const long left = tiles<n.value, tile_outputs(n.value)>(job, row, first, end);
        dot_outputs<n.value>(job, row, left, end);
    };
    const bool small = job.rows * job.in <= 2 * FIRST_CACHE;
    if (job.rows <= (small ? ROWS_AT_ONCE : ROWS_IN_TILE))
        return pick<ROWS_AT_ONCE>(0, job.rows, [&](long row, auto n) INLINE_LAMBDA { tiled(row, n, from, to); });
    for (; from < to; from += SHARED_OUTPUTS)
        in_chunks<ROWS_IN_SHARING_TILE>(job.rows, [&](long row, auto n) INLINE_LAMBDA {
            tiled(row, n, from, from + SHARED_OUTPUTS < to ? from + SHARED_OUTPUTS : to);
        });
}

// Computes a range of outputs for all rows. While the inputs fit into the first-level cache, the weights are read in
// memory order and memory bandwidth is the only limit. More rows share a block of weights that stays in the cache. With
// fast 16-lane loads the inputs may take little more than half of the cache, because prefetched weights take the rest
// (found by measurement).
void rows_in_order(const Linear<float>& job, long from, long to) {
    const auto in_order = [&](long row, auto n) INLINE_LAMBDA { dot_outputs<n.value>(job, row, from, to); };
    const long capacity = in_halves(job.rows) ? FIRST_CACHE : FIRST_CACHE * 7 / 12;
    if (job.rows <= ROWS_AT_ONCE && job.rows * job.in <= capacity)
        return pick<ROWS_AT_ONCE>(0, job.rows, in_order);
    for (; from + BLOCK <= to; from += BLOCK)
        in_chunks<DOT_ROWS>(job.rows, [&](long row, auto n) INLINE_LAMBDA { dot_block<n.value>(job, row, from); });
    in_chunks<DOT_ROWS>(job.rows, in_order);
}

template <typename W>
void few_rows(const Linear<W>& job, long from, long to) {
    if constexpr (std::is_same_v<W, float>)
        if (IN_ORDER) return rows_in_order(job, from, to);
    rows_in_tiles(job, from, to);
}

#if defined(PAIRS)
constexpr int PAIRED = 2 * LANES;  // numbers in a vector

INLINE __m256i rounded(const float* x, long left) {  // LANES numbers, of which those after the first ``left`` are 0
    const __mmask16 inside = left >= LANES ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
    return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(inside, x));
}

template <int ROWS, int OUTS>
INLINE void pair_step(__m512* total, const __m512i* ws, const Half* x, long x_stride) {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        const __m512bh xs = (__m512bh)_mm512_loadu_si512(x + r * x_stride);
        UNROLL
        for (int o = 0; o < OUTS; o++)
            total[o * ROWS + r] = _mm512_dpbf16_ps(total[o * ROWS + r], (__m512bh)ws[o], xs);
    }
}

// A tile as in tile_products. Each instruction multiplies and adds 32 pairs, and nothing is converted.
template <int ROWS, int OUTS>
INLINE void pair_products(const Linear<Paired>& job, const Half* x, long x_stride, long row, long out) {
    __m512 total[(OUTS * ROWS + 3) / 4 * 4] = {};
    x += row * x_stride;
    const Paired* w = job.weight + out * job.in;
    const char* ahead = reinterpret_cast<const char*>(w + OUTS * job.in) + TILE_PREFETCH;
    __m512i ws[OUTS];
    long i = 0;
    for (; i + PAIRED <= job.in; i += PAIRED, ahead += OUTS * sizeof(__m512i)) {
        UNROLL
        for (int at = 0; at < OUTS * int(sizeof(__m512i)); at += sizeof(__m512i) / 2) fetch_ahead(ahead + at);
        UNROLL
        for (int o = 0; o < OUTS; o++) ws[o] = _mm512_loadu_si512(w + o * job.in + i);
        pair_step<ROWS, OUTS>(total, ws, x + i, x_stride);
    }
    if (i < job.in) {
        for (int o = 0; o < OUTS; o++)
            ws[o] = _mm512_maskz_loadu_epi16((1u << (job.in - i)) - 1, w + o * job.in + i);
        pair_step<ROWS, OUTS>(total, ws, x + i, x_stride);
    }
    finish<ROWS, OUTS>(job, row, out, job.in, [&](int n) INLINE_LAMBDA { return (Vec)total[n]; });
}

template <int ROWS, int OUTS>
ONCE long pair_tiles(const Linear<Paired>& job, const Half* x, long x_stride, long row, long from, long to) {
    for (; from + OUTS <= to; from += OUTS) pair_products<ROWS, OUTS>(job, x, x_stride, row, from);
    return from;
}

constexpr int PAIR_ROWS = 8;  // in a tile; found by measurement, as the outputs are

constexpr int pair_outputs(int rows) { return rows <= 6 ? 4 : 2; }

long pairs_stride(long in) { return (in + PAIRED - 1) / PAIRED * PAIRED; }

// Some rows of inputs as bfloat16, until the next call in the same thread. Rows are padded with zeros.
const Half* all_rounded(const float* x, long x_stride, long rows, long in) {
    static thread_local Scratch scratch;
    const long stride = pairs_stride(in);
    Half* const to = reinterpret_cast<Half*>(scratch.of(rows * stride / 2));
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < stride; i += LANES)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + row * stride + i),
                                rounded(x + row * x_stride + i, in - i));
    return to;
}

void few_rows(const Linear<Paired>& job, long from, long to) {
    const long x_stride = pairs_stride(job.in);
    const Half* const x = job.rounded ? job.rounded : all_rounded(job.x, job.x_stride, job.rows, job.in);
    const long step = job.rows <= PAIR_ROWS ? to - from : BLOCK;  // further rows find the weights in the cache
    for (; from < to; from += step)
        in_chunks<PAIR_ROWS>(job.rows, [&](long row, auto n) INLINE_LAMBDA {
            const long end = from + step < to ? from + step : to;
            const long left = pair_tiles<n.value, pair_outputs(n.value)>(job, x, x_stride, row, from, end);
            pair_tiles<n.value, 1>(job, x, x_stride, row, left, end);
        });
}

// The same layer, with inputs that are rounded already, for the products of many rows.
Linear<Paired> with_rounded_inputs(Linear<Paired> job) {
    static thread_local Scratch scratch;
    float* const x = scratch.of(job.rows * job.in + LANES);
    for (long row = 0; row < job.rows; row++)
        for (long i = 0; i < job.in; i += LANES)  // what is written beyond a row is overwritten by the next one
            store(x + row * job.in + i,
                  (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded(job.x + row * job.x_stride + i, job.in - i)), 16));
    job.x = x, job.x_stride = job.in;
    return job;
}
#endif

// A tile of outputs in blocks: each vector is unpacked once and multiplied with ROWS inputs. The sums of one output have
// the same order as in tile_products.
template <int ROWS, int OUTS, typename B>
INLINE void block_products(const Linear<B>& job, long row, long out) {
    Whole total[(OUTS * ROWS + 3) / 4 * 4];
    const float* x = job.x + row * job.x_stride;
    const long length = job.in / B::COUNT;
    constexpr int IN_CHUNK = CHUNK / B::COUNT, PARTS = B::COUNT / PART;
    constexpr int TOGETHER = REGISTERS == 16 && ROWS == 1 ? 1 : OUTS;  // the scales of four outputs need registers too
    constexpr int AT_ONCE = LANES == 4 && PARTS > 4 ? 4 : PARTS;  // with 4 lanes, more would only make longer code
    const B* w = job.weight + out * length;
    for (long n = 0; n < length; n += IN_CHUNK, w += IN_CHUNK) {
        const int count = length - n < IN_CHUNK ? length - n : IN_CHUNK;
        Scales scales[OUTS];
        UNROLL
        for (int o = 0; o < OUTS; o++) {
            for (long at = 0; at < long(sizeof(B)) * IN_CHUNK; at += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(w + o * length) + 8192 + at, 0, 0);
            decode(w + o * length, count, scales[o]);
        }
        _Pragma("GCC unroll 2")
        for (int block = 0; block < count; block++)
            for (int first = 0; first < PARTS; first += AT_ONCE)
                UNROLL
                for (int part = first; part < first + AT_ONCE; part++, x += PART)
                    UNROLL
                    for (int n = 0; n < OUTS; n += TOGETHER)
                        UNROLL
                        for (int v = 0; v < VECS; v++) {
                            Vec ws[TOGETHER];
                            UNROLL
                            for (int o = 0; o < TOGETHER; o++) {
                                ws[o] = numbers(w[(n + o) * length + block], part, v, scales[n + o], block * PARTS + part);
                                KEEP(ws[o]);
                            }
                            UNROLL
                            for (int r = 0; r < ROWS; r++) {
                                const Vec xs = load(x + r * job.x_stride + v * LANES);
                                UNROLL
                                for (int o = 0; o < TOGETHER; o++) total[(n + o) * ROWS + r].add(ws[o], xs);
                            }
                        }
    }
    finish<ROWS, OUTS>(job, row, out, job.in, [&](int n) INLINE_LAMBDA { return total[n].total(); });
}

template <int ROWS, int OUTS, typename B>
ONCE long block_tiles(const Linear<B>& job, long row, long from, long to) {  // returns the first output that is left
    for (; from + OUTS <= to; from += OUTS) block_products<ROWS, OUTS>(job, row, from);
    return from;
}

// With few rows, several outputs at a time, so that their sums need not wait for one another. Found by measurement.
constexpr int block_outputs(int rows) {
    if (REGISTERS == 32) return rows <= 2 ? 4 : 2;
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

// With more rows at a time, rows whose length is a power of two no longer fit into the first-level cache together.
constexpr int BLOCK_ROWS = REGISTERS == 32 ? 8 : 6;

template <typename B>
void few_rows_of_blocks(const Linear<B>& job, long from, long to) {
    const long step = job.rows <= BLOCK_ROWS ? to - from : BLOCK;  // further rows find the blocks in the cache
    for (; from < to; from += step)
        in_chunks<BLOCK_ROWS>(job.rows, [&](long row, auto n) INLINE_LAMBDA {
            const long end = from + step < to ? from + step : to;
            const long left = block_tiles<n.value, block_outputs(n.value)>(job, row, from, end);
            if constexpr (block_outputs(n.value) > 1) block_tiles<n.value, 1>(job, row, left, end);
        });
}

// Many rows: lanes run along the outputs. A buffer in the first-level cache takes PANEL outputs, transposed.
constexpr int PANEL = 2 * LANES, DEPTH = 192;

template <int S>
INLINE void exchange(Vec* a) {  // one stage of a transposition
    UNROLL
    for (int i = 0; i < LANES; i++)
        if (!(i & S)) exchange<S>(a[i], a[i + S], std::make_integer_sequence<int, LANES>{});
}

template <typename W>
INLINE void turn(const W* w, long in, int depth, float* panel) {  // [PANEL, depth] to [depth, PANEL]
    for (int o = 0; o < PANEL; o += LANES) {
        int i = 0;
        for (; i + LANES <= depth; i += LANES) {
            Vec a[LANES];
            UNROLL
            for (int r = 0; r < LANES; r++) a[r] = load(w + (o + r) * in + i);
            exchange<1>(a), exchange<2>(a);
            if constexpr (LANES >= 8) exchange<4>(a);
            if constexpr (LANES == 16) exchange<8>(a);
            UNROLL
            for (int r = 0; r < LANES; r++) store(panel + (i + r) * PANEL + o, a[r]);
        }
        for (; i < depth; i++)
            UNROLL
            for (int r = 0; r < LANES; r++) panel[i * PANEL + o + r] = one(w + (o + r) * in + i);
    }
}

// y += x panel for a part of the inputs, or y = b + x panel for the first part. Also prefetches one panel's worth of
// numbers from ``next``, unless it is null.
template <int ROWS>
ONCE void tile(const float* x, long x_stride, const float* panel, int depth, bool first, const float* bias, float* y,
               long y_stride, const float* next) {
    Vec acc[ROWS][2];
    UNROLL
    for (int r = 0; r < ROWS; r++)
        UNROLL
        for (int t = 0; t < 2; t++)
            acc[r][t] = first ? (bias ? load(bias + t * LANES) : Vec{}) : load(y + r * y_stride + t * LANES);
    for (int i = 0; i < depth; i++) {
        Vec w0 = load(panel + i * PANEL), w1 = load(panel + i * PANEL + LANES);
        KEEP(w0);
        KEEP(w1);
        if (next)
            for (int t = 0; t < PANEL; t += LINE) __builtin_prefetch(next + i * PANEL + t);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            Vec input = all(x[r * x_stride + i]);
            KEEP(input);
            acc[r][0] += input * w0;
            acc[r][1] += input * w1;
        }
    }
    UNROLL
    for (int r = 0; r < ROWS; r++)
        UNROLL
        for (int t = 0; t < 2; t++) store(y + r * y_stride + t * LANES, acc[r][t]);
}

template <typename W>
void panel_all_rows(const Linear<W>& job, long out) {
    alignas(64) float panel[PANEL * DEPTH];
    for (long from = 0; from < job.in; from += DEPTH) {
        int depth = job.in - from < DEPTH ? job.in - from : DEPTH;
        if constexpr (Blocks<W>::value) {
            alignas(64) float numbers[PANEL * DEPTH];
            for (long o = 0; o < PANEL; o++)
                unpack_numbers(job.weight + (out + o) * (job.in / W::COUNT), from, from + depth, numbers + o * depth);
            turn(numbers, depth, depth, panel);
        } else
            turn(job.weight + out * job.in + from, job.in, depth, panel);
        in_chunks<TILE_ROWS>(job.rows, [&](long row, auto n) INLINE_LAMBDA {
            tile<n.value>(job.x + row * job.x_stride + from, job.x_stride, panel, depth, from == 0,
                          job.bias ? job.bias + out : nullptr, job.y + row * job.y_stride + out, job.y_stride, nullptr);
        });
    }
}

constexpr long MANY_ROWS = 48;

struct Range {
    long from, to;
};

// A thread's share of ``count`` items, in whole steps; the last thread also takes the remainder.
INLINE Range share(long count, long step, long thread, long team) {
    const long steps = count / step;
    return {steps * thread / team * step, thread == team - 1 ? count : steps * (thread + 1) / team * step};
}

// Calls work(thread, team) in each thread of a team.
template <typename F>
void in_parallel(int threads, const F& work) {
    const auto run = [](void* data) {
        (*static_cast<const F*>(data))(long(omp_get_thread_num()), long(omp_get_num_threads()));
    };
    GOMP_parallel(run, const_cast<F*>(&work), unsigned(threads), 0);
}

template <typename F>
void each_in_parallel(long count, int threads, const F& work) {  // calls work(0) to work(count - 1)
    in_parallel(threads, [&](long thread, long team) {
        const Range own = share(count, 1, thread, team);
        for (long n = own.from; n < own.to; n++) work(n);
    });
}

// Linear layers that read the same input; their outputs are concatenated. operators.py declares the same structure.
struct Joined {
    long count;
    const void* const* weights;  // each [out, in]
    const float* const* biases;  // each [out], or null
    const long* outs;
    const long* kinds;  // the type of each layer's weights, a Kind
    long in;
};

#define KINDS(DO)                                                                                                   \
    DO(F32, float) DO(BF16, Half) DO(F16, F16) DO(Q4_0, Q4_0) DO(Q4_1, Q4_1) DO(Q5_0, Q5_0) DO(Q5_1, Q5_1)              \
    DO(Q8_0, Q8_0) DO(Q4_K, Q4_K) DO(Q5_K, Q5_K) DO(Q6_K, Q6_K) DO(BF16_BOTH, Paired)

enum class Kind : long {
#define NAME(name, type) name,
    KINDS(NAME)
#undef NAME
};

// Calls do_type with a null pointer of the type of the weights.
template <typename F>
INLINE void of_kind(long kind, F do_type) {
    switch (Kind(kind)) {
#define CASE(name, type) \
    case Kind::name: return do_type(static_cast<const type*>(nullptr));
        KINDS(CASE)
#undef CASE
    }
}

template <typename W>
void outputs(const Linear<W>& job, long from, long to) {
    if (job.rows > MANY_ROWS)
        for (; from + PANEL <= to; from += PANEL) panel_all_rows(job, from);
    if (from == to) return;
    if constexpr (Blocks<W>::value)
        few_rows_of_blocks(job, from, to);
    else
        few_rows(job, from, to);
}

#if defined(PAIRS)
void outputs(Linear<Paired> job, long from, long to) {
    constexpr long ROUNDED = 256;  // rows at a time, which bounds the memory of the rounded inputs
    const long rows = job.rows;
    if (rows <= MANY_ROWS) return few_rows(job, from, to);
    for (long row = 0; row < rows; row += ROUNDED, job.x += ROUNDED * job.x_stride, job.y += ROUNDED * job.y_stride) {
        job.rows = rows - row < ROUNDED ? rows - row : ROUNDED;
        outputs<Paired>(with_rounded_inputs(job), from, to);
    }
}
#endif

// Computes a thread's share of the outputs. ``add`` is not supported with more than MANY_ROWS rows.
void linears(const Joined& layers, const float* x, long x_stride, long rows, float* y, long y_stride, bool add,
             long thread, long team) {
    const Half* rounded = nullptr;  // once for all layers
#if defined(PAIRS)
    for (long layer = 0; layer < layers.count && !rounded && rows <= MANY_ROWS; layer++)
        if (Kind(layers.kinds[layer]) == Kind::BF16_BOTH) rounded = all_rounded(x, x_stride, rows, layers.in);
#endif
    for (long layer = 0; layer < layers.count; y += layers.outs[layer], layer++) {
        const auto [out, to] = share(layers.outs[layer], rows > MANY_ROWS ? PANEL : BLOCK, thread, team);
        of_kind(layers.kinds[layer], [&, from = out, to = to](auto type) {
            const auto weight = static_cast<decltype(type)>(layers.weights[layer]);
            outputs(Linear<std::remove_const_t<std::remove_pointer_t<decltype(type)>>>{
                        x, x_stride, rows, layers.in, weight, layers.biases[layer], y, y_stride, add, rounded},
                    from, to);
        });
    }
}

// ---- attention -----------------------------------------------------------------------------------------------------

struct Attention {
    const float* query;  // [heads, width, dim]
    long query_head, query_token;
    const float *keys, *values;  // [kv_heads, capacity, dim]
    long kv_head;
    const float* mask;  // [width, slots - masked_from], additive; null: every token sees all slots
    long masked_from;   // every token sees the slots below it
    float* out;         // [width, heads * dim]
    long heads, kv_heads, width, dim, slots;
    float scale;
    long rows() const { return heads / kv_heads * width; }  // of a key-value head
};

// acc[r] += sum_j p[r][j] v[j] for a panel of slots; lanes run along the head dimension. Also prefetches the values of
// the next panel.
template <int ROWS, int VECS>
INLINE void add_values(const float* p, const float* v, float* acc, long dim, int count) {
    Vec a[ROWS][VECS];
    UNROLL
    for (int r = 0; r < ROWS; r++)
        UNROLL
        for (int t = 0; t < VECS; t++) a[r][t] = load(acc + r * dim + t * LANES);
    for (int j = 0; j < count; j++) {
        Vec vs[VECS];
        UNROLL
        for (int t = 0; t < VECS; t++) {
            vs[t] = load(v + j * dim + t * LANES);
            KEEP(vs[t]);
            __builtin_prefetch(v + (j + PANEL) * dim + t * LANES);
        }
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            Vec weight = all(p[r * PANEL + j]);
            KEEP(weight);
            UNROLL
            for (int t = 0; t < VECS; t++) a[r][t] += weight * vs[t];
        }
    }
    UNROLL
    for (int r = 0; r < ROWS; r++)
        UNROLL
        for (int t = 0; t < VECS; t++) store(acc + r * dim + t * LANES, a[r][t]);
}

template <int ROWS>
ONCE void add_values(const float* p, const float* v, float* acc, long dim, int count) {
    long d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) add_values<ROWS, 4>(p, v + d, acc + d, dim, count);
    for (; d + LANES <= dim; d += LANES) add_values<ROWS, 1>(p, v + d, acc + d, dim, count);
    for (; d < dim; d++)
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < count; j++) acc[r * dim + d] += p[r * PANEL + j] * v[j * dim + d];
}

struct Softmax {  // of a row, for the slots so far; each lane has its own sum
    Vec total;
    float highest;
};

// Replaces the scores of a panel of slots by weights e^(score - highest), and rescales the sums so far if the highest
// score has changed. The mask, if any, starts at slot ``first``.
INLINE void weigh(float* p, const float* mask, int first, int count, Softmax& softmax, float* acc, long dim) {
    if (mask)
        for (int j = first; j < count; j++) p[j] += mask[j - first];
    for (int j = count; j < PANEL; j++) p[j] = -INFINITY;
    Vec low = load(p), high = load(p + LANES);
    if (any((low > softmax.highest) | (high > softmax.highest))) {
        const float top = largest(low > high ? low : high), shrink = expf(softmax.highest - top);
        softmax.highest = top;
        softmax.total *= shrink;
        for (long d = 0; d < dim; d++) acc[d] *= shrink;
    }
    low = exponential(low - softmax.highest), high = exponential(high - softmax.highest);
    softmax.total += low + high;
    store(p, low), store(p + LANES, high);
}

// Softmax-weighted sum over the slots [from, to) of one key-value head, before division by the sum of the weights.
// Writes acc [rows, dim] and, for each row, the highest score and the sum of e^(score - highest). The keys are
// transposed one panel at a time, so that lanes run along the slots.
void attend_part(const Attention& a, long kv_head, long from, long to, float* acc, float* highest, float* total) {
    const long rows = a.rows(), dim = a.dim;
    static thread_local Scratch scratch;
    static thread_local std::vector<Softmax> softmax;
    const long of_query = Scratch::padded(rows * dim);
    float *query = scratch.of(of_query + 2 * PANEL * dim), *turned = query + of_query, *last = turned + PANEL * dim;
    for (long row = 0; row < rows; row++) {
        const long head = kv_head * (rows / a.width) + row / a.width, token = row % a.width;
        const float* q = a.query + head * a.query_head + token * a.query_token;
        for (long d = 0; d < dim; d++) query[row * dim + d] = q[d] * a.scale;
    }
    softmax.assign(rows, Softmax{Vec{}, -FLT_MAX});
    memset(acc, 0, sizeof(float) * rows * dim);

    alignas(64) float p[SCORE_ROWS * PANEL];
    for (long slot = from; slot < to; slot += PANEL) {
        const int count = to - slot < PANEL ? to - slot : PANEL;
        const float* keys = a.keys + kv_head * a.kv_head + slot * dim;
        const float* values = a.values + kv_head * a.kv_head + slot * dim;
        const float* next = keys + PANEL * dim;
        if (count < PANEL) {
            memcpy(last, keys, sizeof(float) * count * dim);
            memset(last + count * dim, 0, sizeof(float) * (PANEL - count) * dim);
            keys = last;
        }
        turn(keys, dim, dim, turned);
        const bool masked = a.mask && slot + count > a.masked_from;
        const int first_masked = slot < a.masked_from ? a.masked_from - slot : 0;
        const long tail = a.slots - a.masked_from, at = slot + first_masked - a.masked_from;
        in_chunks<SCORE_ROWS>(rows, [&](long first, auto n) INLINE_LAMBDA {
            tile<n.value>(query + first * dim, dim, turned, dim, true, nullptr, p, PANEL, next);
            for (int r = 0; r < n.value; r++) {
                const float* mask = masked ? a.mask + (first + r) % a.width * tail + at : nullptr;
                weigh(p + r * PANEL, mask, first_masked, count, softmax[first + r], acc + (first + r) * dim, dim);
            }
            in_chunks<VALUE_ROWS>(n.value, [&](long row, auto m) INLINE_LAMBDA {
                add_values<m.value>(p + row * PANEL, values, acc + (first + row) * dim, dim, count);
            });
        });
    }
    for (long row = 0; row < rows; row++) {
        highest[row] = softmax[row].highest;
        total[row] = sum(softmax[row].total);
    }
}

// Threads share the slots of each key-value head in parts. With z_i the sum of e^score over part i, the result is
// sum_i z_i / (sum_j z_j) * softmax(scores_i) v_i.
struct Parts {
    Attention a;
    long parts;
    float *acc, *highest, *total;  // [kv_heads, parts, rows, dim], [kv_heads, parts, rows] twice

    static long size(long heads, long width, long dim, long parts) { return parts * heads * width * (dim + 2); }
    Parts(const Attention& a, long parts, float* scratch) : a(a), parts(parts), acc(scratch) {
        highest = acc + jobs() * a.rows() * a.dim;
        total = highest + jobs() * a.rows();
    }
    long jobs() const { return a.kv_heads * parts; }
    void attend(long job) const {
        const long panels = (a.slots + PANEL - 1) / PANEL, first = job * a.rows();
        const Range own = share(panels, 1, job % parts, parts);
        const long to = own.to == panels ? a.slots : own.to * PANEL;  // only the last panel may be incomplete
        attend_part(a, job / parts, own.from * PANEL, to, acc + first * a.dim, highest + first, total + first);
    }
    void join(long head, long token) const {
        const long rows = a.rows(), groups = a.heads / a.kv_heads;
        const long first = head / groups * parts * rows + head % groups * a.width + token;
        float* to = a.out + (token * a.heads + head) * a.dim;
        float top = -FLT_MAX, sum = 0;
        for (long part = 0; part < parts; part++) top = fmaxf(top, highest[first + part * rows]);
        memset(to, 0, sizeof(float) * a.dim);
        for (long part = 0; part < parts; part++) {
            const long at = first + part * rows;
            const float weight = expf(highest[at] - top);
            sum += weight * total[at];
            for (long d = 0; d < a.dim; d++) to[d] += weight * acc[at * a.dim + d];
        }
        for (long d = 0; d < a.dim; d++) to[d] /= sum;
    }
};

// The share of the attention of one query on each of some ranges of slots [from, to), written to ``out`` with a stride.
// The mask, if any, starts at slot ``masked_from``.
void masses_on(const float* q, const float* keys, long dim, long slots, float scale, const float* mask,
               long masked_from, const long* ranges, long count, float* out, long stride, Scratch& scratch) {
    float* const p = scratch.of(Scratch::padded(slots));
    const long whole = dim / LANES * LANES;
    for (long slot = 0; slot < slots; slot += FOUR) {
        Vec products[FOUR] = {};
        for (int n = 0; n < FOUR && slot + n < slots; n++)
            for (long d = 0; d < whole; d += LANES) products[n] += load(q + d) * load(keys + (slot + n) * dim + d);
        Vec4 scores = sums(products[0], products[1], products[2], products[3]);
        for (int n = 0; n < FOUR && slot + n < slots; n++)
            for (long d = whole; d < dim; d++) scores[n] += q[d] * keys[(slot + n) * dim + d];
        scores *= scale;
        memcpy(p + slot, &scores, sizeof scores);
    }
    if (mask)
        for (long slot = masked_from; slot < slots; slot++) p[slot] += mask[slot - masked_from];
    for (long slot = slots; slot % LANES; slot++) p[slot] = -INFINITY;
    Vec top = load(p);
    for (long slot = LANES; slot < slots; slot += LANES) {
        const Vec here = load(p + slot);
        top = here > top ? here : top;
    }
    const float highest = largest(top);
    Vec total{};
    for (long slot = 0; slot < slots; slot += LANES) {
        const Vec weights = exponential(load(p + slot) - highest);
        total += weights;
        store(p + slot, weights);
    }
    const float all_slots = sum(total);
    for (long n = 0; n < count; n++) {
        long from = ranges[2 * n];
        const long to = ranges[2 * n + 1];
        Vec lanes{};
        float inside = 0;
        for (; from + LANES <= to; from += LANES) lanes += load(p + from);
        for (; from < to; from++) inside += p[from];
        out[n * stride] = (inside + sum(lanes)) / all_slots;
    }
}

// ---- decoder layers ------------------------------------------------------------------------------------------------

// operators.py declares the same structures.
struct DecoderLayer {
    const float *attention_norm, *q_norm, *k_norm, *mlp_norm;  // [width], [dim] or null, [dim] or null, [width]
    Joined qkv, out, gate_up, down;
    long windowed;
};

struct Stack {
    long layers, width, heads, kv_heads, dim, inner;
    float eps, scale;
    const DecoderLayer* layer;
    const float* norm;  // [width], of the norm after the last layer
    long qkv() const { return (heads + 2 * kv_heads) * dim; }
};

struct Leaves {  // the tokens that one sequence feeds
    float* const* keys;  // by layer, each [kv_heads, capacity, dim]
    float* const* values;
    long kv_head;              // stride of a key-value head
    long start, count;         // the tokens are written to the slots from start on
    const float* mask[2];      // [count, slots - masked_from], for layers without and with a sliding window
    long masked_from[2], parts;
    const long* ranges;  // [range_count, 2], from and to: the slots of the source and of each passage
    long range_count;
};

struct Head {
    long layer, head;
};

struct Tap {  // copies the states before a layer, after the last one (layers), or after the norm (layers + 1)
    long layer;
    float* to;  // [rows, width]
};

// Where the threads of a team wait for one another. OpenMP's barrier waits in a loop for milliseconds, and so keeps a
// processor from the thread that it waits for if other processes use the machine. This one sleeps after SPIN cycles:
// longer than the threads are apart on an idle machine, and shorter than a thread is interrupted on a busy one.
class Barrier {
public:
    void wait(long team) {
        if (team == 1) return;
        const uint32_t before = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == team) {
            arrived.store(0, std::memory_order_relaxed);
            round.fetch_add(1);  // sequentially consistent, as what sleepers do: one of the two sees the other
            if (asleep.load()) wake_all();
            return;
        }
        for (const uint64_t start = ticks(); ticks() - start < SPIN; rest())
            if (round.load(std::memory_order_acquire) != before) return;
        asleep.fetch_add(1);
        while (round.load() == before) sleep_while(before);
        asleep.fetch_sub(1);
    }

private:
#if defined(__linux__)
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex");
    void wake_all() { syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
    void sleep_while(uint32_t value) {  // the operating system compares again, and sleeps only if it is still the same
        syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    }
#else
    void wake_all() {}
    void sleep_while(uint32_t) { sched_yield(); }
#endif
    std::atomic<uint32_t> round{0};
    std::atomic<int> arrived{0}, asleep{0};
};

struct Buffers {  // shared by all threads
    float* qkv;      // [rows, (heads + 2 kv_heads) dim]
    float* mixed;    // [rows, heads dim]
    float* gate_up;  // [rows, 2 inner]
    float* hidden;   // [rows, inner]
    float* partial;  // Parts of each sequence, one after the other
};

INLINE Vec silu(Vec x) {
    Vec e = exponential(x < 0.0f ? x : -x);
    return x * (x < 0.0f ? e : all(1.0f)) / (1.0f + e);
}

// x / sqrt(mean(x^2) + eps) * weight; NaN if the mean overflows, where it would be 0 for any x
void rms_norm(const float* x, const float* weight, long width, float eps, float* y) {
    Vec squares{};
    long i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (long t = i; t < width; t++) total += x[t] * x[t];
    const float factor = total <= FLT_MAX ? 1.0f / sqrtf(total / width + eps) : NAN;
    for (i = 0; i + LANES <= width; i += LANES) store(y + i, load(x + i) * factor * load(weight + i));
    for (; i < width; i++) y[i] = x[i] * factor * weight[i];
}

// x cos + rotate_half(x) sin in place; sin carries the sign of rotate_half.
void rotate(float* x, const float* cos, const float* sin, long dim) {
    const long half = dim / 2;
    long d = 0;
    for (; d + LANES <= half; d += LANES) {
        const Vec low = load(x + d), high = load(x + d + half);
        store(x + d, low * load(cos + d) + high * load(sin + d));
        store(x + d + half, high * load(cos + d + half) + low * load(sin + d + half));
    }
    for (; d < half; d++) {
        const float low = x[d], high = x[d + half];
        x[d] = low * cos[d] + high * sin[d];
        x[d + half] = high * cos[d + half] + low * sin[d + half];
    }
}

// silu(gate) * up
void gated(const float* gate, const float* up, long count, float* y) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) store(y + i, silu(load(gate + i)) * load(up + i));
    for (; i < count; i++) y[i] = silu(all(gate[i]))[0] * up[i];
}

// Runs a thread's share of all layers for the tokens of all sequences, ``rows`` in total.
void run_layers(const Stack& stack, const Leaves* leaves, long sequences, long rows, float* x, const float* cos,
                const float* sin, const Tap* taps, long tap_count, const Head* source_heads, long source_count,
                float* masses, long columns, const Buffers& buffers, Barrier& barrier, long thread, long team) {
    const long width = stack.width, dim = stack.dim, heads = stack.heads, kv_heads = stack.kv_heads;
    const long q = stack.qkv(), inner = stack.inner;
    static thread_local Scratch scratch, of_scores;
    float* const normed = scratch.of(rows * width);
    float *const qkv = buffers.qkv, *const mixed = buffers.mixed, *const gate_up = buffers.gate_up;
    float* const hidden = buffers.hidden;
    const auto normalise = [&](const float* weight) {  // in every thread: faster than waiting for another one
        for (long row = 0; row < rows; row++)
            rms_norm(x + row * width, weight, width, stack.eps, normed + row * width);
    };
    const auto copy_states = [&](long number, const float* states) {
        for (long tap = 0; tap < tap_count; tap++)
            if (taps[tap].layer == number && tap % team == thread)
                memcpy(taps[tap].to, states, sizeof(float) * rows * width);
    };
    for (long number = 0; number < stack.layers; number++) {
        const DecoderLayer& layer = stack.layer[number];
        copy_states(number, x);
        normalise(layer.attention_norm);
        linears(layer.qkv, normed, width, rows, qkv, q, false, thread, team);
        barrier.wait(team);
        auto [from, to] = share(rows * (heads + kv_heads), 1, thread, team);
        for (long job = from; job < to; job++) {
            const long row = job / (heads + kv_heads), head = job % (heads + kv_heads);
            float* const at = qkv + row * q + head * dim;
            const float* const norm = head < heads ? layer.q_norm : layer.k_norm;
            if (norm) rms_norm(at, norm, dim, stack.eps, at);
            rotate(at, cos + row * dim, sin + row * dim, dim);
            if (head < heads) continue;
            const Leaves* sequence = leaves;
            long token = row;
            while (token >= sequence->count) token -= sequence++->count;
            const long offset = (head - heads) * sequence->kv_head + (sequence->start + token) * dim;
            memcpy(sequence->keys[number] + offset, at, sizeof(float) * dim);
            memcpy(sequence->values[number] + offset, at + kv_heads * dim, sizeof(float) * dim);
        }
        barrier.wait(team);
        const auto attention = [&](auto do_sequence) {
            float* partial = buffers.partial;
            long row = 0;
            for (long n = 0; n < sequences; n++) {
                const Leaves& t = leaves[n];
                const Attention a{qkv + row * q, dim, q, t.keys[number], t.values[number], t.kv_head,
                                  t.mask[layer.windowed], t.masked_from[layer.windowed], mixed + row * heads * dim,
                                  heads, kv_heads, t.count, dim, t.start + t.count, stack.scale};
                do_sequence(Parts(a, t.parts, partial));
                partial += Parts::size(heads, t.count, dim, t.parts);
                row += t.count;
            }
        };
        for (long n = 0, job = 0; n < source_count; n++) {
            if (source_heads[n].layer != number) continue;
            const long head = source_heads[n].head;
            const Leaves* sequence = leaves;
            for (long row = 0, token = 0; row < rows; row++, token++, job++) {
                while (token >= sequence->count) token -= sequence++->count;
                if (job % team != thread) continue;
                const Leaves& t = *sequence;
                const long slots = t.start + t.count, first = t.masked_from[layer.windowed];
                const float* const all_masks = t.mask[layer.windowed];
                const float* const mask = all_masks ? all_masks + token * (slots - first) : nullptr;
                masses_on(qkv + row * q + head * dim, t.keys[number] + head / (heads / kv_heads) * t.kv_head, dim, slots,
                          stack.scale, mask, first, t.ranges, t.range_count, masses + n * columns * rows + row, rows,
                          of_scores);
            }
        }
        attention([&](const Parts& parts) {
            auto [job, end] = share(parts.jobs(), 1, thread, team);
            for (; job < end; job++) parts.attend(job);
        });
        barrier.wait(team);
        attention([&](const Parts& parts) {
            auto [job, end] = share(heads * parts.a.width, 1, thread, team);
            for (; job < end; job++) parts.join(job % heads, job / heads);
        });
        barrier.wait(team);
        linears(layer.out, mixed, heads * dim, rows, x, width, true, thread, team);
        barrier.wait(team);
        normalise(layer.mlp_norm);
        linears(layer.gate_up, normed, width, rows, gate_up, 2 * inner, false, thread, team);
        const Range computed = share(inner, BLOCK, thread, team);  // gate and up outputs that this thread has computed
        for (long row = 0; row < rows; row++) {
            const float* gate = gate_up + row * 2 * inner + computed.from;
            gated(gate, gate + inner, computed.to - computed.from, hidden + row * inner + computed.from);
        }
        barrier.wait(team);
        linears(layer.down, hidden, inner, rows, x, width, true, thread, team);
        barrier.wait(team);
    }
    copy_states(stack.layers, x);
    normalise(stack.norm);
    copy_states(stack.layers + 1, normed);
}

// ---- next tokens ---------------------------------------------------------------------------------------------------

// The highest logits of a row, ties by ascending id, into best [count] and ids [count]. Missing entries are -inf.
void highest_logits(const float* logits, long vocabulary, long count, float* best, long* ids) {
    for (long n = 0; n < count; n++) best[n] = -INFINITY, ids[n] = 0;
    const auto consider = [&](long id) {
        if (!(logits[id] > best[count - 1])) return;
        long rank = count - 1;
        for (; rank > 0 && logits[id] > best[rank - 1]; rank--)
            best[rank] = best[rank - 1], ids[rank] = ids[rank - 1];
        best[rank] = logits[id], ids[rank] = id;
    };
    long id = 0;
    for (; id + PANEL <= vocabulary; id += PANEL) {
        Vec low = load(logits + id), high = load(logits + id + LANES);
        if (largest(low > high ? low : high) > best[count - 1])
            for (long n = id; n < id + PANEL; n++) consider(n);
    }
    for (; id < vocabulary; id++) consider(id);
}

// With z = sum of e^(logit - highest): log z, and the entropy log z - sum((logit - highest) e^(logit - highest)) / z.
void spread(const float* logits, long vocabulary, float highest, double* log_sum, double* entropy) {
    constexpr long PIECE = 512;  // each piece is summed in float32, the pieces in float64
    double sum = 0, products = 0;
    for (long from = 0; from < vocabulary; from += PIECE) {
        const long to = vocabulary - from < PIECE ? vocabulary : from + PIECE;
        Vec weights{}, weighted{};
        for (long id = from; id < to; id += LANES) {
            float last[LANES];
            const float* here = logits + id;
            if (to - id < LANES) {
                for (long n = 0; n < LANES; n++) last[n] = n < to - id ? here[n] : -INFINITY;
                here = last;
            }
            Vec below = load(here) - highest;
            Vec weight = exponential(below);
            weights += weight;
            weighted += weight * (below < -1e4f ? all(-1e4f) : below);  // 0 * -inf would be NaN
        }
        for (int lane = 0; lane < LANES; lane++) sum += weights[lane], products += weighted[lane];
    }
    *log_sum = log(sum);
    *entropy = *log_sum - products / sum;
}

// ---- layouts -------------------------------------------------------------------------------------------------------

// Sizes and field offsets of the structures that operators.py declares too. Python refuses a library that differs.
#define SIZE(structure) {#structure, long(sizeof(structure))}
#define FIELD(structure, field) {#structure "." #field, long(offsetof(structure, field))}
const struct {
    const char* name;
    long number;
} LAYOUT[] = {
    SIZE(Joined), FIELD(Joined, count), FIELD(Joined, weights), FIELD(Joined, biases), FIELD(Joined, outs),
    FIELD(Joined, kinds), FIELD(Joined, in),
#define NUMBER(name, type) {"Kind." #name, long(Kind::name)},
    KINDS(NUMBER)
#undef NUMBER
    SIZE(DecoderLayer), FIELD(DecoderLayer, attention_norm), FIELD(DecoderLayer, q_norm), FIELD(DecoderLayer, k_norm),
    FIELD(DecoderLayer, mlp_norm), FIELD(DecoderLayer, qkv), FIELD(DecoderLayer, out), FIELD(DecoderLayer, gate_up),
    FIELD(DecoderLayer, down), FIELD(DecoderLayer, windowed),
    SIZE(Stack), FIELD(Stack, layers), FIELD(Stack, width), FIELD(Stack, heads), FIELD(Stack, kv_heads),
    FIELD(Stack, dim), FIELD(Stack, inner), FIELD(Stack, eps), FIELD(Stack, scale), FIELD(Stack, layer),
    FIELD(Stack, norm),
    SIZE(Leaves), FIELD(Leaves, keys), FIELD(Leaves, values), FIELD(Leaves, kv_head), FIELD(Leaves, start),
    FIELD(Leaves, count), FIELD(Leaves, mask), FIELD(Leaves, masked_from), FIELD(Leaves, parts),
    FIELD(Leaves, ranges), FIELD(Leaves, range_count),
    SIZE(Tap), FIELD(Tap, layer), FIELD(Tap, to),
    SIZE(Head), FIELD(Head, layer), FIELD(Head, head),
};

}  // namespace

extern "C" {

// The size of a structure ("Tap") or the offset of a field ("Tap.to"), in bytes; -1 if the name is unknown.
long cocoa_layout(const char* name) {
    for (const auto& known : LAYOUT)
        if (strcmp(known.name, name) == 0) return known.number;
    return -1;
}

// x W^T + b for linear layers that read the same x [rows, in].
void cocoa_linear(const Joined* layers, const float* x, long x_stride, long rows, float* y, long y_stride,
                  int threads) {
    in_parallel(threads, [&](long thread, long team) {
        linears(*layers, x, x_stride, rows, y, y_stride, false, thread, team);
    });
}

// Some rows of a matrix [out, in] as float32: y [count, in].
void cocoa_unpack(long kind, const void* weight, long in, const long* ids, long count, float* y, int threads) {
    of_kind(kind, [&](auto type) {
        typedef std::remove_const_t<std::remove_pointer_t<decltype(type)>> W;
        const W* const all_rows = static_cast<const W*>(weight);
        each_in_parallel(count, threads, [&](long n) {
            const W* const row = all_rows + ids[n] * (in / Blocks<W>::COUNT);
            if constexpr (Blocks<W>::value)
                unpack_numbers(row, 0, in, y + n * in);
            else
                for (long i = 0; i < in; i++) y[n * in + i] = one(row + i);
        });
    });
}

// For each row of logits: log p of the highest [count], their ids [count], and the entropy of the distribution.
void cocoa_next_tokens(const float* logits, long row_stride, long rows, long vocabulary, long count, double* out,
                       int threads) {
    each_in_parallel(rows, threads, [&](long row) {
        const float* const here = logits + row * row_stride;
        static thread_local std::vector<float> best;
        static thread_local std::vector<long> ids;
        best.resize(count), ids.resize(count);
        highest_logits(here, vocabulary, count, best.data(), ids.data());
        double log_sum, entropy, *to = out + row * (2 * count + 1);
        spread(here, vocabulary, best[0], &log_sum, &entropy);
        for (long n = 0; n < count; n++) {
            to[n] = double(best[n] - best[0]) - log_sum;
            to[count + n] = ids[n];
        }
        to[2 * count] = entropy < 0 ? 0.0 : entropy;  // NaN stays NaN
    });
}

// softmax(q k^T * scale + mask) v.
void cocoa_attend(const float* query, long query_head, long query_token, const float* keys, const float* values,
                  long kv_head, const float* mask, long masked_from, float* out, long heads, long kv_heads, long width,
                  long dim, long slots, float scale, long parts, int threads) {
    const Attention a{query, query_head, query_token, keys,     values, kv_head, mask,  masked_from,
                      out,   heads,      kv_heads,    width, dim,    slots,   scale};
    static thread_local Scratch scratch;
    const Parts all_parts(a, parts, scratch.of(Parts::size(heads, width, dim, parts)));
    each_in_parallel(all_parts.jobs(), threads, [&](long job) { all_parts.attend(job); });
    for (long token = 0; token < width; token++)
        for (long head = 0; head < heads; head++) all_parts.join(head, token);
}

// All decoder layers for the leaves of some sequences. x [rows, width] is overwritten; cos and sin are [rows, dim].
// masses [source_count, columns, rows] receives the share of each source head's attention on the ranges of its sequence.
void cocoa_layers(const Stack* stack, const Leaves* leaves, long sequences, float* x, const float* cos,
                  const float* sin, const Tap* taps, long tap_count, const Head* source_heads, long source_count,
                  float* masses, long columns, int threads) {
    long rows = 0, partial = 0;
    for (long n = 0; n < sequences; n++) {
        rows += leaves[n].count;
        partial += Parts::size(stack->heads, leaves[n].count, stack->dim, leaves[n].parts);
    }
    static thread_local Scratch of_qkv, of_mixed, of_gate_up, of_hidden, of_partial;  // of the calling thread
    const Buffers shared{of_qkv.of(rows * stack->qkv()), of_mixed.of(rows * stack->heads * stack->dim),
                         of_gate_up.of(rows * 2 * stack->inner), of_hidden.of(rows * stack->inner),
                         of_partial.of(partial)};
    Barrier barrier;
    in_parallel(threads, [&](long thread, long team) {
        run_layers(*stack, leaves, sequences, rows, x, cos, sin, taps, tap_count, source_heads, source_count, masses,
                   columns, shared, barrier, thread, team);
    });
}

// Moves the keys and values of some slots to the slots from ``start`` on, in order. No slot may be below its target.
void cocoa_move(float* const* keys, float* const* values, long layers, long kv_heads, long kv_head, long dim,
                const long* slots, long count, long start) {
    for (long layer = 0; layer < layers; layer++)
        for (float* heads : {keys[layer], values[layer]})
            for (long head = 0; head < kv_heads; head++)
                for (long n = 0; n < count; n++)
                    if (slots[n] != start + n)
                        memcpy(heads + head * kv_head + (start + n) * dim, heads + head * kv_head + slots[n] * dim,
                               sizeof(float) * dim);
}

}  // extern "C"
