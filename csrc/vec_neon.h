// Arm: four registers of four lanes, and the dot product of bytes (FEAT_DotProd).

struct V {
    float32x4_t v[4];
};
constexpr int kAccumulators = 6;  // fours, of 32 registers

template <class F>
inline V each(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}
inline float32x4_t as_float(uint32x4_t u) { return vreinterpretq_f32_u32(u); }
inline uint32x4_t as_bits(float32x4_t f) { return vreinterpretq_u32_f32(f); }
inline V load(const float* p) {
    return each([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, V a) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline V set1(float f) {
    return each([&](int) { return vdupq_n_f32(f); });
}
inline V fma(V a, V b, V c) {
    return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline V add(V a, V b) {
    return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline V sub(V a, V b) {
    return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline V mul(V a, V b) {
    return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline V div(V a, V b) {
    return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline V maximum(V a, V b) {
    return each([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline V where_less(V a, V b, V yes, V no) {
    return each([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), yes.v[i], no.v[i]); });
}
inline V absolute(V a) {
    return each([&](int i) { return vabsq_f32(a.v[i]); });
}
inline V copy_sign(V size, V sign) {
    return each([&](int i) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign.v[i], size.v[i]); });
}
// 2 ** n for the integer n in the low bits of a + 1.5 * 2 ** 23.
inline V power_of_two(V shifted) {
    return each([&](int i) { return as_float(vshlq_n_u32(vaddq_u32(as_bits(shifted.v[i]), vdupq_n_u32(127)), 23)); });
}
inline V load_bf16(const uint16_t* p) {
    return each([&](int i) { return as_float(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
// Each lane as bf16.
inline uint16x4_t narrow(float32x4_t a) {
    const uint32x4_t u = as_bits(a), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint16x4_t r = vshrn_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    return vbsl_u16(vmovn_u32(vceqq_f32(a, a)), r, vdup_n_u16(0x7fc0));
}
inline void store_bf16(uint16_t* p, V a) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, narrow(a.v[i]));
}
inline V round_to_bf16(V a) {
    return each([&](int i) { return as_float(vshll_n_u16(narrow(a.v[i]), 16)); });
}
// Place of lane i among the 16 values of a packed bf16 panel row.
inline int packed_place(int lane) { return lane; }
inline V load_packed(const uint16_t* p) { return load_bf16(p); }
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

inline void store_low_halves(int16_t* p, V a) {
    for (int i = 0; i < 4; ++i) vst1_s16(p + 4 * i, vmovn_s32(vreinterpretq_s32_f32(a.v[i])));
}
inline V load_half(const uint16_t* p) {
    return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}

struct I {
    int32x4_t v[4];
};
struct Q {
    int8x16_t v[4];
};
inline I set_counts(int32_t count) {
    const int32x4_t v = vdupq_n_s32(count);
    return {{v, v, v, v}};
}
inline V to_float(I a) {
    return each([&](int i) { return vcvtq_f32_s32(a.v[i]); });
}
inline Q load_nibbles(const uint8_t* p) {
    const uint8x16_t low = vld1q_u8(p), high = vld1q_u8(p + 16), mask = vdupq_n_u8(15);
    return {{vreinterpretq_s8_u8(vandq_u8(low, mask)), vreinterpretq_s8_u8(vandq_u8(high, mask)),
             vreinterpretq_s8_u8(vshrq_n_u8(low, 4)), vreinterpretq_s8_u8(vshrq_n_u8(high, 4))}};
}
inline Q set_quads(int32_t quad) {
    const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(quad));
    return {{v, v, v, v}};
}
using S = I;

#define ALULA_NEON
#define ALULA_DOT
constexpr int32_t kByteBias = 0;
inline Q load_quads(const uint8_t* p) {
    const int8_t* q = reinterpret_cast<const int8_t*>(p);
    return {{vld1q_s8(q), vld1q_s8(q + 16), vld1q_s8(q + 32), vld1q_s8(q + 48)}};
}
// The barriers keep the compiler from going through the group row by row, with all its weights in flight.
inline S add_quads(Q w, Q x, S s) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        s.v[i] = vdotq_s32(s.v[i], w.v[i], x.v[i]);
        asm volatile("" : "+w"(s.v[i]));
    }
    return s;
}
inline I to_counts(S s) { return s; }
