// Weights in the blocks of GGUF files: the layouts of ggml, and their numbers as float32.
//
// Every type yields its numbers in parts of 32, as two groups of 16 unsigned bytes u with a scale and an offset. The
// numbers are scale * u + offset. A signed type adds a constant to its bytes, and the offset takes it away: the fused
// product rounds once, so that the result is the same. Scales and offsets are decoded for 256 numbers at a time, and
// the products read them from memory. kernels.cpp includes this file after its vector types.

#include <immintrin.h>

constexpr int PART = 32;  // numbers

INLINE float of_half(uint16_t bits) { return _cvtsh_ss(bits); }

constexpr int CHUNK = 256;  // numbers

struct Scales {  // of a chunk: one for each group of 32 numbers, or of 16
    float scale[CHUNK / 16], offset[CHUNK / 16];
};

INLINE __m128i bytes_at(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
INLINE __m128i nibbles(__m128i v, bool upper) {
    return _mm_and_si128(upper ? _mm_srli_epi16(v, 4) : v, _mm_set1_epi8(15));
}

// 16 where a bit is set, for 16 of the 32 bits of a block.
INLINE __m128i fifth_bits(const uint8_t* bits, int half) {
    uint16_t sixteen;
    memcpy(&sixteen, bits + 2 * half, sizeof sixteen);
    const __m128i spread = _mm_shuffle_epi8(_mm_set1_epi16(short(sixteen)),
                                            _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1));
    const __m128i bit = _mm_set1_epi64x(int64_t(0x8040201008040201));
    return _mm_and_si128(_mm_cmpeq_epi8(_mm_and_si128(spread, bit), bit), _mm_set1_epi8(16));
}

// Blocks of 32 numbers with a half-precision scale.
INLINE void symmetric(const uint16_t& d, float zero, Scales& to, int n) {
    to.scale[n] = of_half(d);
    to.offset[n] = -zero * to.scale[n];
}

// Blocks of 32 numbers with a half-precision scale and an offset behind it.
INLINE void with_offset(const uint16_t& d, Scales& to, int n) {
    const __m128 both = _mm_cvtph_ps(_mm_loadu_si32(&d));
    _mm_store_ss(to.scale + n, both);
    _mm_store_ss(to.offset + n, _mm_movehdup_ps(both));
}

// Blocks of 256 numbers in eight groups, whose scales and minima have six bits each, in twelve bytes.
INLINE void six_bits(const uint16_t& d, const uint8_t* packed, Scales& to) {
    uint32_t a, b, c;
    memcpy(&a, packed, 4), memcpy(&b, packed + 4, 4), memcpy(&c, packed + 8, 4);
    const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, upper = 0x30303030;
    const __m128i scales = _mm_setr_epi32(int(a & six), int((c & four) | (a >> 2 & upper)), 0, 0);
    const __m128i minima = _mm_setr_epi32(int(b & six), int((c >> 4 & four) | (b >> 2 & upper)), 0, 0);
    const __m128 both = _mm_cvtph_ps(_mm_loadu_si32(&d));
    const __m256 factor = _mm256_broadcastss_ps(both), minimum = _mm256_broadcastss_ps(_mm_movehdup_ps(both));
    _mm256_storeu_ps(to.scale, factor * _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(scales)));
    _mm256_storeu_ps(to.offset, -(minimum * _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(minima))));
}

// Each type has: COUNT, the numbers of a block; GROUP, the numbers with a common scale; NIBBLES, whether u is four bits
// in bytes that bytes() and upper() name; scales(), for block n of a chunk; and sixteen(), the bytes u of half a part.

struct Q4_0 {
    static constexpr int COUNT = 32, GROUP = 32;
    static constexpr bool NIBBLES = true;
    uint16_t d;
    uint8_t q[16];
    INLINE_LAMBDA void scales(Scales& to, int n) const { symmetric(d, 8, to, n); }
    INLINE_LAMBDA const uint8_t* bytes(int, int) const { return q; }
    INLINE_LAMBDA bool upper(int, int half) const { return half; }
    INLINE_LAMBDA __m128i sixteen(int, int half) const { return nibbles(bytes_at(q), half); }
};

struct Q4_1 {
    static constexpr int COUNT = 32, GROUP = 32;
    static constexpr bool NIBBLES = true;
    uint16_t d, m;
    uint8_t q[16];
    INLINE_LAMBDA void scales(Scales& to, int n) const { with_offset(d, to, n); }
    INLINE_LAMBDA const uint8_t* bytes(int, int) const { return q; }
    INLINE_LAMBDA bool upper(int, int half) const { return half; }
    INLINE_LAMBDA __m128i sixteen(int, int half) const { return nibbles(bytes_at(q), half); }
};

struct Q5_0 {
    static constexpr int COUNT = 32, GROUP = 32;
    static constexpr bool NIBBLES = false;
    uint16_t d;
    uint8_t high[4], q[16];
    INLINE_LAMBDA void scales(Scales& to, int n) const { symmetric(d, 16, to, n); }
    INLINE_LAMBDA __m128i sixteen(int, int half) const {
        return _mm_or_si128(nibbles(bytes_at(q), half), fifth_bits(high, half));
    }
};

struct Q5_1 {
    static constexpr int COUNT = 32, GROUP = 32;
    static constexpr bool NIBBLES = false;
    uint16_t d, m;
    uint8_t high[4], q[16];
    INLINE_LAMBDA void scales(Scales& to, int n) const { with_offset(d, to, n); }
    INLINE_LAMBDA __m128i sixteen(int, int half) const {
        return _mm_or_si128(nibbles(bytes_at(q), half), fifth_bits(high, half));
    }
};

