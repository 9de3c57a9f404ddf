// The vectors that the kernels compute with, and all that differs between processors.
//
// The kernels use the vector extensions that GCC and Clang share. Four kinds of processor are told apart: AVX-512, AVX2,
// NEON of 64-bit ARM, and any other one, for which the compiler makes what it can of vectors of 4 lanes. The last kind
// is the plain reference of the others: no machine builds it by default.

#include <cstdint>
#include <cstring>
#include <ctime>
#include <type_traits>
#include <utility>

#if !defined(__GNUC__)
#error "needs GCC or Clang: their vector extensions"
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VECTOR_BYTES 32
#elif defined(__x86_64__) && !defined(PLAIN_VECTORS)  // the tests define it
#error "needs AVX2 or AVX-512: without them torch is faster"
#else
#define VECTOR_BYTES 16
#endif
#if defined(__aarch64__) && defined(__ARM_NEON) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define NEON 1
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <x86intrin.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIRS 1  // an instruction multiplies bfloat16 by bfloat16
#endif

#define INLINE static inline __attribute__((always_inline))
#define ONCE __attribute__((noinline))  // compiled once instead of into every caller
#define INLINE_LAMBDA __attribute__((always_inline))
// UNROLL is needed to keep an array of vectors in registers
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
// keeps x in a register: GCC would otherwise reload it for each product
#if defined(NEON)
#define KEEP(x) asm("" : "+w"(x))
#elif defined(__x86_64__)
#define KEEP(x) asm("" : "+v"(x))
#else
#define KEEP(x)
#endif

namespace {

constexpr int LANES = VECTOR_BYTES / 4;
typedef float Vec __attribute__((vector_size(VECTOR_BYTES)));
typedef float Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Shorts __attribute__((vector_size(16)));

// Rows and outputs whose sums and operands fill the registers.
#if VECTOR_BYTES == 64  // 32 registers of 16 lanes
constexpr int REGISTERS = 32, ROWS_AT_ONCE = 12, DOT_ROWS = 6, TILE_ROWS = 12, TILE_OUTS = 2;
constexpr int SCORE_ROWS = 6, VALUE_ROWS = 6;
#elif defined(NEON)  // 32 registers of 4 lanes
constexpr int REGISTERS = 32, ROWS_AT_ONCE = 6, DOT_ROWS = 6, TILE_ROWS = 12, TILE_OUTS = 4;
constexpr int SCORE_ROWS = 6, VALUE_ROWS = 6;
#else  // 16 registers
constexpr int REGISTERS = 16, ROWS_AT_ONCE = 6, DOT_ROWS = 3, TILE_ROWS = 6, TILE_OUTS = 2;
constexpr int SCORE_ROWS = 6, VALUE_ROWS = 2;
#endif

INLINE Vec all(float x) { return x - Vec{}; }

// ---- half precision ------------------------------------------------------------------------------------------------

struct F16 {
    uint16_t bits;
};

INLINE float of_half(uint16_t bits) {
#if VECTOR_BYTES > 16
    return _cvtsh_ss(bits);
#elif defined(NEON)
    __fp16 half;
    memcpy(&half, &bits, sizeof half);
    return half;
#else
    uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;
    float value;
    memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;  // the difference of the exponents' biases
    if (magnitude >= 0x7c00u << 13) value = magnitude > 0x7c00u << 13 ? __builtin_nanf("") : __builtin_inff();
    return bits & 0x8000 ? -value : value;
#endif
}

INLINE Vec load(const F16* p) {
#if VECTOR_BYTES == 64
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif VECTOR_BYTES == 32
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(NEON)
    return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
    return Vec{of_half(p[0].bits), of_half(p[1].bits), of_half(p[2].bits), of_half(p[3].bits)};
#endif
}

// Two numbers that lie side by side.
INLINE void load_two(const uint16_t* p, float& first, float& second) {
#if VECTOR_BYTES > 16
    const __m128 both = _mm_cvtph_ps(_mm_loadu_si32(p));
    first = _mm_cvtss_f32(both), second = _mm_cvtss_f32(_mm_movehdup_ps(both));
#else
    first = of_half(p[0]), second = of_half(p[1]);
#endif
}

// ---- bytes ---------------------------------------------------------------------------------------------------------

INLINE Bytes bytes_at(const void* p) {
    typedef uint8_t Anywhere __attribute__((vector_size(16), aligned(1), may_alias));
    return *static_cast<const Anywhere*>(p);
}

// Pairs of bytes shifted as one number, so that bits of one byte come into the other. x86 has no shifts of bytes.
INLINE Bytes pairs_right(Bytes v, uint16_t by) { return (Bytes)((Shorts)v >> by); }
INLINE Bytes pairs_left(Bytes v, uint16_t by) { return (Bytes)((Shorts)v << by); }

INLINE Bytes nibbles(Bytes v, bool upper) {
#ifdef NEON
    return upper ? v >> 4 : v & 15;
#else
    return (upper ? pairs_right(v, 4) : v) & 15;
#endif
}

// Bytes v * LANES to (v + 1) * LANES as numbers.
INLINE Vec widened(Bytes from, int v) {
#if VECTOR_BYTES == 64
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)from));
#elif VECTOR_BYTES == 32
    const __m128i eight = v % 2 ? _mm_srli_si128((__m128i)from, 8) : (__m128i)from;
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
#elif defined(NEON)
    const Bytes places = {0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3, 255, 255, 255};  // 255: a zero
    const Bytes past = {4, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0};
    const Bytes four = (Bytes)vqtbl1q_u8((uint8x16_t)from, (uint8x16_t)(places + past * uint8_t(v)));
    return (Vec)vcvtq_f32_u32((uint32x4_t)four);
