// 16 logical fp32 lanes: one zmm, two ymm, or an array. Included by level.cpp only, inside its own namespace, so
// that no code compiled for a newer CPU can be linked in place of an older one.
//
// maximum(a, b) is a > b ? a : b in every lane (b when either is NaN), on every level.
//
// I is 16 int32 lanes, P two int16 in each of 16 lanes: add_products(a, b, c) adds both products of a lane to c,
// load_pairs widens 32 int8, store_low_halves takes the low 16 bits of each word.
//
// Q is four bytes in each of 16 lanes (on AVX a P), S the sums of their products (an I): add_quads(w, x, s) adds those of w (0 to 15) and x
// (signed), which fit after eight of them. load_nibbles takes lanes 0 to 7 from the low halves of 32 bytes and lanes 8
// to 15 from the high ones.


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

#if defined(ALULA_LEVEL_AVX512)

struct V {
    __m512 v;
};
constexpr int kAccumulators = 24;  // of 32 registers

inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline V set1(float f) { return {_mm512_set1_ps(f)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V maximum(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V where_less(V a, V b, V yes, V no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline V absolute(V a) { return {_mm512_abs_ps(a.v)}; }
inline V copy_sign(V size, V sign) {
    const __m512i mask = _mm512_set1_epi32(int(0x80000000u));
    __m512i s = _mm512_and_si512(_mm512_castps_si512(sign.v), mask);
    __m512i m = _mm512_andnot_si512(mask, _mm512_castps_si512(size.v));
    return {_mm512_castsi512_ps(_mm512_or_si512(s, m))};
}
// 2 ** n for the integer n in the low bits of a + 1.5 * 2 ** 23.
inline V power_of_two(V shifted) {
    __m512i n = _mm512_add_epi32(_mm512_castps_si512(shifted.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(n, 23))};
}
inline V load_bf16(const uint16_t* p) {
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
// Each lane as bf16 in the low half of its word.
inline __m512i narrow(V a) {
    __m512i u = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), r, _mm512_set1_epi32(0x7fc0));
}
inline void store_bf16(uint16_t* p, V a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(narrow(a)));
}
inline V round_to_bf16(V a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(narrow(a), 16))}; }
// Place of lane i among the 16 values of a packed bf16 panel row.
inline int packed_place(int lane) { return lane; }
inline V load_packed(const uint16_t* p) { return load_bf16(p); }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

struct I {
    __m512i v;
};
struct P {
    __m512i v;
};
inline I no_counts() { return {_mm512_setzero_si512()}; }
inline P load_pairs(const int8_t* p) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline P set_pairs(int32_t pair) { return {_mm512_set1_epi32(pair)}; }
inline I add_products(P a, P b, I c) { return {_mm512_add_epi32(c.v, _mm512_madd_epi16(a.v, b.v))}; }
inline V to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline void store_low_halves(int16_t* p, V a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_castps_si512(a.v)));
}
inline V load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

using Q = P;
using S = I;
inline Q load_nibbles(const uint8_t* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m512i wide = _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1);
    return {_mm512_and_si512(wide, _mm512_set1_epi8(15))};
}
inline Q set_quads(int32_t quad) { return set_pairs(quad); }
inline S add_quads(Q w, Q x, S s) { return {_mm512_add_epi16(s.v, _mm512_maddubs_epi16(w.v, x.v))}; }
inline I to_counts(S s) { return {_mm512_madd_epi16(s.v, _mm512_set1_epi16(1))}; }

#elif defined(ALULA_LEVEL_AVX2)

struct V {
    __m256 lo, hi;
};
constexpr int kAccumulators = 6;  // pairs, of 16 registers

inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline V set1(float f) {
    __m256 v = _mm256_set1_ps(f);
    return {v, v};
}
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline V maximum(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline V where_less(V a, V b, V yes, V no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline __m256 sign_mask() { return _mm256_castsi256_ps(_mm256_set1_epi32(int(0x80000000u))); }
inline V absolute(V a) { return {_mm256_andnot_ps(sign_mask(), a.lo), _mm256_andnot_ps(sign_mask(), a.hi)}; }
inline V copy_sign(V size, V sign) {
    V s = absolute(size);
    return {_mm256_or_ps(s.lo, _mm256_and_ps(sign_mask(), sign.lo)),
            _mm256_or_ps(s.hi, _mm256_and_ps(sign_mask(), sign.hi))};
}
inline __m256 power_of_two_8(__m256 shifted) {
    __m256i n = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}
// 2 ** n for the integer n in the low bits of a + 1.5 * 2 ** 23.
inline V power_of_two(V shifted) { return {power_of_two_8(shifted.lo), power_of_two_8(shifted.hi)}; }
inline __m256 widen_8(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
inline V load_bf16(const uint16_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {widen_8(_mm_loadu_si128(q)), widen_8(_mm_loadu_si128(q + 1))};
}
inline __m256i narrow_8(__m256 a) {
    __m256i u = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
}
inline void store_bf16(uint16_t* p, V a) {
    __m256i both = _mm256_packus_epi32(narrow_8(a.lo), narrow_8(a.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}
inline V round_to_bf16(V a) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(narrow_8(a.lo), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(narrow_8(a.hi), 16))};
}
// Lanes i and i + 8 share a 32-bit word, so that one shift and one mask unpack a panel row.
inline int packed_place(int lane) { return lane < 8 ? 2 * lane : 2 * (lane - 8) + 1; }
inline V load_packed(const uint16_t* p) {
    __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000u))))};
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

struct I {
    __m256i lo, hi;
};
struct P {
    __m256i lo, hi;
};
inline I no_counts() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline P load_pairs(const int8_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(q)), _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1))};
}
inline P set_pairs(int32_t pair) {
    __m256i v = _mm256_set1_epi32(pair);
    return {v, v};
}
// The barriers keep the compiler from having more products in flight than there are registers.
inline I add_products(P a, P b, I c) {
    c.lo = _mm256_add_epi32(c.lo, _mm256_madd_epi16(a.lo, b.lo));
    asm volatile("" : "+x"(c.lo));
    c.hi = _mm256_add_epi32(c.hi, _mm256_madd_epi16(a.hi, b.hi));
    asm volatile("" : "+x"(c.hi));
    return c;
}
inline V to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline void store_low_halves(int16_t* p, V a) {
    const __m256i mask = _mm256_set1_epi32(0xffff);
    __m256i both = _mm256_packus_epi32(_mm256_and_si256(_mm256_castps_si256(a.lo), mask),
                                       _mm256_and_si256(_mm256_castps_si256(a.hi), mask));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}
inline V load_half(const uint16_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}

using Q = P;
using S = I;
inline Q load_nibbles(const uint8_t* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(both, mask), _mm256_and_si256(_mm256_srli_epi16(both, 4), mask)};
}
inline Q set_quads(int32_t quad) { return set_pairs(quad); }
inline S add_quads(Q w, Q x, S s) {
    s.lo = _mm256_add_epi16(s.lo, _mm256_maddubs_epi16(w.lo, x.lo));
    asm volatile("" : "+x"(s.lo));
    s.hi = _mm256_add_epi16(s.hi, _mm256_maddubs_epi16(w.hi, x.hi));
    asm volatile("" : "+x"(s.hi));
    return s;
}
inline I to_counts(S s) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(s.lo, ones), _mm256_madd_epi16(s.hi, ones)};
}

#else

struct V {
    float v[16];
};
constexpr int kAccumulators = 6;

