// exp, tanh and log on lanes: the polynomials of kernels/exact.py with fused steps. Included by level.cpp only.

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2High = 0.693359375f;  // nine bits, so whole multiples are exact
constexpr float kLn2Low = -0.00021219444f;
constexpr float kRound = 12582912.0f;  // 1.5 * 2 ** 23: adding it rounds to a whole number
constexpr float kExpMin = -87.0f, kExpMax = 88.0f;
constexpr float kInfinity = __builtin_inff();

// e ** x; 0 below -87, the value at 88 above 88.
inline V vexp(V x) {
    V inside = maximum(x, set1(kExpMin));
    inside = where_less(set1(kExpMax), inside, set1(kExpMax), inside);
    V shifted = fma(inside, set1(kLog2E), set1(kRound));
    V power = sub(shifted, set1(kRound));
    V rest = fma(power, set1(-kLn2High), inside);
    rest = fma(power, set1(-kLn2Low), rest);
    V p = fma(set1(0.0013934543f), rest, set1(0.008363777f));
    p = fma(p, rest, set1(0.041666456f));
    p = fma(p, rest, set1(0.16666573f));
    p = fma(p, rest, set1(0.5f));
    V value = add(fma(mul(rest, rest), p, rest), set1(1.0f));
    return where_less(x, set1(kExpMin), zero(), mul(value, power_of_two(shifted)));
}

inline V vtanh(V x) {
    V square = mul(x, x);
    V p = fma(set1(-0.0060536964f), square, set1(0.020968186f));
    p = fma(p, square, set1(-0.05384499f));
    p = fma(p, square, set1(0.13332734f));
    p = fma(p, square, set1(-0.33333328f));
    V small = fma(mul(x, square), p, x);
    V size = absolute(x);
    V large = sub(set1(1.0f), div(set1(2.0f), add(vexp(add(size, size)), set1(1.0f))));
    return where_less(size, set1(0.625f), small, copy_sign(large, x));
}

inline V capped(V x, float cap) { return mul(set1(cap), vtanh(div(x, set1(cap)))); }

// Natural logarithm of a normal positive number.
inline float slog(float x) {
    uint32_t u = float_to_bits(x);
    int power = int(u >> 23) - 126;
    float fraction = bits_to_float((u & 0x007fffffu) | 0x3f000000u);
    if (fraction < 0.70710678f) {
        fraction += fraction;
        --power;
    }
    float ratio = (fraction - 1.0f) / (fraction + 1.0f), square = ratio * ratio;
    float p = __builtin_fmaf(1.0f / 11, square, 1.0f / 9);
    p = __builtin_fmaf(p, square, 1.0f / 7);
    p = __builtin_fmaf(p, square, 1.0f / 5);
    p = __builtin_fmaf(p, square, 1.0f / 3);
    float twice = ratio + ratio;
    float series = __builtin_fmaf(twice * square, p, twice);
    return __builtin_fmaf(float(power), kLn2High, __builtin_fmaf(float(power), kLn2Low, series));
}
