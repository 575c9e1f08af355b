// AVX2: two registers; -mavxvnni adds the dot product of bytes.

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

struct I {
    __m256i lo, hi;
};
struct Q {
    __m256i lo, hi;
};
inline I set_counts(int32_t count) {
    __m256i v = _mm256_set1_epi32(count);
    return {v, v};
}
inline V to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Q load_nibbles(const uint8_t* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(both, mask), _mm256_and_si256(_mm256_srli_epi16(both, 4), mask)};
}
inline Q set_quads(int32_t quad) {
    __m256i v = _mm256_set1_epi32(quad);
    return {v, v};
}
using S = I;

#ifdef __AVXVNNI__

#define ALULA_DOT
constexpr int32_t kByteBias = 128;
inline Q load_quads(const uint8_t* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline S add_quads(Q w, Q x, S s) {
    return {_mm256_dpbusd_avx_epi32(s.lo, w.lo, x.lo), _mm256_dpbusd_avx_epi32(s.hi, w.hi, x.hi)};
}
inline I to_counts(S s) { return s; }

#else

using P = Q;
inline P load_pairs(const int8_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(q)), _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1))};
}
inline P set_pairs(int32_t pair) { return set_quads(pair); }
// The barriers keep the compiler from having more products in flight than there are registers.
inline I add_products(P a, P b, I c) {
    c.lo = _mm256_add_epi32(c.lo, _mm256_madd_epi16(a.lo, b.lo));
    asm volatile("" : "+x"(c.lo));
    c.hi = _mm256_add_epi32(c.hi, _mm256_madd_epi16(a.hi, b.hi));
    asm volatile("" : "+x"(c.hi));
    return c;
}
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

#endif