template <class F>
inline V each(F f) {
    V r;
    for (int i = 0; i < 16; ++i) r.v[i] = f(i);
    return r;
}
inline V load(const float* p) {
    V r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
inline void store(float* p, V a) { std::memcpy(p, a.v, sizeof a.v); }
inline V set1(float f) {
    return each([&](int) { return f; });
}
inline V fma(V a, V b, V c) {
    return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline V add(V a, V b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline V sub(V a, V b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline V mul(V a, V b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline V div(V a, V b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline V maximum(V a, V b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline V where_less(V a, V b, V yes, V no) {
    return each([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}
inline V absolute(V a) {
    return each([&](int i) { return bits_to_float(float_to_bits(a.v[i]) & 0x7fffffffu); });
}
inline V copy_sign(V size, V sign) {
    return each([&](int i) {
        return bits_to_float((float_to_bits(size.v[i]) & 0x7fffffffu) | (float_to_bits(sign.v[i]) & 0x80000000u));
    });
}
// 2 ** n for the integer n in the low bits of a + 1.5 * 2 ** 23.
inline V power_of_two(V shifted) {
    return each([&](int i) { return bits_to_float((float_to_bits(shifted.v[i]) + 127u) << 23); });
}
inline V load_bf16(const uint16_t* p) {
    return each([&](int i) { return from_bf16(p[i]); });
}
inline void store_bf16(uint16_t* p, V a) {
    for (int i = 0; i < 16; ++i) p[i] = to_bf16(a.v[i]);
}
inline V round_to_bf16(V a) {
    return each([&](int i) { return from_bf16(to_bf16(a.v[i])); });
}
// Place of lane i among the 16 values of a packed bf16 panel row.
inline int packed_place(int lane) { return lane; }
inline V load_packed(const uint16_t* p) { return load_bf16(p); }
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

struct I {
    int32_t v[16];
};
struct P {
    int16_t v[32];
};
inline I no_counts() { return {}; }
inline P load_pairs(const int8_t* p) {
    P r;
    for (int i = 0; i < 32; ++i) r.v[i] = p[i];
    return r;
}
inline P set_pairs(int32_t pair) {
    P r;
    for (int i = 0; i < 16; ++i) std::memcpy(r.v + 2 * i, &pair, 4);
    return r;
}
inline I add_products(P a, P b, I c) {
    for (int i = 0; i < 16; ++i)
        c.v[i] += int32_t(a.v[2 * i]) * b.v[2 * i] + int32_t(a.v[2 * i + 1]) * b.v[2 * i + 1];
    return c;
}
inline V to_float(I a) {
    return each([&](int i) { return float(a.v[i]); });
}
inline void store_low_halves(int16_t* p, V a) {
    for (int i = 0; i < 16; ++i) p[i] = int16_t(float_to_bits(a.v[i]) & 0xffff);
}
// fp16 is 5 bits of exponent and 10 of mantissa: moved into place, it is 2 ** 112 too small, infinity and NaN aside.
inline float from_half(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = uint32_t(h & 0x7fffu) << 13;
    if (rest >= 0x0f800000u) return bits_to_float(sign | 0x70000000u | rest);
    return bits_to_float(sign | float_to_bits(bits_to_float(rest) * 0x1p112f));
}
inline V load_half(const uint16_t* p) {
    return each([&](int i) { return from_half(p[i]); });
}

struct Q {
    uint8_t v[64];
};
using S = I;
inline Q load_nibbles(const uint8_t* p) {
    Q r;
    for (int i = 0; i < 32; ++i) {
        r.v[i] = p[i] & 15;
        r.v[i + 32] = p[i] >> 4;
    }
    return r;
}
inline Q set_quads(int32_t quad) {
    Q r;
    for (int i = 0; i < 16; ++i) std::memcpy(r.v + 4 * i, &quad, 4);
    return r;
}
inline S add_quads(const Q& w, const Q& x, S s) {
    for (int i = 0; i < 64; ++i) s.v[i / 4] += int32_t(w.v[i]) * int8_t(x.v[i]);
    return s;
}
inline I to_counts(S s) { return s; }

#endif

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
