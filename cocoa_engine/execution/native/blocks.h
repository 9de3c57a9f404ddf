// Weights in the blocks of GGUF files: the layouts of ggml, and their numbers as float32.
//
// Every type yields its numbers in parts of 32, as two groups of 16 unsigned bytes u with a scale and an offset. The
// numbers are scale * u + offset. A signed type adds a constant to its bytes, and the offset takes it away: the fused
// product rounds once, so that the result is the same. Scales and offsets are decoded for 256 numbers at a time, and
// the products read them from memory. kernels.cpp includes this file after its vector types.

constexpr int PART = 32;  // numbers
constexpr int CHUNK = 256;  // numbers

struct Scales {  // of a chunk: one for each group of 32 numbers, or of 16
    float scale[CHUNK / 16], offset[CHUNK / 16];
};

// 16 where a bit is set, for 16 of the 32 bits of a block.
INLINE Bytes fifth_bits(const uint8_t* bits, int half) {
    uint16_t sixteen;
    memcpy(&sixteen, bits + 2 * half, sizeof sixteen);
    const Bytes both = (Bytes)(sixteen - Shorts{});
    const Bytes spread = __builtin_shufflevector(both, both, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const Bytes bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    return (Bytes)((spread & bit) == bit) & 16;
}

// Blocks of 32 numbers with a half-precision scale.
INLINE void symmetric(const uint16_t& d, float zero, Scales& to, int n) {
    to.scale[n] = of_half(d);
    to.offset[n] = -zero * to.scale[n];
}

// Blocks of 32 numbers with a half-precision scale and an offset behind it.
INLINE void with_offset(const uint16_t& d, Scales& to, int n) { load_two(&d, to.scale[n], to.offset[n]); }

// Blocks of 256 numbers in eight groups, whose scales and minima have six bits each, in twelve bytes.
INLINE void six_bits(const uint16_t& d, const uint8_t* packed, Scales& to) {
    uint32_t a, b, c;
    memcpy(&a, packed, 4), memcpy(&b, packed + 4, 4), memcpy(&c, packed + 8, 4);
    const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, upper = 0x30303030;
    float factor, minimum;
    load_two(&d, factor, minimum);
    scaled<uint8_t>(factor, (a & six) | uint64_t((c & four) | (a >> 2 & upper)) << 32, to.scale);
    scaled<uint8_t>(-minimum, (b & six) | uint64_t((c >> 4 & four) | (b >> 2 & upper)) << 32, to.offset);
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
    INLINE_LAMBDA Bytes sixteen(int, int half) const { return nibbles(bytes_at(q), half); }
};

struct Q4_1 {
    static constexpr int COUNT = 32, GROUP = 32;
    static constexpr bool NIBBLES = true;
    uint16_t d, m;
    uint8_t q[16];
    INLINE_LAMBDA void scales(Scales& to, int n) const { with_offset(d, to, n); }
    INLINE_LAMBDA const uint8_t* bytes(int, int) const { return q; }
    INLINE_LAMBDA bool upper(int, int half) const { return half; }
    INLINE_LAMBDA Bytes sixteen(int, int half) const { return nibbles(bytes_at(q), half); }
};

struct Q5_0 {
    static constexpr int COUNT = 32, GROUP = 32;
    static constexpr bool NIBBLES = false;
    uint16_t d;
    uint8_t high[4], q[16];
    INLINE_LAMBDA void scales(Scales& to, int n) const { symmetric(d, 16, to, n); }
    INLINE_LAMBDA Bytes sixteen(int, int half) const {
        return nibbles(bytes_at(q), half) | fifth_bits(high, half);
    }
};

struct Q5_1 {
    static constexpr int COUNT = 32, GROUP = 32;
    static constexpr bool NIBBLES = false;
    uint16_t d, m;
    uint8_t high[4], q[16];
    INLINE_LAMBDA void scales(Scales& to, int n) const { with_offset(d, to, n); }
    INLINE_LAMBDA Bytes sixteen(int, int half) const {
        return nibbles(bytes_at(q), half) | fifth_bits(high, half);
    }
};

struct Q8_0 {
    static constexpr int COUNT = 32, GROUP = 32;
    static constexpr bool NIBBLES = false;
    uint16_t d;
    int8_t q[32];
    INLINE_LAMBDA void scales(Scales& to, int n) const { symmetric(d, 128, to, n); }
    INLINE_LAMBDA Bytes sixteen(int, int half) const { return bytes_at(q + 16 * half) ^ 128; }
};

struct Q4_K {
    static constexpr int COUNT = 256, GROUP = 32;
    static constexpr bool NIBBLES = true;
    uint16_t d, dmin;
    uint8_t packed[12], q[128];
    INLINE_LAMBDA void scales(Scales& to, int) const { six_bits(d, packed, to); }
    INLINE_LAMBDA const uint8_t* bytes(int part, int half) const { return q + 32 * (part / 2) + 16 * half; }
    INLINE_LAMBDA bool upper(int part, int) const { return part % 2; }
    INLINE_LAMBDA Bytes sixteen(int part, int half) const { return nibbles(bytes_at(bytes(part, half)), part % 2); }
};

struct Q5_K {
    static constexpr int COUNT = 256, GROUP = 32;
    static constexpr bool NIBBLES = false;
    uint16_t d, dmin;
    uint8_t packed[12], high[32], q[128];
    INLINE_LAMBDA void scales(Scales& to, int) const { six_bits(d, packed, to); }
    INLINE_LAMBDA Bytes sixteen(int part, int half) const {
        const Bytes bit = uint8_t(1 << part) - Bytes{};
        const Bytes set = (Bytes)((bytes_at(high + 16 * half) & bit) == bit);
        return nibbles(bytes_at(q + 32 * (part / 2) + 16 * half), part % 2) | (set & 16);
    }
};

struct Q6_K {
    static constexpr int COUNT = 256, GROUP = 16;
    static constexpr bool NIBBLES = false;
    uint8_t q[128], high[64];
    int8_t factors[16];
    uint16_t d;
    INLINE_LAMBDA void scales(Scales& to, int) const {
        const float scale = of_half(d);
        for (int n = 0; n < 16; n += 8) {
            uint64_t eight;
            memcpy(&eight, factors + n, sizeof eight);
            scaled<int8_t>(scale, eight, to.scale + n);
            scaled<int8_t>(scale * -32, eight, to.offset + n);
        }
    }
    INLINE_LAMBDA Bytes sixteen(int part, int half) const {
        const int quarter = part % 4;  // of 128 numbers
        const Bytes v = bytes_at(q + 64 * (part / 4) + 32 * (quarter % 2) + 16 * half);
        const Bytes two = pairs_right(bytes_at(high + 32 * (part / 4) + 16 * half), 2 * quarter) & 3;
        return nibbles(v, quarter >= 2) | pairs_left(two, 4);
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

// Vector v of the numbers of a part. ``scales`` are those of the part's chunk, where it is number ``place``.
template <typename B>
INLINE Vec numbers(const B& block, int part, int v, const Scales& scales, int place) {
    const int half = v * LANES / 16, group = B::GROUP == 16 ? 2 * place + half : place;
    const float scale = scales.scale[group], offset = scales.offset[group];
    if constexpr (B::NIBBLES && LOOKUP)
        return looked_up(numbers_of_nibbles(scale, offset), bytes_at(block.bytes(part, half)), block.upper(part, half));
    else
        return widened(block.sixteen(part, half), v % (16 / LANES)) * scale + offset;
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
        UNROLL
        for (int v = 0; v < VECS; v++) store(out + v * LANES, numbers(block, part, v, scales, part));
    }
}
