// Weights in the blocks of GGUF files: the layouts of ggml, and their numbers as float32.
//
// Every type yields its numbers in parts of 32, as two groups of 16 unsigned bytes u with a scale and an offset. The
// numbers are scale * u + offset. A signed type adds a constant to its bytes, and the offset takes it away: the fused
// product rounds once, so that the result is the same. kernels.cpp includes this file after its vector types.

#include <immintrin.h>

constexpr int PART = 32;  // numbers

INLINE float of_half(uint16_t bits) { return _cvtsh_ss(bits); }

struct Sixteen {
    __m128i u;
    float scale, offset;
};

INLINE __m128i bytes_at(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
INLINE __m128i low_nibbles(__m128i v) { return _mm_and_si128(v, _mm_set1_epi8(15)); }
INLINE __m128i high_nibbles(__m128i v) { return low_nibbles(_mm_srli_epi16(v, 4)); }

// 16 where a bit is set, for 16 of the 32 bits of a block.
INLINE __m128i fifth_bits(const uint8_t* bits, int half) {
    uint16_t sixteen;
    memcpy(&sixteen, bits + 2 * half, sizeof sixteen);
    const __m128i spread = _mm_shuffle_epi8(_mm_set1_epi16(short(sixteen)),
                                            _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1));
    const __m128i bit = _mm_set1_epi64x(int64_t(0x8040201008040201));
    return _mm_and_si128(_mm_cmpeq_epi8(_mm_and_si128(spread, bit), bit), _mm_set1_epi8(16));
}

struct Q4_0 {
    static constexpr int COUNT = 32;
    uint16_t d;
    uint8_t q[16];
    INLINE_LAMBDA void part(int, Sixteen* out) const {
        const float scale = of_half(d);
        const __m128i v = bytes_at(q);
        out[0] = {low_nibbles(v), scale, -8 * scale};
        out[1] = {high_nibbles(v), scale, -8 * scale};
    }
};

struct Q4_1 {
    static constexpr int COUNT = 32;
    uint16_t d, m;
    uint8_t q[16];
    INLINE_LAMBDA void part(int, Sixteen* out) const {
        const float scale = of_half(d), offset = of_half(m);
        const __m128i v = bytes_at(q);
        out[0] = {low_nibbles(v), scale, offset};
        out[1] = {high_nibbles(v), scale, offset};
    }
};

struct Q5_0 {
    static constexpr int COUNT = 32;
    uint16_t d;
    uint8_t high[4], q[16];
    INLINE_LAMBDA void part(int, Sixteen* out) const {
        const float scale = of_half(d);
        const __m128i v = bytes_at(q);
        out[0] = {_mm_or_si128(low_nibbles(v), fifth_bits(high, 0)), scale, -16 * scale};
        out[1] = {_mm_or_si128(high_nibbles(v), fifth_bits(high, 1)), scale, -16 * scale};
    }
};

struct Q5_1 {
    static constexpr int COUNT = 32;
    uint16_t d, m;
    uint8_t high[4], q[16];
    INLINE_LAMBDA void part(int, Sixteen* out) const {
        const float scale = of_half(d), offset = of_half(m);
        const __m128i v = bytes_at(q);
        out[0] = {_mm_or_si128(low_nibbles(v), fifth_bits(high, 0)), scale, offset};
        out[1] = {_mm_or_si128(high_nibbles(v), fifth_bits(high, 1)), scale, offset};
    }
};

struct Q8_0 {
    static constexpr int COUNT = 32;
    uint16_t d;
    int8_t q[32];
    INLINE_LAMBDA void part(int, Sixteen* out) const {
        const float scale = of_half(d);
        const __m128i sign = _mm_set1_epi8(-128);
        for (int half = 0; half < 2; half++)
            out[half] = {_mm_xor_si128(bytes_at(q + 16 * half), sign), scale, -128 * scale};
    }
};

// The scale and the minimum of eight groups of 32 numbers, six bits each, in twelve bytes.
INLINE void six_bits(const uint8_t* s, int j, int* scale, int* minimum) {
    if (j < 4)
        *scale = s[j] & 63, *minimum = s[j + 4] & 63;
    else
        *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, *minimum = s[j + 4] >> 4 | (s[j] >> 6) << 4;
}