struct Q8_0 {
    static constexpr int COUNT = 32, GROUP = 32;
    static constexpr bool NIBBLES = false;
    uint16_t d;
    int8_t q[32];
    INLINE_LAMBDA void scales(Scales& to, int n) const { symmetric(d, 128, to, n); }
    INLINE_LAMBDA __m128i sixteen(int, int half) const {
        return _mm_xor_si128(bytes_at(q + 16 * half), _mm_set1_epi8(-128));
    }
};

struct Q4_K {
    static constexpr int COUNT = 256, GROUP = 32;
    static constexpr bool NIBBLES = true;
    uint16_t d, dmin;
    uint8_t packed[12], q[128];
    INLINE_LAMBDA void scales(Scales& to, int) const { six_bits(d, packed, to); }
    INLINE_LAMBDA const uint8_t* bytes(int part, int half) const { return q + 32 * (part / 2) + 16 * half; }
    INLINE_LAMBDA bool upper(int part, int) const { return part % 2; }
    INLINE_LAMBDA __m128i sixteen(int part, int half) const { return nibbles(bytes_at(bytes(part, half)), part % 2); }
};

struct Q5_K {
    static constexpr int COUNT = 256, GROUP = 32;
    static constexpr bool NIBBLES = false;
    uint16_t d, dmin;
    uint8_t packed[12], high[32], q[128];
    INLINE_LAMBDA void scales(Scales& to, int) const { six_bits(d, packed, to); }
    INLINE_LAMBDA __m128i sixteen(int part, int half) const {
        const __m128i bit = _mm_set1_epi8(char(1 << part));
        const __m128i set = _mm_cmpeq_epi8(_mm_and_si128(bytes_at(high + 16 * half), bit), bit);
        const __m128i v = nibbles(bytes_at(q + 32 * (part / 2) + 16 * half), part % 2);
        return _mm_or_si128(v, _mm_and_si128(set, _mm_set1_epi8(16)));
    }
};

struct Q6_K {
    static constexpr int COUNT = 256, GROUP = 16;
    static constexpr bool NIBBLES = false;
    uint8_t q[128], high[64];
    int8_t factors[16];
    uint16_t d;
    INLINE_LAMBDA void scales(Scales& to, int) const {
        const __m256 scale = _mm256_set1_ps(of_half(d));
        for (int n = 0; n < 16; n += 8) {
            const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(factors + n));
            const __m256 found = scale * _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
            _mm256_storeu_ps(to.scale + n, found);
            _mm256_storeu_ps(to.offset + n, found * _mm256_set1_ps(-32));
        }
    }
    INLINE_LAMBDA __m128i sixteen(int part, int half) const {
        const int quarter = part % 4;  // of 128 numbers
        const __m128i v = bytes_at(q + 64 * (part / 4) + 32 * (quarter % 2) + 16 * half);
        const __m128i upper = _mm_srl_epi16(bytes_at(high + 32 * (part / 4) + 16 * half), _mm_cvtsi32_si128(2 * quarter));
        const __m128i two = _mm_slli_epi16(_mm_and_si128(upper, _mm_set1_epi8(3)), 4);
        return _mm_or_si128(nibbles(v, quarter >= 2), two);
    }
};

static_assert(sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20 && sizeof(Q5_0) == 22 && sizeof(Q5_1) == 24 && sizeof(Q8_0) == 34);
static_assert(sizeof(Q4_K) == 144 && sizeof(Q5_K) == 176 && sizeof(Q6_K) == 210);

constexpr int VECS = PART / LANES;  // vectors of a part

// Decodes the scales of ``count`` blocks, up to a chunk.
template <typename B>
INLINE void decode(const B* blocks, int count, Scales& to) {
    for (int n = 0; n < count; n++) blocks[n].scales(to, n);
}

// The numbers of a part, in registers. ``scales`` are those of the part's chunk, where it is number ``place``.
template <typename B>
INLINE void unpack(const B& block, int part, const Scales& scales, int place, Vec* w) {
#ifdef __AVX512F__
    if constexpr (B::NIBBLES) {
        const __m512 counted = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512 numbers = _mm512_fmadd_ps(counted, _mm512_set1_ps(scales.scale[place]),
                                               _mm512_set1_ps(scales.offset[place]));  // all that a nibble can mean
        UNROLL
        for (int half = 0; half < 2; half++) {
            const __m512i wide = _mm512_cvtepu8_epi32(bytes_at(block.bytes(part, half)));
            const __m512i index = block.upper(part, half) ? _mm512_srli_epi32(wide, 4) : wide;  // lower bits only
            w[half] = (Vec)_mm512_permutexvar_ps(index, numbers);
        }
        return;
    }
#endif
    UNROLL
    for (int v = 0; v < VECS; v++) {
        const int half = v * LANES / 16, group = B::GROUP == 16 ? 2 * place + half : place;
        const __m128i from = block.sixteen(part, half);
#ifdef __AVX512F__
        const Vec u = (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(from));
#else
        const __m128i eight = v % 2 ? _mm_srli_si128(from, 8) : from;
        const Vec u = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
#endif
        w[v] = u * scales.scale[group] + scales.offset[group];
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
    Scales scales;
    for (long i = from; i < to; i += PART, out += PART) {
        const B& block = row[i / B::COUNT];
        const int part = i % B::COUNT / PART;
        if (i == from || part == 0) block.scales(scales, 0);
        Vec w[VECS];
        unpack(block, part, scales, part, w);
        UNROLL
        for (int v = 0; v < VECS; v++) store(out + v * LANES, w[v]);
    }
}