#else
    const Bytes zero{};
    const Shorts eight = (Shorts)(v / 2 ? __builtin_shufflevector(from, zero, 8, 16, 9, 16, 10, 16, 11, 16, 12, 16, 13,
                                                                  16, 14, 16, 15, 16)
                                        : __builtin_shufflevector(from, zero, 0, 16, 1, 16, 2, 16, 3, 16, 4, 16, 5, 16,
                                                                  6, 16, 7, 16));
    const Ints four = (Ints)(v % 2 ? __builtin_shufflevector(eight, (Shorts)zero, 4, 8, 5, 8, 6, 8, 7, 8)
                                   : __builtin_shufflevector(eight, (Shorts)zero, 0, 8, 1, 8, 2, 8, 3, 8));
    return __builtin_convertvector(four, Vec);
#endif
}

// Writes factor times each of eight bytes.
template <typename T>
INLINE void scaled(float factor, uint64_t eight_bytes, float* to) {
#if VECTOR_BYTES > 16
    const __m128i bytes = _mm_cvtsi64_si128(int64_t(eight_bytes));
    const __m256i ints = std::is_signed<T>::value ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
    _mm256_storeu_ps(to, _mm256_set1_ps(factor) * _mm256_cvtepi32_ps(ints));
#elif defined(NEON)
    const int16x8_t wide = std::is_signed<T>::value ? vmovl_s8(vcreate_s8(eight_bytes))
                                                    : vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(eight_bytes)));
    vst1q_f32(to, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), factor));
    vst1q_f32(to + 4, vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(wide)), factor));
#else
    T bytes[8];
    memcpy(bytes, &eight_bytes, sizeof bytes);
    for (int n = 0; n < 8; n++) to[n] = factor * bytes[n];
#endif
}

