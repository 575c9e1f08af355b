// AVX-512: one register; -mavx512vnni adds the dot product of bytes.

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

inline void store_low_halves(int16_t* p, V a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_castps_si512(a.v)));
}
inline V load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

struct I {
    __m512i v;
};
struct Q {
    __m512i v;
};
inline I set_counts(int32_t count) { return {_mm512_set1_epi32(count)}; }
inline V to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Q load_nibbles(const uint8_t* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m512i wide = _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1);
    return {_mm512_and_si512(wide, _mm512_set1_epi8(15))};
}
inline Q set_quads(int32_t quad) { return {_mm512_set1_epi32(quad)}; }
using S = I;

#ifdef __AVX512VNNI__

#define ALULA_DOT
constexpr int32_t kByteBias = 128;
inline Q load_quads(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline S add_quads(Q w, Q x, S s) { return {_mm512_dpbusd_epi32(s.v, w.v, x.v)}; }
inline I to_counts(S s) { return s; }

#else

using P = Q;
inline P load_pairs(const int8_t* p) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline P set_pairs(int32_t pair) { return set_quads(pair); }
inline I add_products(P a, P b, I c) { return {_mm512_add_epi32(c.v, _mm512_madd_epi16(a.v, b.v))}; }
inline S add_quads(Q w, Q x, S s) { return {_mm512_add_epi16(s.v, _mm512_maddubs_epi16(w.v, x.v))}; }
inline I to_counts(S s) { return {_mm512_madd_epi16(s.v, _mm512_set1_epi16(1))}; }

#endif
