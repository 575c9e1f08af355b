// 16 logical fp32 lanes. Included by level.cpp only, inside its own namespace, so that no code compiled for a newer CPU
// can be linked in place of an older one. ALULA_VEC has the registers: vec_avx512.h (one), vec_avx2.h (two),
// vec_neon.h (four) or vec_portable.h (an array).
//
// maximum(a, b) is a > b ? a : b in every lane (b when either is NaN), on every level. store_low_halves takes the low
// 16 bits of each word.
//
// I is 16 int32 lanes. Q is four bytes in each of 16 lanes, S the sums of their products (an I): add_quads(w, x, s)
// adds those of w (0 to 15) and x (signed) to s; on AVX2 and AVX-512 eight of them fit. load_nibbles takes lanes 0 to
// 7 from the low halves of 32 bytes and lanes 8 to 15 from the high ones.
//
// With ALULA_DOT one instruction multiplies and adds four bytes, and w may be any weight in int8 plus kByteBias
// (load_quads). Without it P is two int16 in each of 16 lanes: add_products(a, b, c) adds both products of a lane to
// c, load_pairs widens 32 int8.

inline float bits_to_float(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

inline uint32_t float_to_bits(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}

inline float from_bf16(uint16_t h) { return bits_to_float(uint32_t(h) << 16); }

// Round to nearest even; every NaN becomes the same quiet one.
inline uint16_t to_bf16(float f) {
    uint32_t u = float_to_bits(f);
    if (f != f) return 0x7fc0;
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#include ALULA_VEC

inline V load_packed(const float* p) { return load(p); }
inline V zero() { return set1(0.0f); }

// Sum and maximum over the lanes, by halves: lane i with i + 8, then i + 4, i + 2, i + 1.
inline float lane_sum(V a) {
    float s[16];
    store(s, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) s[i] += s[i + half];
    return s[0];
}

inline float lane_max(V a) {
    float s[16];
    store(s, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) s[i] = s[i] > s[i + half] ? s[i] : s[i + half];
    return s[0];
}

// Lane numbers, to compare with a count.
inline V lane_numbers() {
    alignas(64) static constexpr float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers);
}

// Values of a row, whatever its dtype: 16 from `at`, or the last `count` with `fill` behind them.
inline V row_load(const void* row, bool bf16, int64_t at) {
    return bf16 ? load_bf16(static_cast<const uint16_t*>(row) + at) : load(static_cast<const float*>(row) + at);
}

inline float row_value(const void* row, bool bf16, int64_t at) {
    return bf16 ? from_bf16(static_cast<const uint16_t*>(row)[at]) : static_cast<const float*>(row)[at];
}

inline V row_load(const void* row, bool bf16, int64_t at, int64_t width, float fill = 0.0f) {
    if (at + 16 <= width) return row_load(row, bf16, at);
    float part[16];
    for (int i = 0; i < 16; ++i) part[i] = at + i < width ? row_value(row, bf16, at + i) : fill;
    return load(part);
}

inline void row_store(void* row, bool bf16, int64_t at, int64_t width, V a) {
    uint16_t* h = static_cast<uint16_t*>(row) + at;
    float* f = static_cast<float*>(row) + at;
    if (at + 16 <= width) {
        bf16 ? store_bf16(h, a) : store(f, a);
        return;
    }
    float part[16];
    store(part, a);
    for (int i = 0; at + i < width; ++i) {
        if (bf16)
            h[i] = to_bf16(part[i]);
        else
            f[i] = part[i];
    }
}

// a rounded to the dtype and back.
inline V rounded(V a, bool bf16) { return bf16 ? round_to_bf16(a) : a; }

inline const void* row_at(const Rows& rows, int64_t row) {
    int64_t size = rows.bf16 ? 2 : 4;
    return static_cast<const char*>(rows.data) + row * rows.stride * size;
}

inline void* row_at(void* data, bool bf16, int64_t index) {
    return static_cast<char*>(data) + index * (bf16 ? 2 : 4);
}

// Scratch memory, aligned to cache lines; freed at the end of the scope.
struct Scratch {
    float* data;
    explicit Scratch(int64_t floats)
        : data(static_cast<float*>(std::aligned_alloc(64, size_t((floats * 4 + 127) / 64 * 64)))) {}
    ~Scratch() { std::free(data); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
};
