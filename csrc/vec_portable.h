// An array, for any CPU.

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

struct I {
    int32_t v[16];
};
struct Q {
    uint8_t v[64];
};
inline I set_counts(int32_t count) {
    I r;
    for (int i = 0; i < 16; ++i) r.v[i] = count;
    return r;
}
inline V to_float(I a) {
    return each([&](int i) { return float(a.v[i]); });
}
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
using S = I;

#define ALULA_DOT
constexpr int32_t kByteBias = 128;
inline Q load_quads(const uint8_t* p) {
    Q r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
inline S add_quads(const Q& w, const Q& x, S s) {
    for (int i = 0; i < 64; ++i) s.v[i / 4] += int32_t(w.v[i]) * int8_t(x.v[i]);
    return s;
}
inline I to_counts(S s) { return s; }