struct Q4_K {
    static constexpr int COUNT = 256;
    uint16_t d, dmin;
    uint8_t scales[12], q[128];
    INLINE_LAMBDA void part(int j, Sixteen* out) const {
        int scale, minimum;
        six_bits(scales, j, &scale, &minimum);
        const float factor = of_half(d) * scale, offset = -(of_half(dmin) * minimum);
        for (int half = 0; half < 2; half++) {
            const __m128i v = bytes_at(q + 32 * (j / 2) + 16 * half);
            out[half] = {j % 2 ? high_nibbles(v) : low_nibbles(v), factor, offset};
        }
    }
};

struct Q5_K {
    static constexpr int COUNT = 256;
    uint16_t d, dmin;
    uint8_t scales[12], high[32], q[128];
    INLINE_LAMBDA void part(int j, Sixteen* out) const {
        int scale, minimum;
        six_bits(scales, j, &scale, &minimum);
        const float factor = of_half(d) * scale, offset = -(of_half(dmin) * minimum);
        const __m128i bit = _mm_set1_epi8(char(1 << j));
        for (int half = 0; half < 2; half++) {
            const __m128i v = bytes_at(q + 32 * (j / 2) + 16 * half);
            const __m128i set = _mm_cmpeq_epi8(_mm_and_si128(bytes_at(high + 16 * half), bit), bit);
            const __m128i nibbles = j % 2 ? high_nibbles(v) : low_nibbles(v);
            out[half] = {_mm_or_si128(nibbles, _mm_and_si128(set, _mm_set1_epi8(16))), factor, offset};
        }
    }
};

struct Q6_K {
    static constexpr int COUNT = 256;
    uint8_t q[128], high[64];
    int8_t scales[16];
    uint16_t d;
    INLINE_LAMBDA void part(int j, Sixteen* out) const {
        const int quarter = j % 4;  // of 128 numbers
        for (int half = 0; half < 2; half++) {
            const __m128i v = bytes_at(q + 64 * (j / 4) + 32 * (quarter % 2) + 16 * half);
            const __m128i upper = _mm_srl_epi16(bytes_at(high + 32 * (j / 4) + 16 * half), _mm_cvtsi32_si128(2 * quarter));
            const __m128i two = _mm_slli_epi16(_mm_and_si128(upper, _mm_set1_epi8(3)), 4);
            const float scale = of_half(d) * scales[2 * j + half];
            out[half] = {_mm_or_si128(quarter < 2 ? low_nibbles(v) : high_nibbles(v), two), scale, -32 * scale};
        }
    }
};

static_assert(sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20 && sizeof(Q5_0) == 22 && sizeof(Q5_1) == 24 && sizeof(Q8_0) == 34);
static_assert(sizeof(Q4_K) == 144 && sizeof(Q5_K) == 176 && sizeof(Q6_K) == 210);

constexpr int VECS = PART / LANES;  // vectors of a part

// The numbers of a part, in registers.
template <typename B>
INLINE void unpack(const B& block, int part, Vec* w) {
    Sixteen found[2];
    block.part(part, found);
    UNROLL
    for (int v = 0; v < VECS; v++) {
        const Sixteen& from = found[v * LANES / 16];
#ifdef __AVX512F__
        const Vec u = (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(from.u));
#else
        const __m128i eight = v % 2 ? _mm_srli_si128(from.u, 8) : from.u;
        const Vec u = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
#endif
        w[v] = u * from.scale + from.offset;
    }
}

// Whether W is a block type, and not the type of a number.
template <typename W, typename = void>
struct Blocks {
    static constexpr bool value = false;
    static constexpr long COUNT = 1;
};
template <typename W>
struct Blocks<W, decltype(void(W::COUNT))> {
    static constexpr bool value = true;
    static constexpr long COUNT = W::COUNT;
};

template <typename B>
void unpack_numbers(const B* row, long from, long to, float* out) {  // from and to in whole parts
    for (long i = from; i < to; i += PART, out += PART) {
        Vec w[VECS];
        unpack(row[i / B::COUNT], i % B::COUNT / PART, w);
        UNROLL
        for (int v = 0; v < VECS; v++) store(out + v * LANES, w[v]);
    }
}
