// int8 by pairs: numbers are widened to 16 bits, and an instruction multiplies and adds two of them. See bytes.h.

// Rows in int8, each padded to whole groups: scales, and numbers widened to int16. Strides differ by the type only.
struct QuantisedRows {
    const float* scales;
    const int16_t* numbers;
    int64_t stride;  // in floats
    QuantisedRows from(int64_t row, int64_t group) const {
        return {scales + row * stride + group, numbers + 2 * row * stride + group * kGroup, stride};
    }
};

// In the place of widened rows, which is larger. `wide` has widened_stride(in) floats a row.
inline QuantisedRows quantised_rows(const LinearArgs& a, float* wide) {
    const int64_t groups = ceil_div(a.in, kGroup);
    return {wide, reinterpret_cast<int16_t*>(wide + groups), widened_stride(a.in)};
}

inline void quantise_row(const LinearArgs& a, int64_t r, float* wide) {
    const int64_t groups = ceil_div(a.in, kGroup);
    float* scales = wide + r * widened_stride(a.in);
    int16_t* numbers = reinterpret_cast<int16_t*>(scales + groups);
    for (int64_t g = 0; g < groups; ++g)
        scales[g] = quantise_group(row_at(a.x, r), a.x.bf16, g * kGroup, a.in, false, numbers + g * kGroup);
}

// One pair of inputs: counts of R rows and NP panels.
template <int R, int NP>
inline void add_pair(const int16_t* x, int64_t ldx, const int8_t* w, int64_t panel, I (&count)[R][NP]) {
    P weight[NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) weight[p] = load_pairs(w + p * panel);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        int32_t pair;
        std::memcpy(&pair, x + r * ldx, sizeof pair);
        const P value = set_pairs(pair);
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p) count[r][p] = add_products(value, weight[p], count[r][p]);
    }
}

// How Bytes multiplies.
struct ByteProduct {
    using Rows = QuantisedRows;
    static constexpr int64_t kRowBytes = 4 + 2 * kGroup;
    static constexpr int32_t kBias = 0;

    static Rows rows(const LinearArgs& a, float* wide) { return quantised_rows(a, wide); }
    static void prepare(const LinearArgs& a, int64_t r, float* wide) { quantise_row(a, r, wide); }
    static float scale(const Rows& x, int64_t row, int64_t group) { return x.scales[row * x.stride + group]; }
    static I start(const Rows&, int64_t, int64_t) { return set_counts(0); }

    // Place of a number among those of its group: its output's lane, and its input.
    static int64_t place(int64_t lane, int64_t i) { return 16 * (i - i % 2) + 2 * lane + i % 2; }

    template <int R, int NP>
    static void add_group(const Rows& x, int64_t group, const char* w, int64_t panel, I (&count)[R][NP]) {
        const int8_t* weights = reinterpret_cast<const int8_t*>(w);
#pragma GCC unroll 4
        for (int64_t i = 0; i < kGroup; i += 2)
            add_pair<R, NP>(x.numbers + group * kGroup + i, 2 * x.stride, weights + 16 * i, panel, count);
    }
};