#if VECTOR_BYTES == 64
constexpr bool LOOKUP = true;  // whether the 16 numbers that a nibble can mean are looked up, instead of computed
INLINE Vec numbers_of_nibbles(float scale, float offset) {
    const __m512 counted = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (Vec)_mm512_fmadd_ps(counted, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
}
INLINE Vec looked_up(Vec numbers, Bytes from, bool upper) {
    const __m512i wide = _mm512_cvtepu8_epi32((__m128i)from);
    const __m512i index = upper ? _mm512_srli_epi32(wide, 4) : wide;  // only the lower bits count
    return (Vec)_mm512_permutexvar_ps(index, (__m512)numbers);
}
#else
constexpr bool LOOKUP = false;
INLINE Vec numbers_of_nibbles(float, float) { return Vec{}; }
INLINE Vec looked_up(Vec numbers, Bytes, bool) { return numbers; }
#endif

// ---- lanes ---------------------------------------------------------------------------------------------------------

#if VECTOR_BYTES == 64
#define PICK(a, b, p, q, r, s) \
    __builtin_shufflevector(a, b, p, q, r, s, p + 4, q + 4, r + 4, s + 4, p + 8, q + 8, r + 8, s + 8, p + 12, q + 12, \
                            r + 12, s + 12)
INLINE Vec8 lower(Vec v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE Vec8 upper(Vec v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE Vec8 folded(Vec v) { return lower(v) + upper(v); }
INLINE Vec8 larger(Vec v) { return lower(v) > upper(v) ? lower(v) : upper(v); }
#elif VECTOR_BYTES == 32
#define PICK(a, b, p, q, r, s) __builtin_shufflevector(a, b, p, q, r, s, p + 4, q + 4, r + 4, s + 4)
INLINE Vec8 folded(Vec v) { return v; }
INLINE Vec8 larger(Vec v) { return v; }
#else
#define PICK(a, b, p, q, r, s) __builtin_shufflevector(a, b, p, q, r, s)
#endif

#if VECTOR_BYTES > 16
INLINE Vec4 quarters(Vec v) {  // sums of every fourth lane
    Vec8 h = folded(v);
    return __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
}
INLINE Vec4 largest_quarters(Vec v) {
    Vec8 h = larger(v);
    Vec4 q = __builtin_shufflevector(h, h, 0, 1, 2, 3), other = __builtin_shufflevector(h, h, 4, 5, 6, 7);
    return q > other ? q : other;
}
#else
INLINE Vec4 quarters(Vec v) { return v; }
INLINE Vec4 largest_quarters(Vec v) { return v; }
#endif

INLINE Vec4 sums(Vec a, Vec b, Vec c, Vec d) {  // of four vectors at once
    constexpr int B = LANES;                    // first lane of the second vector
    Vec ab = PICK(a, b, 0, B, 1, B + 1) + PICK(a, b, 2, B + 2, 3, B + 3);
    Vec cd = PICK(c, d, 0, B, 1, B + 1) + PICK(c, d, 2, B + 2, 3, B + 3);
    return quarters(PICK(ab, cd, 0, 1, B, B + 1) + PICK(ab, cd, 2, 3, B + 2, B + 3));
}

INLINE float sum(Vec v) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += v[lane];
    return total;
}

INLINE float largest(Vec v) {
    const Vec4 q = largest_quarters(v);
    const float x = q[0] > q[1] ? q[0] : q[1], y = q[2] > q[3] ? q[2] : q[3];
    return x > y ? x : y;
}

INLINE bool any(Ints mask) {
#if VECTOR_BYTES == 64
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif VECTOR_BYTES == 32
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    typedef int64_t Two __attribute__((vector_size(16)));
    return (((Two)mask)[0] | ((Two)mask)[1]) != 0;
#endif
}

// One stage of a transposition: exchanges lanes with bit S and vectors with bit S.
template <int S, int... LANE>
INLINE void exchange(Vec& first, Vec& second, std::integer_sequence<int, LANE...>) {
    const Vec a = first, b = second;
    first = __builtin_shufflevector(a, b, (LANE & S ? LANES + LANE - S : LANE)...);
    second = __builtin_shufflevector(a, b, (LANE & S ? LANES + LANE : LANE + S)...);
}

// e^x for x <= 0, by the Cephes polynomial. The error is at most 2 units in the last place. Below -87.3 the result is 0
// or almost 0; below -104 it is 0.
INLINE Vec exponential(Vec x) {
#if VECTOR_BYTES == 64
    const Vec bounded = (Vec)_mm512_max_ps((__m512)all(-200.0f), (__m512)x);  // NaN stays NaN
    const Vec whole = (Vec)_mm512_roundscale_ps((__m512)(bounded * 1.44269504f), _MM_FROUND_TO_NEAREST_INT);
#else
    const Vec bounded = x < -87.3f ? all(-87.3f) : x;
    const Ints n = __builtin_convertvector(bounded * 1.44269504f - 0.5f, Ints);
    const Vec whole = __builtin_convertvector(n, Vec);
#endif
    const Vec r = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
#if VECTOR_BYTES == 64
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    const Vec scaled = p * (Vec)((n + 127) << 23);
    return x < -87.3f ? Vec{} : scaled;
#endif
}

// ---- waiting -------------------------------------------------------------------------------------------------------

#ifdef __x86_64__
constexpr uint64_t SPIN = 100000;  // cycles, tens of microseconds
INLINE uint64_t ticks() { return __rdtsc(); }
INLINE void rest() { _mm_pause(); }
#else
constexpr uint64_t SPIN = 30000;  // nanoseconds
INLINE uint64_t ticks() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}
INLINE void rest() {
#ifdef __aarch64__
    asm volatile("isb");  // some processors ignore yield
#endif
}
#endif

}  // namespace
